"""The component readout (C7, C8): logits, whole steps, where its vectors lie, and the scales it starts with."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import CIConfig, ComponentReadout, GlobalMLP, LayerwiseMLP, init_ci
from param_decomp_jax.ci.readout import initial_scales
from param_decomp_jax.decomposition.components import Components
from param_decomp_jax.method.adversary import BroadcastAcrossBatch
from param_decomp_jax.method.calibration import calibrate, percentiles
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import Problem, run_clean_pass
from param_decomp_jax.nn.grouped import OverPositions, group
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, MeshShape, is_axes, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding, shardings
from tests import reference as ref
from tests.core import test_ci as functions
from tests.core import test_devices as devices
from tests.core import test_embedding_site as embedding
from tests.core import test_experts as experts
from tests.core import tiny, toys
from tests.core.test_chunkwise import FLAT, LASTING, TERMS, TOY, TOY_SITES
from tests.core.test_policies import POLICIES, under

CONFIGS = {name: ComponentReadout(config) for name, config in functions.CONFIGS.items()}  # type: ignore[arg-type]
UNLIKE = {"plain": PLAIN} | {
    name: POLICIES[name] for name in ("lean", "published", "blocks of tokens and components, lazy")
}
UNLIKE["unrolled micro-batches, lazy"] = MemoryPolicy(
    save=PLAIN.save - {"logits", "site_inputs"}, component_block=2, layers="unroll", micro_batches=2
)
VECTORS = ("s_plus", "a_plus", "b_plus", "s_minus", "a_minus", "b_minus", "b")


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True], ids=["all at once", "lazy"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name: str, lazy: bool) -> None:
    """Around every CI function; made of all components at once, and block by block."""
    lead = functions.LEADS["sequence"]
    args = (
        functions.ci_of(CONFIGS[name]),
        functions.components(),
        functions.inputs_of(lead),
        functions.cotangents_of(lead),
    )
    with jax.enable_x64(True):
        memory = functions.LAZY if lazy else PLAIN
        functions.assert_like_reference(CONFIGS[name], *tiny.to_float64(args), 1e-9, memory)


@pytest.mark.parametrize(
    ("function", "policy", "exact"),
    [
        pytest.param(GlobalMLP((4,)), "lean", True, id="global MLP, lean"),
        pytest.param(FLAT.transformer, "plain", True, marks=pytest.mark.slow, id="transformer"),
        pytest.param(FLAT.transformer, "plain", False, marks=pytest.mark.slow, id="transformer in fp32"),
        pytest.param(FLAT, "lean", True, marks=pytest.mark.slow, id="chunkwise, lean"),
        pytest.param(LayerwiseMLP("mlp", (3,)), "lean", True, marks=pytest.mark.slow, id="mlp, lean"),
        pytest.param(LayerwiseMLP("shared_mlp", (3,)), "lean", False, marks=pytest.mark.slow, id="shared_mlp in fp32"),
    ],
)
def test_a_step_is_the_reference(function: Any, policy: str, exact: bool) -> None:
    """Of transformers and MLPs; lean: logits where they are read, in blocks."""
    chosen = {"layers.0.mlp_in": 4} if isinstance(function, GlobalMLP) else TOY_SITES
    problem = tiny.problem(TERMS, toys.target(TOY, chosen), ci=ComponentReadout(function))
    problem = under(problem, PLAIN if policy == "plain" else POLICIES[policy])
    tiny.assert_step_is_the_reference(problem, toys.weights(TOY), toys.features(TOY), exact)


@pytest.mark.slow
def test_a_step_with_tied_sites_and_identities_is_the_reference() -> None:
    """T4: what comes to V through the readout of the second of a pair reaches the pair's U."""
    target = toys.target(toys.SPARSE, toys.with_identities(toys.EVERY_MATRIX, 3), toys.TIED)
    problem = tiny.problem(TERMS, target, ci=ComponentReadout(LayerwiseMLP("shared_mlp", (4,))))
    tiny.assert_step_is_the_reference(problem, toys.weights(toys.SPARSE), toys.features(toys.SPARSE), exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", UNLIKE.values(), ids=UNLIKE)
def test_a_step_on_a_llama_is_the_reference(policy: MemoryPolicy) -> None:
    """Scanned and unrolled, logits kept and made where they are read, whole and in blocks of all sorts."""
    problem = under(tiny.problem((*TERMS, LASTING), ci=ComponentReadout(tiny.TRANSFORMER)), policy)
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["plain", "lean"])
@pytest.mark.parametrize("function", [tiny.CHUNKWISE, LayerwiseMLP("mlp", (3,))], ids=["chunkwise", "mlp"])
def test_a_step_with_experts_is_the_reference(function: Any, policy: str) -> None:
    problem = tiny.problem(experts.TERMS, experts.target(), ci=ComponentReadout(function))
    problem = under(problem, PLAIN if policy == "plain" else POLICIES["lean"])
    tiny.assert_step_is_the_reference(problem, experts.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (tiny.SHARED, "plain"),
        (GlobalMLP((5,)), "plain"),
        (tiny.TRANSFORMER, "lean"),
    ],
    ids=["shared_mlp", "global MLP", "transformer, lean"],
)
def test_a_step_with_the_embedding_is_the_reference(function: Any, policy: str) -> None:
    """F7: h is a row of V, whatever the function reads of the row of W."""
    chosen = embedding.ALONE if policy == "plain" else embedding.CHOSEN
    problem = tiny.problem(embedding.TERMS[:3], tiny.target(chosen=chosen), ci=ComponentReadout(function))
    problem = under(problem, PLAIN if policy == "plain" else POLICIES["lean"])
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "policy"),
    [(MeshShape(2, 2, 2), "lean"), (MeshShape(fsdp=8), "plain"), (MeshShape(fsdp=8, nodes=2), "whole 8B")],
    ids=["2x2x2", "1x8x1", "held"],
)
def test_one_device_is_eight(shape: MeshShape, policy: str) -> None:
    """Split over all axes of the mesh, most levers of memory on; held, as the whole 8B model is."""
    terms = devices.terms_with(devices.attacked("PersistentPGDReconLoss", BroadcastAcrossBatch(), 1), TERMS[1])
    target = tiny.target(devices.CONFIG, devices.CHOSEN)
    problem = tiny.problem(terms, target, ci=ComponentReadout(tiny.CHUNKWISE), batch_size=devices.LEADING[0])
    devices.assert_eight_is_one(problem, 2, shape, policy)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_axes_describe_every_array(config: CIConfig) -> None:
    """The vectors are split by component and no product's (N1); all else is as without them."""
    ci = functions.ci_of(config)
    axes = ci.axes()
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(ci)
    assert isinstance(config, ComponentReadout)
    bare = jax.tree.leaves(functions.ci_of(config.function).axes(), is_leaf=is_axes)
    described = jax.tree.leaves((axes.function, [own.head for own in axes.heads.values()]), is_leaf=is_axes)
    assert sorted(bare, key=repr) == sorted(described, key=repr)
    for own in axes.heads.values():
        assert jax.tree.leaves(own.readout, is_leaf=is_axes) == [Axes((None, "component"))] * len(VECTORS)


