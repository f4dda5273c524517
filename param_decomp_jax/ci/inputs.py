"""Inputs of a CI function that reads every site at once (F5): kept from the clean pass, or recomputed from it.

A global CI function maps all sites' clean inputs into one sum (`JointAffine`). If they are kept, those inputs are the
largest arrays of the clean pass. They can instead be recomputed, layer by layer, from the residual at which each layer
starts, which masked forwards need anyway (F6).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Segment, Sites
from param_decomp_jax.nn.grouped import ExpertGroups, group
from param_decomp_jax.sharding.by_layer import stacked
from param_decomp_jax.targets.base import Target, UniformLayers, Weights, layers_of_segment
from param_decomp_jax.targets.plain_linears import CHOSEN, RESIDUAL, PlainLayer, frozen_axes

SiteInputs = dict[str, Float[Array, "layers *n d_in"]]
"""The clean inputs of the sites, by stack."""

ChosenExperts = dict[str, Int[Array, "..."]]
"""The experts that the positions of the clean pass take, ``[layers, *n, k]``, by stack; only stacks of experts are in
it."""

Contribution = Callable[[Float[Array, "*n d_in"], Any, ExpertGroups | None], Array]
"""A function from a site's clean input and the site's own parameters to its summand. With groups, it returns the
summand of all experts at once."""


LayerRange = tuple[Segment, int, int]
"""A range of layers of a segment: the first layer, and the one after the last."""


@runtime_checkable
class SummableInputs(Protocol):
    """The clean inputs of some layers' sites."""

    def sum_over_sites(
        self, start: Array, contribution: Contribution, parameters: dict[str, Any], recompute: bool
    ) -> Array:
        """Returns ``start + Σ contribution(input, parameters)`` over the sites. ``parameters``: by stack, with a layer
        axis, for the stacks that are read.

        ``recompute``: whether a site's summand is recomputed in the backward pass.
        """
        ...


@runtime_checkable
class CIInputs(SummableInputs, Protocol):
    """The clean inputs of all sites. ``by_stack``: the arrays themselves; empty if they are recomputed."""

    @property
    def by_stack(self) -> SiteInputs: ...

    def of_layers(self, layers: Sequence[LayerRange]) -> tuple[Any, Callable[[Any], SummableInputs]]:
        """Returns what the inputs of some layers' sites are computed from, as arrays with a leading layer axis, and a
        function that turns such arrays, or slices of them along that axis, into inputs."""
        ...


@dataclass(frozen=True)
class KeptInputs:
    """The inputs as the clean pass recorded them."""

    by_stack: SiteInputs
    chosen: ChosenExperts = field(default_factory=dict)

    def of_layers(self, layers: Sequence[LayerRange]) -> tuple[Any, Callable[[Any], SummableInputs]]:
        rows = {
            stack.name: slice(first - stack.first, stop - stack.first)
            for segment, first, stop in layers
            for stack in segment.stacks
        }
        own = ({n: x[rows[n]] for n, x in arrays.items() if n in rows} for arrays in (self.by_stack, self.chosen))
        return tuple(own), lambda arrays: KeptInputs(*arrays)

    def sum_over_sites(
        self, start: Array, contribution: Contribution, parameters: dict[str, Any], recompute: bool
    ) -> Array:
        summand = jax.checkpoint(contribution, prevent_cse=False) if recompute else contribution
        for name, x in self.by_stack.items():
            if name not in parameters:
                continue
            experts = parameters[name].shape[1] if name in self.chosen else 0

            def add(total: Array, layer: Any, experts: int = experts) -> tuple[Array, None]:
                x, own, chosen = layer
                # Added outside of what is recomputed, so that partial sums are not kept.
                return total + summand(x, own, group(chosen, experts) if experts else None), None

            start, _ = lax.scan(add, start, (x, parameters[name], self.chosen.get(name)))
        return start


