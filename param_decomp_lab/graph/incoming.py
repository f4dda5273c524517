"""Incoming edges of a graph's nodes, as flat arrays on the host: what lies between the core's tables and a graph."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.attribution import (
    Cut,
    Edges,
    Outputs,
    RestsOfStack,
    Targets,
    behind_rests,
    edges,
    for_attribution,
    take_apart,
)
from param_decomp_jax.analysis.importances import SiteReading, read_sites
from param_decomp_jax.ci.inputs import ChosenExperts
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_lab.compilation import jitted
from param_decomp_lab.graph.firing import LEAST, find_firing
from param_decomp_lab.runs.opened import OpenedRun

GRADIENT_BYTES = 1 << 29
"""Bytes of the gradients with respect to what the sites give, for all targets that are computed at once."""
MOST_AT_ONCE = 64


@dataclass(frozen=True)
class SourceOrder:
    """The sources of a graph in one order: components that fire, rests, embeddings, biases. ``rest_site``,
    ``rest_position``: of each rest; those of an expert's slots are of the expert's site. ``rest_stack``: number of its
    stack, and ``rest_place``: its layer, row and expert there."""

    components: int
    rest_site: Int[np.ndarray, " r"]
    rest_position: Int[np.ndarray, " r"]
    rest_stack: Int[np.ndarray, " r"]
    rest_place: Int[np.ndarray, "3 r"]
    embeddings: int

    @property
    def sources(self) -> int:
        return self.components + len(self.rest_site) + self.embeddings + 1


@dataclass(frozen=True)
class IncomingEdges:
    """Weights of all sources, in the order of a `SourceOrder`; ``delta``: the part of each rest that is the delta's."""

    weights: Float[np.ndarray, "K N"]
    delta: Float[np.ndarray, "K r"]


