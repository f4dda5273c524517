"""The embedding as a site (F7): a table of which rows are looked up, masked as any matrix is."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.importances import read_sites
from param_decomp_jax.ci import CIConfig, GlobalMLP, LayerwiseMLP
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.method.masks import Constant, Stochastic
from param_decomp_jax.method.recon import AllSites, Beside, EachSite, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.memory import INTERMEDIATES, LEAN, PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_jax.targets.base import choose_sites
from tests.core import test_devices as devices
from tests.core import tiny

EMBEDDING = "embed_tokens"
CHOSEN = {EMBEDDING: 6, **{name: C for name, C in tiny.CHOSEN.items() if not name.startswith("layers.1.")}}
ATTACK = PersistentAttack(AdamAscent(Schedule(0.05)), BroadcastAcrossBatch(), n_warmup_steps=2)
TERMS = (
    Faithfulness("FaithfulnessLoss", 3.0),
    ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(2.0, 0.5, 0.0, 0.6), eps=1e-6), beta=0.5),
    Reconstruction(
        "StochasticReconSubsetLoss", 0.7, AllSites(), UniformKSubset(), Stochastic(),
        beside=Beside(0.5, ("resid_pre.0", "resid_post.*")),
    ),
    Reconstruction("PersistentPGDReconSubsetLoss", 0.4, AllSites(), UniformKSubset(), ATTACK),
)  # fmt: skip
EVERY_WAY = (
    *TERMS,
    # The embedding alone live, and not live where others are.
    Reconstruction("CIMaskedReconLayerwiseLoss", 0.2, EachSite(), Everywhere(), Constant(0.0)),
    Reconstruction("StochasticHiddenActsReconLoss", 0.3, AllSites(), Everywhere(), Stochastic(), error="hidden_acts"),
)
ALONE = {EMBEDDING: 6}
CASES: dict[str, Problem] = {
    "with others, transformer": tiny.problem(EVERY_WAY, tiny.target(chosen=CHOSEN), ci=tiny.TRANSFORMER),
    "alone, shared_mlp": tiny.problem(TERMS[:3], tiny.target(chosen=ALONE), ci=tiny.SHARED),
    "with others, vector_mlp": tiny.problem(
        TERMS[:3], tiny.target(chosen=CHOSEN), ci=LayerwiseMLP("vector_mlp", (4,)), use_delta=False
    ),
    "a tied head, global MLP": tiny.problem(
        TERMS[:3], tiny.target(dataclasses.replace(tiny.CONFIG, tied=True), CHOSEN), ci=GlobalMLP((5,))
    ),
}


@pytest.mark.parametrize(
    ("case", "exact"),
    [
        pytest.param(case, exact, marks=[] if exact and case.startswith("alone") else pytest.mark.slow)
        for case in CASES
        for exact in (True, False)
    ],
)
def test_a_step_is_the_reference(case: str, exact: bool) -> None:
    weights = tiny.weights(CASES[case].target.architecture)
    tiny.assert_step_is_the_reference(CASES[case], weights, tiny.TOKENS, exact)


@cache
def outcome(memory: MemoryPolicy) -> Any:
    problem = tiny.problem(EVERY_WAY, tiny.target(chosen=CHOSEN, memory=memory), ci=tiny.TRANSFORMER, memory=memory)
    with jax.enable_x64(True):
        problem = tiny.in_float64(problem)
        state, weights = map(tiny.to_float64, (tiny.ruffled_state(problem), tiny.weights()))
        return jax.device_get(tiny.jit_step(problem, state, weights, jnp.asarray(tiny.TOKENS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(LEAN, component_block=2, token_block=4, attention="blocked"),
        dataclasses.replace(LEAN, micro_batches=2, attention="plain", layers="unroll"),
        MemoryPolicy(save=frozenset(INTERMEDIATES) - {"site_inputs", "ci"}),
    ],
    ids=["lean, in blocks", "lean, in two parts", "inputs made again"],
)
def test_no_policy_changes_a_number(policy: MemoryPolicy) -> None:
    want, got = outcome(PLAIN), outcome(policy)
    for a, b in ((want.metrics, got.metrics), (want.gradients, got.gradients), (want.state, got.state)):
        assert max(map(tiny.deviation, jax.tree.leaves(a), jax.tree.leaves(b))) <= 1e-9


@pytest.mark.slow
def test_one_device_is_eight() -> None:
    """Split over all axes of the mesh, most levers of memory on."""
    terms = devices.terms_with(devices.attacked("PersistentPGDReconLoss", BroadcastAcrossBatch(), 1), TERMS[2])
    target = tiny.target(devices.CONFIG, {EMBEDDING: 8, **devices.CHOSEN})
    problem = tiny.problem(terms, target, ci=tiny.TRANSFORMER, batch_size=devices.LEADING[0])
    # From seed 2, ten steps make 1.4e-9 of one device's rounding.
    devices.assert_eight_is_one(problem, 3, MeshShape(2, 2, 2))


@pytest.mark.parametrize("ci", [tiny.SHARED, GlobalMLP((4,))], ids=["layerwise", "global"])
def test_activations_are_rows_of_v(ci: CIConfig) -> None:
    """What a run that is opened says of a component: ‖U_c‖ · V[token, c]."""
    problem = tiny.problem((), tiny.target(chosen=CHOSEN), ci=ci)
    state = tiny.ruffled_state(problem)
    tokens = jnp.asarray(tiny.TOKENS)
    read = jax.jit(lambda *a: read_sites(problem, *a, tokens, [EMBEDDING])[1])
    found = read(state.learned, tiny.weights())[EMBEDDING]
    factors = tiny.ref_components(state.components, problem.target.sites)[EMBEDDING]
    want = factors["V"][tiny.TOKENS] * np.linalg.norm(factors["U"], axis=1)
    np.testing.assert_allclose(found.activation, want, rtol=1e-5, atol=1e-6)
    assert found.importance.shape == (*tiny.LEADING, CHOSEN[EMBEDDING])


def test_no_one_hot_vector_is_made() -> None:
    """Neither the forwards nor the backward pass have an array of tokens by vocabulary but the KL's own."""
    vocabulary = 23
    config = dataclasses.replace(tiny.CONFIG, vocab_size=vocabulary)
    problem = tiny.problem(EVERY_WAY[-1:], tiny.target(config, ALONE), ci=tiny.SHARED)
    step = partial(tiny.step_outcome, problem)
    text = str(jax.make_jaxpr(step)(tiny.ruffled_state(problem), tiny.weights(config), tiny.TOKENS))
    assert f"[{vocabulary},{CHOSEN[EMBEDDING]}]" in text
    assert f"5,{vocabulary}]" not in text


def test_canonical_order_and_identities() -> None:
    """Of layer −1, before all others; nothing can be put before it."""
    sites = choose_sites(tiny.CONFIG.matrices(), dict(reversed(CHOSEN.items())))
    assert (sites.all[0].name, sites.all[0].layer) == (EMBEDDING, -1)
    assert (sites.stacks[0].d_in, sites.stacks[0].read_width) == (tiny.CONFIG.vocab_size, tiny.CONFIG.d_model)
    with pytest.raises(AssertionError, match="not matrices of this target"):
        choose_sites(tiny.CONFIG.matrices(), {f"{EMBEDDING}.pre_identity": 3})
