"""The causal importances of one batch, from the target's weights and what a run has learned (section 3)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci import Logits, squashings
from param_decomp_jax.ci.inputs import ChosenExperts
from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.decomposition.components import row_or_product, site_axes, with_views
from param_decomp_jax.decomposition.sites import Stack
from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem, causal_importance, importance_reader, run_clean_pass
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.mesh import Axes, gather_tree, is_axes
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.points import Point


def read_batch(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    outputs: bool = False,
    points: Collection[Point] = (),
    inputs_of_sites: bool = False,
) -> DecomposedBatch:
    """Runs the clean pass of a batch, and returns it with its importances, read as λ. ``learned``: with the components
    of every stack.

    ``outputs``: keeps the sites' outputs too. ``points``: keeps the activations there. ``inputs_of_sites``: keeps the
    sites' inputs, even if the CI function does not read them.
    """
    clean_pass = run_clean_pass(problem, learned.ci, weights, inputs, outputs, points, inputs_of_sites)
    ci_outputs = causal_importance(problem, clean_pass, *learned)
    reader = importance_reader(problem, learned.ci, ci_outputs, clean_pass)
    return DecomposedBatch(clean_pass, learned.components, reader)


def importance_logits(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """Returns the logits that λ is squashed from, of every site, by stack. Beyond 0 and 1 they still tell strong cases
    from weak ones. For experts, there is one for every slot.

    All logits are computed at once, whatever the memory policy says, so use it for batches of a few positions.
    """
    target = problem.target
    memory = replace(target.memory, save=target.memory.save | {"logits"})
    at_once = replace(problem, target=replace(target, memory=memory))  # type: ignore[type-var]
    clean_pass = run_clean_pass(at_once, learned.ci, weights, inputs, outputs=False)
    ci_outputs = causal_importance(at_once, clean_pass, *_with_views(problem, learned))
    assert isinstance(ci_outputs, Logits)
    return ci_outputs.by_stack


def site_logits(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array, names: Collection[str]
) -> dict[str, Float[Array, "*n C"]]:
    """Returns `importance_logits` of some sites, by name, without computing the others; −∞ where a site does not exist
    (X4)."""
    learned = _with_views(problem, learned)
    return _logits_by_name(problem, read_batch(_lazily(problem), learned, weights, inputs), names)


def _with_views(problem: Problem, learned: Learned) -> Learned:
    """Returns ``learned`` with the components of every stack."""
    return learned._replace(components=with_views(learned.components, problem.target.sites))


def _by_name(
    problem: Problem,
    names: Collection[str],
    of_layer: Callable[[Stack, int], Array],
    chosen: ChosenExperts,
    fill: float,
) -> dict[str, Float[Array, "*n C"]]:
    """Returns ``of_layer`` for some sites, by name. It is called once for all experts of a layer.

    The site of an expert has ``fill`` where it does not exist (X4).
    """
    sites, layers = problem.target.sites, {}
    found = {}
    for site, (stack, row) in zip(sites.all, sites.stack_rows, strict=True):
        if site.name not in names:
            continue
        layer = row if stack.experts is None else row[0]
        if (stack.name, layer) not in layers:
            layers[stack.name, layer] = of_layer(stack, layer)
        values = layers[stack.name, layer]
        found[site.name] = (
            values if stack.experts is None else _of_expert(values, chosen[stack.name][layer], row[1], fill)
        )
    return found


def _of_expert(
    slots: Float[Array, "*n k C"], chosen: Int[Array, "*n k"], expert: int | Int[Array, ""], fill: float
) -> Float[Array, "*n C"]:
    """Returns what one expert has at every position, with ``fill`` where it is not taken."""
    own = chosen == expert
    value = jnp.take_along_axis(slots, jnp.argmax(own, axis=-1)[..., None, None], axis=-2)[..., 0, :]
    return jnp.where(jnp.any(own, axis=-1)[..., None], value, fill)


def _logits_by_name(
    problem: Problem, batch: DecomposedBatch, names: Collection[str]
) -> dict[str, Float[Array, "*n C"]]:
    """Returns the logits of some sites of a ``batch`` that is read lazily; −∞ where a site does not exist."""
    reader = batch.reader

    def of_layer(stack: Stack, layer: int) -> Array:
        own = (
            reader.slices(stack, stack.first + layer, stack.first + layer + 1),
            batch.components[stack.name].V[layer][None],
        )
        axes = reader.axes(stack), site_axes(stack)[0]
        head, V = gather_tree(jax.tree.map(lambda x: x[0], own), axes, problem.compute_dtype)
        chosen = reader.chosen[stack.name][layer] if stack.experts is not None else None
        number = stack.first + layer
        features = {name: x[0] for name, x in reader.layer_features([stack], number, number + 1).items()}
        return reader.at_layer(stack, features).logits(head, V, reader.groups(stack, chosen))

    return _by_name(problem, names, of_layer, reader.chosen, -jnp.inf)


def squash_existing(squash: Squash, logits: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Turns logits of `site_logits` into importances: 0 where a site does not exist (X4)."""
    exists = logits > -jnp.inf
    return jnp.where(exists, squash(jnp.where(exists, logits, 0)), 0)


