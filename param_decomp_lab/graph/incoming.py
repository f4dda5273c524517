"""Incoming edges of a graph's nodes, as flat arrays on the host: what lies between the core's tables and a graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.attribution import Cut, Edges, Outputs, Targets, edges, for_attribution, take_apart
from param_decomp_jax.analysis.importances import SiteReading, read_sites
from param_decomp_jax.ci.inputs import ChosenExperts
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_lab.compilation import jitted
from param_decomp_lab.graph.firing import find_firing
from param_decomp_lab.runs.opened import OpenedRun

GRADIENT_BYTES = 1 << 29
"""Bytes of the gradients with respect to what the sites give, for all targets that are computed at once."""
MOST_AT_ONCE = 64


@dataclass(frozen=True)
class SourceOrder:
    """The sources of a graph in one order: components that fire, rests, embeddings, biases. ``rest_site``,
    ``rest_position``: of each rest; those of an expert's slots are of the expert's site."""

    components: int
    rest_site: Int[np.ndarray, " r"]
    rest_position: Int[np.ndarray, " r"]
    embeddings: int

    @property
    def sources(self) -> int:
        return self.components + len(self.rest_site) + self.embeddings + 1


@dataclass(frozen=True)
class IncomingEdges:
    """Weights of all sources, in the order of a `SourceOrder`; ``delta``: the part of each rest that is the delta's."""

    weights: Float[np.ndarray, "K N"]
    delta: Float[np.ndarray, "K r"]


class Incoming:
    """One row of inputs taken apart; gives incoming edges of components and outputs.

    ``inputs``: ``[1, T]`` token ids or ``[1, n]`` features, on the mesh. ``importances``: λ by site; those of the CI
    function unless others are given.
    """

    def __init__(
        self,
        opened: OpenedRun,
        inputs: Array,
        threshold: float,
        importances: Mapping[str, Float[np.ndarray, "rows C"]] | None = None,
    ) -> None:
        self._opened, self._inputs = opened, inputs
        self.problem = for_attribution(opened.problem)
        self.sites = self.problem.target.sites
        with jax.set_mesh(opened.mesh):
            chosen, readings = jitted(_read)(self.problem, opened.learned, opened.weights, inputs)
        own = {name: _flat(reading.importance) for name, reading in readings.items()}
        self.importances = own if importances is None else dict(importances)
        a = {name: _flat(reading.activation) for name, reading in readings.items()}
        on_host = {name: _merge_positions(np.asarray(x)) for name, x in chosen.items()}
        self.firing, self._tables = find_firing(self.sites, self.importances, a, on_host, threshold)
        with jax.set_mesh(opened.mesh):
            self._cut: Cut = jitted(take_apart)(
                self.problem, opened.learned.components, opened.weights, inputs, self._tables
            )
        self.layout = self._lay_out(on_host)
        held = sum(x.size * x.dtype.itemsize for x in self._cut.outputs.values())
        self.at_once = int(np.clip(GRADIENT_BYTES // max(held, 1), 1, MOST_AT_ONCE))

    def _lay_out(self, chosen: dict[str, np.ndarray]) -> SourceOrder:
        sites, positions = [], []
        for stack in self.sites.stacks:
            layers, rows = self._tables[stack.name].number.shape[:2]
            first = np.asarray([stack.of_layer(stack.first + layer)[0] for layer in range(layers)])
            if stack.experts is None:
                site = np.repeat(first, rows)
                position = np.tile(np.arange(rows), layers)
            else:
                of_slots = chosen[stack.name]
                members = np.asarray([stack.of_layer(stack.first + layer) for layer in range(layers)])
                site = np.take_along_axis(members, of_slots.reshape(layers, -1), axis=1).reshape(-1)
                position = np.tile(np.arange(rows) // of_slots.shape[-1], layers)
            sites.append(site)
            positions.append(position)
        cut = self._cut
        embeddings = 0
        if cut.embeddings is not None:
            embeddings = cut.embeddings.shape[0]
        elif cut.entry is not None:
            embeddings = cut.entry.shape[1]
        return SourceOrder(len(self.firing), np.concatenate(sites), np.concatenate(positions), embeddings)

    def of_components(self, nodes: Int[np.ndarray, " K"]) -> IncomingEdges:
        """Edges into some of the components that fire."""
        return self._in_batches(nodes, lambda batch: self.firing.targets(batch))

    def of_outputs(self, row: int, numbers: Int[np.ndarray, " K"]) -> IncomingEdges:
        """Edges into outputs: of tokens' logits at a position, or of a toy's features (``row`` 0)."""
        return self._in_batches(
            numbers,
            lambda batch: Outputs(jnp.full(len(batch), row, jnp.int32), jnp.asarray(batch, jnp.int32)),
        )

    def _in_batches(self, numbers: np.ndarray, make: Any) -> IncomingEdges:
        found = []
        for start in range(0, len(numbers), self.at_once):
            own = numbers[start : start + self.at_once]
            padded = np.concatenate([own, np.full(self.at_once - len(own), own[-1])])
            found.append(self._flatten(self._edges(make(padded)), len(own)))
        weights, delta = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return IncomingEdges(weights, delta)

    def _edges(self, targets: Targets | Outputs) -> Edges:
        components = self._opened.learned.components
        with jax.set_mesh(self._opened.mesh):
            found: Edges = jitted(edges)(
                self.problem, components, self._opened.weights, self._inputs, self._cut, self._tables, targets
            )
        return found

    def _flatten(self, found: Edges, n: int) -> tuple[np.ndarray, np.ndarray]:
        of_components, firing = [], self.firing
        for number, stack in enumerate(self.sites.stacks):
            own = firing.stack == number
            place = firing.layer[own], firing.row[own], firing.column[own]
            of_components.append(np.asarray(found.components[stack.name])[:n, *place])
        rest = np.concatenate([np.asarray(found.rest[s.name])[:n].reshape(n, -1) for s in self.sites.stacks], axis=1)
        delta = np.concatenate([np.asarray(found.delta[s.name])[:n].reshape(n, -1) for s in self.sites.stacks], axis=1)
        of_entry = np.asarray(found.embeddings)[:n], np.asarray(found.biases)[:n, None]
        return np.concatenate([*of_components, rest, *of_entry], axis=1), delta

    def predictions(self) -> Float[np.ndarray, "rows n"]:
        """The network's outputs at every position, on which the edges of outputs are computed."""
        with jax.set_mesh(self._opened.mesh):
            return _flat(jitted(_clean)(self.problem, self._opened.weights, self._inputs))


def _flat(x: Array) -> np.ndarray:
    found = np.asarray(x)
    return found.reshape(-1, found.shape[-1])


def _merge_positions(chosen: np.ndarray) -> np.ndarray:
    """``[layers, 1, T, k]`` to ``[layers, T, k]``."""
    return chosen.reshape(chosen.shape[0], -1, chosen.shape[-1])


def _read(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array
) -> tuple[ChosenExperts, dict[str, SiteReading]]:
    names = [site.name for site in problem.target.sites.all]
    clean_pass, readings = read_sites(problem, learned, weights, inputs, names)
    return clean_pass.chosen, readings


def _clean(problem: Problem, weights: Weights, inputs: Array) -> Array:
    target = problem.target
    return target.predictions(weights, target.forward(weights, inputs, UNTOUCHED).output)
