"""Section 8: the whole training step against the reference, from the same state and with the same draws."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.adversary import (
    AdamAscent, BroadcastAcrossBatch, FreshAttack, PerBatchPerPosition, PersistentAttack, RepeatAcrossBatch, SignAscent,
    SingleSource,
)  # fmt: skip
from param_decomp_jax.losses import Faithfulness, Frequency, ImportanceMinimality, Lp, SmoothL0
from param_decomp_jax.masks import Constant, Stochastic
from param_decomp_jax.optim import AdamW
from param_decomp_jax.recon import AllSites, Chunks, EachSite, Reconstruction
from param_decomp_jax.routing import Everywhere, UniformKSubset
from param_decomp_jax.schedules import Anneal, Schedule
from param_decomp_jax.state import FaithfulnessWarmup, init_state
from param_decomp_jax.step import Problem, warmup_step, warmup_transformation
from tests import reference as ref
from tests.core import tiny

FAITHFUL = Faithfulness("FaithfulnessLoss", 3.0)
IMPORTANCE = ImportanceMinimality(
    "ImportanceMinimalityLoss", 0.03, Lp(Anneal(2.0, 0.5, 0.0, 0.6), eps=1e-6), beta=0.5
)
FREQUENT = dataclasses.replace(
    IMPORTANCE, penalty=SmoothL0(Schedule(0.4, "cosine", 0.0, 0.5)), frequency=Frequency(0.01, 100.0), beta=0.0
)
CHUNKWISE = Reconstruction("ChunkwiseSubsetReconLoss", 0.7, Chunks(3), UniformKSubset(), Stochastic(), n_samples=2)
ASCENT = AdamAscent(Schedule(0.05, "linear", 0.5, 0.2), 0.5, 0.99)
PERSISTENT = PersistentAttack(ASCENT, BroadcastAcrossBatch(), n_warmup_steps=2)

CASES: dict[str, Problem] = {
    "chunkwise, persistent Adam, transformer": tiny.problem(
        (
            FAITHFUL,
            IMPORTANCE,
            CHUNKWISE,
            Reconstruction("PersistentPGDReconLoss", 0.4, AllSites(), Everywhere(), PERSISTENT),
        ),
        ci=tiny.TRANSFORMER,
    ),
    "layerwise, persistent sign under sigmoid, shared_mlp": tiny.problem(
        (
            Reconstruction("StochasticReconLayerwiseLoss", 0.5, EachSite(), Everywhere(), Stochastic("binomial"), 1),
            Reconstruction(
                "PersistentPGDReconLoss", 2.0, AllSites(), Everywhere(),
                PersistentAttack(SignAscent(Schedule(0.2)), SingleSource(), sigmoid=True, n_warmup_steps=1),
            ),
            IMPORTANCE,
        ),
        ci=tiny.SHARED,
    ),
    "scalar mlp, fresh attack, normal": tiny.problem(
        (
            Reconstruction(
                "PGDReconLoss", 0.6, AllSites(), Everywhere(), FreshAttack("random", 0.125, 3, "unique_per_datapoint")
            ),
            Reconstruction("UnmaskedReconLoss", 0.2, AllSites(), Everywhere(), Constant(1.0)),
            IMPORTANCE,
        ),
        ci=tiny.SCALAR,
        squashing="normal",
    ),
    "persistent subset twice, frequency, two bundles, no delta": tiny.problem(
        (
            Reconstruction(
                "PersistentPGDReconSubsetLoss", 0.5, AllSites(), UniformKSubset(),
                PersistentAttack(ASCENT, PerBatchPerPosition(), sigmoid=True, n_warmup_steps=1), n_samples=2,
            ),
            Reconstruction(
                "PersistentPGDReconLoss", 0.8, AllSites(), Everywhere(),
                PersistentAttack(SignAscent(Schedule(0.1)), RepeatAcrossBatch(2), n_warmup_steps=0),
            ),
            FREQUENT,
            FAITHFUL,
        ),
        ci=tiny.SHARED,
        use_delta=False,
    ),
}  # fmt: skip


def assert_step(problem: Problem, got: tiny.Outcome, want: ref.StepResult, tolerance: float) -> float:
    """Total, terms, gradients and the whole new state of one step."""
    metrics = {name.removeprefix("loss/"): float(x) for name, x in got.metrics.items() if name.startswith("loss/")}
    terms = {name.replace("/frequency", "_frequency"): x for name, x in want.terms.items()}
    return max(
        tiny.assert_alike({**terms, "total": want.total}, metrics, tolerance),
        tiny.assert_alike(want.gradients, tiny.ref_gradients(got.gradients, problem), tolerance),
        tiny.assert_alike(want.state, tiny.ref_state(got.state, problem.target.sites), tolerance),
    )


def one_step(problem: Problem, weights: Any, state: Any, tolerance: float) -> float:
    got = tiny.jit_step(problem, state, weights, jnp.asarray(tiny.TOKENS))
    want = tiny.ref_step(problem, tiny.ref_state(state, problem.target.sites), weights, tiny.TOKENS)
    return assert_step(problem, got, want, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_step_in_fp32(case: str) -> None:
    problem = CASES[case]
    worst = one_step(problem, tiny.weights(), tiny.ruffled_state(problem), 1e-5)
    print(f"{case}: {worst:.1e}")


@pytest.mark.parametrize("case", CASES)
def test_step_in_float64(case: str) -> None:
    problem = CASES[case]
    state = tiny.ruffled_state(problem)
    with jax.enable_x64(True):
        problem = tiny.in_float64(problem)
        worst = one_step(problem, tiny.to_float64(tiny.weights()), tiny.to_float64(state), 1e-9)
    print(f"{case}: {worst:.1e}")
