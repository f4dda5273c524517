"""The toy model of superposition (Elhage et al. 2022): n sparse features through a narrower hidden layer and back.

``out = ReLU(h W₂ + b)`` with ``h = x W₁`` passed through fixed square layers, if there are any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.memory import PLAIN, MemoryPolicy
from param_decomp_jax.numerics import mean_squared_error
from param_decomp_jax.sites import Matrix, Sites, Stack
from param_decomp_jax.targets.base import (
    Forward,
    Linears,
    UniformLayers,
    Weights,
    run_layers,
    site_weights,
    split_matrices,
)  # fmt: skip

FIRST, HIDDEN, LAST = "linear1", "hidden", "linear2"
"""Kinds of matrices, in order of application."""


@dataclass(frozen=True)
class TMSConfig:
    """``n_features`` features through ``n_hidden`` dimensions, ``n_hidden_layers`` square layers between."""

    n_features: int
    n_hidden: int
    n_hidden_layers: int = 0

    @property
    def last(self) -> int:
        """Layer number of ``linear2``; ``linear1`` is layer 0 and the hidden ones lie between."""
        return self.n_hidden_layers + 1


def matrices(config: TMSConfig) -> tuple[Matrix, ...]:
    """Every matrix that can be a site, in canonical order."""
    n, h = config.n_features, config.n_hidden
    between = range(config.n_hidden_layers)
    return (
        Matrix("linear1", 0, FIRST, "x", n, h),
        *(Matrix(f"hidden_layers.{i}", i + 1, HIDDEN, "h", h, h) for i in between),
        Matrix("linear2", config.last, LAST, "h", h, n),
    )


def weight_shapes(config: TMSConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array, in the structure of the weights."""
    n, h = config.n_features, config.n_hidden
    shapes: dict[str, tuple[int, ...]] = {"linear1": (n, h), "linear2": (h, n), "bias": (n,)}
    if config.n_hidden_layers:
        shapes["hidden_layers"] = (config.n_hidden_layers, h, h)
    return shapes


@dataclass(frozen=True)
class TMS:
    """Inputs and output ``[B, n_features]``."""

    config: TMSConfig
    sites: Sites
    memory: MemoryPolicy = PLAIN
    compute_dtype: Any = jnp.float32

    def forward(
        self, weights: Weights, inputs: Float[Array, "B n"], linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Features to their reconstruction."""
        first, x = start if start is not None else (0, inputs.astype(self.compute_dtype))
        x, records = run_layers(self.uniform_layers(weights), x, linears, first, self.memory)
        return Forward(jax.nn.relu(x + weights["bias"].astype(x.dtype)), records)

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        """Each matrix is a layer, the hidden ones are alike."""

        def layers(kind: str, W: Array, first: int, stop: int) -> UniformLayers:
            return UniformLayers(lambda x, w, linear: linear(kind, x, w), W, first, stop)

        last = self.config.last
        hidden = [layers(HIDDEN, weights["hidden_layers"], 1, last)] if last > 1 else []
        return (
            layers(FIRST, weights["linear1"][None], 0, 1),
            *hidden,
            layers(LAST, weights["linear2"][None], last, last + 1),
        )

    def errors(
        self, weights: Weights, clean: Float[Array, "B n"], masked: Sequence[Float[Array, "B n"]]
    ) -> Float[Array, " streams"]:
        """R1: mean squared error over all elements."""
        return jnp.stack([mean_squared_error(clean, x) for x in masked])

    def site_weights(self, weights: Mapping[str, Array]) -> dict[str, Float[Array, "layers d_in d_out"]]:
        """W of every site, by stack."""

        def matrix(stack: Stack) -> Array:
            if stack.kind == HIDDEN:
                return weights["hidden_layers"][stack.first - 1 : stack.first - 1 + stack.n_layers]
            return weights[stack.kind][None]

        return site_weights(self.sites, matrix)

    def weight_axes(self, weights: Weights) -> Any:
        """Every matrix is split by output."""
        return split_matrices(weights)