class SiteReading(NamedTuple):
    """One site on a batch: λ, and the activations ``a_c = ‖U_c‖ · (x · V_c)`` of its components, both in fp32.

    Both are 0 where the site does not exist (X4)."""

    importance: Float[Array, "*n C"]
    activation: Float[Array, "*n C"]


def read_sites(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array, names: Collection[str]
) -> tuple[CleanPass, dict[str, SiteReading]]:
    """Runs the clean pass of a batch, and returns it with a reading of some sites, by name."""
    batch = read_batch(_lazily(problem), _with_views(problem, learned), weights, inputs, inputs_of_sites=True)
    clean_pass, components, reader = batch.clean_pass, batch.components, batch.reader
    logits = _logits_by_name(problem, batch, names)

    def activations(stack: Stack, layer: int) -> Array:
        of_layer = components[stack.name].V[layer], components[stack.name].U[layer]
        V, U = gather_tree(of_layer, site_axes(stack), problem.compute_dtype)
        x = clean_pass.inputs
        if not stack.lookup:
            x = clean_pass.site_inputs[stack.name][layer].astype(problem.compute_dtype)
        # V is scaled, which costs least: there are more positions than dimensions.
        scaled = (wide(V) * jnp.linalg.norm(wide(U), axis=-1)[..., None, :]).astype(V.dtype)
        chosen = reader.chosen[stack.name][layer] if stack.experts is not None else None
        return row_or_product(x, scaled, reader.groups(stack, chosen))

    found = _by_name(problem, names, activations, reader.chosen, 0.0)
    return clean_pass, {
        name: SiteReading(wide(squash_existing(reader.squash, logits[name])), activation)
        for name, activation in found.items()
    }


def _lazily(problem: Problem) -> Problem:
    """Returns the problem with logits computed where they are read."""
    target = problem.target
    memory = replace(target.memory, save=target.memory.save - {"logits"})
    return replace(problem, target=replace(target, memory=memory))  # type: ignore[type-var]


def chosen_logits(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    chosen: Mapping[str, Int[np.ndarray, "layers n"] | Int[Array, "layers n"]],
    first: tuple[int, ...] = (),
) -> dict[str, Float[Array, "layers *n n"]]:
    """Returns `importance_logits` of a few components of every site, by stack, without computing the others.

    ``chosen``: their numbers, by stack; for experts ``[layers, experts, n]``. The result for experts is ``[layers,
    experts, *n, n]``, with −∞ where a site does not exist (X4). ``first``: how many entries of the first axes of the
    positions are used, such as the first rows of a batch.
    """
    kept = tuple(slice(n) for n in first)
    batch = read_batch(_lazily(problem), _with_views(problem, learned), weights, inputs)
    reader = batch.reader

    def stack_logits(stack: Stack) -> Array:
        of_sites = reader.slices(stack, stack.first, stack.first + stack.n_layers)
        axes = reader.axes(stack), site_axes(stack)[0]

        def pick(of: Axes, x: Array, numbers: Array) -> Array:
            axis = of.at("component")
            if axis is None:
                return x
            if stack.experts is None:
                return jnp.take(x, numbers, axis=axis)
            return jax.vmap(lambda own, of_expert: jnp.take(own, of_expert, axis=axis - 1))(x, numbers)

        def logits_of_one(site: Any) -> Array:
            *of_layer, numbers, features, experts = site
            few = jax.tree.map(lambda a, x: pick(a, x, numbers), axes, tuple(of_layer), is_leaf=is_axes)
            head, V = gather_tree(few, axes, problem.compute_dtype)
            logits = reader.at_layer(stack, features).logits(head, V, reader.groups(stack, experts))
            logits = logits[kept] if kept else logits
            if stack.experts is None:
                return logits
            experts = experts[kept] if kept else experts
            of_each = jax.vmap(lambda e: _of_expert(logits, experts, e, -jnp.inf))
            return of_each(jnp.arange(stack.experts))

        numbers = jnp.asarray(chosen[stack.name])
        features = reader.layer_features([stack], stack.first, stack.first + stack.n_layers)
        of_stack = (of_sites, batch.components[stack.name].V, numbers, features, reader.chosen.get(stack.name))
        return jax.lax.map(logits_of_one, of_stack)

    return {stack.name: stack_logits(stack) for stack in problem.target.sites.stacks}


def lower_importances(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """Returns λ of every site on one batch, by stack, in the layout of `importance_logits`."""
    lower, _ = squashings(problem.decomposition.squashing)
    return jax.tree.map(lower, importance_logits(problem, learned, weights, inputs))
