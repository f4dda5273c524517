"""Checkpoints: which stay, what is in them, that restored buffers are reused, and other devices than saved them."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console

from param_decomp_jax.losses import Faithfulness
from param_decomp_jax.memory import STATE_PARTS
from param_decomp_jax.state import State, init_state
from param_decomp_lab.build import Built, build
from param_decomp_lab.checkpoints import Checkpoints, flatten
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.memory import Memory
from param_decomp_lab.config.wrapper import Mesh
from param_decomp_lab.programs import state_shapes
from param_decomp_lab.run import compile_steps
from tests.core import tiny as core
from tests.lab.tiny_run import BATCH, STEPS, Tiny, pd_here, programs_shared, rows, saved_arrays, saved_steps

PER_ROW = "PersistentPGDReconSubsetLoss"
EARLY, LATE = 40, 180
"""Steps at which `finished` kept a checkpoint: before the second adversary is on, and after."""


@pytest.fixture(scope="module", autouse=True)
def _programs_shared(tiny: Tiny) -> Iterator[None]:
    with programs_shared(tiny):
        yield


def built_on(run: Path, mesh: Mesh) -> Built:
    config = RunConfig.from_yaml(run / "config.yaml")
    return build(replace(config, wrapper=config.wrapper.model_copy(update={"mesh": mesh})), Console(quiet=True))


def initial(built: Built) -> State:
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(built.outline))
    init = partial(init_state, built.problem.decomposition, built.problem.target.sites, built.leading)
    return jax.jit(init, out_shardings=shardings)()


def buffers(state: State) -> set[int]:
    return {part.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for part in x.addressable_shards}


def assert_reused(built: Built, state: State) -> None:
    """The trainer's own step writes the new state where the old one was: no leaf is left out."""
    step, _ = compile_steps(built, 1)
    before = buffers(state)
    assert len(before) == len(jax.tree.leaves(state)) * built.mesh.size
    new, _ = step(state, built.weights, built.train.inputs(0, 1, 1), np.int32(1))
    assert [name for name, x in flatten(state).items() if not x.is_deleted()] == []
    assert buffers(new) == before


def test_buffers_are_reused_before_and_after_a_restore(finished: Path) -> None:
    built = built_on(finished, Mesh())
    assert_reused(built, initial(built))
    assert_reused(built, Checkpoints(finished).restore(LATE, state_shapes(built.outline)))


def test_goes_on_with_moments_in_host_memory(finished: Path) -> None:
    """Offloaded by the policy of the run that goes on: restored to where they belong, and the same numbers."""
    config = RunConfig.from_yaml(finished / "config.yaml")
    memory = Memory(offload=tuple(STATE_PARTS)).settled("plain")
    offloaded = replace(config, wrapper=config.wrapper.model_copy(update={"memory": memory}))
    metrics = []
    for built in (build(config, Console(quiet=True)), build(offloaded, Console(quiet=True))):
        state = Checkpoints(finished).restore(LATE, state_shapes(built.outline))
        kinds = {name: x.sharding.memory_kind for name, x in flatten(state).items() if x.ndim}
        step, _ = compile_steps(built, 1)
        state, (values,) = step(state, built.weights, built.train.inputs(LATE, 1, 1), np.int32(1))
        assert {name: x.sharding.memory_kind for name, x in flatten(state).items() if x.ndim} == kinds
        metrics.append(np.asarray(values))
    in_host = {name for name, kind in kinds.items() if kind == "pinned_host"}
    assert in_host == {
        name for name in kinds if {"components_moments", "ci_moments", "mean", "square"} & set(name.split("/"))
    }
    np.testing.assert_array_equal(*metrics)


def test_goes_on_from_one_device_on_eight(finished: Path) -> None:
    """D3: ten steps from a checkpoint of one device give its run's metrics.

    Sources per row are split with the rows, what belongs to components by component.
    """
    built = built_on(finished, Mesh(replica=2, fsdp=4))
    state = Checkpoints(finished).restore(LATE, state_shapes(built.outline))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {8}
    for stack in built.problem.target.sites.stacks:
        factors, own = state.components[stack.name], stack.C // 4
        assert factors.V.addressable_shards[0].data.shape[2] == factors.U.addressable_shards[0].data.shape[1] == own
        assert {x.addressable_shards[0].data.shape[-1] for x in jax.tree.leaves(state.ci.heads[stack.name])} == {own}
    adversary = state.adversaries[PER_ROW]
    for x in jax.tree.leaves((adversary.raw, adversary.mean, adversary.square)):
        assert x.sharding.spec == PartitionSpec(None, ("replica", "fsdp"))
        assert x.addressable_shards[0].data.shape[1] * 8 == x.shape[1] == BATCH
    kept = saved_arrays(finished, LATE)
    here = flatten(state)
    assert {name.partition("/")[2] for name in kept} == here.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(np.asarray(here[name.partition("/")[2]]), array)

    with jax.set_mesh(built.mesh):
        step, names = compile_steps(built, 1)
    expected = {row["step"]: row for row in rows(finished)}

    def compare(state: State, first: int, stop: int) -> list[int]:
        compared = []
        for number in range(first, stop):
            state, (values,) = step(state, built.weights, built.train.inputs(number, 1, 1), np.int32(1))
            if number in expected:
                got = {f"train/{name}": float(value) for name, value in zip(names, np.asarray(values), strict=True)}
                want = {name: expected[number].get(name, 0.0) for name in got}  # a term that is off is not logged
                assert got == pytest.approx(want, rel=1e-5, abs=0), number
                compared.append(number)
        return compared

    assert compare(state, LATE, LATE + 1) == [LATE]
    # Later on, logits at the edges of the squashing turn rounding into gradients (7e-4 after ten steps from 180).
    early = Checkpoints(finished).restore(EARLY, state_shapes(built.outline))
    assert compare(early, EARLY, EARLY + 10) == [42, 45, 48]


