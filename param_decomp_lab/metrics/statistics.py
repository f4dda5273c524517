"""Computes statistics of causal importances over batches: histograms, means, densities."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from param_decomp_jax.ci import per_component
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.nn.grouped import OverPositions
from param_decomp_lab.schema.site_names import of_all_experts

BINS = 100
MANY_SITES = 128
"""With more sites than this, `Statistics.pooled` pools the experts of a layer."""


def batch_statistics(
    batch: DecomposedBatch, threshold: float
) -> dict[str, tuple[Float[Array, "*lead bins"], Float[Array, "*lead C"], Float[Array, "*lead C"]]]:
    """Returns, by stack, a histogram of λ over [0, 1], mean λ for each component, and the share of positions with λ
    above the threshold.

    For experts, the histogram is over the positions that take them; at the others λ is 0 (X4).
    """

    def of_components(logits: Float[Array, "*n C"], over: OverPositions) -> tuple[Array, Array, Array]:
        lower = batch.reader.squash(logits)
        bins = jnp.clip((lower * BINS).astype(jnp.int32), 0, BINS - 1)
        density = over.sum((lower > threshold).astype(jnp.float32)) / batch.n_positions
        return over.counts(bins, BINS), over.sum(lower) / batch.n_positions, density

    found = per_component(batch.reader, batch.components, batch.target.sites, batch.target.memory, of_components)
    # One row of an 8B model has more entries than an int32 can count.
    return {name: (jnp.sum(counts, axis=-2, dtype=jnp.float32), *rest) for name, (counts, *rest) in found.items()}


@dataclass
class Statistics:
    """`batch_statistics` over several batches of equal size, per site."""

    counts: dict[str, np.ndarray]
    means: dict[str, np.ndarray]
    densities: dict[str, np.ndarray]

    @classmethod
    def over(cls, sites: Sites, batches: list[Any], n_histogram: int | None = None) -> "Statistics":
        """Combines host copies of one `batch_statistics` for each batch; histograms use the first ``n_histogram``
        (default: all).
        """
        names = [site.name for site in sites.all]

        def column(which: int, combine: Any, first: int | None = None) -> dict[str, np.ndarray]:
            kept = [sites.unstack({stack: own[which] for stack, own in batch.items()}) for batch in batches[:first]]
            return {name: combine(np.stack([own[name] for own in kept]), axis=0) for name in names}

        return cls(column(0, np.sum, n_histogram), column(1, np.mean), column(2, np.mean))

    def pooled(self) -> "Statistics":
        """Returns what figures show: if there are many sites, the components of a layer's experts are pooled by kind.

        768 panels would take minutes to draw, and nobody would read them.
        """
        if len(self.counts) <= MANY_SITES:
            return self
        members: dict[str, list[str]] = {}
        for name in self.counts:
            members.setdefault(of_all_experts(name), []).append(name)

        def joined(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: np.concatenate([arrays[site] for site in own]) for name, own in members.items()}

        counts = {name: np.sum([self.counts[site] for site in own], axis=0) for name, own in members.items()}
        return Statistics(counts, joined(self.means), joined(self.densities))
