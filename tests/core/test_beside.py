"""Hidden activations beside the output (R6): whole steps against the reference, memory policies, devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.decomposition.schedules import Knot, Knots, Schedule
from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    FreshAttack,
    PerBatch,
    PersistentAttack,
    SGDAscent,
)
from param_decomp_jax.method.losses import Faithfulness
from param_decomp_jax.method.masks import Constant, Stochastic
from param_decomp_jax.method.objective import Objective, term_keys
from param_decomp_jax.method.recon import AllSites, Beside, Chunks, EachSite, Merged, Reconstruction, n_attack_passes
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.state import State
from param_decomp_jax.method.step import Problem, compared_points
from param_decomp_jax.sharding.memory import LEAN, PLAIN
from param_decomp_jax.sharding.mesh import MeshShape
from tests.cases import slow_but
from tests.core import tiny, toys
from tests.core.test_devices import CHOSEN, CONFIG, LEADING, assert_eight_is_one
from tests.core.test_policies import under

RISING = Knots(2.0, (Knot(0.0, 0.25), Knot(1.0, 1.0)))
BLOCKS = Beside(0.7, ("resid_post.*",))
FEW = Beside(RISING, ("attn_out.1", "mlp_out.2", "resid_pre.1"))
CLIMBING = PersistentAttack(SGDAscent(Schedule(0.5)), PerBatch(), n_warmup_steps=1)
ADAM = PersistentAttack(AdamAscent(Schedule(0.05), 0.5, 0.99), BroadcastAcrossBatch(), n_warmup_steps=1)
FRESH = FreshAttack("random", 0.125, 2, "per_row")


def of_the_sum(beside: Beside) -> Beside:
    return dataclasses.replace(beside, adversary_objective="term")


def persistent(beside: Beside, name: str = "PersistentPGDReconLoss", attack: PersistentAttack = CLIMBING) -> Any:
    return Reconstruction(name, 0.5, AllSites(), Everywhere(), attack, beside=beside)


LATE = Reconstruction("ChunkwiseSubsetReconLoss", 0.9, Chunks(2), UniformKSubset(), Stochastic(), beside=BLOCKS)
"""Chunks that begin at every layer: before it their points have error 0."""
FRESHLY = Reconstruction("PGDReconLoss", 0.6, AllSites(), Everywhere(), FRESH, beside=FEW)
PLAIN_TERM = Reconstruction("CIMaskedReconLoss", 0.4, AllSites(), Everywhere(), Constant(0.0))
MERGED = Reconstruction(
    "MergedStochasticSubsetPPGDReconLoss",
    0.8,
    AllSites(),
    UniformKSubset(),
    Merged(ADAM, Stochastic(), 0.5),
    beside=FEW,
)
ROUTED = Reconstruction(
    "PersistentPGDReconSubsetLoss", 0.7, AllSites(), UniformKSubset(), CLIMBING, n_samples=2, beside=FEW
)


def of_llama(*terms: Reconstruction) -> Problem:
    return tiny.problem((*terms, Faithfulness("FaithfulnessLoss", 1.0)))


def test_a_step() -> None:
    """Live sets of several starts, points in a few layers, a rising coefficient, a fresh attack on the sum;
    sources that climb the output's error alone, and others that climb the sum; a term without points beside them."""
    other = persistent(of_the_sum(FEW), "PersistentPGDReconLoss_2", ADAM)
    problem = of_llama(LATE, persistent(BLOCKS), other, FRESHLY, PLAIN_TERM)
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


def test_a_step_of_merged_and_routed_sources() -> None:
    problem = of_llama(MERGED, ROUTED)
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


def test_a_step_of_a_toy() -> None:
    """A ResidMLP, whose points are of its residual stream; layers one at a time."""
    config, layerwise = toys.residual(), LayerwiseMLP("mlp", (3,))
    term = Reconstruction("CIMaskedReconLayerwiseLoss", 0.4, EachSite(), Everywhere(), Constant(0.0), beside=BLOCKS)
    terms = (term, persistent(Beside(RISING, ("resid_pre.1", "resid_post.2"))))
    problem = tiny.problem(terms, toys.target(config, toys.EVERY_LAYER), ci=layerwise, batch_size=6)
    tiny.assert_step_is_the_reference(problem, toys.weights(config), toys.features(config), exact=True)


POLICIES = {
    "micro-batches and fused KL": dataclasses.replace(LEAN, micro_batches=2, component_block=2, vocabulary_block=8),
    "unrolled": dataclasses.replace(PLAIN, layers="unroll"),
    "lean": LEAN,
    "grouped": dataclasses.replace(LEAN, layer_group=2),
}


