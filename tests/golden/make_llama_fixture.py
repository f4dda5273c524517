"""Writes the golden Llamas with transformers. Needs torch, which nothing else does; in an environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    python tests/golden/make_llama_fixture.py tests/golden/llama

Each fixture has ``logits.npz``: ``tokens`` int32 [B, T] and the fp32 ``logits`` [B, T, vocab] that transformers gives.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LOGITS_FILE = "logits.npz"
COMMON = {"vocab_size": 64, "attention_bias": False, "attn_implementation": "eager", "rms_norm_eps": 1e-5}
FIXTURES = {
    # Heads in groups, a head_dim that is not d_model / heads, and frequencies that the Llama-3.1 scaling changes well
    # within the 40 positions.
    "scaled": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    # Many files with an index, a tied head, one key for all heads, no scaling.
    "sharded_tied": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
SHARD_SIZE = {"scaled": "1GB", "sharded_tied": "16KB"}


def make(out: Path) -> None:
    for seed, (name, settings) in enumerate(FIXTURES.items()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **settings)).float().eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Large enough that attention is sharp and every matrix matters; norms around 1.
                is_norm = "norm" in parameter_name
                parameter.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
        model.save_pretrained(out / name, max_shard_size=SHARD_SIZE[name])
        tokens = torch.randint(COMMON["vocab_size"], (2, 40))
        np.savez(out / name / LOGITS_FILE, tokens=tokens.numpy().astype(np.int32), logits=logits(model, tokens))
        (out / name / "generation_config.json").unlink(missing_ok=True)


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(tokens).logits.float().numpy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)
