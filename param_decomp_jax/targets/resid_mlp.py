"""The residual MLP: sparse features embedded at random in a residual stream, and a few neurons that compute on them.

``r = x W_E``, per layer ``r ← r + act(r W_in + b_in) W_out + b_out``, ``out = r W_Eᵀ``; rows of W_E have unit norm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.decomposition.sites import Matrix, Sites, Units
from param_decomp_jax.nn.numerics import matmul
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, Tensors
from param_decomp_jax.targets.base import (
    Forward,
    LayerLinears,
    Linears,
    UniformLayers,
    Weights,
    hooked,
    run_layers,
    site_weights,
)  # fmt: skip
from param_decomp_jax.targets.features import FeatureTarget
from param_decomp_jax.targets.points import Point, points_of_layers

KINDS = ("mlp_in", "mlp_out")
"""The two matrices of a layer, in order of application."""


@dataclass(frozen=True)
class ResidMLPConfig(Architecture):
    """``d_mlp``: neurons of each layer. ``in_bias``, ``out_bias``: frozen biases after the two matrices."""

    n_features: int
    d_embed: int
    d_mlp: int
    n_layers: int
    activation: Literal["relu", "gelu"] = "relu"
    in_bias: bool = False
    out_bias: bool = False

    name = "resid_mlp"
    title = "ResidMLP"
    experiment = "resid_mlp"

    @property
    def inputs(self) -> FeatureInputs:
        return FeatureInputs(self.n_features, -1.0)

    def matrices(self) -> tuple[Matrix, ...]:
        d, m = self.d_embed, self.d_mlp
        gives, takes = Units("neuron", "output", m), Units("neuron", "input", m)
        return tuple(
            matrix
            for i in range(self.n_layers)
            for matrix in (
                Matrix(f"layers.{i}.mlp_in", i, "mlp_in", "residual_in", d, m, faces=gives),
                Matrix(f"layers.{i}.mlp_out", i, "mlp_out", "hidden", m, d, faces=takes),
            )
        )

    @property
    def residual_width(self) -> int:
        return self.d_embed

    def points(self) -> tuple[Point, ...]:
        return points_of_layers(self.n_layers, ("resid_pre", "mlp_out", "resid_post"))

    def weight_shapes(self) -> dict[str, Any]:
        d, m, n = self.d_embed, self.d_mlp, self.n_layers
        layers: dict[str, tuple[int, ...]] = {"mlp_in": (n, d, m), "mlp_out": (n, m, d)}
        if self.in_bias:
            layers["in_bias"] = (n, m)
        if self.out_bias:
            layers["out_bias"] = (n, d)
        return {"embed": (self.n_features, d), "layers": layers}

    def tensors(self) -> dict[str, Any]:
        """``W_E`` is the embedding, whose transpose is the unembedding."""
        names = self.weight_shapes()["layers"]
        layers = {name: Tensors(tuple(f"layers.{i}.{name}" for i in range(self.n_layers)), True) for name in names}
        return {"embed": Tensors(("W_E",)), "layers": layers}

    def target(self, sites: Sites, memory: MemoryPolicy = PLAIN, compute_dtype: Any = jnp.float32) -> "ResidMLP":
        return ResidMLP(self, sites, memory, compute_dtype)

    def describe(self) -> str:
        layers = f"{self.n_layers} layer{'s'[: self.n_layers > 1]} of {self.d_mlp} neurons"
        return f"ResidMLP, {self.n_features} features in width {self.d_embed:,}, {layers}, {self.activation}"

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return {"architecture": self.name, **asdict(self)}


@dataclass(frozen=True)
class ResidMLP(FeatureTarget):
    """The model as a target."""

    architecture: ResidMLPConfig

    def forward(
        self, weights: Weights, inputs: Float[Array, "B n"], linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Maps features to features."""
        first, x = start if start is not None else (0, self.embed(weights, inputs))
        x, records = run_layers(self.uniform_layers(weights), x, linears, first, self.memory)
        return Forward(matmul(x, weights["embed"].T), records)

    def embed(self, weights: Weights, inputs: Float[Array, "B n"]) -> Float[Array, "B d"]:
        return matmul(inputs.astype(self.compute_dtype), weights["embed"])

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        """Returns all layers as one run."""
        return (UniformLayers(self._layer, weights["layers"], 0, self.architecture.n_layers),)

    def _layer(self, x: Float[Array, "B d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B d"]:
        h = linear("mlp_in", x, w["mlp_in"])
        if self.architecture.in_bias:
            h = h + w["in_bias"].astype(h.dtype)
        h = jax.nn.relu(h) if self.architecture.activation == "relu" else jax.nn.gelu(h, approximate=False)
        y = linear("mlp_out", h, w["mlp_out"])
        if self.architecture.out_bias:
            y = y + w["out_bias"].astype(y.dtype)
        return x + hooked(linear, "hook_mlp_out", y)

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "*lead d_in d_out"]]:
        """Returns W of every site, by stack."""
        layers = weights["layers"]
        return site_weights(self.sites, lambda s: layers[s.kind][s.first : s.first + s.n_layers])
