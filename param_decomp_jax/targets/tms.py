"""The toy model of superposition (Elhage et al. 2022): n sparse features through a narrower hidden layer and back.

``out = ReLU(h W₂ + b)`` with ``h = x W₁`` passed through fixed square layers, if there are any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.decomposition.sites import Matrix, Sites, Stack
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, Tensors
from param_decomp_jax.targets.base import Forward, Linears, UniformLayers, Weights, run_layers, site_weights
from param_decomp_jax.targets.features import FeatureTarget

FIRST, HIDDEN, LAST = "linear1", "hidden", "linear2"
"""The kinds of matrices, in the order in which they are applied."""


@dataclass(frozen=True)
class TMSConfig(Architecture):
    """``n_features`` features through ``n_hidden`` dimensions, ``n_hidden_layers`` square layers between."""

    n_features: int
    n_hidden: int
    n_hidden_layers: int = field(default=0, metadata={"least": 0})

    name = "tms"
    title = "TMS"
    experiment = "tms"

    @property
    def inputs(self) -> FeatureInputs:
        return FeatureInputs(self.n_features, 0.0)

    @property
    def last(self) -> int:
        """The layer number of ``linear2``; ``linear1`` is layer 0, and the hidden layers lie between."""
        return self.n_hidden_layers + 1

    def matrices(self) -> tuple[Matrix, ...]:
        n, h = self.n_features, self.n_hidden
        between = range(self.n_hidden_layers)
        return (
            Matrix("linear1", 0, FIRST, "x", n, h),
            *(Matrix(f"hidden_layers.{i}", i + 1, HIDDEN, "h", h, h) for i in between),
            Matrix("linear2", self.last, LAST, "h", h, n),
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        n, h = self.n_features, self.n_hidden
        shapes: dict[str, tuple[int, ...]] = {"linear1": (n, h), "linear2": (h, n), "bias": (n,)}
        if self.n_hidden_layers:
            shapes["hidden_layers"] = (self.n_hidden_layers, h, h)
        return shapes

    def tensors(self) -> dict[str, Tensors]:
        """Returns the tensors; ``linear2`` is stored even if it was tied to ``linear1`` in training."""
        hidden = Tensors(tuple(f"hidden_layers.{i}" for i in range(self.n_hidden_layers)), stacked=True)
        return {name: hidden if name == "hidden_layers" else Tensors((name,)) for name in self.weight_shapes()}

    def target(self, sites: Sites, memory: MemoryPolicy = PLAIN, compute_dtype: Any = jnp.float32) -> "TMS":
        return TMS(self, sites, memory, compute_dtype)

    def describe(self) -> str:
        hidden = f", {self.n_hidden_layers} hidden layer{'s'[: self.n_hidden_layers > 1]}"
        return f"TMS, {self.n_features} features in {self.n_hidden}{hidden if self.n_hidden_layers else ''}"

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return {"architecture": self.name, **asdict(self)}


@dataclass(frozen=True)
class TMS(FeatureTarget):
    """The model as a target."""

    architecture: TMSConfig

    def forward(
        self, weights: Weights, inputs: Float[Array, "B n"], linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Maps features to their reconstruction."""
        first, x = start if start is not None else (0, self.embed(weights, inputs))
        x, records = run_layers(self.uniform_layers(weights), x, linears, first, self.memory)
        return Forward(jax.nn.relu(x + weights["bias"].astype(x.dtype)), records)

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        """Returns one layer for each matrix; the hidden ones form one run."""

        def layers(kind: str, W: Array, first: int, stop: int) -> UniformLayers:
            return UniformLayers(lambda x, w, linear: linear(kind, x, w), W, first, stop)

        last = self.architecture.last
        hidden = [layers(HIDDEN, weights["hidden_layers"], 1, last)] if last > 1 else []
        return (
            layers(FIRST, weights["linear1"][None], 0, 1),
            *hidden,
            layers(LAST, weights["linear2"][None], last, last + 1),
        )

    def site_weights(self, weights: Mapping[str, Array]) -> dict[str, Float[Array, "*lead d_in d_out"]]:
        """Returns W of every site, by stack."""

        def matrix(stack: Stack) -> Array:
            if stack.kind == HIDDEN:
                return weights["hidden_layers"][stack.first - 1 : stack.first - 1 + stack.n_layers]
            return weights[stack.kind][None]

        return site_weights(self.sites, matrix)
