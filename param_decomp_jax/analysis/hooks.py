"""Activations at hooks of a decoder: reading them in the clean pass, and passes that replace one of them (B6).

Hooks have the names that TransformerLens gives them. `targets/decoder.py:Decoder.hooks` says which a decoder has.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.decoder import NORMALIZED, Decoder
from param_decomp_jax.targets.plain_linears import UNTOUCHED, PlainLayer, frozen_axes
from param_decomp_jax.targets.points import RESID_POST, RESID_PRE


@dataclass(frozen=True)
class Hook:
    """The activation ``name`` of layer ``layer``."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"blocks.{self.layer}.{self.name}"

    @property
    def boundary(self) -> int | None:
        """The number of the layer that a point of the residual stream enters, or the number of all layers after the
        last one; None for a point within a layer."""
        return {RESID_PRE: self.layer, RESID_POST: self.layer + 1}.get(self.name)


@dataclass
class _HookedLayer(PlainLayer):
    """Records the activation at a hook, or replaces it by ``value``."""

    name: str = ""
    value: Array | None = None

    def enter(self, x: Shaped[Array, "*n"]) -> None:
        self.hook(RESID_PRE, x)

    def hook(self, name: str, x: Array) -> Array:
        if name != self.name:
            return x
        if self.value is not None:
            return self.value.astype(x.dtype)
        self.records[name] = x
        return x


@dataclass(frozen=True)
class _HookedLinears:
    """Applies every matrix as it is, with a hook in one layer, which is a scan of its own."""

    at: Hook
    memory: MemoryPolicy
    value: Array | None = None

    def scan_boundaries(self) -> frozenset[int]:
        return frozenset({self.at.layer, self.at.layer + 1})

    def join(self, layer: int, x: Any) -> Any:
        return x

    def slices(self, first: int, stop: int) -> Any:
        return None

    def layer(self, first: int, stop: int, slice_: Any) -> PlainLayer:
        if first != self.at.layer:
            return PlainLayer(frozen_axes(self.memory))
        return _HookedLayer(frozen_axes(self.memory), name=self.at.name, value=self.value)


def activation(target: Decoder, weights: Weights, inputs: Int[Array, "B T"], at: Hook) -> Float[Array, "B T d"]:
    """Returns the activation at a hook in the clean pass."""
    _check(target, at)
    if at.boundary == target.architecture.n_layers:
        last: Array = target.forward(weights, inputs, UNTOUCHED).output
        return last
    layer, name = at.layer, at.name
    if at.boundary is not None:
        layer, name = at.boundary, RESID_PRE
    elif name == NORMALIZED:
        name = "hook_mlp_in"
    found = target.forward(weights, inputs, _HookedLinears(Hook(layer, name), target.memory)).records[layer][name][0]
    return target.normalized(found) if at.name == NORMALIZED else found


def output_with(
    target: Decoder, weights: Weights, inputs: Int[Array, "B T"], at: Hook, value: Float[Array, "B T d"]
) -> Float[Array, "B T d"]:
    """Returns the target's output with ``value`` in place of the activation at a hook."""
    _check(target, at)
    assert at.name != NORMALIZED, "can only be read"
    value = value.astype(target.compute_dtype)
    if at.boundary == target.architecture.n_layers:
        return value
    if at.boundary is not None:
        between: Array = target.forward(weights, inputs, UNTOUCHED, (at.boundary, value)).output
        return between
    within: Array = target.forward(weights, inputs, _HookedLinears(at, target.memory, value)).output
    return within


def _check(target: Decoder, at: Hook) -> None:
    assert at.name in target.hooks, f"{target} has no hook {at.name}"
    assert 0 <= at.layer < target.architecture.n_layers, f"{target} has no layer {at.layer}"