@dataclass(frozen=True)
class PartsOfRest:
    """What one rest is made of (E10). ``components``: of its site, 0 for those that fire there."""

    components: Float[np.ndarray, " C"]
    delta: float


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
        self._opened, self._inputs, self.threshold = opened, inputs, threshold
        self.problem = for_attribution(opened.problem)
        self.sites = self.problem.target.sites
        with jax.set_mesh(opened.mesh):
            chosen, readings = jitted(_read)(self.problem, opened.learned, opened.weights, inputs)
        own = {name: _flat(reading.importance) for name, reading in readings.items()}
        self.importances = own if importances is None else dict(importances)
        self.activations = a = {name: _flat(reading.activation) for name, reading in readings.items()}
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
        sites, positions, stacks, places = [], [], [], []
        for number, stack in enumerate(self.sites.stacks):
            layers, rows = self._tables[stack.name].number.shape[:2]
            first = np.asarray([stack.of_layer(stack.first + layer)[0] for layer in range(layers)])
            layer, row = np.repeat(np.arange(layers), rows), np.tile(np.arange(rows), layers)
            expert = np.zeros_like(layer)
            if stack.experts is None:
                site, position = np.repeat(first, rows), row
            else:
                of_slots = chosen[stack.name]
                expert = of_slots.reshape(-1)
                members = np.asarray([stack.of_layer(stack.first + layer) for layer in range(layers)])
                site = members[layer, expert]
                position = row // of_slots.shape[-1]
            sites.append(site)
            positions.append(position)
            stacks.append(np.full_like(layer, number))
            places.append(np.stack([layer, row, expert]))
        cut = self._cut
        embeddings = 0
        if cut.embeddings is not None:
            embeddings = cut.embeddings.shape[0]
        elif cut.entry is not None:
            embeddings = cut.entry.shape[1]
        of_rests = [np.concatenate(parts) for parts in (sites, positions, stacks)]
        return SourceOrder(
            len(self.firing), of_rests[0], of_rests[1], of_rests[2], np.concatenate(places, axis=1), embeddings
        )

    def of_components(self, nodes: Int[np.ndarray, " K"]) -> IncomingEdges:
        """Edges into some of the components that fire."""
        return self._weights(nodes, self.firing.targets)

    def of_outputs(self, row: int, numbers: Int[np.ndarray, " K"]) -> IncomingEdges:
        """Edges into outputs: of tokens' logits at a position, or of a toy's features (``row`` 0)."""
        return self._weights(numbers, self._outputs_at(row))

    def behind(
        self,
        rests: Int[np.ndarray, " r"],
        row: int,
        outputs: tuple[Int[np.ndarray, " K"], Float[np.ndarray, "K r"]],
        components: tuple[Int[np.ndarray, " M"], Float[np.ndarray, "M r"]],
    ) -> list[PartsOfRest]:
        """What some rests contribute to targets, part by part, each times a factor of the target and the rest (E10).
        The rests are given by their numbers in the `SourceOrder`. ``outputs``: as of `of_outputs`; ``components``: as
        of `of_components`."""
        gradient: dict[str, Array] | None = None
        for (numbers, factors), make in ((outputs, self._outputs_at(row)), (components, self.firing.targets)):
            of_all = np.zeros((len(numbers), len(self.layout.rest_site)), np.float32)
            of_all[:, rests] = factors
            for start, batch, _ in self._batches(numbers):
                found = self._edges(make(batch), of_all[start : start + self.at_once]).gradient
                gradient = found if gradient is None else jax.tree.map(jnp.add, gradient, found)
        return [] if gradient is None or not len(rests) else self._along(gradient, rests)

    def _along(self, gradient: dict[str, Array], rests: Int[np.ndarray, " r"]) -> list[PartsOfRest]:
        layout, tables, column = self.layout, {}, np.zeros(len(rests), int)
        for number, stack in enumerate(self.sites.stacks):
            own = layout.rest_stack[rests] == number
            column[own] = np.arange(own.sum())
            width = LEAST  # a power of two: graphs share their program
            while width < own.sum():
                width *= 2
            places = np.zeros((3, width), np.int32)
            places[:, : own.sum()] = layout.rest_place[:, rests[own]]
            tables[stack.name] = RestsOfStack(*map(jnp.asarray, places))
        with jax.set_mesh(self._opened.mesh):
            found = jitted(behind_rests)(self.problem, self._opened.learned.components, self._cut, gradient, tables)
        slopes, deltas = jax.device_get(found)
        parts = []
        for rest, at in zip(rests, column, strict=True):
            site, position = self.sites.all[layout.rest_site[rest]].name, layout.rest_position[rest]
            stack = self.sites.stacks[layout.rest_stack[rest]].name
            a, importance = self.activations[site][position], self.importances[site][position]
            of_components = np.where(importance > self.threshold, 0, a * slopes[stack][at])
            parts.append(PartsOfRest(of_components, float(deltas[stack][at])))
        return parts

    def _outputs_at(self, row: int) -> Any:
        return lambda numbers: Outputs(jnp.full(len(numbers), row, jnp.int32), jnp.asarray(numbers, jnp.int32))

    def _weights(self, numbers: np.ndarray, make: Any) -> IncomingEdges:
        none = np.zeros((0, len(self.layout.rest_site)), np.float32)
        found = [self._flatten(self._edges(make(batch), none), n) for _, batch, n in self._batches(numbers)]
        weights, delta = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return IncomingEdges(weights, delta)

    def _batches(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
        """Where each batch begins, its numbers, the last of them repeated to ``at_once``, and how many it has."""
        for start in range(0, len(numbers), self.at_once):
            own = numbers[start : start + self.at_once]
            yield start, np.concatenate([own, np.full(self.at_once - len(own), own[-1])]), len(own)

    def _edges(self, targets: Targets | Outputs, factors: Float[np.ndarray, "K r"]) -> Edges:
        """``factors``: of the first targets, for each rest; 0 of the others. Always given, so that following targets
        and looking behind rests are one program."""
        padded = np.zeros((self.at_once, factors.shape[1]), np.float32)
        padded[: len(factors)] = factors
        of_stacks, start = {}, 0
        for stack in self.sites.stacks:
            shape = self._tables[stack.name].number.shape[:2]
            stop = start + math.prod(shape)
            of_stacks[stack.name] = jnp.asarray(padded[:, start:stop].reshape(-1, *shape))
            start = stop
        components = self._opened.learned.components
        with jax.set_mesh(self._opened.mesh):
            found: Edges = jitted(edges)(
                self.problem,
                components,
                self._opened.weights,
                self._inputs,
                self._cut,
                self._tables,
                targets,
                of_stacks,
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