# ---- the start ----


def test_nothing_is_added_at_the_start() -> None:
    """C8: 0 exactly, around a function that is drawn as it would be without a readout."""
    config = CONFIGS["shared_mlp"]
    draw = jax.jit(lambda key: tuple(init_ci(of, key, functions.SITES) for of in (config.function, config)))
    bare, ci = draw(jax.random.key(3))
    name = functions.SITES.stacks[0].name
    readout, h = ci.heads[name].readout, jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 4)), jnp.float32)
    added, back = jax.vjp(jax.jit(lambda readout: readout(h)), readout)
    np.testing.assert_array_equal(added, 0)
    to_readout = back(jnp.ones_like(added))[0]
    assert np.all(to_readout.s_plus != 0), "else it would stay at the start"
    assert not np.any(to_readout.a_plus), "moves only after s has"
    for of, own in bare.heads.items():
        assert jax.tree.structure(own) == jax.tree.structure(ci.heads[of].head)
        jax.tree.map(np.testing.assert_array_equal, own, ci.heads[of].head)


def scales_of(problem: Problem, components: Components, weights: Any, inputs: np.ndarray) -> Any:
    """a₊ of every stack."""
    spec, sites = problem.decomposition, problem.target.sites
    ci = init_ci(spec.ci, jax.random.key(0), sites)
    found: Any = jax.jit(partial(calibrate, problem))(Learned(components, ci), weights, jnp.asarray(inputs))
    for own in found.heads.values():
        np.testing.assert_array_equal(own.readout.a_minus, own.readout.a_plus)
        assert not any(np.any(getattr(own.readout, name)) for name in VECTORS if not name.startswith("a_"))
    return {name: own.readout.a_plus for name, own in found.heads.items()}


def wanted_scales(problem: Problem, components: Components, weights: Any, inputs: np.ndarray) -> ref.Tree:
    """By the reference, from its own clean pass; by site."""
    sites = problem.target.sites
    clean = ref.clean_pass(tiny.ref_target(problem.target, weights, inputs), [site.name for site in sites.all])
    V = {s: own["V"] for s, own in ref.tie(tiny.ref_components(components, sites), sites.tied).items()}
    return {
        s: ref.initial_readout(ref.where_it_exists(clean.reads[s] @ V[s], s, clean.exists).reshape(-1, V[s].shape[1]))[
            "a_plus"
        ]
        for s in clean.reads
    }


