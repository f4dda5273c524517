"""The inputs of the toy models: vectors of sparse features."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from param_decomp_jax.draws import positions, uniform


@dataclass(frozen=True)
class SparseFeatures:
    """Batches of feature vectors; an active feature is U[low, 1), the others are 0.

    ``at_least_zero_active``: each feature is active with ``probability``, independently. ``exactly_one_active``: one
    feature per row, each as likely, whatever ``probability``.
    """

    n_features: int
    probability: float
    low: float = 0.0
    generation: Literal["at_least_zero_active", "exactly_one_active"] = "at_least_zero_active"

    def batch(self, key: PRNGKeyArray, step: int | Integer[Array, ""], size: int) -> Float[Array, "size n_features"]:
        """The batch of a step: a function of (key, step) and nothing else."""
        values_key, choice_key = jax.random.split(jax.random.fold_in(key, step))
        rows = positions((size,))
        values = self.low + (1 - self.low) * uniform(values_key, rows, self.n_features)
        match self.generation:
            case "at_least_zero_active":
                active = uniform(choice_key, rows, self.n_features) < self.probability
            case "exactly_one_active":
                chosen = (uniform(choice_key, rows, 1) * self.n_features).astype(jnp.int32)
                active = jnp.minimum(chosen, self.n_features - 1) == jnp.arange(self.n_features)
        return jnp.where(active, values, 0.0)
