"""Attributions between components, summed over a batch (E8): their mutual effects over a lot of text."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.attribution import READINGS, CutLinears, Targets, reading_of
from param_decomp_jax.decomposition.components import Components, row_or_product, with_views
from param_decomp_jax.decomposition.sites import Stack
from param_decomp_jax.method.step import Problem
from param_decomp_jax.nn.grouped import ExpertGroups, group, grouped_matmul
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import CHOSEN, RESIDUAL, PlainLinears, output_record


class Normalizers(NamedTuple):
    """Sums over the positions of a batch, for every component, by stack: λ, a², and the number of positions (for
    experts, those that take the expert)."""

    importance: dict[str, Float[Array, "layers *experts C"]]
    square: dict[str, Float[Array, "layers *experts C"]]
    positions: dict[str, Float[Array, "layers *experts"]]


class _Batch(NamedTuple):
    """The cut network of a batch. By stack: the sites' outputs, activations ``x · V_c`` (without ‖U_c‖), and the
    experts taken."""

    outputs: dict[str, Float[Array, "layers *_n _d_out"]]
    inner: dict[str, Float[Array, "layers *_n C"]]
    chosen: dict[str, Int[Array, "layers *_n _k"]]
    entry: Array | None


def normalizers(
    problem: Problem,
    components: Components,
    weights: Weights,
    inputs: Array,
    importances: Mapping[str, Float[Array, "layers *_n C"]],
) -> Normalizers:
    """Returns one batch's share of what E8 divides by. ``importances``: λ by stack; for experts, λ of every slot."""
    components = with_views(components, problem.target.sites)
    batch = _take_apart(problem, components, weights, inputs)
    importance, square, positions = {}, {}, {}
    for stack in problem.target.sites.stacks:
        name = stack.name
        norms = jnp.linalg.norm(components[name].U, axis=-1)
        chosen = batch.chosen.get(name)
        importance[name] = _sum_rows(importances[name], chosen, stack)
        square[name] = _sum_rows(batch.inner[name] ** 2, chosen, stack) * norms**2
        positions[name] = _sum_rows(jnp.ones((*batch.inner[name].shape[:-1], 1)), chosen, stack)[..., 0]
    return Normalizers(importance, square, positions)


def edge_sums(
    problem: Problem,
    components: Components,
    weights: Weights,
    inputs: Array,
    importances: Mapping[str, Float[Array, "layers *_n C"]],
    targets: Targets,
) -> dict[str, Float[Array, "K layers *experts C"]]:
    """Returns ``Σ λ_s ℓ_s ∂A_t/∂ℓ_s`` of E8 over a batch, by stack of the sources, for K targets (whose rows are not
    used)."""
    sites = problem.target.sites
    components = with_views(components, sites)
    batch = _take_apart(problem, components, weights, inputs)

    def back(wanted: Targets) -> dict[str, Array]:
        def total(outputs: dict[str, Array]) -> Float[Array, ""]:
            rows = {stack.name: _rows_of_target(stack, batch, wanted) for stack in sites.stacks}
            linears = CutLinears(sites, outputs, batch.chosen, reading_of(sites, components, wanted, rows))
            start = sites.all[0].layer, inputs if batch.entry is None else batch.entry
            forward = problem.target.forward(weights, inputs, linears, start)
            read = [jnp.sum(records[READINGS]) for records in forward.records.values() if READINGS in records]
            return sum(read, start=jnp.zeros(()))  # with the embedding as the only site, nothing is read

        gradient = jax.grad(total)(batch.outputs)
        return {stack.name: _of_stack(stack, gradient[stack.name]) for stack in sites.stacks}

    def _of_stack(stack: Stack, gradient: Array) -> Array:
        name = stack.name
        leaves = importances[name] * batch.inner[name]
        return lax.map(_sums_of_layer(stack), (gradient, leaves, components[name].U, batch.chosen.get(name)))

    found: dict[str, Array] = jax.vmap(back)(targets)
    return found


def _take_apart(problem: Problem, components: Components, weights: Weights, inputs: Array) -> _Batch:
    target, sites = problem.target, problem.target.sites
    clean = target.forward(weights, inputs, PlainLinears(sites, outputs=True, memory=target.memory))
    outputs, inner, chosen = {}, {}, {}
    for segment in sites.segments:
        records = clean.records[segment.first]
        for stack in segment.stacks:
            outputs[stack.name] = records[output_record(stack.kind)]
            experts = None
            if stack.experts is not None:
                experts = chosen[stack.name] = records[CHOSEN]
            x = jnp.broadcast_to(inputs, (1, *inputs.shape)) if stack.lookup else records[stack.reads]
            inner[stack.name] = lax.map(_inner(stack), (x, components[stack.name].V, experts))
    first, entry = sites.all[0].layer, None
    if first >= 0:
        start = max(layer for layer in clean.records if layer <= first)
        entry = clean.records[start][RESIDUAL][first - start]
    return _Batch(outputs, inner, chosen, entry)


def _inner(stack: Stack) -> Any:
    def of_layer(layer: Any) -> Array:
        x, V, experts = layer
        groups = None if experts is None else group(experts, stack.experts or 0)
        inner: Array = row_or_product(x, V, groups)
        return inner

    return of_layer


def _rows_of_target(stack: Stack, batch: _Batch, wanted: Targets) -> Float[Array, "layers rows"]:
    """Selects every position, or for an expert the slots that take it."""
    outputs = batch.outputs[stack.name]
    if stack.experts is None:
        return jnp.ones((outputs.shape[0], outputs[0, ..., 0].size), outputs.dtype)
    return (batch.chosen[stack.name].reshape(outputs.shape[0], -1) == wanted.expert).astype(outputs.dtype)


def _sums_of_layer(stack: Stack) -> Any:
    """Returns ``Σ (g · U_c) leaf_c`` over the rows of a layer; for experts, over the slots of each."""

    def sums(of_layer: Any) -> Array:
        gradient, leaves, U, experts = of_layer
        if experts is None:
            g, leaf = gradient.reshape(-1, gradient.shape[-1]), leaves.reshape(-1, leaves.shape[-1])
            return jnp.sum((leaf.T @ g) * U, axis=-1)
        groups: ExpertGroups = group(experts, stack.experts or 0)
        products = grouped_matmul(gradient, jnp.swapaxes(U, -1, -2), groups) * leaves
        return _sum_rows(products[None], experts[None], stack)[0]

    return sums


def _sum_rows(
    x: Float[Array, "layers *_n C"], chosen: Int[Array, "layers *_n k"] | None, stack: Stack
) -> Float[Array, "layers *experts C"]:
    """Sums over positions; for experts, over the slots of each."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    if chosen is None:
        return rows.sum(axis=1)
    own = jax.nn.one_hot(chosen.reshape(chosen.shape[0], -1), stack.experts or 0, dtype=x.dtype)
    return jnp.einsum("lrc,lre->lec", rows, own)
