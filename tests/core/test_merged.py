"""Merged and pooled terms (A8, A9) and what came with them (L5, L6, A2, A5): whole steps against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.decomposition.schedules import Anneal, Knot, Knots, Schedule
from param_decomp_jax.method.adversary import (
    AdamAscent,
    FreshAttack,
    MomentumAscent,
    PerBatch,
    PersistentAttack,
    Pool,
    SGDAscent,
    effective,
)
from param_decomp_jax.method.inspection import step_draws
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp, SmoothL0, mean_frequency
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.recon import AllSites, Merged, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.memory import LEAN
from param_decomp_jax.sharding.mesh import MeshShape
from tests.core import tiny, toys
from tests.core.test_devices import CHOSEN, CONFIG, LEADING, assert_eight_is_one
from tests.core.test_policies import under

HALF = Knots(0.8, (Knot(0.0, 0.25), Knot(0.5, 1.0), Knot(1.0, 0.5, "cosine")))
MOMENTUM = PersistentAttack(MomentumAscent(Schedule(0.3), 0.7), PerBatch(), n_warmup_steps=2)
POOLED = PersistentAttack(AdamAscent(Schedule(0.05), 0.5, 0.99), Pool(3), n_warmup_steps=1)
FREQUENT = ImportanceMinimality(
    "ImportanceMinimalityLoss",
    0.03,
    SmoothL0(Schedule(0.4, "linear", 0.0, 0.5), normalize_at_one=True),
    frequency=Frequency(0.01, 100.0, ema_halflife_steps=4.0),
)
LP = ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(1.5, 0.7), 1e-3, normalize_at_one=True), beta=0.5)


def merged(attack: PersistentAttack, fraction: float | Knots = HALF) -> Reconstruction:
    pooled = "Pooled" if isinstance(attack.scope, Pool) else ""
    sources = Merged(attack, Stochastic(), fraction)
    return Reconstruction(f"MergedStochasticSubset{pooled}PPGDReconLoss", 0.8, AllSites(), UniformKSubset(), sources)


def of_llama() -> Problem:
    climbing = PersistentAttack(SGDAscent(Schedule(0.5)), PerBatch(), n_warmup_steps=1)
    own = Reconstruction("PersistentPGDReconLoss", 0.5, AllSites(), Everywhere(), climbing)
    return tiny.problem((merged(MOMENTUM), own, FREQUENT, Faithfulness("FaithfulnessLoss", 3.0, normalize="per_site")))


def of_toy() -> Problem:
    attack = FreshAttack("random", 0.125, 2, "per_row")
    terms = (merged(POOLED, 0.5), Reconstruction("PGDReconLoss", 0.6, AllSites(), Everywhere(), attack), LP)
    target = toys.target(toys.SPARSE, {**toys.EVERY_MATRIX, "linear1": 8, "linear2": 8}, toys.TIED)
    return tiny.problem(terms, target, ci=LayerwiseMLP("mlp", (3,)), batch_size=6)


def test_a_merged_step() -> None:
    """Rows of both kinds, sources of rows that climb with momentum, a fraction by knots; L5 and L6."""
    problem = of_llama()
    (draws,) = tiny.ref_draws(problem, 5)["MergedStochasticSubsetPPGDReconLoss"]
    assert 0 < draws["adversarial"].sum() < tiny.LEADING[0]
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


def test_a_pooled_step_of_a_toy() -> None:
    """Particles without an axis of positions, a fresh attack on rows, ψ over its value at 1."""
    inputs = toys.features(toys.SPARSE, 6, 0)
    tiny.assert_step_is_the_reference(of_toy(), toys.weights(toys.SPARSE), inputs, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_pooled_step(exact: bool) -> None:
    problem = tiny.problem((merged(POOLED), LP), ci=tiny.TRANSFORMER)
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact)


@pytest.mark.slow
@pytest.mark.parametrize("attack", [MOMENTUM, POOLED], ids=["momentum", "pool"])
def test_policies_and_devices(attack: PersistentAttack) -> None:
    """D1, with most levers of memory on: micro-batches have the rows that the whole batch has."""
    terms = (merged(attack), FREQUENT)
    state = tiny.ruffled_state(problem := tiny.problem(terms))
    with jax.enable_x64(True):
        exact, state = tiny.in_float64(problem), tiny.to_float64(state)
        policy = dataclasses.replace(LEAN, micro_batches=2, component_block=2, vocabulary_block=8)
        steps = [
            tiny.jit_step(of, state, tiny.to_float64(tiny.weights()), jnp.asarray(tiny.TOKENS))
            for of in (exact, under(exact, policy))
        ]
    sites = problem.target.sites
    tiny.assert_alike(*(tiny.ref_state(step.state, sites) for step in steps), 1e-9)
    eight = tiny.problem(terms, tiny.target(CONFIG, CHOSEN), ci=tiny.TRANSFORMER, batch_size=LEADING[0])
    assert_eight_is_one(eight, 2, MeshShape(2, 2, 2))


def test_draws() -> None:
    """A8, A9: about the share asked for, of both kinds of rows; every particle; others in every step."""
    term = merged(POOLED, 0.25)
    problem = tiny.problem((term,), batch_size=400)
    draw = jax.jit(lambda step: step_draws(problem, step, (400, 2))[term.name][0])
    first, second = draw(0), draw(1)
    for own in (first, second):
        assert 0.15 < float(jnp.mean(own.rows < 0.25)) < 0.35
        assert np.bincount(own.particle, minlength=3).min() > 90
    assert not np.array_equal(first.rows, second.rows)
    assert not np.array_equal(first.particle, second.particle)


def test_a_pool_gives_rows_their_particle() -> None:
    """A9, and gradients: nothing to those that were not drawn."""
    problem = tiny.problem((merged(POOLED),))
    raw = tiny.ruffled_state(problem).adversaries[merged(POOLED).name].raw
    particle = np.array([2, 0, 1, 0])

    def used(raw: dict) -> dict:
        return effective(POOLED, raw, jnp.asarray(particle)[:, None])

    got, gradient = used(raw), jax.grad(lambda raw: sum(jnp.sum(x**2) for x in jax.tree.leaves(used(raw))))(raw)
    for name, own in raw.items():
        for x, y, g in zip(
            jax.tree.leaves(own), jax.tree.leaves(got[name]), jax.tree.leaves(gradient[name]), strict=True
        ):
            np.testing.assert_allclose(y, np.asarray(x)[:, particle, np.arange(4)], rtol=1e-6)
            others = np.ones(x.shape[1:3], bool)
            others[particle, np.arange(4)] = False
            assert not np.any(np.asarray(g)[:, others])


def test_means_are_of_many_batches() -> None:
    """L6 without noise: the same batch again and again gives that batch's value, whatever the half-life, and its
    gradient; the reference's means."""
    spec, f = Frequency(1.0, 50.0, ema_halflife_steps=3.0), np.array([[0.0, 0.01, 0.5]])
    with jax.enable_x64(True):
        means = {"a": jnp.zeros((1, 3))}
        for step in range(4):
            value_of = lambda S, means=means, step=step: mean_frequency(spec, means, {"a": S}, 8, jnp.asarray(step))  # noqa: E731
            (value, means), gradient = jax.value_and_grad(value_of, has_aux=True)(jnp.asarray(8 * f))
            assert float(value) == pytest.approx(float((f * np.log2(1 + 50 * f)).sum()), rel=1e-12)
            slope = np.log2(1 + 50 * f) + 50 * f / ((1 + 50 * f) * np.log(2))
            np.testing.assert_allclose(gradient, slope / 8, rtol=1e-12)
