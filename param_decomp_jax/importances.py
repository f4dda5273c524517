"""Causal importances of one batch, from the target's weights and what a run has learned (section 3)."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci import ImportanceReader, Logits, squashings
from param_decomp_jax.clean_pass import CleanPass
from param_decomp_jax.components import U_AXES, V_AXES, Components, with_views
from param_decomp_jax.memory import Intermediate
from param_decomp_jax.mesh import Axes, gather_tree, is_axes
from param_decomp_jax.numerics import matmul_wide, wide
from param_decomp_jax.sites import Stack
from param_decomp_jax.step import Problem, causal_importance, importance_reader, run_clean_pass
from param_decomp_jax.targets.base import Weights


def read_batch(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array, outputs: bool = False
) -> tuple[CleanPass, ImportanceReader]:
    """The clean pass of a batch and how its importances are read, as λ. ``outputs`` keeps the sites' outputs too."""
    clean_pass = run_clean_pass(problem, ci, weights, inputs, outputs)
    return clean_pass, importance_reader(
        problem, ci, causal_importance(problem, clean_pass, components, ci), clean_pass
    )


def importance_logits(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """What λ is squashed from, of every site, by stack: beyond 0 and 1 it still tells a strong case from a weak one.

    All of it at once, whatever the memory policy says: for batches of a few positions.
    """
    target = problem.target
    memory = replace(target.memory, save=target.memory.save | {"logits"})
    at_once = replace(problem, target=replace(target, memory=memory))  # type: ignore[type-var]
    components = with_views(components, target.sites)
    clean_pass = run_clean_pass(at_once, ci, weights, inputs, outputs=False)
    ci_outputs = causal_importance(at_once, clean_pass, components, ci)
    assert isinstance(ci_outputs, Logits)
    return ci_outputs.by_stack


def site_logits(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array, names: Collection[str]
) -> dict[str, Float[Array, "*n C"]]:
    """`importance_logits` of some sites, by name; nothing is made of the others."""
    components = with_views(components, problem.target.sites)
    _, reader = read_batch(_lazily(problem), components, ci, weights, inputs)
    return _logits_by_name(problem, reader, components, names)


def _logits_by_name(
    problem: Problem, reader: ImportanceReader, components: Components, names: Collection[str]
) -> dict[str, Float[Array, "*n C"]]:
    """Logits of some sites from a lazy ``reader``; ``components``: of every stack."""

    def logits_of_one(stack: Stack, row: int) -> Array:
        of_layer = (reader.slices(stack, stack.first + row, stack.first + row + 1), components[stack.name].V[row][None])
        axes = reader.axes(stack), V_AXES
        head, V = gather_tree(jax.tree.map(lambda x: x[0], of_layer), axes, problem.compute_dtype)
        return reader.logits(head, V)

    sites = problem.target.sites
    places = zip(sites.all, sites.stack_rows, strict=True)
    return {site.name: logits_of_one(stack, row) for site, (stack, row) in places if site.name in names}


class SiteReading(NamedTuple):
    """Of one site on a batch: λ, and the activations ``a_c = ‖U_c‖ · (x · V_c)`` of its components, both in fp32."""

    importance: Float[Array, "*n C"]
    activation: Float[Array, "*n C"]


def read_sites(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array, names: Collection[str]
) -> tuple[CleanPass, dict[str, SiteReading]]:
    """The clean pass of a batch, and what some sites' components do in it, by name."""
    sites = problem.target.sites
    components = with_views(components, sites)
    clean_pass, reader = read_batch(_lazily(problem, {"site_inputs"}), components, ci, weights, inputs)
    logits = _logits_by_name(problem, reader, components, names)

    def activations(stack: Stack, row: int) -> Array:
        of_layer = components[stack.name].V[row], components[stack.name].U[row]
        V, U = gather_tree(of_layer, (V_AXES, U_AXES), problem.compute_dtype)
        x = clean_pass.site_inputs[stack.name][row].astype(problem.compute_dtype)
        # On V, where it costs least: there are more positions than dimensions.
        return matmul_wide(x, (wide(V) * jnp.linalg.norm(wide(U), axis=1)).astype(V.dtype))

    places = zip(sites.all, sites.stack_rows, strict=True)
    return clean_pass, {
        site.name: SiteReading(wide(reader.squash(logits[site.name])), activations(stack, row))
        for site, (stack, row) in places
        if site.name in names
    }


def _lazily(problem: Problem, kept: Collection[Intermediate] = ()) -> Problem:
    """The same, with logits made where they are read. ``kept``: what is not recomputed."""
    target = problem.target
    memory = replace(target.memory, save=target.memory.save - {"logits"} | set(kept))
    return replace(problem, target=replace(target, memory=memory))  # type: ignore[type-var]


def chosen_logits(
    problem: Problem,
    components: Components,
    ci: Any,
    weights: Weights,
    inputs: Array,
    chosen: Mapping[str, Int[np.ndarray, "layers n"]],
) -> dict[str, Float[Array, "layers *n n"]]:
    """`importance_logits` of a few components of every site, by stack; nothing is made of the others.

    ``chosen``: their numbers, by stack.
    """
    target = problem.target
    components = with_views(components, target.sites)
    _, reader = read_batch(_lazily(problem), components, ci, weights, inputs)

    def stack_logits(stack: Stack) -> Array:
        of_sites = reader.slices(stack, stack.first, stack.first + stack.n_layers)
        axes = reader.axes(stack), V_AXES

        def pick(of: Axes, x: Array, numbers: Array) -> Array:
            axis = of.at("component")
            return x if axis is None else jnp.take(x, numbers, axis=axis)

        def logits_of_one(site: Any) -> Array:
            *of_layer, numbers = site
            few = jax.tree.map(lambda a, x: pick(a, x, numbers), axes, tuple(of_layer), is_leaf=is_axes)
            head, V = gather_tree(few, axes, problem.compute_dtype)
            return reader.logits(head, V)

        return jax.lax.map(logits_of_one, (of_sites, components[stack.name].V, jnp.asarray(chosen[stack.name])))

    return {stack.name: stack_logits(stack) for stack in target.sites.stacks}


def lower_importances(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """λ of every site on one batch, by stack, as `importance_logits`."""
    lower, _ = squashings(problem.decomposition.squashing)
    return jax.tree.map(lower, importance_logits(problem, components, ci, weights, inputs))