def test_items(finished: Path) -> None:
    """`learned` is the decomposition, `training` the rest: moments, sources, step (T5)."""
    arrays = saved_arrays(finished, STEPS)
    learned = {name.removeprefix("learned/") for name in arrays if name.startswith("learned/")}
    training = {name.removeprefix("training/") for name in arrays if name.startswith("training/")}
    assert {name.split("/")[0] for name in learned} == {"components", "ci"}
    assert {name.split("/")[0] for name in training} == {"components_moments", "ci_moments", "adversaries", "step"}
    assert arrays["learned/components/layers.0-1.mlp.up_proj/V"].shape == (2, 16, 20)
    assert arrays["training/step"] == STEPS
    for name in ("PersistentPGDReconLoss", PER_ROW):
        parts = {path.split("/")[2] for path in training if path.startswith(f"adversaries/{name}/")}
        assert parts == {"raw", "mean", "square", "count"}
    # Two updates a step where there is a warm-up ascent; the other is off for its first 60 steps (A3, A6).
    assert arrays["training/adversaries/PersistentPGDReconLoss/count"] == 2 * STEPS
    assert arrays[f"training/adversaries/{PER_ROW}/count"] == STEPS - 60
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32), np.dtype(np.int32)}  # N1


def test_last_ones_and_milestones_stay(finished: Path) -> None:
    assert saved_steps(finished) == [40, 180, 200]


@pytest.fixture(scope="module")
def small() -> State:
    problem = core.problem((Faithfulness("FaithfulnessLoss", 1.0),))
    return core.ruffled_state(problem, step=7)


@pytest.mark.parametrize(
    ("keep_last", "milestones", "left"),
    [(None, (), [0, 1, 2, 3, 4, 5]), (1, (), [5]), (2, (0, 3), [0, 3, 4, 5]), (3, (4,), [3, 4, 5])],
)
def test_which_stay(
    tmp_path: Path, small: State, keep_last: int | None, milestones: tuple[int, ...], left: list[int]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last, lambda step: step in milestones)
    for step in range(6):
        checkpoints.save(step, small, "a: 1")
    assert checkpoints.steps() == saved_steps(tmp_path) == left
    checkpoints.close()
    assert Checkpoints(tmp_path, keep_last).steps() == left


def test_a_second_save_of_a_step_is_none(tmp_path: Path, small: State) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, small, "first: 1")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ckpts").rglob("*")}
    checkpoints.save(3, replace(small, step=small.step + 1), "second: 2")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ckpts").rglob("*")} == before
    assert checkpoints.configuration(3) == "first: 1"
    restored = checkpoints.restore(3, jax.eval_shape(lambda: small))
    assert int(restored.step) == 7


def test_a_save_that_was_killed_is_no_checkpoint(tmp_path: Path, small: State) -> None:
    """orbax fills a temporary folder: what a killed save left is swept away, and the one before counts."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, small, "a: 1")
    shutil.copytree(tmp_path / "ckpts" / "3", tmp_path / "ckpts" / "4.orbax-checkpoint-tmp")
    checkpoints.close()
    reopened = Checkpoints(tmp_path)
    assert reopened.steps() == [3]
    reopened.save(4, small, "a: 1")
    assert sorted(path.name for path in (tmp_path / "ckpts").iterdir()) == ["3", "4"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves an event loop behind
@pytest.mark.parametrize("lost", ["learned", "training", "training/manifest.ocdbt", "learned/d"])
def test_a_damaged_checkpoint_is_refused(finished: Path, tmp_path: Path, lost: str) -> None:
    run = tmp_path / finished.name
    shutil.copytree(finished, run)
    path = run / "ckpts" / str(STEPS) / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = (run / "metrics.jsonl").read_bytes()
    outcome = pd_here("train", "--resume", run)
    assert outcome.status == 2, outcome
    assert f"the checkpoint {run / 'ckpts' / str(STEPS)} cannot be read" in outcome.err
    assert "Traceback" not in outcome.err
    assert (run / "metrics.jsonl").read_bytes() == before
