"""The batch on which a metric measures, as its jitted program sees it."""

from dataclasses import dataclass
from zlib import crc32

import jax
from jaxtyping import PRNGKeyArray

from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.masks import Stochastic


@dataclass(frozen=True)
class Batch(DecomposedBatch):
    """A batch of an evaluation.

    ``sampling``: how the run draws stochastic masks. ``metrics_key``: the single random key of all metrics on this
    batch.
    """

    sampling: Stochastic
    metrics_key: PRNGKeyArray

    def key(self, name: str) -> PRNGKeyArray:
        """Returns a random key for one metric."""
        return jax.random.fold_in(self.metrics_key, crc32(name.encode()))
