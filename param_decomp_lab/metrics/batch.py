"""What a metric measures on: a batch of an evaluation, as its jitted program sees it."""

from dataclasses import dataclass
from zlib import crc32

import jax
from jaxtyping import PRNGKeyArray

from param_decomp_jax.ci import ImportanceReader
from param_decomp_jax.decomposition.components import Components
from param_decomp_jax.method.clean_pass import CleanPass
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.step import Problem


@dataclass(frozen=True)
class Batch:
    """``clean_pass``: the target on the batch. ``reader``: the causal importances there. ``sampling``: how the run
    draws stochastic masks. ``metrics_key``: the one random key of all metrics on this batch."""

    problem: Problem
    clean_pass: CleanPass
    components: Components
    reader: ImportanceReader
    sampling: Stochastic
    metrics_key: PRNGKeyArray

    @property
    def n_positions(self) -> int:
        """Positions of the batch; a toy's rows have one each."""
        return self.clean_pass.at.size

    def key(self, name: str) -> PRNGKeyArray:
        """A random key of the metric's own."""
        return jax.random.fold_in(self.metrics_key, crc32(name.encode()))
