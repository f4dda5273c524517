"""What causal importances look like: per batch on the device, and as figures."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci import ci_logits, squashings
from param_decomp_jax.components import Components, with_views
from param_decomp_jax.sites import Sites
from param_decomp_jax.step import Problem, run_clean
from param_decomp_jax.targets.base import Weights

BINS = 100


def lower_importances(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """λ of every site on one batch, by stack."""
    lower, _ = squashings(problem.decomposition.squashing)
    return jax.tree.map(lower, importance_logits(problem, components, ci, weights, inputs))


def importance_logits(
    problem: Problem, components: Components, ci: Any, weights: Weights, inputs: Array
) -> dict[str, Float[Array, "layers *n C"]]:
    """What λ is squashed from: beyond 0 and 1 it still tells a strong case from a weak one."""
    _, site_inputs = run_clean(problem.target, weights, inputs, problem.decomposition.use_delta, outputs=False)
    return ci_logits(ci, site_inputs, with_views(components, problem.target.sites), problem.compute_dtype)


def mean_l0(importances: dict[str, Array], threshold: float) -> dict[str, Float[Array, " layers"]]:
    """By stack and layer: mean number of components with λ above the threshold, per position."""

    def of_stack(x: Array) -> Array:
        return jnp.mean(jnp.sum(x > threshold, axis=-1), axis=tuple(range(1, x.ndim - 1)))

    return {name: of_stack(x) for name, x in importances.items()}


def batch_statistics(
    importances: dict[str, Array], threshold: float
) -> dict[str, tuple[Int[Array, "layers bins"], Float[Array, "layers C"], Float[Array, "layers C"]]]:
    """By stack: histogram of λ over [0, 1], mean λ per component, share of positions with λ above the threshold."""

    def of_layer(x: Float[Array, "*n C"]) -> tuple[Array, Array, Array]:
        flat = x.reshape(-1, x.shape[-1])
        bins = jnp.clip((flat * BINS).astype(jnp.int32), 0, BINS - 1)
        counts = jnp.bincount(bins.ravel(), length=BINS)
        return counts, jnp.mean(flat, axis=0), jnp.mean(flat > threshold, axis=0)

    return {name: jax.lax.map(of_layer, x) for name, x in importances.items()}


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