@pytest.mark.parametrize("name", slow_but(["micro-batches and fused KL"], POLICIES))
def test_policies(name: str) -> None:
    """Every lever of memory computes the same; the norms at points are those of the whole batch."""
    problem = of_llama(dataclasses.replace(LATE, live=Chunks(4)), persistent(of_the_sum(FEW)))
    tiny.assert_step_is_the_reference(under(problem, POLICIES[name]), tiny.weights(), tiny.TOKENS, exact=True)


def test_rows_that_streams_share() -> None:
    """In bfloat16, with layers written out, streams have the clean rows in common up to the first masked matrix. Up to
    there they differ by nothing, and after it by as much as where each has rows of its own."""

    def losses(problem: Problem, state: State, weights: Any, inputs: jax.Array) -> Any:
        batch = read_batch(problem, state.learned, weights, inputs, points=compared_points(problem))
        keys = term_keys(problem.decomposition, jax.random.key(0))
        return Objective(problem.decomposition, state.step, keys).total_loss(batch, {})[1].metrics

    of_rounding = Beside(1.0, ("resid_pre.0", "attn_out.0", "resid_post.*"))
    term = Reconstruction(
        "StochasticReconLoss", 1.0, AllSites(), Everywhere(), Stochastic(), n_samples=2, beside=of_rounding
    )
    chosen = {name: C for name, C in tiny.CHOSEN.items() if not name.startswith("layers.0.self_attn")}
    found = []
    for layers in ("scan", "unroll"):
        target = tiny.target(chosen=chosen, memory=dataclasses.replace(PLAIN, layers=layers), dtype=jnp.bfloat16)
        problem = tiny.problem((term,), target, compute_dtype="bfloat16")
        state = tiny.ruffled_state(problem)
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), tiny.weights())
        metrics = jax.jit(losses, static_argnums=0)(problem, state, weights, jnp.asarray(tiny.TOKENS))
        own = {k.rpartition("/")[-1]: float(x) for k, x in metrics.items() if k.startswith(f"loss/{term.name}/")}
        assert own.pop("resid_pre.0") == 0
        assert own.pop("attn_out.0") < 1e-5  # one rounding
        found.append(own)
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=0.03), name


@pytest.mark.slow
def test_eight_devices_are_one() -> None:
    terms = (dataclasses.replace(LATE, live=Chunks(3)), persistent(BLOCKS))
    problem = tiny.problem(terms, tiny.target(CONFIG, CHOSEN), ci=tiny.TRANSFORMER, batch_size=LEADING[0])
    assert_eight_is_one(problem, 2, MeshShape(2, 2, 2))


def test_a_term_that_is_off() -> None:
    """Its parts are 0 until it begins, and its sources stay as they are (A6)."""
    late = dataclasses.replace(CLIMBING, start_frac=0.8)
    problem = of_llama(persistent(BLOCKS, attack=late))
    state = tiny.ruffled_state(problem)
    got = tiny.jit_step(problem, state, tiny.weights(), jnp.asarray(tiny.TOKENS))
    name = "PersistentPGDReconLoss"
    parts = {key: float(x) for key, x in got.metrics.items() if key.startswith(f"loss/{name}")}
    assert parts == dict.fromkeys(
        [f"loss/{name}{p}" for p in ("", "/output", *(f"/resid_post.{n}" for n in range(3)))], 0
    )
    for before, after in zip(jax.tree.leaves(state.adversaries), jax.tree.leaves(got.state.adversaries), strict=True):
        np.testing.assert_array_equal(before, after)


def test_where_nothing_is_active() -> None:
    """A batch of a toy can be 0 everywhere, and its activations with it."""
    config = toys.residual()
    problem = tiny.problem(
        (dataclasses.replace(PLAIN_TERM, beside=BLOCKS),), toys.target(config, {"layers.0.mlp_in": 3}), batch_size=6
    )
    state = tiny.ruffled_state(problem, leading=(6,))
    got = tiny.jit_step(problem, state, toys.weights(config), jnp.zeros((6, 5)))
    assert float(got.metrics["loss/CIMaskedReconLoss/resid_post.2"]) == 0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(got.gradients))


def test_passes_that_the_sources_take() -> None:
    """Those that climb the output alone take one more for each forward."""
    assert n_attack_passes(ROUTED, 6) == 1 + 2
    assert n_attack_passes(dataclasses.replace(ROUTED, beside=of_the_sum(FEW)), 6) == 1
    assert n_attack_passes(LATE, 6) == 0
