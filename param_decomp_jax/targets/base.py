"""The interface of a target: a frozen forward pass whose caller decides how its matrices are applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Matrix, Segment, Site, Sites, Stack
from param_decomp_jax.nn.grouped import ExpertGroups
from param_decomp_jax.sharding.by_layer import SomeLayers, layers_of, stacked
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes
from param_decomp_jax.sharding.remat import over_layers
from param_decomp_jax.targets.points import RESID_POST

Weights = Any
"""A pytree of frozen arrays. It is always an argument of the jitted step, never closed over."""


@runtime_checkable
class LayerLinears(Protocol):
    """How one layer applies its matrices. ``records``: arrays of this layer that the pass keeps."""

    records: dict[str, Array]

    @property
    def frozen(self) -> Axes:
        """The logical axes of one of its matrices at rest."""
        ...

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        """Applies the layer's matrix ``kind`` with weights ``W`` to ``x``."""
        ...

    def look_up(
        self, kind: str, rows: Int[Array, "*n"], table: Float[Array, "n d"], dtype: Any
    ) -> Float[Array, "*n d"]:
        """Returns ``rows`` of the table ``kind``, in ``dtype`` (F7)."""
        ...

    def enter(self, x: Shaped[Array, "*n"]) -> None:
        """Receives the layer's input (the residual stream, or tokens) before any matrix is applied."""
        ...

    def choose(self, logits: Float[Array, "*n experts"], k: int) -> Int[Array, "*n k"]:
        """Receives the logits of the layer's router at each position, and returns which k experts are computed (X1,
        X3)."""
        ...

    def grouped(
        self, kind: str, x: Float[Array, "*n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
    ) -> Float[Array, "*n k d_out"]:
        """Applies the matrix ``kind`` of every slot's expert. ``x``: one row for every slot, or (s = 1) one that the
        slots of a position share."""
        ...


@runtime_checkable
class HookedLayer(Protocol):
    """A `LayerLinears` that sees other activations than what the matrices read, and may replace them (B6)."""

    def hook(self, name: str, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """Returns what replaces ``x``, the activation at the hook ``name`` of the layer."""
        ...


def hooked(linear: LayerLinears, name: str, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Returns the activation at a hook of a layer, or what replaces it. ``name``: TransformerLens' name."""
    return linear.hook(name, x) if isinstance(linear, HookedLayer) else x


@runtime_checkable
class ReadsPatterns(Protocol):
    """A `LayerLinears` that sees its layer's attention (H3)."""

    def see_pattern(self, pattern: Float[Array, "B heads T T"]) -> None:
        """Receives how much every position attends to every other, in fp32 or wider."""
        ...


@runtime_checkable
class SharedRows(Protocol):
    """A `LayerLinears` of several forward passes that may share rows (see `alike`)."""

    def alike(self, *arrays: Float[Array, "..."]) -> tuple[Float[Array, "rows ..."], ...]: ...


def alike(linear: LayerLinears, *arrays: Float[Array, "..."]) -> tuple[Float[Array, "rows ..."], ...]:
    """Returns the arrays with equal numbers of rows, before a layer computes with several of them
    (`Target.joins_rows`)."""
    return linear.alike(*arrays) if isinstance(linear, SharedRows) else arrays


@runtime_checkable
class Linears(Protocol):
    """How a whole forward pass applies the target's matrices (F1 to F4).

    Layers between two neighbouring ``scan_boundaries`` are treated alike, so that one scan can run over them.
    ``slices`` returns the arrays they need, with a leading layer axis, and ``layer`` turns one slice of these into a
    `LayerLinears`.
    """

    def scan_boundaries(self) -> frozenset[int]: ...

    def join(self, layer: int, x: Any) -> Any:
        """Returns the input of the scan that begins at ``layer``, from the output of the scan before it."""
        ...

    def slices(self, first: int, stop: int) -> Any: ...

    def layer(self, first: int, stop: int, slice_: Any) -> LayerLinears: ...


@dataclass(frozen=True)
class WholeForward:
    """`Linears` of one forward pass through all layers, which treat the layers of a segment of sites alike."""

    sites: Sites

    def scan_boundaries(self) -> frozenset[int]:
        return frozenset(edge for segment in self.sites.segments for edge in (segment.first, segment.stop))

    def join(self, layer: int, x: Any) -> Any:
        return x

    def stacks_at(self, layer: int) -> list[Stack]:
        """Returns the stacks that have a site in this layer."""
        return [stack for stack in self.sites.stacks if layer in stack.layers]


class Forward(NamedTuple):
    """The result of a forward pass: the target's output, and what its linears recorded.

    ``records``: arrays ``[layers, ...]``, by the first layer of their scan, then by the name of the record.
    """

    output: Any
    records: Mapping[int, dict[str, Array]]


@runtime_checkable
class Target(Protocol):
    """A frozen network. ``inputs`` is one batch: token ids ``[B, T]`` for a language model."""

    @property
    def architecture(self) -> Any:
        """The `targets/architecture.py:Architecture` that made it."""
        ...

    @property
    def sites(self) -> Sites: ...

    @property
    def memory(self) -> MemoryPolicy: ...

    @property
    def joins_rows(self) -> bool:
        """Whether its layers call `alike` wherever they compute with several arrays. If so, masked forwards share the
        rows of the batch up to the first masked matrix."""
        ...

    def forward(
        self, weights: Weights, inputs: Array, linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Runs one pass. ``start = (layer, x)`` begins at that layer from its clean input ``x`` (F6)."""
        ...

    def uniform_layers(self, weights: Weights) -> Sequence["UniformLayers"]:
        """Returns all layers in order, in runs of layers that one scan can run over."""
        ...

    def activation_axes(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes of an activation before its last one, for a batch of inputs of this shape: ``[B, T]`` for
        token ids."""
        ...

    def predictions(self, weights: Weights, output: Any) -> Float[Array, "*n d"]:
        """Returns the forward's output as people read it, in fp32 or wider: logits, or a toy's features."""
        ...

    def reference(self, weights: Weights, clean: Any) -> Any:
        """Returns what `errors` compares masked outputs with, computed once from the clean output."""
        ...

    def errors(self, weights: Weights, reference: Any, masked: Sequence[Any]) -> Float[Array, " streams"]:
        """Returns R1: the distance of each masked output from the clean one, as a mean over the global batch.

        ``reference``: what `reference` returned for the clean output.
        """
        ...

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "*lead d_in d_out"]]:
        """Returns W of every site, by stack."""
        ...

    def weight_axes(self, weights: Weights) -> Any:
        """Returns the logical axes of every array (or shape) of the weights, in their structure."""
        ...


def choose_sites(matrices: Sequence[Matrix], chosen: Mapping[str, int], tied: Sequence[tuple[str, str]] = ()) -> Sites:
    """Returns the sites named in ``chosen`` (name to C), in canonical order whatever the order of ``chosen``.

    ``matrices``: all matrices of the target, in canonical order. ``<name>.pre_identity`` is an identity inserted before
    a matrix, on what it reads.
    """
    sites = []
    for m in matrices:
        identity = replace(m, name=m.name + PRE_IDENTITY, kind=m.kind + PRE_IDENTITY, d_out=m.d_in, faces=None)
        possible = (m,) if m.lookup else (identity, m)
        sites += [Site(**vars(x), C=chosen[x.name]) for x in possible if x.name in chosen]
    unknown = chosen.keys() - {site.name for site in sites}
    assert not unknown, f"not matrices of this target: {unknown}"
    return Sites(tuple(sites), tuple(tied))


def site_weights(sites: Sites, matrix: Callable[[Stack], Any]) -> dict[str, Float[Array, "*lead d_in d_out"]]:
    """Returns W of every site, by stack. ``matrix``: returns it for a stack of the target's own matrices, as it is
    kept."""

    def stack_weights(stack: Stack) -> Array:
        if stack.kind.endswith(PRE_IDENTITY):
            return jnp.broadcast_to(jnp.eye(stack.d_in), (*stack.lead, stack.d_in, stack.d_in))
        W: Array = stacked(matrix(stack))
        return W

    return {stack.name: stack_weights(stack) for stack in sites.stacks}


class UniformLayers(NamedTuple):
    """The layers ``first .. stop - 1``, which share code and shapes, so that one scan can run over them.

    ``apply(x, layer_weights, linear)`` returns the next ``x``. ``weights``: those of these layers, with a leading layer
    axis.
    """

    apply: Callable[[Any, Any, LayerLinears], Any]
    weights: Any
    first: int
    stop: int

    def slice_weights(self, first: int, stop: int) -> Any:
        """Returns the weights of the layers ``first .. stop - 1``, numbered as in the whole target."""
        return layers_of(self.weights, slice(first - self.first, stop - self.first))


def layers_of_segment(groups: Sequence[UniformLayers], segment: Segment) -> UniformLayers:
    """Returns the uniform layers in which a segment of the sites lies.

    One scan runs over a segment, so a segment may not extend over two of ``groups``: their matrices must differ in
    `Matrix.group`, in kind or in shape. Fails by assertion if they do not.
    """
    layers = next(g for g in groups if g.first <= segment.first < g.stop)
    assert segment.stop <= layers.stop, (
        f"sites of layers {segment.first} to {segment.stop - 1} form one segment, but layer {layers.stop} begins "
        "another group of alike layers: give its matrices another `group`"
    )
    return layers


def run_layers(
    groups: Sequence[UniformLayers], x: Any, linears: Linears, first: int, memory: MemoryPolicy
) -> tuple[Any, dict[int, dict[str, Array]]]:
    """Runs all layers from ``first`` on, in one scan for every part of ``groups`` that ``linears`` treats alike.

    Returns the last ``x`` and the records (see `Forward`).
    """
    records: dict[int, dict[str, Array]] = {}
    for layers in groups:
        if first < layers.stop:
            x, new = _run_group(layers, x, linears, max(first, layers.first), memory)
            records |= new
    return x, records


def _run_group(
    layers: UniformLayers, x: Any, linears: Linears, first: int, memory: MemoryPolicy
) -> tuple[Any, dict[int, dict[str, Array]]]:
    records = {}
    edges = sorted({first, layers.stop} | {edge for edge in linears.scan_boundaries() if first < edge < layers.stop})
    for a, b in pairwise(edges):

        def body(x: Any, xs: Any, a: int = a, b: int = b) -> tuple[Any, dict[str, Array]]:
            layer_weights, slice_ = xs
            linear = linears.layer(a, b, slice_)
            linear.enter(x)
            x = hooked(linear, RESID_POST, layers.apply(x, layer_weights, linear))
            return x, linear.records

        x = linears.join(a, x)
        own = SomeLayers(layers.weights, a - layers.first, b - layers.first)
        x, records[a] = over_layers(memory, body, x, (own, linears.slices(a, b)))
    return x, records