@dataclass
class _SummingLayer(PlainLayer):
    """A layer of the clean pass that collects its sites' summands. ``parameters``: those of this layer's sites, by
    kind."""

    contribution: Contribution = field(kw_only=True)
    parameters: dict[str, Any] = field(kw_only=True)
    summands: list[Array] = field(default_factory=list, kw_only=True)

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        for site in (kind + PRE_IDENTITY, kind):
            if site in self.parameters:
                self.summands.append(self.contribution(lax.stop_gradient(x), self.parameters[site], None))
        return super().__call__(kind, x, W)

    def look_up(
        self, kind: str, rows: Int[Array, "*n"], table: Float[Array, "n d"], dtype: Any
    ) -> Float[Array, "*n d"]:
        y = super().look_up(kind, rows, table, dtype)
        if kind in self.parameters:
            self.summands.append(self.contribution(lax.stop_gradient(y), self.parameters[kind], None))
        return y

    def grouped(
        self, kind: str, x: Float[Array, "*n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
    ) -> Float[Array, "*n k d_out"]:
        if kind in self.parameters:
            self.summands.append(self.contribution(lax.stop_gradient(x), self.parameters[kind], groups))
        return super().grouped(kind, x, W, groups)


@dataclass(frozen=True)
class RecomputedInputs:
    """The inputs, recomputed layer by layer. ``records``: the records of the clean pass, with every residual."""

    target: Target
    weights: Weights
    records: dict[int, dict[str, Array]]

    @property
    def by_stack(self) -> SiteInputs:
        return {}

    def sum_over_sites(
        self, start: Array, contribution: Contribution, parameters: dict[str, Any], recompute: bool
    ) -> Array:
        arrays, of_arrays = self.of_layers([(s, s.first, s.stop) for s in self.target.sites.segments])
        return of_arrays(arrays).sum_over_sites(start, contribution, parameters, recompute)

    def of_layers(self, layers: Sequence[LayerRange]) -> tuple[Any, Callable[[Any], SummableInputs]]:
        groups = self.target.uniform_layers(self.weights)
        alike = [(segment, layers_of_segment(groups, segment)) for segment, _, _ in layers]
        arrays = [
            (self.records[segment.first][RESIDUAL][first - segment.first : stop - segment.first],
             stacked(of_segment.slice_weights(first, stop)))
            for (segment, first, stop), (_, of_segment) in zip(layers, alike, strict=True)
        ]  # fmt: skip
        return arrays, lambda arrays: _RecomputedLayers(self, alike, arrays)

    def add_segment(
        self,
        start: Array,
        layers: UniformLayers,
        segment: Segment,
        arrays: tuple[Array, Weights],
        contribution: Contribution,
        parameters: dict[str, Any],
    ) -> Array:
        """Adds the summands of some layers of a segment. ``arrays``: their residuals and weights."""
        by_kind = {stack.kind: parameters[stack.name] for stack in segment.stacks if stack.name in parameters}
        if not by_kind:
            return start

        def layer_sum(residual: Array, weights: Weights, own: dict[str, Any]) -> Array:
            frozen = frozen_axes(self.target.memory)
            layer = _SummingLayer(frozen, contribution=contribution, parameters=own)
            layers.apply(residual, weights, layer)
            total = layer.summands[0]
            for other in layer.summands[1:]:
                total = total + other
            return total

        # The layer is always recomputed, because keeping its results would mean keeping the inputs.
        recomputed = jax.checkpoint(layer_sum, prevent_cse=False)
        return lax.scan(lambda total, layer: (total + recomputed(*layer), None), start, (*arrays, by_kind))[0]


@dataclass(frozen=True)
class _RecomputedLayers:
    """The inputs of some layers' sites, recomputed from ``arrays``: residuals and weights, by segment."""

    inputs: RecomputedInputs
    segments: Sequence[tuple[Segment, UniformLayers]]
    arrays: Sequence[tuple[Array, Weights]]

    def sum_over_sites(
        self, start: Array, contribution: Contribution, parameters: dict[str, Any], recompute: bool
    ) -> Array:
        for (segment, layers), arrays in zip(self.segments, self.arrays, strict=True):
            start = self.inputs.add_segment(start, layers, segment, arrays, contribution, parameters)
        return start


def site_inputs(sites: Sites, records: dict[int, dict[str, Array]]) -> SiteInputs:
    """Returns the sites' inputs from the records of a clean pass that kept them."""
    return {stack.name: records[segment.first][stack.reads] for segment in sites.segments for stack in segment.stacks}


def chosen_experts(sites: Sites, records: dict[int, dict[str, Array]]) -> ChosenExperts:
    """Returns the chosen experts from the records of a clean pass."""
    return {
        stack.name: records[segment.first][CHOSEN]
        for segment in sites.segments
        for stack in segment.stacks
        if stack.experts is not None
    }
