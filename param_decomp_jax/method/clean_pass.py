"""The clean pass of a batch (F4), which all masked forwards of the batch share."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt32

from param_decomp_jax.ci import ImportanceReader
from param_decomp_jax.ci.inputs import (
    ChosenExperts,
    CIInputs,
    KeptInputs,
    RecomputedInputs,
    SiteInputs,
    chosen_experts,
)
from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.decomposition.components import Components
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.targets.base import Forward, Target, Weights
from param_decomp_jax.targets.plain_linears import RESIDUAL
from param_decomp_jax.targets.points import RESID_POST, RESID_PRE, Point, point_name

PointRecords = dict[str, dict[tuple[int, ...], Shaped[Array, "_ *leading _"]]]
"""Activations at points, by hook and by the numbers of the layers in an array."""


@dataclass(frozen=True)
class CleanPass:
    """A batch and the results of its forward pass with no live site.

    ``forward``: the output and the records. ``reference``: what errors compare masked outputs with, if it is computed
    beforehand. ``site_inputs``: clean inputs of the sites by stack, empty where they are recomputed. ``at``: global
    numbers of the positions (M4). ``batch``: the number of rows of the global batch. ``points``: activations at the
    points that were asked for. ``point_squares``: sums of squares over the whole batch, by the name of the point.
    """

    target: Target
    weights: Weights
    inputs: Array
    forward: Forward
    reference: Any
    site_inputs: SiteInputs
    at: UInt32[Array, "*leading"]
    batch: int
    use_delta: bool
    points: PointRecords = field(default_factory=dict)
    point_squares: dict[str, Float[Array, ""]] = field(default_factory=dict)

    @property
    def leading(self) -> tuple[int, ...]:
        """The global leading axes of an activation."""
        return self.at.shape

    @property
    def looked_up(self) -> dict[str, Int[Array, "layers *leading"]]:
        """The numbers of the looked-up rows (F7), by stack of tables."""
        return {stack.name: self.inputs[None] for stack in self.target.sites.stacks if stack.lookup}

    @property
    def chosen(self) -> ChosenExperts:
        """The experts that the positions take, where experts' matrices are sites."""
        return chosen_experts(self.target.sites, dict(self.forward.records))

    @property
    def ci_inputs(self) -> CIInputs:
        """What a global CI function reads."""
        if self.site_inputs:
            return KeptInputs(self.site_inputs, self.chosen)
        return RecomputedInputs(self.target, self.weights, dict(self.forward.records))

    def residual(self, live: tuple[int, ...]) -> Array:
        """Returns the clean residual at the first live layer, where a forward with these live sites leaves the clean
        pass (F6)."""
        layer = self.target.sites.all[live[0]].layer
        first = max(start for start in self.forward.records if start <= layer)
        return self.forward.records[first][RESIDUAL][layer - first]

    def at_point(self, point: Point) -> Shaped[Array, "*leading _"]:
        """Returns the activation at one of the points that were asked for."""
        return self.at_hook(point.hook, range(point.layer, point.layer + 1))[0]

    def at_boundaries(self, boundaries: Sequence[int]) -> Float[Array, "_ *leading _"]:
        """Returns the residual streams that enter the blocks with these numbers, stacked (C10)."""
        found: list[tuple[Array, list[int]]] = []
        for boundary in boundaries:
            array, row = self._entering(boundary)
            if found and found[-1][0] is array and _evenly(found[-1][1], row):
                found[-1][1].append(row)
            else:
                found.append((array, [row]))
        # Slices instead of stacked rows, so that an array that is wanted whole is not copied.
        parts = [x[rows[0] : rows[-1] + 1 : rows[1] - rows[0] if len(rows) > 1 else 1] for x, rows in found]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _entering(self, boundary: int) -> tuple[Array, int]:
        """Returns where the residual stream that enters a block is kept: an array and a row."""
        for first, own in self.forward.records.items():
            if RESIDUAL in own and first <= boundary < first + own[RESIDUAL].shape[0]:
                return own[RESIDUAL], boundary - first
        for hook, layer in ((RESID_PRE, boundary), (RESID_POST, boundary - 1)):
            for layers, array in self.points.get(hook, {}).items():
                if layer in layers:
                    return array, layers.index(layer)
        raise AssertionError(f"the residual stream that enters block {boundary} was not recorded")

    def at_hook(self, hook: str, layers: range) -> Shaped[Array, "_ *leading _"]:
        """Returns the activations at a hook in neighbouring layers, all of which were asked for."""
        parts = []
        for recorded, array in sorted(self.points[hook].items()):
            rows = [n for n, layer in enumerate(recorded) if layer in layers]
            if rows:
                # An array that is wanted whole is not copied.
                parts.append(array if len(rows) == len(recorded) else array[rows[0] : rows[-1] + 1])
        found = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        assert found.shape[0] == len(layers), f"{hook} is not recorded in all layers of {layers}"
        return found


def _evenly(rows: list[int], row: int) -> bool:
    """Returns whether ``row`` follows the last of ``rows`` at the same distance as that one follows its predecessor."""
    step = row - rows[-1]
    return step > 0 and (len(rows) == 1 or step == rows[-1] - rows[-2])


def point_records(records: Mapping[int, dict[str, Array]], points: Collection[Point]) -> PointRecords:
    """Returns the activations at ``points`` from the records of a clean pass that was told to keep them."""
    found: PointRecords = {}
    for hook in sorted({point.hook for point in points}):
        asked = {point.layer for point in points if point.hook == hook}
        for first, own in records.items():
            if hook in own:
                rows = [row for row in range(own[hook].shape[0]) if first + row in asked]
                array = own[hook] if len(rows) == own[hook].shape[0] else own[hook][jnp.asarray(rows)]
                found.setdefault(hook, {})[tuple(first + row for row in rows)] = array
        missing = asked - {layer for layers in found.get(hook, {}) for layer in layers}
        assert not missing, f"{hook} was not recorded in the layers {sorted(missing)}"
    return found


def squares(points: PointRecords) -> dict[str, Float[Array, ""]]:
    """Returns the sum of squares over the whole batch at every point, by the point's name (N2)."""
    return {
        point_name(hook, layer): jnp.sum(wide(array[row]) ** 2)
        for hook, by_layers in points.items()
        for layers, array in by_layers.items()
        for row, layer in enumerate(layers)
    }


@dataclass(frozen=True)
class DecomposedBatch:
    """A batch as losses and masked forwards see it.

    ``components``: the components of every stack, as arrays ``[layers, …]``. ``reader``: reads the causal importances
    of the positions, site by site.
    """

    clean_pass: CleanPass
    components: Components
    reader: ImportanceReader

    @property
    def target(self) -> Target:
        return self.clean_pass.target

    @property
    def n_positions(self) -> int:
        """The number of positions of the batch; a toy has one per row."""
        return self.clean_pass.at.size

    def with_squash(self, squash: Squash) -> "DecomposedBatch":
        """Returns the batch with another function from logits to causal importances."""
        return replace(self, reader=replace(self.reader, squash=squash))

    def constant(self) -> "DecomposedBatch":
        """The batch for an adversary (A1): no gradient reaches components or causal importances."""
        reader = replace(self.reader, outputs=jax.lax.stop_gradient(self.reader.outputs))
        return replace(self, components=jax.lax.stop_gradient(self.components), reader=reader)
