"""Experts' matrices as sites (section 12): against the reference, and under every memory policy and mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import GlobalMLP, LayerwiseMLP
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    FreshAttack,
    PerBatchPerPosition,
    PersistentAttack,
)
from param_decomp_jax.method.locality import NonlinearityLocality
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp
from param_decomp_jax.method.masks import Constant, Stochastic
from param_decomp_jax.method.recon import AllSites, Beside, Chunks, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import step_outcome
from param_decomp_jax.nn.grouped import group, grouped_matmul_wide
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding, shardings
from param_decomp_jax.targets.qwen3_moe import Qwen3MoeConfig
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_jax.targets.transformer_config import Experts
from tests.core import tiny

# A dense layer, two alike ones whose up and down matrices of all experts are sites, and one whose experts are frozen.
CONFIG = Qwen3MoeConfig(
    vocab_size=11, d_model=8, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=2, d_mlp=6, norm_eps=1e-5,
    experts=Experts(n=4, per_token=2, d_mlp=5, normalised=True, dense_layers=(0,)),
)  # fmt: skip
CHOSEN = {"layers.0.mlp.up_proj": 4, "layers.1.self_attn.q_proj": 3, "layers.2.self_attn.q_proj": 3}
CHOSEN |= {
    f"layers.{n}.mlp.experts.{e}.{kind}": C
    for n in (1, 2)
    for kind, C in (("up_proj", 4), ("down_proj", 3))
    for e in range(4)
}
ADAM = AdamAscent(Schedule(0.05), 0.5, 0.9)
TERMS = (
    Faithfulness("FaithfulnessLoss", 3.0),
    ImportanceMinimality("ImportanceMinimalityLoss", 0.02, Lp(Anneal(2.0, 0.4, 0.0, 1.0), 1e-12), 0.5),
    Reconstruction("StochasticReconSubsetLoss", 0.5, AllSites(), UniformKSubset(), Stochastic()),
    Reconstruction("CIMaskedReconLoss", 0.3, AllSites(), Everywhere(), Constant(0.0)),
    Reconstruction(
        "PersistentPGDReconLoss",
        0.4,
        AllSites(),
        Everywhere(),
        PersistentAttack(ADAM, PerBatchPerPosition(), n_warmup_steps=1),
    ),
)
LP = Lp(Anneal(1.0, 0.5, 0.0, 1.0), 1e-12)
RANDOM = FreshAttack("random", 0.125, 2, "shared_across_batch")
MORE = (
    ImportanceMinimality("ImportanceMinimalityLoss", 0.02, LP, frequency=Frequency(0.01, 30.0)),
    Reconstruction(
        "ChunkwiseSubsetReconLoss", 0.5, Chunks(5), UniformKSubset(), Stochastic("binomial"),
        beside=Beside(0.6, ("mlp_out.*", "resid_pre.2")),
    ),
    NonlinearityLocality("NonlinearityLocalityLoss", 0.3, (("neuron", 0.7), ("attention_head", 0.4)), 0.5, 10),
    Reconstruction("StochasticHiddenActsReconLoss", 0.2, AllSites(), Everywhere(), Stochastic(), error="hidden_acts"),
    Reconstruction("PGDReconLoss", 0.3, AllSites(), Everywhere(), RANDOM),
    Reconstruction(
        "PersistentPGDReconLoss", 0.4, AllSites(), Everywhere(),
        PersistentAttack(ADAM, BroadcastAcrossBatch(), sigmoid=True, n_warmup_steps=1),
    ),
)  # fmt: skip


def target(memory: MemoryPolicy = MemoryPolicy(), config: Any = CONFIG) -> Any:  # noqa: B008
    # No norms of queries and keys: the reference has none.
    return tiny.target(dataclasses.replace(config, qk_norm=None), CHOSEN, memory)


def weights(config: Any = CONFIG) -> Any:
    return tiny.weights(dataclasses.replace(config, qk_norm=None))


@pytest.mark.slow
@pytest.mark.parametrize("terms", [TERMS, MORE], ids=["terms", "more"])
@pytest.mark.parametrize("exact", [False, True], ids=["fp32", "float64"])
def test_a_step_is_the_reference(terms: Any, exact: bool) -> None:
    problem = tiny.problem(terms, target(), ci=tiny.TRANSFORMER)
    tiny.assert_step_is_the_reference(problem, weights(), tiny.TOKENS, exact)


LEAN = MemoryPolicy(
    save=frozenset(), component_block=1, token_block=8, vocabulary_block=8, attention="blocked", micro_batches=2
)


@pytest.mark.slow
def test_the_leanest_step_is_the_reference() -> None:
    """Nothing is kept, everything is cut into blocks: of positions, of components, of the batch."""
    problem = tiny.problem(TERMS, target(LEAN), ci=tiny.TRANSFORMER, memory=LEAN)
    tiny.assert_step_is_the_reference(problem, weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("attacked", [False, True])
def test_a_small_lean_step_is_the_reference(attacked: bool) -> None:
    """One layer, all of whose matrices of experts are sites; positions and components in blocks, logits made lazily."""
    experts = dataclasses.replace(CONFIG.experts, dense_layers=())  # type: ignore[type-var]
    config = dataclasses.replace(CONFIG, n_layers=1, experts=experts, qk_norm=None)
    memory = MemoryPolicy(save=frozenset({"layers", "ci", "vocabulary", "attention"}), component_block=2, token_block=8)
    chosen = {m.name: 4 for m in config.matrices() if m.expert is not None}
    attack = PersistentAttack(ADAM, PerBatchPerPosition())
    terms = TERMS[:3]
    if attacked:
        terms += (Reconstruction("PersistentPGDReconLoss", 0.4, AllSites(), Everywhere(), attack),)
    problem = tiny.problem(terms, tiny.target(config, chosen, memory), ci=GlobalMLP((6,)), memory=memory)
    tiny.assert_step_is_the_reference(problem, weights(config), tiny.TOKENS, exact=True)


CI = [LayerwiseMLP("shared_mlp", (5,)), LayerwiseMLP("mlp", (3,)), LayerwiseMLP("vector_mlp", (3,)), GlobalMLP((6, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("ci", CI, ids=str)
def test_every_ci_function_is_the_reference(ci: Any) -> None:
    tiny.assert_step_is_the_reference(tiny.problem(TERMS, target(), ci=ci), weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4, 2), (2, 2, 2)], ids=str)
def test_eight_devices_are_one(shape: tuple[int, int, int]) -> None:
    """D3. Every device lays out the slots of its own rows."""
    problem = tiny.problem(TERMS, target(), ci=tiny.TRANSFORMER)
    state, inputs = tiny.ruffled_state(problem), jnp.asarray(tiny.TOKENS)
    want = jax.device_get(tiny.jit_step(problem, state, weights(), inputs))
    mesh = make_mesh(MeshShape(*shape))
    placed = jax.tree.map(jax.device_put, state, state_shardings(mesh, problem.decomposition, state))
    own = jax.tree.map(jax.device_put, weights(), shardings(mesh, target().weight_axes(None), weights()))
    batch = jax.device_put(inputs, batch_sharding(mesh, inputs.shape))
    with jax.set_mesh(mesh):
        got = jax.device_get(jax.jit(step_outcome, static_argnums=0)(problem, placed, own, batch))
    for a, b in zip(jax.tree.leaves(want.metrics), jax.tree.leaves(got.metrics), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(want.gradients), jax.tree.leaves(got.gradients), strict=True):
        assert tiny.deviation(a, b) < 1e-4


def naive(x: np.ndarray, W: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.einsum("btkd,btkdo->btko", np.broadcast_to(x, (*chosen.shape, x.shape[-1])), W[chosen])


@pytest.mark.parametrize(
    ("leading", "k", "experts", "shared"),
    [((2, 5), 2, 4, False), ((2, 5), 2, 4, True), ((1, 1), 1, 1, False), ((2, 3), 8, 8, True), ((2, 24), 2, 3, False)],
)
def test_grouped_products(leading: tuple[int, int], k: int, experts: int, shared: bool) -> None:
    """Also where one expert takes nearly all, and another nothing."""
    rng = np.random.default_rng(0)
    chosen = np.array([[rng.permutation(experts)[:k] for _ in range(leading[1])] for _ in range(leading[0])], np.int32)
    if leading[1] == 24:
        chosen[:] = (0, 2)
    x = rng.normal(size=(*leading, 1 if shared else k, 3)).astype(np.float32)
    W = rng.normal(size=(experts, 3, 6)).astype(np.float32)
    weight = rng.normal(size=(*leading, k, 6)).astype(np.float32)

    def loss(x: Any, W: Any) -> Any:
        y = grouped_matmul_wide(x, W, group(jnp.asarray(chosen), experts))
        return jnp.sum(weight * y), y

    (_, y), (to_x, to_W) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, W)
    np.testing.assert_allclose(y, naive(x, W, chosen), rtol=1e-4, atol=1e-5)
    back = naive(weight, np.swapaxes(W, 1, 2), chosen)
    np.testing.assert_allclose(to_x, back.sum(axis=2, keepdims=True) if shared else back, rtol=1e-4, atol=1e-4)
    outer = np.einsum("btkd,btko->btkdo", np.broadcast_to(x, (*chosen.shape, 3)), weight)
    np.testing.assert_allclose(to_W, [outer[chosen == e].sum(axis=0) for e in range(experts)], rtol=1e-4, atol=1e-4)


def test_a_single_expert_is_an_mlp_with_any_activation() -> None:
    alone = dataclasses.replace(CONFIG, activation="gelu", experts=Experts(n=1, per_token=1, d_mlp=6, normalised=True))
    plain = dataclasses.replace(alone, experts=None)
    own = tiny.weights(plain)
    mlp = {kind: own["layers"][kind] for kind in ("gate_proj", "up_proj", "down_proj")}
    experts = {f"experts.{kind}": matrix[:, None] for kind, matrix in mlp.items()}
    router = jnp.zeros(alone.weight_shapes()["experts"]["router"])
    layers = {name: x for name, x in own["layers"].items() if name not in mlp}
    tokens = jnp.arange(10).reshape(2, 5)
    as_expert = language_logits({**own, "layers": layers, "experts": {"router": router, **experts}}, alone, tokens)
    np.testing.assert_allclose(as_expert, language_logits(own, plain, tokens), atol=1e-5)
