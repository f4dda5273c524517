"""Computes on the devices, for a batch, the importances and activations of the sites and the target's predictions."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.importances import SiteReading, read_sites
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.architecture import TokenInputs
from param_decomp_jax.targets.base import Weights

AnyArray = jax.Array | np.ndarray


class SiteSums(NamedTuple):
    """Sums over all valid positions of a block, whether or not a component fires there. Activations enter with their
    absolute values.

    Sums over only the firings are left to the host: here, they would cost a fifth of the pass on a CPU.
    """

    importance_sum: Float[AnyArray, "*blocks C"]
    activation_sum: Float[AnyArray, "*blocks C"]
    activation_max: Float[AnyArray, "*blocks C"]


class SiteValues(NamedTuple):
    """The values of one site, for each of ``blocks`` blocks of n positions, including padding rows of the last one.

    ``importance``: λ. ``activation``: ``‖U_c‖ · (x · V_c)``.
    """

    importance: Float[Array, "blocks n C"]
    activation: Float[Array, "blocks n C"]
    sums: SiteSums


class BatchValues(NamedTuple):
    """``sites``: by name. ``outputs``: the largest predictions at the chosen positions, and the indices of these
    outputs.
    """

    sites: dict[str, SiteValues]
    outputs: tuple[Float[Array, "blocks s k"], Int[Array, "blocks s k"]]


def batch_values(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    valid: Int[Array, " blocks"],
    sampled: Int[Array, "blocks s"],
    names: Sequence[str],
    n_outputs: int,
) -> BatchValues:
    """Runs one clean pass. ``inputs``: the rows of ``blocks`` blocks; ``valid``: how many rows of each block are valid.
    ``sampled``: indices, within each block, of the positions whose ``n_outputs`` largest predictions are returned:
    next-token probabilities, or a toy's outputs.
    """
    target, blocks, rows = problem.target, len(valid), len(inputs) // len(valid)
    clean, readings = read_sites(problem, learned, weights, inputs, names)

    def by_block(x: Float[Array, "*n d"]) -> Float[Array, "blocks n d"]:
        return x.reshape(blocks, -1, x.shape[-1])

    n = by_block(clean.forward.output).shape[1]
    counts = (jnp.arange(n) // (n // rows) < valid[:, None])[..., None]

    def values(reading: SiteReading) -> SiteValues:
        importance, activation = (by_block(x) for x in reading)
        # Padding is masked only in the sums, because setting it to 0 in the arrays would be another pass through
        # memory.
        lam, size = (jnp.where(counts, jnp.abs(x), 0) for x in (importance, activation))
        return SiteValues(importance, activation, SiteSums(lam.sum(1), size.sum(1), size.max(1)))

    hidden = jnp.take_along_axis(by_block(clean.forward.output), sampled[..., None], axis=1)
    predictions = target.predictions(weights, hidden.reshape(-1, hidden.shape[-1])).reshape(*sampled.shape, -1)
    if isinstance(target.architecture.inputs, TokenInputs):
        predictions = jax.nn.softmax(predictions, axis=-1)
    found = {name: values(reading) for name, reading in readings.items()}
    largest, which = jax.lax.top_k(predictions, n_outputs)
    return BatchValues(found, (largest, which))
