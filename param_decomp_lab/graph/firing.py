"""The components that fire on one row of inputs, as nodes of a graph and as tables for the devices."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from param_decomp_jax.analysis.attribution import Firing, Targets
from param_decomp_jax.decomposition.sites import Sites, Stack

LEAST = 8
"""Width of a table at least; widths are powers of two, so that prompts of a length share their programs."""


@dataclass(frozen=True)
class FiringComponents:
    """N components, each at a position, in order of stacks. ``site``: canonical number. ``row``: position, or slot of
    experts. ``column``: its place in the table of its row."""

    stack: Int[np.ndarray, " N"]
    layer: Int[np.ndarray, " N"]
    row: Int[np.ndarray, " N"]
    column: Int[np.ndarray, " N"]
    number: Int[np.ndarray, " N"]
    expert: Int[np.ndarray, " N"]
    site: Int[np.ndarray, " N"]
    position: Int[np.ndarray, " N"]
    importance: Float[np.ndarray, " N"]
    activation: Float[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.stack)

    def targets(self, nodes: Int[np.ndarray, " K"]) -> Targets:
        """Some of them as what edges lead to."""
        fields = (self.stack, self.layer, self.row, self.number, self.expert)
        return Targets(*(jnp.asarray(values[nodes], jnp.int32) for values in fields))


def find_firing(
    sites: Sites,
    importances: Mapping[str, Float[np.ndarray, "rows C"]],
    activations: Mapping[str, Float[np.ndarray, "rows C"]],
    chosen: Mapping[str, Int[np.ndarray, "layers rows k"]],
    threshold: float,
) -> tuple[FiringComponents, dict[str, Firing]]:
    """The components with λ above ``threshold``, and by stack the table of them.

    ``importances``, ``activations``: by site, at every position. ``chosen``: experts, by stack.
    """
    names = [site.name for site in sites.all]
    found: dict[str, list[np.ndarray]] = {field: [] for field in FiringComponents.__dataclass_fields__}
    tables = {}
    for stack_number, stack in enumerate(sites.stacks):
        parts = []
        for place, site in zip(stack.rows(), stack.sites, strict=True):
            layer, expert = (place, 0) if stack.experts is None else place
            position, number = np.nonzero(importances[names[site]] > threshold)
            row = position
            if stack.experts is not None:
                of_layer = chosen[stack.name][layer]
                row = position * of_layer.shape[-1] + np.argmax(of_layer[position] == expert, axis=-1)
            own = np.stack([np.full_like(position, x) for x in (layer, expert, site)] + [position, row, number])
            values = [x[names[site]][position, number] for x in (importances, activations)]
            parts.append((own, np.stack(values)))
        (layer, expert, site, position, row, number), (importance, activation) = (
            np.concatenate(part, axis=1) for part in zip(*parts, strict=True)
        )
        n_rows = _n_rows(stack, importances[names[stack.sites[0]]].shape[0], chosen)
        column, table = _table(stack, n_rows, layer, row, number)
        tables[stack.name] = table
        own_stack = np.full_like(layer, stack_number)
        columns = (own_stack, layer, row, column, number, expert, site, position, importance, activation)
        for field, value in zip(found, columns, strict=True):
            found[field].append(value)
    return FiringComponents(*(np.concatenate(parts) for parts in found.values())), tables


def _n_rows(stack: Stack, positions: int, chosen: Mapping[str, np.ndarray]) -> int:
    return positions if stack.experts is None else positions * chosen[stack.name].shape[-1]


def _table(
    stack: Stack, n_rows: int, layer: np.ndarray, row: np.ndarray, number: np.ndarray
) -> tuple[Int[np.ndarray, " N"], Firing]:
    """The column of each component in its row, and the table."""
    place = layer * n_rows + row
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=stack.n_layers * n_rows)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    column = np.empty_like(place)
    column[order] = np.arange(len(place)) - starts[place[order]]
    width = LEAST
    while width < counts.max(initial=0):
        width *= 2
    width = min(width, max(stack.C, int(counts.max(initial=0))))
    numbers = np.zeros((stack.n_layers, n_rows, width), np.int32)
    fires = np.zeros(numbers.shape, np.float32)
    numbers[layer, row, column] = number
    fires[layer, row, column] = 1
    return column, Firing(jnp.asarray(numbers), jnp.asarray(fires))
