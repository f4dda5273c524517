"""What causal importances look like over batches: histograms, means, densities, L0."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci import per_component
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.nn.grouped import OverPositions
from param_decomp_lab.config.site_patterns import of_all_experts

BINS = 100
MANY_SITES = 128
"""With more sites than this, `Statistics.pooled` takes the experts of a layer together."""


def batch_statistics(
    batch: DecomposedBatch, threshold: float
) -> dict[str, tuple[Float[Array, "*lead bins"], Float[Array, "*lead C"], Float[Array, "*lead C"]]]:
    """By stack: histogram of λ over [0, 1], mean λ per component, share of positions with λ above the threshold.

    Of experts, the histogram is over the positions that they are taken at; at the others λ is 0 (X4).
    """

    target, n_positions = batch.clean_pass.target, batch.clean_pass.at.size

    def of_components(logits: Float[Array, "*n C"], over: OverPositions) -> tuple[Array, Array, Array]:
        lower = batch.reader.squash(logits)
        bins = jnp.clip((lower * BINS).astype(jnp.int32), 0, BINS - 1)
        density = over.sum((lower > threshold).astype(jnp.float32)) / n_positions
        return over.counts(bins, BINS), over.sum(lower) / n_positions, density

    found = per_component(batch.reader, batch.components, target.sites, target.memory, of_components)
    # One row of an 8B has more entries than an int32 counts.
    return {name: (jnp.sum(counts, axis=-2, dtype=jnp.float32), *rest) for name, (counts, *rest) in found.items()}


def mean_l0(batch: DecomposedBatch, thresholds: Sequence[float]) -> list[dict[str, Float[Array, "*lead"]]]:
    """For each threshold, by stack and layer: mean number of components with λ above it, per position."""
    target, n_positions = batch.clean_pass.target, batch.clean_pass.at.size

    def alive(logits: Float[Array, "*n C"], over: OverPositions) -> Float[Array, "*experts C thresholds"]:
        lower = batch.reader.squash(logits)
        return jnp.stack([over.sum((lower > t).astype(jnp.float32)) / n_positions for t in thresholds], axis=-1)

    if not thresholds:
        return []
    found = per_component(batch.reader, batch.components, target.sites, target.memory, alive)
    return [{name: jnp.sum(x[..., n], axis=-1) for name, x in found.items()} for n in range(len(thresholds))]


def routed_shares(batch: DecomposedBatch) -> dict[str, Float[Array, "layers experts"]]:
    """By stack, of the stacks of experts alone: the share of the positions that take each expert (X3)."""
    n_positions = batch.clean_pass.at.size

    def of_layer(chosen: Int[Array, "*n k"], n_experts: int) -> Float[Array, " experts"]:
        taken = chosen.reshape(-1, 1) == jnp.arange(n_experts)
        return jnp.sum(taken, axis=0, dtype=jnp.float32) / n_positions

    stacks = batch.clean_pass.target.sites.stacks
    experts = {stack.name: stack.experts for stack in stacks if stack.experts is not None}
    return {name: jax.vmap(partial(of_layer, n_experts=n))(batch.reader.chosen[name]) for name, n in experts.items()}


@dataclass
class Statistics:
    """`batch_statistics` over several batches of equal size, per site."""

    counts: dict[str, np.ndarray]
    means: dict[str, np.ndarray]
    densities: dict[str, np.ndarray]

    @classmethod
    def over(cls, sites: Sites, batches: list[Any], n_histogram: int | None = None) -> "Statistics":
        """From the host copies of one `batch_statistics` per batch; histograms of the first ``n_histogram`` (all)."""
        names = [site.name for site in sites.all]

        def column(which: int, combine: Any, first: int | None = None) -> dict[str, np.ndarray]:
            kept = [sites.unstack({stack: own[which] for stack, own in batch.items()}) for batch in batches[:first]]
            return {name: combine(np.stack([own[name] for own in kept]), axis=0) for name in names}

        return cls(column(0, np.sum, n_histogram), column(1, np.mean), column(2, np.mean))

    def pooled(self) -> "Statistics":
        """What figures show: where there are many sites, the components of a layer's experts together, by kind.

        768 panels take minutes to draw, and nobody reads them.
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
