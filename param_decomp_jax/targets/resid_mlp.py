"""The residual MLP: sparse features embedded at random in a residual stream, a few neurons that compute on them.

``r = x W_E``, per layer ``r ← r + act(r W_in + b_in) W_out + b_out``, ``out = r W_Eᵀ``; rows of W_E have unit norm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.memory import PLAIN, MemoryPolicy
from param_decomp_jax.numerics import matmul, mean_squared_error
from param_decomp_jax.sites import Matrix, Sites
from param_decomp_jax.targets.base import (
    Forward,
    LayerLinears,
    Linears,
    UniformLayers,
    Weights,
    run_layers,
    site_weights,
    split_matrices,
)  # fmt: skip

KINDS = ("mlp_in", "mlp_out")
"""The two matrices of a layer, in order of application."""


@dataclass(frozen=True)
class ResidMLPConfig:
    """``d_mlp``: neurons of each layer. ``in_bias``, ``out_bias``: frozen biases after the two matrices."""

    n_features: int
    d_embed: int
    d_mlp: int
    n_layers: int
    activation: Literal["relu", "gelu"] = "relu"
    in_bias: bool = False
    out_bias: bool = False


def matrices(config: ResidMLPConfig) -> tuple[Matrix, ...]:
    """Every matrix that can be a site, in canonical order."""
    d, m = config.d_embed, config.d_mlp
    return tuple(
        matrix
        for i in range(config.n_layers)
        for matrix in (
            Matrix(f"layers.{i}.mlp_in", i, "mlp_in", "residual_in", d, m),
            Matrix(f"layers.{i}.mlp_out", i, "mlp_out", "hidden", m, d),
        )
    )


def weight_shapes(config: ResidMLPConfig) -> dict[str, Any]:
    """Shape of every array, in the structure of the weights."""
    d, m, n = config.d_embed, config.d_mlp, config.n_layers
    layers: dict[str, tuple[int, ...]] = {"mlp_in": (n, d, m), "mlp_out": (n, m, d)}
    if config.in_bias:
        layers["in_bias"] = (n, m)
    if config.out_bias:
        layers["out_bias"] = (n, d)
    return {"embed": (config.n_features, d), "layers": layers}


@dataclass(frozen=True)
class ResidMLP:
    """Inputs and output ``[B, n_features]``."""

    config: ResidMLPConfig
    sites: Sites
    memory: MemoryPolicy = PLAIN
    compute_dtype: Any = jnp.float32

    def forward(
        self, weights: Weights, inputs: Float[Array, "B n"], linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Features to features."""
        embed = weights["embed"]
        first, x = start if start is not None else (0, matmul(inputs.astype(self.compute_dtype), embed))
        x, records = run_layers(self.uniform_layers(weights), x, linears, first, self.memory)
        return Forward(matmul(x, embed.T), records)

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        """All layers are alike."""
        return (UniformLayers(self._layer, weights["layers"], 0, self.config.n_layers),)

    def _layer(self, x: Float[Array, "B d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B d"]:
        h = linear("mlp_in", x, w["mlp_in"])
        if self.config.in_bias:
            h = h + w["in_bias"].astype(h.dtype)
        h = jax.nn.relu(h) if self.config.activation == "relu" else jax.nn.gelu(h, approximate=False)
        y = linear("mlp_out", h, w["mlp_out"])
        if self.config.out_bias:
            y = y + w["out_bias"].astype(y.dtype)
        return x + y

    def errors(
        self, weights: Weights, clean: Float[Array, "B n"], masked: Sequence[Float[Array, "B n"]]
    ) -> Float[Array, " streams"]:
        """R1: mean squared error over all elements."""
        return jnp.stack([mean_squared_error(clean, x) for x in masked])

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "layers d_in d_out"]]:
        """W of every site, by stack."""
        layers = weights["layers"]
        return site_weights(self.sites, lambda s: layers[s.kind][s.first : s.first + s.n_layers])

    def weight_axes(self, weights: Weights) -> Any:
        """Every matrix is split by output."""
        return split_matrices(weights)
