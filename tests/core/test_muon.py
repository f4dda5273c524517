"""Muon (T7, N5): against the reference, against optax, and on many devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from param_decomp_aot.traffic import traffic
from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.decomposition.components import Factors, components_axes
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method import muon as muon_module
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.muon import Muon, muon, newton_schulz, orthogonalize
from param_decomp_jax.method.recon import AllSites, Reconstruction
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.state_sharding import moments_axes
from param_decomp_jax.sharding.mesh import Axes, MeshShape, make_mesh
from param_decomp_jax.sharding.placement import shardings
from tests import reference as ref
from tests.core import tiny

SPEC = Muon(Schedule(0.02, "cosine", 0.0, 0.2), beta=0.9, weight_decay=0.1, clip_norm=0.5, n_iterations=4)
TERMS = (
    Reconstruction("StochasticReconLoss", 1.0, AllSites(), Everywhere(), Stochastic()),
    ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(1.5, 1.0), 1e-6), beta=0.5),
    Faithfulness("FaithfulnessLoss", 3.0),
)
STACKED = {"gate": (3, 24, 64, 40), "up": (3, 24, 64, 40), "down": (3, 40, 64, 24)}
"""Stacks of one shape in both directions, and two shapes of matrices."""


def factors(seed: int) -> dict[str, Factors]:
    rng = np.random.default_rng(seed)
    return {
        name: Factors(*(jnp.asarray(rng.normal(size=(n, *shape)), float) for shape in ((d_in, C), (C, d_out))))
        for name, (n, d_in, C, d_out) in STACKED.items()
    }


# ---- the arithmetic ----


@pytest.mark.parametrize(
    "kind", ["shared_mlp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("vector_mlp", "mlp"))]
)
def test_a_whole_step(kind: Any) -> None:
    """Both optimisers, in float64, gradients and momenta too; matrices of sites, and of components."""
    ci = LayerwiseMLP(kind, (5,))
    problem = tiny.problem(TERMS, ci=ci, components_optimizer=SPEC, ci_optimizer=dataclasses.replace(SPEC, beta=0.8))
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
def test_a_joint_function_goes_site_by_site() -> None:
    """The rows of a transformer's projection and its last map: each site's is a matrix of its own (T7). So are the
    matrices of its blocks, with the options of C9: gate and up are two."""
    problem = tiny.problem(TERMS, ci=tiny.WITH_OPTIONS, ci_optimizer=SPEC)
    state, sites = tiny.ruffled_state(problem, seed=5), problem.target.sites

    def by_site(ci: dict[str, Any]) -> dict[str, Any]:
        rows = np.cumsum([stack.read_width for stack, _ in sites.stack_rows])[:-1]
        columns = np.cumsum([site.C for site in sites.all])[:-1]
        own = {"input": np.split(ci["input"]["w"], rows), "head": np.split(ci["head"]["w"], columns, axis=1)}
        return {**own, "b": [ci["input"]["b"], ci["head"]["b"]], "blocks": ci["blocks"]}

    start = tiny.ref_state(state, sites)
    gradient = tiny.ref_step(problem, start, tiny.weights(), tiny.TOKENS).gradients["ci"]
    moments = {key: by_site(own) if key in "mv" else own for key, own in start["ci_moments"].items()}
    optimizer = tiny.schema_optimizer(SPEC)
    want = ref.optimise(optimizer, by_site(start["ci"]), by_site(gradient), moments, start["step"], 10)[0]
    with jax.enable_x64(True):
        problem, state = tiny.in_float64(problem), tiny.to_float64(state)
        got = tiny.jit_step(problem, state, tiny.to_float64(tiny.weights()), jnp.asarray(tiny.TOKENS)).state
        tiny.assert_alike(want, by_site(tiny.ref_ci(got.ci, sites)), 1e-9)


@pytest.mark.parametrize("rms", [0.2, None])
def test_is_optax_matrix_by_matrix(rms: float | None) -> None:
    """One update in fp32, where both are 1e-6 from the exact one; five in float64."""
    dims = optax.contrib.MuonDimensionNumbers(-2, -1)
    for exact, n_updates, tolerance in ((False, 1, 5e-6), (True, 5, 1e-12)):
        with jax.enable_x64(exact):
            start = factors(0)
            spec = Muon(Schedule(0.02), weight_decay=0.1, consistent_rms=rms)
            mine = muon(spec, lambda _: 0.02, components_axes(start))
            theirs = optax.contrib.muon(
                0.02,
                weight_decay=0.1,
                consistent_rms=rms,
                muon_weight_dimension_numbers=jax.tree.map(lambda _: dims, start),
            )
            found = []
            for optimizer in (mine, theirs):
                parameters, state, update = start, optimizer.init(start), jax.jit(optimizer.update)
                for n in range(n_updates):
                    updates, state = update(factors(n + 1), state, parameters)
                    parameters = optax.apply_updates(parameters, updates)
                found.append(jax.device_get(updates))
        for name, own in found[0].items():
            for row in range(own.V.shape[0]):
                assert tiny.deviation(found[1][name].V[row], own.V[row]) <= tolerance
                assert tiny.deviation(found[1][name].U[row], own.U[row]) <= tolerance


def test_in_bfloat16() -> None:
    """N5: as far from the exact result as the reference with the same roundings. The two differ by as much, since small
    singular values, and what was rounded of them, grow by 3.4 in each iteration."""
    d = np.random.default_rng(0).normal(size=(3, 12, 40)).astype(np.float32)
    exact, rounded = ref.newton_schulz(d, 5), ref.newton_schulz(d, 5, ref.bfloat16)
    (got,) = orthogonalize([jnp.asarray(d)], [Axes((None, None, "component"))], Muon(Schedule(1.0), dtype="bfloat16"))
    assert got.dtype == jnp.float32
    assert 1e-3 < tiny.deviation(exact, got) < 2 * tiny.deviation(exact, rounded) < 0.2


def test_singular_values_come_near_one() -> None:
    """Whatever they were, down to a hundredth of the largest; vectors stay, zeros stay zero."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(30, 20)))[0] for _ in range(2))
    x = left * np.geomspace(1, 0.01, 20) @ right.T
    values = np.linalg.svd(newton_schulz(jnp.asarray(x, jnp.float32), 5), compute_uv=False)[:20]
    assert 0.6 < values.min() < values.max() < 1.3
    assert not np.any(newton_schulz(jnp.zeros((2, 3)), 5))


