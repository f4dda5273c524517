"""Section 8: the whole training step against the reference, from the same state and with the same draws."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import (
    AdamAscent,
    Adversary,
    BroadcastAcrossBatch,
    FreshAttack,
    PerBatchPerPosition,
    PersistentAttack,
    RepeatAcrossBatch,
    SignAscent,
    SingleSource,
)  # fmt: skip
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp, SmoothL0
from param_decomp_jax.method.masks import Constant, Stochastic
from param_decomp_jax.method.recon import AllSites, Chunks, EachSite, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.state import FaithfulnessWarmup
from param_decomp_jax.method.step import Problem, warmup_step, warmup_transformation
from tests import reference as ref
from tests.core import tiny

FAITHFUL = Faithfulness("FaithfulnessLoss", 3.0)
IMPORTANCE = ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(2.0, 0.5, 0.0, 0.6), eps=1e-6), beta=0.5)
FREQUENT = dataclasses.replace(
    IMPORTANCE, penalty=SmoothL0(Schedule(0.4, "cosine", 0.0, 0.5)), frequency=Frequency(0.01, 100.0), beta=0.0
)
CHUNKWISE = Reconstruction("ChunkwiseSubsetReconLoss", 0.7, Chunks(5), UniformKSubset(), Stochastic())
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
                PersistentAttack(ASCENT, PerBatchPerPosition(), sigmoid=True, n_warmup_steps=2), n_samples=2,
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


@functools.cache
def wanted(case: str) -> ref.StepResult:
    """The reference's step of a case; float64 whatever the core computes in, so both precisions share it."""
    problem = CASES[case]
    start = tiny.ref_state(tiny.ruffled_state(problem), problem.target.sites)
    return tiny.ref_step(problem, start, tiny.weights(), tiny.TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_step_in_fp32(case: str) -> None:
    problem = CASES[case]
    got = tiny.jit_step(problem, tiny.ruffled_state(problem), tiny.weights(), jnp.asarray(tiny.TOKENS))
    print(f"{case}: {tiny.assert_step(problem, got, wanted(case), 1e-5):.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_step_in_float64(case: str) -> None:
    state = tiny.ruffled_state(CASES[case])
    with jax.enable_x64(True):
        problem, state = tiny.in_float64(CASES[case]), tiny.to_float64(state)
        got = tiny.jit_step(problem, state, tiny.to_float64(tiny.weights()), jnp.asarray(tiny.TOKENS))
        print(f"{case}: {tiny.assert_step(problem, got, wanted(case), 1e-9):.1e}")


@pytest.mark.slow
def test_count_of_source_updates() -> None:
    """A3: n_warmup_steps + 1 updates per step, of every bundle its own."""
    case = "persistent subset twice, frequency, two bundles, no delta"
    problem = CASES[case]
    state = tiny.ruffled_state(problem)
    new = tiny.jit_step(problem, state, tiny.weights(), jnp.asarray(tiny.TOKENS)).state
    counts = {name: int(a.count - state.adversaries[name].count) for name, a in new.adversaries.items()}
    assert counts == {"PersistentPGDReconSubsetLoss": 3, "PersistentPGDReconLoss": 1}


@pytest.mark.slow
def test_five_steps_in_a_row() -> None:
    """From the true start, through warm-up of the rates, annealing of p and the start of the persistent term (A6)."""
    late = dataclasses.replace(PERSISTENT, n_warmup_steps=1, start_frac=0.2)
    terms = (
        FAITHFUL,
        dataclasses.replace(IMPORTANCE, penalty=Lp(Anneal(2.0, 0.5, 0.1, 0.3), eps=1e-6)),
        Reconstruction("StochasticReconSubsetLoss", 0.7, AllSites(), UniformKSubset(), Stochastic()),
        Reconstruction("PersistentPGDReconLoss", 0.4, AllSites(), Everywhere(), late),
    )
    problem = tiny.problem(terms)
    first = eqx.tree_at(lambda s: s.step, tiny.ruffled_state(problem), jnp.zeros((), jnp.int32))
    first = dataclasses.replace(
        first,
        components_moments=jax.tree.map(jnp.zeros_like, first.components_moments),
        ci_moments=jax.tree.map(jnp.zeros_like, first.ci_moments),
        adversaries={
            name: Adversary(a.raw, *jax.tree.map(jnp.zeros_like, (a.mean, a.square, a.count)))
            for name, a in first.adversaries.items()
        },
    )
    name, worst, want = "PersistentPGDReconLoss", 0.0, tiny.ref_state(first, problem.target.sites)
    with jax.enable_x64(True):
        problem, state = tiny.in_float64(problem), tiny.to_float64(first)
        weights, tokens = tiny.to_float64(tiny.weights()), jnp.asarray(tiny.TOKENS)
        for step in range(5):
            before = state
            state, metrics, _ = tiny.jit_step(problem, state, weights, tokens)
            result = tiny.ref_step(problem, want, weights, tiny.TOKENS)
            want = result.state
            worst = max(worst, tiny.assert_alike(want, tiny.ref_state(state, problem.target.sites), 1e-9))
            assert tiny.deviation(result.total, metrics["loss/total"]) <= 1e-9
            if step < 2:  # A6: off means not computed, nothing moves
                assert metrics[f"loss/{name}"] == 0
                assert_same(before.adversaries, state.adversaries)
            else:
                assert metrics[f"loss/{name}"] > 0
    assert int(state.adversaries[name].count) == 3 * 2
    print(f"{worst:.1e}")


def assert_same(a: Any, b: Any) -> None:
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def test_faithfulness_warmup() -> None:
    """T3."""
    problem = tiny.problem((FAITHFUL,), warmup=FaithfulnessWarmup(steps=3, lr=1e-2, weight_decay=0.2))
    sites, weights = problem.target.sites, tiny.weights()
    components = tiny.ruffled_state(problem).components
    forward = tiny.ref_target(problem.target, weights, tiny.TOKENS)
    frozen = ref.clean_pass(forward, [site.name for site in sites.all]).weights
    want = ref.faithfulness_warmup(tiny.ref_components(components, sites), frozen, tiny.schema(problem))
    with jax.enable_x64(True):
        components, weights = tiny.to_float64(components), tiny.to_float64(weights)
        moments, losses = warmup_transformation(problem).init(components), []
        step = jax.jit(warmup_step, static_argnums=0)
        for _ in range(problem.decomposition.warmup.steps):
            components, moments, loss = step(problem, components, moments, weights)
            losses.append(float(loss))
        tiny.assert_alike(want, tiny.ref_components(components, sites), 1e-9)
    assert losses == sorted(losses, reverse=True)
