"""Writes `tests/golden/hooks.npz`: activations at TransformerLens' hooks in layer 1 of golden models.

Needs torch, transformers and transformer-lens, in an environment of its own (3.9.0, which came with sae-lens 6.54.12,
made what is there):

    HF_HUB_OFFLINE=1 python tests/golden/make_hook_fixtures.py tests/golden
"""

import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

MODELS = ("gpt2", "gemma2", "gpt_neox", "olmo2", "qwen3_moe")
LAYER, POSITIONS = 1, 6
HOOKS = (
    "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_in", "ln2.hook_normalized",
    "mlp.hook_in", "mlp.hook_out", "hook_mlp_out",
)  # fmt: skip


def main(golden: Path) -> None:
    # The library wants one; ids are given.
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), bos_token="b", eos_token="b"
    )
    words.init_kwargs["name_or_path"] = str(golden)
    found = {}
    for name in MODELS:
        folder = golden / "families" / name
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        bridge = TransformerBridge.boot_transformers(
            str(folder), hf_model=model, device="cpu", dtype=torch.float32, tokenizer=words
        )
        bridge.set_use_hook_mlp_in(True)
        tokens = np.load(folder / "expected.npz")["tokens"][:1, :POSITIONS]
        with torch.no_grad():
            _, cache = bridge.run_with_cache(torch.from_numpy(tokens).long())
        for hook in HOOKS:
            key = f"blocks.{LAYER}.{hook}"
            try:
                found[f"{name}.{key}"] = cache[key].float().numpy()
            except KeyError:  # a parallel layer has nothing between attention and MLP
                continue
    np.savez_compressed(golden / "hooks.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
