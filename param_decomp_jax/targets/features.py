"""The common part of the toy models: inputs that are vectors of sparse features, and the error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from param_decomp_jax.decomposition.draws import positions, uniform
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.nn.numerics import mean_squared_error, wide
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import held_axes
from param_decomp_jax.targets.base import Weights


@dataclass(frozen=True)
class SparseFeatures:
    """Batches of feature vectors; an active feature is U[low, 1), the others are 0.

    ``at_least_zero_active``: each feature is active with ``probability``, independently. ``exactly_one_active``: one
    feature per row, all equally likely; ``probability`` is not used.
    """

    n_features: int
    probability: float
    low: float = 0.0
    generation: Literal["at_least_zero_active", "exactly_one_active"] = "at_least_zero_active"

    def batch(self, key: PRNGKeyArray, step: int | Integer[Array, ""], size: int) -> Float[Array, "size n_features"]:
        """Returns the batch of a step, which depends only on (key, step)."""
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


@dataclass(frozen=True)
class FeatureTarget:
    """A target from features to features, both ``[B, n_features]``, without its forward pass."""

    architecture: Any
    sites: Sites
    memory: MemoryPolicy = PLAIN
    compute_dtype: Any = jnp.float32

    @property
    def joins_rows(self) -> bool:
        return False

    def embed(self, weights: Weights, inputs: Float[Array, "B n"]) -> Float[Array, "B d"]:
        """Returns the input of the first layer, which is linear in the features: here the features themselves."""
        return inputs.astype(self.compute_dtype)

    def activation_axes(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the batch axis."""
        return inputs[:1]

    def predictions(self, weights: Weights, output: Float[Array, "B n"]) -> Float[Array, "B n"]:
        """Returns the output in fp32 or wider."""
        return wide(output)

    def reference(self, weights: Weights, clean: Float[Array, "B n"]) -> Float[Array, "B n"]:
        """Returns the clean output itself."""
        return clean

    def errors(
        self, weights: Weights, reference: Float[Array, "B n"], masked: Sequence[Float[Array, "B n"]]
    ) -> Float[Array, " streams"]:
        """Returns R1: the mean squared error over all elements."""
        return jnp.stack([mean_squared_error(reference, x) for x in masked])

    def weight_axes(self, weights: Weights) -> Any:
        """Returns the logical axes of every array, in the structure of the weights."""
        return held_axes(self.architecture.weight_axes(), self.memory.held_by("target"))
