"""What a target is: a frozen forward pass that is told how to apply its matrices."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from param_decomp_jax.memory import MemoryPolicy
from param_decomp_jax.sites import Sites

Weights = Any
"""A pytree of frozen arrays; always an argument of the jitted step, never closed over."""


@runtime_checkable
class LayerLinears(Protocol):
    """How one layer applies its matrices. ``records`` is what the pass wants kept of this layer."""

    records: dict[str, Array]

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        """The layer's matrix ``kind`` with weights ``W``, applied to ``x``."""
        ...

    def enter(self, x: Float[Array, "*n d"]) -> None:
        """The layer's input (the residual stream), shown before anything is applied."""
        ...


@runtime_checkable
class Linears(Protocol):
    """How a whole forward pass applies the target's matrices (F1 to F4).

    Layers between two neighbouring ``cuts`` are treated alike, hence can be scanned together: ``slices`` gives what
    they need, with a leading layer axis, and ``layer`` turns one such slice into the layer's way of multiplying.
    """

    def cuts(self) -> frozenset[int]: ...

    def slices(self, first: int, stop: int) -> Any: ...

    def layer(self, first: int, stop: int, slice_: Any) -> LayerLinears: ...


class Forward(NamedTuple):
    """What a forward pass gives: the target's output, and what its linears recorded.

    ``records``: by the first layer of each uncut run of layers, arrays ``[layers, ...]`` by record name.
    """

    output: Any
    records: Mapping[int, dict[str, Array]]


@runtime_checkable
class Target(Protocol):
    """A frozen network. ``inputs`` is one batch: token ids ``[B, T]`` for a language model."""

    @property
    def sites(self) -> Sites: ...

    def forward(
        self, weights: Weights, inputs: Array, linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """One pass. ``start = (layer, x)`` begins at that layer from its clean input ``x`` (F6)."""
        ...

    def error(self, weights: Weights, clean: Any, masked: Any) -> Float[Array, ""]:
        """R1: distance of a masked output from the clean one, a mean over the global batch."""
        ...

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "layers d_in d_out"]]:
        """W of every site, by stack."""
        ...


def run_layers(
    layer: Callable[[Any, Any, LayerLinears], Any],
    x: Any,
    weights: Any,
    linears: Linears,
    first: int,
    stop: int,
    memory: MemoryPolicy,
) -> tuple[Any, dict[int, dict[str, Array]]]:
    """Layers ``first .. stop - 1`` of a network whose layers are alike, ``weights`` stacked over all of its layers.

    ``layer(x, weights_of_the_layer, linear)`` gives the next ``x``. One scan for every run of layers that ``linears``
    treats alike. Returns the last ``x`` and the records (see `Forward`).
    """
    records = {}
    edges = sorted({first, stop} | {cut for cut in linears.cuts() if first < cut < stop})
    for a, b in pairwise(edges):

        def body(x: Any, xs: Any, a: int = a, b: int = b) -> tuple[Any, dict[str, Array]]:
            frozen, of_sites = xs
            linear = linears.layer(a, b, of_sites)
            linear.enter(x)
            x = layer(x, frozen, linear)
            return x, linear.records

        frozen = jax.tree.map(lambda w, a=a, b=b: w[a:b], weights)
        x, records[a] = memory.over_layers(body, x, (frozen, linears.slices(a, b)))
    return x, records
