"""What is set in a CI function from the batch of step 0, before training: the scales of its component readout (C8)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.ci import CIFunction, ImportanceReader, LazyLogits, per_component
from param_decomp_jax.ci.readout import ReadoutCI, activations, initial_scales
from param_decomp_jax.decomposition.components import with_views
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem, head_inputs, run_clean_pass
from param_decomp_jax.nn.grouped import ExpertGroups, OverPositions
from param_decomp_jax.sharding.mesh import constrain
from param_decomp_jax.targets.base import Weights

ABOVE = 0.001
"""The share of positions at which the size of h is above the percentile."""


def calibrate(problem: Problem, learned: Learned, weights: Weights, inputs: Array) -> CIFunction:
    """Returns the CI function with the scales of its readout set (C8), if it has a readout. ``learned``: as trained;
    ``inputs``: the batch of step 0."""
    components, ci = learned
    if not isinstance(ci, ReadoutCI):
        return ci
    sites = problem.target.sites
    clean_pass = run_clean_pass(problem, ci, weights, inputs, outputs=False)

    def sizes(head: None, features: None, x: Any, V: Array, groups: ExpertGroups | None) -> Array:
        return jnp.abs(activations(x, V, groups))

    nothing = dict.fromkeys(ci.heads)
    reader = ImportanceReader(
        LazyLogits(None, nothing),
        jnp.abs,
        head_inputs(ci, clean_pass),
        clean_pass.at.ndim,
        nothing,
        sizes,
        problem.compute_dtype,
        clean_pass.chosen,
    )
    found = per_component(reader, with_views(components, sites), sites, problem.target.memory, percentiles)
    return ci.with_scales({name: initial_scales(q) for name, q in found.items()})


def percentiles(sizes: Float[Array, "*n C"], over: OverPositions) -> Float[Array, "*experts C"]:
    """Returns the 99.9th percentile of each component's sizes, linearly interpolated (C8); 0 for a site that exists
    nowhere."""
    columns = sizes.reshape(-1, sizes.shape[-1])
    if over.groups is None:
        return _percentile(columns, jnp.ones(columns.shape[0], bool))
    chosen = over.groups.chosen.reshape(-1)
    # Stacks run in sequence, because each sorts the rows of the whole batch.
    found: Array = jax.lax.map(lambda expert: _percentile(columns, chosen == expert), jnp.arange(over.n_experts))
    return found


def _percentile(columns: Float[Array, "n C"], counted: Array) -> Float[Array, " C"]:
    """Returns the percentile `ABOVE` of each column over the rows that are ``counted``. Numbers are not negative."""
    n = columns.shape[0]
    # Each device gets whole columns to sort. Rows that do not count sort first.
    in_order = jnp.sort(constrain(jnp.where(counted[:, None], columns, -1), None, "component"), axis=0)
    # The place is counted from the end, where fp32 is exact enough for any n.
    place = ABOVE * jnp.maximum(jnp.sum(counted) - 1, 0).astype(columns.dtype)
    upper = jnp.floor(place).astype(jnp.int32)
    above, below = in_order[n - 1 - upper], in_order[jnp.maximum(n - 2 - upper, 0)]
    share = place - upper
    # Interpolated only if there is a second number; with one, place is 0.
    return jnp.maximum(jnp.where(share > 0, (1 - share) * above + share * below, above), 0)