def test_large_matrices_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large for a batch gives what a batch gives."""
    d = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
    arrays, axes = [d, d[:1].mT], [Axes((None, None, "component"))] * 2
    want = orthogonalize(arrays, axes, SPEC)
    monkeypatch.setattr(muon_module, "LARGE", 8)
    for x, y in zip(want, orthogonalize(arrays, axes, SPEC), strict=True):
        assert tiny.deviation(x, y) < 1e-5
    assert tiny.deviation(want[0][0].T, want[1][0]) < 1e-5


# ---- on many devices ----


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(fsdp=8),
        pytest.param(MeshShape(2, 2, 2, nodes=2), marks=pytest.mark.slow),
        pytest.param(MeshShape(fsdp=8, nodes=2), marks=pytest.mark.slow),
        pytest.param(MeshShape(replica=2, fsdp=4), marks=pytest.mark.slow),
        pytest.param(MeshShape(fsdp=4, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_whole_matrices_travel(shape: MeshShape) -> None:
    """D1: the update of one device. Each shape of matrices is sent out and back once, and within a replica nothing else
    is: no Gram matrix is added up or collected."""
    with jax.enable_x64(True):
        parameters, gradient = factors(0), factors(1)
        axes = components_axes(parameters)
        optimizer = muon(Muon(Schedule(0.02)), lambda _: 0.02, axes)
        state = optimizer.init(parameters)
        want, _ = jax.jit(optimizer.update)(gradient, state, parameters)
        mesh = make_mesh(shape)
        with jax.set_mesh(mesh):
            places = shardings(mesh, axes, parameters)
            of_state = shardings(mesh, moments_axes(state, parameters, axes), state)
            given = [jax.device_put(x, at) for x, at in ((gradient, places), (state, of_state), (parameters, places))]
            program = jax.jit(optimizer.update, out_shardings=(places, of_state)).lower(*given).compile()
            got, new = program(*given)
        assert new.momentum["up"].V.sharding == places["up"].V
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), want, got)
    sent = traffic(program.as_text(), gpus_per_node=4).collectives
    expected = {"all-to-all": 4} | ({"all-gather": 2} if shape.replica > 1 else {})
    found: dict[str, int] = {}
    for collective, n in sent.items():
        found[collective.kind] = found.get(collective.kind, 0) + n
        assert collective.kind != "all-gather" or collective.group == shape.replica
    assert found == expected
