"""D1 to D4, M4: ten steps on one device and on eight simulated ones, the batch and per-row sources split."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from param_decomp_jax.adversary import AdamAscent, BroadcastAcrossBatch, PerBatchPerPosition, PersistentAttack
from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.masks import Stochastic
from param_decomp_jax.mesh import MeshShape, make_mesh
from param_decomp_jax.placement import batch_sharding, from_host, replicate, state_shardings
from param_decomp_jax.recon import AllSites, Reconstruction
from param_decomp_jax.routing import Everywhere, UniformKSubset
from param_decomp_jax.schedules import Anneal, Schedule
from param_decomp_jax.state import State
from param_decomp_jax.step import Problem, training_step
from tests.core import tiny, toys

LEADING = (8, 5)
STEPS = 10
ATTACKED = "PersistentPGDReconLoss"


def terms_with(attack: PersistentAttack, *others: Reconstruction) -> tuple[Any, ...]:
    return (
        *others,
        Reconstruction(ATTACKED, 0.5, AllSites(), Everywhere(), attack),
        ImportanceMinimality("ImportanceMinimalityLoss", 0.01, Lp(Anneal(1.5, 1.0), 1e-6), beta=0.5),
        Faithfulness("FaithfulnessLoss", 1.0),
    )


def make_problem(scope: Any) -> Problem:
    attack = PersistentAttack(AdamAscent(Schedule(0.05), 0.5, 0.99), scope, n_warmup_steps=1)
    subset = Reconstruction("StochasticReconSubsetLoss", 0.5, AllSites(), UniformKSubset(), Stochastic())
    return tiny.problem(terms_with(attack, subset), batch_size=LEADING[0])


def make_tms_problem() -> Problem:
    """Tied weights, and C5: V of the pair is read on every device."""
    attack = PersistentAttack(AdamAscent(Schedule(0.05), 0.5, 0.99), PerBatchPerPosition())
    stochastic = Reconstruction("StochasticReconLoss", 0.5, AllSites(), Everywhere(), Stochastic())
    target = toys.target(toys.SPARSE, toys.EVERY_MATRIX, toys.TIED)
    return tiny.problem(terms_with(attack, stochastic), target, ci=LayerwiseMLP("mlp", (3,)), batch_size=LEADING[0])


def tokens(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, tiny.CONFIG.vocab_size, LEADING).astype(np.int32)


def feature_vectors(step: int) -> np.ndarray:
    return toys.features(toys.SPARSE, LEADING[0], step)


def run(
    problem: Problem, state: State, weights: Any, batch: Callable[[int], np.ndarray], n_devices: int
) -> tuple[dict[str, list[float]], State]:
    """Ten steps on other batches each; every metric's trajectory and the last state."""
    mesh = make_mesh(MeshShape(fsdp=n_devices))
    places = state_shardings(mesh, problem.decomposition, state)
    state = jax.tree.map(lambda x, place: from_host(np.asarray(x), place), state, places)
    weights = replicate(weights, mesh)
    step = jax.jit(training_step, static_argnums=0, donate_argnums=1, out_shardings=(places, None))
    rows = []
    for number in range(STEPS):
        state, metrics = step(problem, state, weights, from_host(batch(number), batch_sharding(mesh)))
        rows.append(metrics)
    sources = state.adversaries[ATTACKED].raw
    parts = {len({str(shard.index) for shard in x.addressable_shards}) for x in jax.tree.leaves(sources)}
    split = isinstance(problem.decomposition.persistent[ATTACKED][1].scope, PerBatchPerPosition)
    assert parts == {n_devices if split else 1}  # D2
    return {name: [float(row[name]) for row in rows] for name in rows[0]}, state


@pytest.mark.parametrize(
    ("scope", "exact"),
    [
        (BroadcastAcrossBatch(), False),
        (PerBatchPerPosition(), True),
        pytest.param(BroadcastAcrossBatch(), True, marks=pytest.mark.slow),
        pytest.param(PerBatchPerPosition(), False, marks=pytest.mark.slow),
    ],
    ids=["broadcast-fp32", "per_row-float64", "broadcast-float64", "per_row-fp32"],
)
def test_one_device_is_eight(scope: Any, exact: bool) -> None:
    problem = make_problem(scope)
    state = tiny.ruffled_state(problem, step=0, leading=LEADING)
    assert_one_is_eight(problem, state, tiny.weights(), tokens, exact)


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["float64", "fp32"])
def test_one_device_is_eight_on_a_toy(exact: bool) -> None:
    """One row for each device, no sequence axis."""
    problem = make_tms_problem()
    state = tiny.ruffled_state(problem, step=0, seed=5, leading=LEADING[:1])
    assert_one_is_eight(problem, state, toys.weights(toys.SPARSE), feature_vectors, exact)


def assert_one_is_eight(
    problem: Problem, state: State, weights: Any, batch: Callable[[int], np.ndarray], exact: bool
) -> None:
    tolerance = 1e-9 if exact else 1e-5
    with jax.enable_x64(exact):
        if exact:
            problem, state, weights = tiny.in_float64(problem), tiny.to_float64(state), tiny.to_float64(weights)
        alone, alone_state = run(problem, state, weights, batch, 1)
        together, together_state = run(problem, state, weights, batch, 8)
    assert len(alone["loss/total"]) == STEPS
    for name, trajectory in alone.items():
        np.testing.assert_allclose(together[name], trajectory, rtol=tolerance, err_msg=name)
    sites = problem.target.sites
    worst = tiny.assert_alike(tiny.ref_state(alone_state, sites), tiny.ref_state(together_state, sites), tolerance)
    relative = max(tiny.deviation(x, together[name]) for name, x in alone.items())
    print(f"state {worst:.1e}, metrics {relative:.1e}")