STARTS: dict[str, Any] = {
    "toy, tied, identities": (
        toys.target(toys.SPARSE, toys.with_identities(toys.EVERY_MATRIX, 3), toys.TIED),
        toys.weights(toys.SPARSE),
        toys.features(toys.SPARSE, 40),
    ),
    "embedding": (tiny.target(chosen=embedding.CHOSEN), tiny.weights(), tiny.TOKENS),
    "experts": (experts.target(), experts.weights(), tiny.TOKENS),
}


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "in blocks"])
@pytest.mark.parametrize("case", STARTS)
def test_scales_are_those_of_the_reference(case: str, lazy: bool) -> None:
    """C8, with global functions and recomputed inputs too; V that are 0 at a component, at a site."""
    target, weights, inputs = STARTS[case]
    problem = tiny.problem((), target, ci=ComponentReadout(GlobalMLP((4,))))
    problem = under(problem, POLICIES["lean"]) if lazy else problem
    components = jax.tree.map(np.array, tiny.ruffled_state(problem, leading=inputs.shape).components)
    first, *_, last = components.values()
    first.V[..., 0], last.V[:] = 0, 0
    with jax.enable_x64(True):
        found = scales_of(tiny.in_float64(problem), tiny.to_float64(components), tiny.to_float64(weights), inputs)
    want = wanted_scales(problem, components, weights, inputs)
    tiny.assert_alike(want, ref.tree_map(tiny.array, target.sites.unstack(found)), 1e-9)


@pytest.mark.slow
def test_scales_of_eight_devices_are_those_of_one() -> None:
    target = tiny.target(devices.CONFIG, devices.CHOSEN)
    ci = ComponentReadout(tiny.TRANSFORMER)
    problem = tiny.problem(TERMS, target, ci=ci, batch_size=devices.LEADING[0])
    state, weights, tokens = (
        tiny.ruffled_state(problem, leading=devices.LEADING),
        tiny.weights(devices.CONFIG),
        devices.tokens(0),
    )
    want = jax.jit(partial(calibrate, problem))(state.learned, weights, jnp.asarray(tokens))
    mesh = make_mesh(MeshShape(2, 2, 2))
    where = state_shardings(mesh, problem.decomposition, state)
    placed = jax.tree.map(jax.device_put, state, where)
    own = jax.tree.map(jax.device_put, weights, shardings(mesh, target.weight_axes(None), weights))
    batch = jax.device_put(tokens, batch_sharding(mesh, tokens.shape))
    with jax.set_mesh(mesh):
        program = jax.jit(partial(calibrate, problem), out_shardings=where.ci)
        got = program(Learned(placed.components, placed.ci), own, batch)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 1001, 1002, 4000])
def test_percentiles_are_numpys(n: int) -> None:
    """Of one number, of so few that it is near the largest, of a number of them that needs no interpolation."""
    sizes = np.abs(np.random.default_rng(n).normal(size=(n, 3))).astype(np.float32)
    np.testing.assert_allclose(
        percentiles(jnp.asarray(sizes), OverPositions()), np.percentile(sizes, 99.9, axis=0), rtol=2e-6
    )


def test_percentiles_of_experts() -> None:
    """X4: over the positions that take an expert; 0 for one that none takes."""
    rng = np.random.default_rng(0)
    chosen = np.stack([np.array([0, e])[rng.permutation(2)] for e in rng.integers(1, 3, 60)]).reshape(3, 20, 2)
    sizes = np.abs(rng.normal(size=(3, 20, 2, 5))).astype(np.float32)
    found = percentiles(jnp.asarray(sizes), OverPositions(group(jnp.asarray(chosen, jnp.int32), 4), 4))
    for expert in range(3):
        np.testing.assert_allclose(found[expert], np.percentile(sizes[chosen == expert], 99.9, axis=0), rtol=2e-6)
    np.testing.assert_array_equal(found[3], 0)


def test_no_scale_is_extreme() -> None:
    q = jnp.asarray([[2.0, 1e-30, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(initial_scales(q), [[0.5, 500, 500, 2], [1, 1, 1, 1]], rtol=1e-6)


@pytest.mark.slow
def test_calibration_keeps_no_inputs_for_a_function_without_one() -> None:
    """It gives such a function back as it is."""
    problem = tiny.problem(TERMS)
    state = tiny.ruffled_state(problem)
    assert calibrate(problem, state.learned, tiny.weights(), jnp.asarray(tiny.TOKENS)) is state.ci


@pytest.mark.parametrize("wrapped", [False, True])
def test_inputs_are_kept_for_the_readout(wrapped: bool) -> None:
    """Also under a policy that recomputes them for a global function."""
    policy = dataclasses.replace(PLAIN, save=PLAIN.save - {"site_inputs"})
    config = ComponentReadout(tiny.TRANSFORMER) if wrapped else tiny.TRANSFORMER
    problem = under(tiny.problem(TERMS, ci=config), policy)
    ci = jax.eval_shape(partial(init_ci, config, sites=problem.target.sites), jax.random.key(0))
    clean = jax.eval_shape(
        lambda w, t: run_clean_pass(problem, ci, w, t, outputs=False).site_inputs,
        tiny.weights(),
        jnp.asarray(tiny.TOKENS),
    )
    assert bool(clean) == wrapped
