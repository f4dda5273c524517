"""The least arithmetic of a training step with scalar MLPs as CI functions, and how fast this machine does it.

A bound for `torch_step.py`, to be checked by hand: nothing is computed twice, and everything at the best rate that a
program of JAX reaches here, with no time for memory, for other elementwise operations, or for random numbers.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.method.losses import Faithfulness
from param_decomp_jax.method.recon import Reconstruction, live_sets, n_samples
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig


@dataclass(frozen=True)
class Counts:
    """Of one step. ``ci_multiply_adds``: those of the CI functions' MLPs. ``multiply_adds``: all, these among them."""

    exponentials: int
    ci_multiply_adds: int
    multiply_adds: int


def counts(problem: Problem) -> Counts:
    """What a step cannot do without, each thing once.

    - *Exponentials*: one for each hidden activation of the scalar MLPs. GELU is x Φ(x), its derivative Φ(x) + x φ(x).
      The normal density φ takes one exponential, and Φ is a rational function beside it.
    - *Multiply-adds of the scalar MLPs*: an affine map takes one for each entry of its matrix, forward, and two
      backward, for the gradient of the matrix and for that of what it reads.
    - *Multiply-adds of target and components*: `_products`, for every row of the batch; and V U, forward and twice
      backward, if there is a faithfulness loss.
    """
    spec, sites = problem.decomposition, problem.target.sites.all
    assert isinstance(spec.ci, LayerwiseMLP)
    rows, C = spec.batch_size, sum(site.C for site in sites)
    ci = 3 * rows * C * sum(d_in * d_out for d_in, d_out in pairwise((1, *spec.ci.hidden, 1)))
    faithfulness = any(isinstance(term, Faithfulness) for term in spec.terms)
    deltas = 3 * sum(site.d_in * site.C * site.d_out for site in sites) if faithfulness else 0
    return Counts(rows * C * sum(spec.ci.hidden), ci, ci + rows * sum(_products(problem)) + deltas)


def _products(problem: Problem) -> Iterator[int]:
    """Multiply-adds of matrix products for one row of the batch: of the clean pass, then of every masked forward.

    A live site is computed as F2 has it. What the clean pass knows is not computed again: a forward begins at its first
    live site (F6), whose xW and xV the clean pass has (the CI function reads xV). The gradients of such an xV add up,
    with the CI function's, before they go to V. No gradient goes to frozen matrices, nor further back than the first
    live site.
    """
    target = problem.target
    architecture = target.architecture
    assert isinstance(architecture, TMSConfig | ResidMLPConfig)
    matrices, of_name = architecture.matrices(), {site.name: site for site in target.sites.all}
    numbers = {site.name: number for number, site in enumerate(target.sites.all)}
    # The embedding, which comes before all sites, and the unembedding, which comes after them.
    outer = architecture.n_features * architecture.d_embed if isinstance(architecture, ResidMLPConfig) else 0

    yield 2 * outer + sum(matrix.d_in * matrix.d_out for matrix in matrices)
    yield 2 * sum(site.d_in * site.C for site in target.sites.all)
    for term in problem.decomposition.terms:
        if not isinstance(term, Reconstruction):
            continue
        for live in live_sets(term.live, len(target.sites)):
            forward = 2 * outer
            started = False
            for matrix in matrices:
                W = matrix.d_in * matrix.d_out
                if numbers.get(matrix.name) in live:
                    site = of_name[matrix.name]
                    # The product with U has two gradients; xV has two, too, and the frozen xW one.
                    forward += 3 * site.C * site.d_out
                    forward += 3 * site.d_in * site.C + 2 * W if started else 0
                    started = True
                elif started:
                    forward += 2 * W
            yield n_samples(term) * forward


# ---- what this machine reaches ----

CACHED = 1 << 18
"""Elements of which exponentials are taken at once: 1 MiB, which second-level caches hold, and enough work that cores
which share it seldom wait for each other."""
SIDE = 512
"""Of the square matrices that are multiplied."""


@dataclass(frozen=True)
class Rates:
    """A second."""

    exponentials: float
    multiply_adds: float


def rate_measurement() -> Callable[[], Rates]:
    """Compiled now; measures fp32 when called, on all cores that the process may use, for some tenths of a second."""
    # Each round's exponentials are those of the round before: near 0.57, where nothing overflows.
    exponentials = _timed(lambda x: jnp.exp(-x), jnp.linspace(0.0, 1.0, CACHED), 200)
    # Of variance 1/SIDE, so that products neither grow nor vanish.
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(SIDE, SIDE)) / SIDE**0.5, jnp.float32)
    products = _timed(lambda x: x @ matrix, matrix, 8)
    return lambda: Rates(CACHED / exponentials(), SIDE**3 / products())


def _timed(once: Callable[[Any], Any], x: Any, times: int) -> Callable[[], float]:
    """Gives the seconds of one application, in a program of so many: the median of several such programs."""
    program = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: once(x), x)).lower(x).compile()

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(x))
        return (time.perf_counter() - start) / times

    return lambda: statistics.median(seconds() for _ in range(5))
