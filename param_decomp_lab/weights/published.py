"""Architectures of published Llamas by hub id, from their public ``config.json``: for `pd check` where no file is."""

from dataclasses import replace

from param_decomp_jax.targets.llama import LlamaConfig, RopeScaling
from param_decomp_lab.weights.hf_llama import DTYPES

_LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_mlp=14_336,
    rms_norm_eps=1e-5, rope_theta=500_000.0,
)  # fmt: skip
_LLAMA_3_1_8B = replace(_LLAMA_3_8B, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
_LLAMA_3_1_70B = replace(_LLAMA_3_1_8B, d_model=8192, n_layers=80, n_heads=64, d_mlp=28_672)
_LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128_256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_mlp=8192,
    rms_norm_eps=1e-5, rope_theta=500_000.0, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), tied=True,
)  # fmt: skip
_LLAMA_3_2_3B = replace(_LLAMA_3_2_1B, d_model=3072, n_layers=28, n_heads=24, head_dim=128)
_SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_mlp=1536,
    rms_norm_eps=1e-5, rope_theta=100_000.0, tied=True,
)  # fmt: skip

PUBLISHED: dict[str, LlamaConfig] = {
    f"{name}{suffix}": config
    for name, config in {
        "meta-llama/Meta-Llama-3-8B": _LLAMA_3_8B,
        "meta-llama/Meta-Llama-3.1-8B": _LLAMA_3_1_8B,
        "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
        "meta-llama/Llama-3.1-70B": _LLAMA_3_1_70B,
        "meta-llama/Llama-3.2-1B": _LLAMA_3_2_1B,
        "meta-llama/Llama-3.2-3B": _LLAMA_3_2_3B,
        "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    }.items()
    for suffix in ("", "-Instruct")
}

PUBLISHED_DTYPE = DTYPES["bfloat16"]
"""What all of them are stored in."""
