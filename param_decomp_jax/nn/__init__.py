"""Parts of neural networks that do not depend on sites or components."""

from param_decomp_jax.nn.attention import attend
from param_decomp_jax.nn.fused_kl import Head
from param_decomp_jax.nn.grouped import OverPositions, group, grouped_matmul_wide
from param_decomp_jax.nn.numerics import (
    kl_divergence,
    layer_norm,
    matmul,
    matmul_wide,
    mean_squared_error,
    rms_norm,
    wide,
)
from param_decomp_jax.nn.rotary import Llama3Scaling

__all__ = [
    "Head", "Llama3Scaling", "OverPositions", "attend", "group", "grouped_matmul_wide", "kl_divergence",
    "layer_norm", "matmul", "matmul_wide", "mean_squared_error", "rms_norm", "wide",
]  # fmt: skip
