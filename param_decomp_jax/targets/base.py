"""What a target is: a frozen forward pass that is told how to apply its matrices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.memory import MemoryPolicy
from param_decomp_jax.mesh import Axes
from param_decomp_jax.remat import over_layers
from param_decomp_jax.sites import PRE_IDENTITY, Site, Sites, Stack

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

    def join(self, layer: int, x: Any) -> Any:
        """What goes into the run of layers that begins at ``layer``, given what came out of the one before."""
        ...

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

    @property
    def memory(self) -> MemoryPolicy: ...

    def forward(
        self, weights: Weights, inputs: Array, linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """One pass. ``start = (layer, x)`` begins at that layer from its clean input ``x`` (F6)."""
        ...

    def runs(self, weights: Weights) -> Sequence["Run"]:
        """The layers, in order, as runs of alike ones."""
        ...

    def errors(self, weights: Weights, clean: Any, masked: Sequence[Any]) -> Float[Array, " streams"]:
        """R1: distance of each masked output from the clean one, a mean over the global batch."""
        ...

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "layers d_in d_out"]]:
        """W of every site, by stack."""
        ...

    def weight_axes(self, weights: Weights) -> Any:
        """Logical axes of every array (or shape) of the weights, in their structure."""
        ...


def split_matrices(weights: Weights) -> Any:
    """Logical axes of weights whose arrays of two or more axes are matrices: each is split by its last axis."""
    return jax.tree.map(lambda w: Axes((*(None,) * (len(w.shape) - 1), "split" if len(w.shape) > 1 else None)), weights)


@dataclass(frozen=True)
class Matrix:
    """A matrix of a target that may be decomposed; fields as of a `Site`."""

    name: str
    layer: int
    kind: str
    reads: str
    d_in: int
    d_out: int


def choose_sites(matrices: Sequence[Matrix], chosen: Mapping[str, int], tied: Sequence[tuple[str, str]] = ()) -> Sites:
    """The sites named in ``chosen`` (name to C), in canonical order whatever the order given.

    ``matrices``: all that the target has, in canonical order. ``<name>.pre_identity`` is an identity put before a
    matrix, on what it reads.
    """
    sites = []
    for m in matrices:
        before = Site(m.name + PRE_IDENTITY, m.layer, m.kind + PRE_IDENTITY, m.reads, m.d_in, m.d_in, 0)
        for site in (before, Site(m.name, m.layer, m.kind, m.reads, m.d_in, m.d_out, 0)):
            if site.name in chosen:
                sites.append(replace(site, C=chosen[site.name]))
    unknown = chosen.keys() - {site.name for site in sites}
    assert not unknown, f"not matrices of this target: {unknown}"
    return Sites(tuple(sites), tuple(tied))


def site_weights(
    sites: Sites, matrix: Callable[[Stack], Float[Array, "layers d_in d_out"]]
) -> dict[str, Float[Array, "layers d_in d_out"]]:
    """W of every site, by stack; ``matrix`` gives it for a stack of the target's own matrices."""

    def of_stack(stack: Stack) -> Array:
        if stack.kind.endswith(PRE_IDENTITY):
            return jnp.broadcast_to(jnp.eye(stack.d_in), (stack.n_layers, stack.d_in, stack.d_in))
        return matrix(stack)

    return {stack.name: of_stack(stack) for stack in sites.stacks}


class Run(NamedTuple):
    """Layers ``first .. stop - 1`` that are alike: ``layer(x, weights_of_the_layer, linear)`` gives the next ``x``.

    ``weights``: of these layers, with a leading layer axis.
    """

    layer: Callable[[Any, Any, LayerLinears], Any]
    weights: Any
    first: int
    stop: int

    def of(self, first: int, stop: int) -> Any:
        """Weights of the layers ``first .. stop - 1``."""
        return jax.tree.map(lambda w: w[first - self.first : stop - self.first], self.weights)


def run_layers(
    runs: Sequence[Run], x: Any, linears: Linears, first: int, memory: MemoryPolicy
) -> tuple[Any, dict[int, dict[str, Array]]]:
    """All layers from ``first`` on, one scan for every part of a run that ``linears`` treats alike.

    Returns the last ``x`` and the records (see `Forward`).
    """
    records: dict[int, dict[str, Array]] = {}
    for run in runs:
        if first < run.stop:
            x, of_run = _run(run, x, linears, max(first, run.first), memory)
            records |= of_run
    return x, records


def _run(
    run: Run, x: Any, linears: Linears, first: int, memory: MemoryPolicy
) -> tuple[Any, dict[int, dict[str, Array]]]:
    records = {}
    edges = sorted({first, run.stop} | {cut for cut in linears.cuts() if first < cut < run.stop})
    for a, b in pairwise(edges):

        def body(x: Any, xs: Any, a: int = a, b: int = b) -> tuple[Any, dict[str, Array]]:
            frozen, of_sites = xs
            linear = linears.layer(a, b, of_sites)
            linear.enter(x)
            x = run.layer(x, frozen, linear)
            return x, linear.records

        x = linears.join(a, x)
        x, records[a] = over_layers(memory, body, x, (run.of(a, b), linears.slices(a, b)))
    return x, records
