"""What causal importances look like: per batch on the device, and as figures."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci import ImportanceReader, Logits, per_component, squashings
from param_decomp_jax.clean_pass import CleanPass
from param_decomp_jax.components import V_AXES, Components, with_views
from param_decomp_jax.mesh import Axes, gather_tree, is_axes
from param_decomp_jax.sites import Sites, Stack
from param_decomp_jax.step import Problem, causal_importance, importance_reader, run_clean_pass
from param_decomp_jax.targets.base import Weights

BINS = 100


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


def logits_of_sites(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array, names: Collection[str]
) -> dict[str, Float[Array, "*n C"]]:
    """`importance_logits` of some sites, by name; nothing is made of the others."""
    target = problem.target
    components = with_views(components, target.sites)
    _, reader = read_batch(_lazily(problem), components, ci, weights, inputs)

    def of_site(stack: Stack, row: int) -> Array:
        of_layer = (reader.slices(stack, stack.first + row, stack.first + row + 1), components[stack.name].V[row][None])
        axes = reader.axes(stack), V_AXES
        head, V = gather_tree(jax.tree.map(lambda x: x[0], of_layer), axes, problem.compute_dtype)
        return reader.logits(head, V)

    places = zip(target.sites.all, target.sites.stack_rows, strict=True)
    return {site.name: of_site(stack, row) for site, (stack, row) in places if site.name in names}


def _lazily(problem: Problem) -> Problem:
    """The same, with logits made where they are read."""
    target = problem.target
    memory = replace(target.memory, save=target.memory.save - {"logits"})
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

    def of_stack(stack: Stack) -> Array:
        of_sites = reader.slices(stack, stack.first, stack.first + stack.n_layers)
        axes = reader.axes(stack), V_AXES

        def pick(of: Axes, x: Array, numbers: Array) -> Array:
            axis = of.at("component")
            return x if axis is None else jnp.take(x, numbers, axis=axis)

        def of_site(site: Any) -> Array:
            *of_layer, numbers = site
            few = jax.tree.map(lambda a, x: pick(a, x, numbers), axes, tuple(of_layer), is_leaf=is_axes)
            head, V = gather_tree(few, axes, problem.compute_dtype)
            return reader.logits(head, V)

        return jax.lax.map(of_site, (of_sites, components[stack.name].V, jnp.asarray(chosen[stack.name])))

    return {stack.name: of_stack(stack) for stack in target.sites.stacks}


def lower_importances(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """λ of every site on one batch, by stack, as `importance_logits`."""
    lower, _ = squashings(problem.decomposition.squashing)
    return jax.tree.map(lower, importance_logits(problem, components, ci, weights, inputs))


def batch_statistics(
    problem: Problem, components: Components, reader: ImportanceReader, threshold: float
) -> dict[str, tuple[Float[Array, "layers bins"], Float[Array, "layers C"], Float[Array, "layers C"]]]:
    """By stack: histogram of λ over [0, 1], mean λ per component, share of positions with λ above the threshold."""

    def of_components(logits: Float[Array, "*n C"]) -> tuple[Array, Array, Array]:
        flat = reader.squash(logits).reshape(-1, logits.shape[-1])
        bins = jnp.clip((flat * BINS).astype(jnp.int32), 0, BINS - 1)
        counts = jax.vmap(lambda column: jnp.bincount(column, length=BINS), in_axes=1)(bins)
        return counts, jnp.mean(flat, axis=0), jnp.mean(flat > threshold, axis=0)

    found = per_component(reader, components, problem.target.sites, problem.target.memory, of_components)
    # One row of an 8B has more entries than an int32 counts.
    return {name: (jnp.sum(counts, axis=1, dtype=jnp.float32), *rest) for name, (counts, *rest) in found.items()}


def mean_l0(
    problem: Problem, components: Components, reader: ImportanceReader, thresholds: Sequence[float]
) -> list[dict[str, Float[Array, " layers"]]]:
    """For each threshold, by stack and layer: mean number of components with λ above it, per position."""

    def alive(logits: Float[Array, "*n C"]) -> Float[Array, "C thresholds"]:
        lower = reader.squash(logits)
        return jnp.stack([jnp.mean(lower > t, axis=tuple(range(lower.ndim - 1))) for t in thresholds], axis=-1)

    if not thresholds:
        return []
    found = per_component(reader, components, problem.target.sites, problem.target.memory, alive)
    return [{name: jnp.sum(x[..., n], axis=1) for name, x in found.items()} for n in range(len(thresholds))]


@dataclass
class Statistics:
    """`batch_statistics` over several batches of equal size, per site."""

    counts: dict[str, np.ndarray]
    means: dict[str, np.ndarray]
    densities: dict[str, np.ndarray]

    @classmethod
    def over(cls, sites: Sites, batches: list[Any], n_histogram: int | None = None) -> "Statistics":
        """From the host copies of one `batch_statistics` per batch; histograms of the first ``n_histogram`` (all)."""
        per_batch = [sites.unstack({n: list(zip(*s, strict=True)) for n, s in batch.items()}) for batch in batches]
        names = [site.name for site in sites.all]

        def column(which: int, combine: Any, first: int | None = None) -> dict[str, np.ndarray]:
            kept = per_batch[:first]
            return {name: combine(np.stack([batch[name][which] for batch in kept]), axis=0) for name in names}

        return cls(column(0, np.sum, n_histogram), column(1, np.mean), column(2, np.mean))
