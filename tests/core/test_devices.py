"""D1 to D4, M4: ten steps on one device and on eight simulated ones, everything split that can be."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_aot.buffers import ledger
from param_decomp_aot.timeline import timeline
from param_decomp_aot.traffic import traffic
from param_decomp_jax.ci import CIConfig, ComponentReadout, LayerwiseMLP
from param_decomp_jax.decomposition.draws import positions
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method import objective as objective_module
from param_decomp_jax.method import step as step_module
from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    PerBatch,
    PerBatchPerPosition,
    PersistentAttack,
    Pool,
    RepeatAcrossBatch,
)
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp, penalty_sum
from param_decomp_jax.method.masks import Sources, Stochastic
from param_decomp_jax.method.muon import Muon
from param_decomp_jax.method.recon import AllSites, Chunks, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.state import State, init_state
from param_decomp_jax.method.state_sharding import state_axes, state_shardings
from param_decomp_jax.method.step import Problem, hold_trained, training_step
from param_decomp_jax.sharding import mesh as mesh_module
from param_decomp_jax.sharding.memory import BALANCED, FAST, HELD_GROUPS, LEAN, PLAIN, HeldBy, HeldGroup, MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, MeshShape, is_axes, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding, from_host, shardings
from param_decomp_jax.targets.llama import module_name
from tests.core import tiny, toys
from tests.core.test_policies import under

LEADING = (8, 5)
STEPS = 10
ALONE = MeshShape()
SHAPES = [MeshShape(fsdp=8), MeshShape(replica=2, fsdp=4), MeshShape(fsdp=4, tensor=2), MeshShape(2, 2, 2)]
POLICIES = {"plain": PLAIN, "lean": dataclasses.replace(LEAN, component_block=4, vocabulary_block=8)}
POLICIES["fast"] = dataclasses.replace(FAST, vocabulary_block=8)
POLICIES["lean, held by nodes"] = dataclasses.replace(
    POLICIES["lean"], held=(("ci", "node"), ("components", "node"), ("sources", "node"), ("target", "node"))
)
POLICIES["whole 8B"] = dataclasses.replace(
    POLICIES["fast"],
    held=(("ci", "node"), ("components", "device"), ("heads", "device"), ("sources", "device"), ("target", "device")),
)

# Components that all meshes divide, that some of them do, and that few do.
CONFIG = dataclasses.replace(tiny.CONFIG, vocab_size=16)
CHOSEN = {module_name(n, kind): C for n in range(2) for kind, C in (("q_proj", 8), ("up_proj", 16))}
CHOSEN |= {module_name(2, "q_proj"): 6, module_name(2, "v_proj"): 4}


def terms_with(*others: Reconstruction) -> tuple[Any, ...]:
    return (
        *others,
        ImportanceMinimality("ImportanceMinimalityLoss", 0.01, Lp(Anneal(1.5, 1.0), 1e-6), beta=0.5),
        Faithfulness("FaithfulnessLoss", 1.0),
    )


def attacked(name: str, scope: Any, n_warmup_steps: int = 0) -> Reconstruction:
    attack = PersistentAttack(AdamAscent(Schedule(0.05), 0.5, 0.99), scope, n_warmup_steps=n_warmup_steps)
    return Reconstruction(name, 0.5, AllSites(), Everywhere(), attack)


def make_problem() -> Problem:
    """Sources that are split with the batch, shared by all rows, and tiled over them; streams that begin apart."""
    terms = terms_with(
        Reconstruction("StochasticReconSubsetLoss", 0.5, AllSites(), UniformKSubset(), Stochastic()),
        Reconstruction("ChunkwiseSubsetReconLoss", 0.5, Chunks(4), UniformKSubset(), Stochastic()),
        attacked("PersistentPGDReconLoss", BroadcastAcrossBatch(), 1),
        attacked("PersistentPGDReconLoss_rows", PerBatchPerPosition()),
        attacked("PersistentPGDReconLoss_tiled", RepeatAcrossBatch(2)),
    )
    muon = Muon(Schedule(5e-3), clip_norm=0.5)
    target = tiny.target(CONFIG, CHOSEN)
    return tiny.problem(terms, target, ci=tiny.TRANSFORMER, ci_optimizer=muon, batch_size=LEADING[0])


def make_tms_problem() -> Problem:
    """Tied weights, and C5: V of the pair is read on every device."""
    stochastic = Reconstruction("StochasticReconLoss", 0.5, AllSites(), Everywhere(), Stochastic())
    terms = terms_with(attacked("PersistentPGDReconLoss_rows", PerBatchPerPosition()), stochastic)
    target = toys.target(toys.SPARSE, {**toys.EVERY_MATRIX, "linear1": 8, "linear2": 8}, toys.TIED)
    return tiny.problem(terms, target, ci=LayerwiseMLP("mlp", (3,)), batch_size=LEADING[0])


def tokens(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, CONFIG.vocab_size, LEADING).astype(np.int32)


def feature_vectors(step: int) -> np.ndarray:
    return toys.features(toys.SPARSE, LEADING[0], step)


# ---- what lies where ----


def n_parts(x: jax.Array) -> int:
    return len({str(shard.index) for shard in x.addressable_shards})


def divided(size: int, *mesh_axes: int) -> int:
    """Into how many parts mesh axes of these sizes split an axis; one that does not divide it does not."""
    parts = 1
    for n in mesh_axes:
        if size % (parts * n) == 0:
            parts *= n
    return parts


def assert_split(problem: Problem, state: State, weights: Any, shape: MeshShape) -> None:
    """D2, D3: components and what belongs to them by component, matrices by output, the batch's own by row."""

    def by_component(C: int) -> int:
        return divided(C, shape.tensor, shape.fsdp // shape.nodes, shape.nodes)

    def of_target(size: int) -> int:
        match problem.decomposition.memory.held_by("target"):
            case "device":
                return 1
            case "node":
                return divided(size, shape.tensor, shape.fsdp // shape.nodes)
            case None:
                return by_component(size)

    trained = [stack for stack in problem.target.sites.stacks if stack.name in state.components]
    for moment in (state.components, state.components_moments[0].mu, state.components_moments[0].nu):
        for stack in trained:
            assert (n_parts(moment[stack.name].V), n_parts(moment[stack.name].U)) == (by_component(stack.C),) * 2
    assert shape == ALONE or max(by_component(stack.C) for stack in trained) > 1
    for name, adversary in state.adversaries.items():
        per_row = isinstance(problem.decomposition.persistent[name][1].scope, PerBatchPerPosition | PerBatch | Pool)
        for bundle in (kept for kept in (adversary.raw, adversary.mean, adversary.square) if kept is not None):
            for stack in problem.target.sites.stacks:
                sources: Sources = bundle[stack.name]
                assert sources.delta is not None
                rows = shape.replica * shape.fsdp if per_row else 1
                columns = divided(stack.C, shape.tensor) if per_row else by_component(stack.C)
                assert (n_parts(sources.components), n_parts(sources.delta)) == (rows * columns, rows), name
    for stack in problem.target.sites.stacks:
        head = state.ci.heads[stack.name]
        last = head[-1] if isinstance(head, tuple) else head
        assert {n_parts(x) for x in jax.tree.leaves(last)} == {by_component(stack.C)}
    for path, x in jax.tree_util.tree_leaves_with_path(weights):
        vector = "norm" in path[-1].key or x.ndim == 1
        assert n_parts(x) == (1 if vector else of_target(x.shape[-1])), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "ci",
    [tiny.TRANSFORMER, tiny.WITH_OPTIONS, tiny.CHUNKWISE, ComponentReadout(tiny.TRANSFORMER), tiny.SHARED],
    ids=["transformer", "with options", "chunkwise", "readout", "layerwise"],
)
def test_moments_lie_like_what_they_are_moments_of(ci: CIConfig) -> None:
    """D2, also where the CI function has None in place of weights (norms without them)."""
    problem = tiny.problem(terms_with(), ci=ci)
    state = jax.eval_shape(partial(init_state, problem.decomposition, problem.target.sites, LEADING))
    axes = state_axes(problem.decomposition, state)
    leaves = partial(jax.tree.leaves, is_leaf=is_axes)
    assert any("split" in of.names or "component" in of.names for of in leaves(axes.ci))
    for trained, (moments, *_) in ((axes.ci, axes.ci_moments), (axes.components, axes.components_moments)):
        assert leaves(moments.mu) == leaves(moments.nu) == leaves(trained)


def run(
    problem: Problem,
    state: State,
    weights: Any,
    batch: Callable[[int], np.ndarray],
    shape: MeshShape,
    steps: int = STEPS,
) -> tuple[dict[str, list[float]], State]:
    """Steps on other batches each; every metric's trajectory and the last state."""
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        places = state_shardings(mesh, problem.decomposition, state)
        state = jax.tree.map(lambda x, place: from_host(np.asarray(x), place), state, places)
        frozen = shardings(mesh, problem.target.weight_axes(weights), weights)
        weights = jax.tree.map(lambda x, place: from_host(np.asarray(x), place), weights, frozen)
        step = jax.jit(training_step, static_argnums=0, donate_argnums=1, out_shardings=(places, None))
        rows = []
        for number in range(steps):
            inputs = batch(number)
            state, metrics = step(problem, state, weights, from_host(inputs, batch_sharding(mesh, inputs.shape)))
            rows.append(metrics)
    assert_split(problem, state, weights, shape)
    jax.clear_caches()  # programs for eight devices are large, and no other test asks for the same
    return {name: [float(row[name]) for row in rows] for name in rows[0]}, jax.device_get(state)


@cache
def of_llama(
    policy: MemoryPolicy, shape: MeshShape, exact: bool, steps: int = STEPS
) -> tuple[dict[str, list[float]], State]:
    problem, weights = make_problem(), tiny.weights(CONFIG)
    # From seed 1 a logit comes to the edge of the squashing, whose gradient makes 1.4e-5 of rounding in eight steps.
    state = tiny.ruffled_state(problem, step=0, seed=2, leading=LEADING)
    with jax.enable_x64(exact):
        if exact:
            problem, state, weights = tiny.in_float64(problem), tiny.to_float64(state), tiny.to_float64(weights)
        return run(under(problem, policy), state, weights, tokens, shape, steps)


@cache
def of_toy(shape: MeshShape, exact: bool) -> tuple[dict[str, list[float]], State]:
    problem, weights = make_tms_problem(), toys.weights(toys.SPARSE)
    state = tiny.ruffled_state(problem, step=0, seed=5, leading=LEADING[:1])
    with jax.enable_x64(exact):
        if exact:
            problem, state, weights = tiny.in_float64(problem), tiny.to_float64(state), tiny.to_float64(weights)
        return run(problem, state, weights, feature_vectors, shape)


ALL = [
    (shape, policy, exact)
    for s, shape in enumerate(SHAPES)
    for p, policy in enumerate(("plain", "lean"))
    for exact in (True, False)
    if exact or (s + p) % 2 == 0  # rounding, once for each mesh and each policy
]
ALL += [
    (MeshShape(fsdp=8, nodes=2), "fast", True),
    (MeshShape(fsdp=8), "fast", False),
    (MeshShape(fsdp=8, nodes=4), "lean, held by nodes", True),
    (MeshShape(2, 2, 2, 2), "lean, held by nodes", True),
    (MeshShape(fsdp=4, tensor=2, nodes=2), "fast", True),
    (MeshShape(fsdp=4, tensor=2, nodes=2), "lean, held by nodes", False),
]
SHARPEST = (MeshShape(2, 2, 2), "lean", True)
"""Every axis of the mesh, most levers of memory: compared in every run of CI."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "policy", "exact"),
    [
        pytest.param(*of, id=f"{of[0]}-{of[1]}-{of[2]}", marks=pytest.mark.always if of == SHARPEST else [])
        for of in ALL
    ],
)
def test_one_device_is_eight(shape: MeshShape, policy: str, exact: bool) -> None:
    """Whatever the mesh and the memory policy on it."""
    assert_one_is_eight(make_problem(), of_llama(PLAIN, ALONE, exact), of_llama(POLICIES[policy], shape, exact), exact)


HELD: tuple[dict[HeldGroup, HeldBy], ...] = (
    dict.fromkeys(HELD_GROUPS, "node"),
    {"components": "node", "ci": "node", "heads": "device", "sources": "device", "target": "node"},
    {"components": "device", "ci": "device", "heads": "node", "sources": "node", "target": "device"},
    {"components": "device", "heads": "device"},
)
"""Every group held by a node, by a device, and (but for heads) not at all."""
PRESETS = {"plain": PLAIN, "balanced": dataclasses.replace(BALANCED, component_block=4, vocabulary_block=8)}
PRESETS |= {name: POLICIES[name] for name in ("lean", "fast")}
NODES = [
    MeshShape(fsdp=8),
    MeshShape(fsdp=8, nodes=2),
    MeshShape(fsdp=8, nodes=4),
    MeshShape(fsdp=4, tensor=2, nodes=2),
    MeshShape(2, 4, 1, nodes=2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "preset", "held"),
    [
        pytest.param(shape, preset, (s + p) % len(HELD), id=f"{shape}-{preset}-{(s + p) % len(HELD)}")
        for s, shape in enumerate(NODES)
        for p, preset in enumerate(PRESETS)
    ],
)
def test_whatever_is_held(shape: MeshShape, preset: str, held: int) -> None:
    """Every preset on every division into nodes, each with some of `HELD`: two steps, of which the second one sees what
    the first has updated."""
    policy = dataclasses.replace(PRESETS[preset], held=tuple(sorted(HELD[held].items())))
    want, _ = of_llama(PLAIN, ALONE, True)
    got, _ = of_llama.__wrapped__(policy, shape, True, steps=2)
    for name, trajectory in want.items():
        np.testing.assert_allclose(got[name], trajectory[:2], rtol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "exact"),
    [
        (MeshShape(fsdp=8), True),
        pytest.param(MeshShape(fsdp=8), False, marks=pytest.mark.slow),
        pytest.param(MeshShape(2, 2, 2), True, marks=pytest.mark.slow),
    ],
    ids=["1x8x1-float64", "1x8x1-fp32", "2x2x2-float64"],
)
def test_one_device_is_eight_on_a_toy(shape: MeshShape, exact: bool) -> None:
    """One row for each device, no sequence axis."""
    assert_one_is_eight(make_tms_problem(), of_toy(ALONE, exact), of_toy(shape, exact), exact)


def assert_eight_is_one(problem: Problem, seed: int, shape: MeshShape, policy: str = "lean") -> None:
    """In float64, most levers of memory on. ``problem``: of a `CONFIG` target. ``seed``: of the state."""
    state = tiny.ruffled_state(problem, step=0, seed=seed, leading=LEADING)
    with jax.enable_x64(True):
        problem, state = tiny.in_float64(problem), tiny.to_float64(state)
        weights = tiny.to_float64(tiny.weights(CONFIG))
        runs = [
            run(under(problem, policy), state, weights, tokens, of)
            for policy, of in ((PLAIN, ALONE), (POLICIES[policy], shape))
        ]
    assert_one_is_eight(problem, *runs, exact=True)


# ---- a step that is broken across devices ----


def next_device(x: jax.Array, axes: Axes, dtype: Any, gather: Any = mesh_module.gather) -> jax.Array:
    """A gather that puts every device's part where the next one's belongs."""
    used = gather(x, axes, dtype)
    for axis, (at_rest, in_use) in enumerate(zip(axes.names, axes.in_use, strict=True)):
        if at_rest != in_use:
            used = jnp.roll(used, x.shape[axis] // mesh_module.n_parts(at_rest or "", x.shape[axis]), axis)
    return used


def alike_on_all(leading: tuple[int, ...]) -> jax.Array:
    """Numbers of the positions on a device: every device then draws the same."""
    return positions((1, *leading[1:])) + jnp.zeros((leading[0], 1), jnp.uint32)


def not_reduced(penalty: Any, importance: jax.Array, *args: Any) -> jax.Array:
    """The sum over one device's rows, taken for that over the batch (L3)."""
    return penalty_sum(penalty, importance[:1], *args) * importance.shape[0]


BREAKS: dict[str, Any] = {
    "gather": (mesh_module, "gather", next_device),
    "draws": (step_module, "positions", alike_on_all),
    "reduction": (objective_module, "penalty_sum", not_reduced),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [None, *BREAKS])
def test_a_broken_step_is_noticed(
    what: str | None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What the comparison above would say if a part were gathered, drawn or summed up wrongly."""
    want, _ = of_llama(PLAIN, ALONE, True)
    if what is not None:
        module, name, broken = BREAKS[what]
        monkeypatch.setattr(module, name, broken)
        request.addfinalizer(jax.clear_caches)
    jax.clear_caches()
    got, _ = of_llama.__wrapped__(POLICIES["lean"], MeshShape(fsdp=8), True, steps=2)
    worst = max(tiny.deviation(np.asarray(x[:2]), got[name]) for name, x in want.items())
    assert worst > 1e-3 if what else worst < 1e-9


def assert_one_is_eight(problem: Problem, alone: Any, together: Any, exact: bool) -> None:
    tolerance = 1e-9 if exact else 1e-5
    (want, want_state), (got, got_state) = alone, together
    assert len(want["loss/total"]) == STEPS
    for name, trajectory in want.items():
        np.testing.assert_allclose(got[name], trajectory, rtol=tolerance, err_msg=name)
    sites = problem.target.sites
    # D3 is about metrics. In fp32 ten updates of Adam make up to 3e-5 of rounding where a source's gradient is near 0.
    of_state = (tiny.ref_state(want_state, sites), tiny.ref_state(got_state, sites))
    worst = tiny.assert_alike(*of_state, tolerance if exact else 1e-4)
    relative = max(tiny.deviation(x, got[name]) for name, x in want.items())
    print(f"state {worst:.1e}, metrics {relative:.1e}")


@pytest.mark.slow
def test_copies_are_gone_before_the_update(tmp_path: Path) -> None:
    """In the compiled step: each copy is gathered between the nodes and within them, once, and XLA frees its buffer
    when the backward pass ends, at the latest (its last operation reads one on some machines). The updates' temporaries
    come after that."""
    problem, weights = under(make_tms_problem(), POLICIES["fast"]), toys.weights(toys.SPARSE)
    state = tiny.ruffled_state(problem, step=0, seed=5, leading=LEADING[:1])
    inputs, mesh = feature_vectors(0), make_mesh(MeshShape(fsdp=8, nodes=2))

    def shapes(tree: Any, places: Any) -> Any:
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

    with jax.set_mesh(mesh):
        places = state_shardings(mesh, problem.decomposition, state)
        frozen = shardings(mesh, problem.target.weight_axes(weights), weights)
        step = jax.jit(training_step, static_argnums=0, donate_argnums=1, out_shardings=(places, None))
        rows = shapes(inputs, batch_sharding(mesh, inputs.shape))
        lowered = step.lower(problem, shapes(state, places), shapes(weights, frozen), rows)
        held = jax.tree.leaves(jax.eval_shape(partial(hold_trained, problem), state.learned))
        program = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})

    def dumped(ending: str) -> str:
        (file,) = tmp_path.glob(f"*training_step.cpu_after_optimizations{ending}.txt")
        return file.read_text()

    found = timeline(ledger(dumped("-buffer-assignment"), dumped("-live-range"), dumped("")))
    copies = [span for span in found.spans if "/hold/" in span.buffer.scope]
    backward = [n for n, scope in enumerate(found.schedule) if "transpose(jvp(losses))" in scope]
    assert max(span.last for span in copies) <= max(backward)
    assert found.live[max(backward) + 1 :].max() <= found.live.max() - sum(x.size * x.dtype.itemsize for x in held)
    gathers = traffic(program.as_text(), gpus_per_node=4).collectives
    assert sum(n for c, n in gathers.items() if c.kind == "all-gather" and "/hold/" in c.scope) == 2 * len(held)
