"""Checkpoints: which stay, what is in them, damage, that restored buffers are reused, other devices than saved them."""

import gc
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console

from param_decomp_jax.method.losses import Faithfulness
from param_decomp_jax.method.state import Learned, State, init_state
from param_decomp_jax.sharding.memory import STATE_PARTS
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.memory import Memory
from param_decomp_lab.config.wrapper import Mesh
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.runs.checkpoints.damage import Damaged, find_file_damage
from param_decomp_lab.runs.checkpoints.store import Checkpoints, flatten
from param_decomp_lab.setup import Setup, set_up
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.training.loop import compile_steps
from tests.cases import slow_but
from tests.core import tiny as core
from tests.lab.tiny_run import BATCH, EARLY, LATE, SECOND_ON, STEPS, rows, saved_arrays, saved_steps

PER_ROW = "PersistentPGDReconSubsetLoss"


def built_on(run: Path, mesh: Mesh) -> Setup:
    config = RunConfig.from_yaml(run / "config.yaml")
    return set_up(
        ResolvedConfig(replace(config, wrapper=config.wrapper.model_copy(update={"mesh": mesh}))), Console(quiet=True)
    )


def initial(setup: Setup) -> State:
    shardings = jax.tree.map(lambda x: x.sharding, setup.outline.state)
    init = partial(init_state, setup.problem.decomposition, setup.problem.target.sites, setup.leading)
    return jax.jit(init, out_shardings=shardings)()


def buffers(state: State) -> set[int]:
    return {part.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for part in x.addressable_shards}


def assert_reused(setup: Setup, step: Any, state: State) -> None:
    """The trainer's own step writes the new state where the old one was: no leaf is left out."""
    before = buffers(state)
    assert len(before) == len(jax.tree.leaves(state)) * setup.mesh.size
    new, _ = step(state, setup.weights, setup.train.inputs(0, 1, 1), np.int32(1))
    assert [name for name, x in flatten(state).items() if not x.is_deleted()] == []
    assert buffers(new) == before


@pytest.mark.slow
def test_buffers_are_reused_before_and_after_a_restore(finished: Path) -> None:
    setup = built_on(finished, Mesh())
    step = compile_steps(setup, 1)
    assert_reused(setup, step, initial(setup))
    assert_reused(setup, step, Checkpoints(finished).restore(LATE, setup.outline.state))


@pytest.mark.slow
def test_goes_on_with_moments_in_host_memory(finished: Path) -> None:
    """Offloaded by the policy of the run that goes on: restored to where they belong, and the same numbers."""
    config = RunConfig.from_yaml(finished / "config.yaml")
    memory = Memory(offload=tuple(STATE_PARTS)).resolved("plain")
    offloaded = replace(config, wrapper=config.wrapper.model_copy(update={"memory": memory}))
    metrics = []
    for setup in (
        set_up(ResolvedConfig(config), Console(quiet=True)),
        set_up(ResolvedConfig(offloaded), Console(quiet=True)),
    ):
        state = Checkpoints(finished).restore(LATE, setup.outline.state)
        kinds = {name: x.sharding.memory_kind for name, x in flatten(state).items() if x.ndim}
        step = compile_steps(setup, 1)
        state, made = step(state, setup.weights, setup.train.inputs(LATE, 1, 1), np.int32(1))
        assert {name: x.sharding.memory_kind for name, x in flatten(state).items() if x.ndim} == kinds
        metrics.append(np.asarray(made.values))
    in_host = {name for name, kind in kinds.items() if kind == "pinned_host"}
    assert in_host == {
        name for name in kinds if {"components_moments", "ci_moments", "mean", "square"} & set(name.split("/"))
    }
    # Not bit for bit: the moments come back after a barrier, and what XLA fuses around it differs by a rounding.
    np.testing.assert_allclose(*metrics, rtol=1e-6)


@pytest.mark.slow
def test_goes_on_from_one_device_on_eight(finished: Path) -> None:
    """D3: ten steps from a checkpoint of one device give its run's metrics.

    Sources per row are split with the rows, what belongs to components by component.
    """
    setup = built_on(finished, Mesh(replica=2, fsdp=4))
    state = Checkpoints(finished).restore(LATE, setup.outline.state)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {8}
    for stack in setup.problem.target.sites.stacks:
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

    with jax.set_mesh(setup.mesh):
        step = compile_steps(setup, 1)
    expected = {row["step"]: row for row in rows(finished)}

    def compare(state: State, first: int, stop: int) -> list[int]:
        compared = []
        for number in range(first, stop):
            state, made = step(state, setup.weights, setup.train.inputs(number, 1, 1), np.int32(1))
            if number in expected:
                values = np.asarray(made.values)[0].tolist()
                got = {f"train/{name}": value for name, value in zip(made.names, values, strict=True)}
                want = {name: expected[number].get(name, 0.0) for name in got}  # a term that is off is not logged
                assert got == pytest.approx(want, rel=1e-5, abs=0), number
                compared.append(number)
        return compared

    assert compare(state, LATE, LATE + 1) == [LATE]
    # Later on, logits at the edges of the squashing turn rounding into gradients (7e-4 after ten steps from the 180th
    # of a longer run).
    early = Checkpoints(finished).restore(EARLY, setup.outline.state)
    assert compare(early, EARLY, EARLY + 10) == [21, 24, 27]


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
    # Two updates a step where there is a warm-up ascent; the other is off until it joins (A3, A6).
    assert arrays["training/adversaries/PersistentPGDReconLoss/count"] == 2 * STEPS
    assert arrays[f"training/adversaries/{PER_ROW}/count"] == STEPS - SECOND_ON
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32), np.dtype(np.int32)}  # N1


def test_last_ones_and_milestones_stay(finished: Path) -> None:
    assert saved_steps(finished) == [EARLY, LATE, STEPS]


@pytest.fixture(scope="module")
def small() -> State:
    problem = core.problem((Faithfulness("FaithfulnessLoss", 1.0),))
    return core.ruffled_state(problem, step=7)


@pytest.mark.parametrize(
    ("keep_last", "milestones", "left"),
    [
        pytest.param(None, (), [0, 1, 2, 3], marks=pytest.mark.slow),
        pytest.param(1, (), [3], marks=pytest.mark.slow),
        (2, (0, 2), [0, 2, 3]),
        pytest.param(2, (1,), [1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_which_stay(
    tmp_path: Path, small: State, keep_last: int | None, milestones: tuple[int, ...], left: list[int]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last, lambda step: step in milestones)
    for step in range(4):
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


# ---- damage ----


def saved(folder: Path, small: State, *steps: int) -> Checkpoints:
    """Checkpoints in which every state is another one."""
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, moved(small, step), f"of: {step}", {"target": "0123"})
    return checkpoints


def moved(small: State, step: int) -> State:
    return jax.tree.map(lambda x: x + step, small)


def largest(checkpoint: Path, item: str) -> Path:
    """The file with most of the item's arrays."""
    return max(
        (path for path in (checkpoint / item).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def pipe_in_place(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def unlisted(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """Where there is no list of the files, and only reading the arrays can tell."""

    def both(checkpoint: Path) -> None:
        damage(checkpoint)
        (checkpoint / "files.json").unlink()

    return both


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda at: halve(largest(at, "learned")), "were saved"),
    "truncated, not listed": (unlisted(lambda at: halve(largest(at, "learned"))), "cannot be read"),
    "a file missing": (lambda at: largest(at, "training").unlink(), "No such file"),
    "a file missing, not listed": (unlisted(lambda at: largest(at, "training").unlink()), "cannot be read"),
    "one bit": (lambda at: flip(largest(at, "learned")), "cannot be read"),
    "an item missing": (lambda at: shutil.rmtree(at / "training"), "No such file"),
    "its manifest missing, not listed": (unlisted(lambda at: (at / "learned/manifest.ocdbt").unlink()), "cannot be r"),
    "a pipe, not listed": (unlisted(lambda at: pipe_in_place(at / "learned/_METADATA")), "is not a regular file"),
    "the description missing": (lambda at: (at / "_CHECKPOINT_METADATA").unlink(), "No such file"),
    "the description cut off": (unlisted(lambda at: halve(at / "_CHECKPOINT_METADATA")), "_CHECKPOINT_METADATA cannot"),
    "another configuration": (
        unlisted(lambda at: replace_text(at / "_CHECKPOINT_METADATA", "of: 5", "of: 6")),
        "its digest does not match",
    ),
    "the list cut off": (lambda at: halve(at / "files.json"), "files.json cannot be read"),
}


@pytest.fixture(scope="module")
def three_saved(small: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With checkpoints of steps 3, 4 and 5; not to be written to."""
    folder = tmp_path_factory.mktemp("three-saved")
    saved(folder, small, 3, 4, 5).close()
    return folder


def fits(step: int) -> None:
    pass


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("param_decomp_lab.runs.checkpoints.store.RETRY_AFTER_S", 0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves an event loop behind
@pytest.mark.parametrize("damage", slow_but(["truncated", "one bit", "an item missing"], DAMAGES))
def test_the_newest_good_one_is_used(three_saved: Path, tmp_path: Path, small: State, damage: str) -> None:
    shutil.copytree(three_saved, tmp_path, dirs_exist_ok=True)
    inflict, says = DAMAGES[damage]
    inflict(tmp_path / "ckpts" / "5")
    checkpoints = Checkpoints(tmp_path)
    found = checkpoints.restore_newest(jax.eval_shape(lambda: small), fits)
    assert found is not None
    step, state, wrong = found
    assert step == 4
    assert list(wrong) == [5]
    assert str(tmp_path / "ckpts" / "5") in wrong[5]
    assert says in wrong[5]
    assert "\n" not in wrong[5]
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(moved(small, 4)), strict=True):
        np.testing.assert_array_equal(got, want)
    assert saved_steps(tmp_path) == [3, 4, 5]  # so far nothing is moved

    held = {path.name for path in (tmp_path / "ckpts" / "5").rglob("*")}
    assert checkpoints.rename_damaged(wrong) == ["damaged-5"]
    assert {path.name for path in (tmp_path / "ckpts" / "damaged-5").rglob("*")} == held  # nothing is lost
    checkpoints.save(5, moved(small, 5), "of: 5")
    assert int(checkpoints.restore(5, jax.eval_shape(lambda: small)).step) == int(small.step) + 5
    checkpoints.close()


def test_every_file_of_the_list_is_looked_at(three_saved: Path, tmp_path: Path) -> None:
    """Those of both items, and beside them; of one byte less, of none, and gone."""
    checkpoint = Path(shutil.copytree(three_saved / "ckpts" / "5", tmp_path / "5"))
    listed = json.loads((checkpoint / "files.json").read_text())
    assert {name.split("/")[0] for name in listed} > {"learned", "training"}
    for name in listed:
        content = (checkpoint / name).read_bytes()
        for cut in (content[:-1], b""):
            (checkpoint / name).write_bytes(cut)
            assert find_file_damage(checkpoint, ["learned", "training"]).startswith(f"{name} has {len(cut):,} bytes")
        (checkpoint / name).unlink()
        assert find_file_damage(checkpoint, ["learned", "training"]) == f"{name}: No such file or directory"
        (checkpoint / name).write_bytes(content)
    assert find_file_damage(checkpoint, ["learned", "training"]) == ""


def test_blocks_of_zeros_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause that TensorStore gives, and nothing of what orbax's coroutines leave behind."""
    noise = np.random.default_rng(0).normal(size=(2, 64, 64)).astype(np.float32)  # too large to lie in the index
    state: Any = {
        "components": dict(zip("VU", map(jax.numpy.asarray, noise), strict=True)),
        "step": jax.numpy.asarray(0),
    }
    for step in (1, 2):
        saved_to = Checkpoints(tmp_path)
        saved_to.save(step, state, "")
        saved_to.close()
    for arrays in (tmp_path / "ckpts" / "2" / "learned" / "ocdbt.process_0" / "d").iterdir():
        arrays.write_bytes(bytes(arrays.stat().st_size))
    passed_on: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda of: passed_on.append(repr(of.object)))
    found = Checkpoints(tmp_path).restore_newest(jax.eval_shape(lambda: state), fits)
    gc.collect()
    assert found is not None
    assert found[0] == 1
    said = found[2][2]
    assert said.startswith(f"{tmp_path / 'ckpts' / '2' / 'learned'} cannot be read: ")
    assert re.search(r"Error reading .*ZSTD", said), said
    assert "\n" not in said
    assert [of for of in passed_on if "coroutine" in of] == []


def test_what_only_a_fingerprint_shows(tmp_path: Path, small: State) -> None:
    """Whole arrays, readable and of the right shape, which are not those that were saved."""
    checkpoints = saved(tmp_path, small, 3, 4)
    for step in (3, 4):
        (tmp_path / "ckpts" / str(step) / "files.json").unlink()
    shutil.rmtree(tmp_path / "ckpts" / "4" / "learned")
    shutil.copytree(tmp_path / "ckpts" / "3" / "learned", tmp_path / "ckpts" / "4" / "learned")
    with pytest.raises(Damaged, match=r"4/learned: c\S+ does not hold what was saved"):
        checkpoints.restore(4, jax.eval_shape(lambda: small))
    checkpoints.close()


def test_none_is_good(tmp_path: Path, small: State) -> None:
    """Each is named, nothing is moved, and the next try says the same; nobody begins at the beginning."""
    saved(tmp_path, small, 3, 4).close()
    for step in (3, 4):
        largest(tmp_path / "ckpts" / str(step), "learned").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"(?s)every checkpoint of this run is damaged.*ckpts/4.*ckpts/3"):
            Checkpoints(tmp_path).restore_newest(jax.eval_shape(lambda: small), fits)
        assert saved_steps(tmp_path) == [3, 4]
    for step in (3, 4):
        (tmp_path / "ckpts" / str(step)).rename(tmp_path / "ckpts" / f"damaged-{step}")
    with pytest.raises(UserError, match=r"only damaged checkpoints \(damaged-3, damaged-4\)"):
        Checkpoints(tmp_path).restore_newest(jax.eval_shape(lambda: small), fits)
    assert Checkpoints(tmp_path / "new").restore_newest(jax.eval_shape(lambda: small), fits) is None


def test_damage_that_was_there_for_a_moment(tmp_path: Path, small: State, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, small, 3, 4).close()
    looks: list[Path] = []

    def once(checkpoint: Path, items: list[str]) -> str:
        looks.append(checkpoint)
        return "learned/_METADATA: Stale file handle" if len(looks) == 1 else ""

    monkeypatch.setattr("param_decomp_lab.runs.checkpoints.store.find_file_damage", once)
    found = Checkpoints(tmp_path).restore_newest(jax.eval_shape(lambda: small), fits)
    assert found is not None
    assert (found[0], found[2]) == (4, {})


def test_fingerprints_are_made_by_all_or_none(tmp_path: Path, small: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take all processes: one whose file system fails must say so before, or the others wait in there for ever."""
    saved(tmp_path, small, 3).close()

    def unreadable(checkpoint: Path) -> None:
        raise Damaged(f"{checkpoint}: Stale file handle")

    monkeypatch.setattr("param_decomp_lab.runs.checkpoints.store.read_description", unreadable)
    monkeypatch.setattr(
        "param_decomp_lab.runs.checkpoints.store.fingerprint", lambda _: pytest.fail("a collective was begun")
    )
    with pytest.raises(Damaged, match="Stale file handle"):
        Checkpoints(tmp_path).restore(3, jax.eval_shape(lambda: small))


def test_what_may_not_be_read_is_not_damaged(tmp_path: Path, small: State, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, small, 3).close()

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("PERMISSION_DENIED: Error opening manifest.ocdbt")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointHandler.restore", refuse)
    with pytest.raises(UserError, match="may not be read") as refusal:
        Checkpoints(tmp_path).restore_newest(jax.eval_shape(lambda: small), fits)
    assert not isinstance(refusal.value, Damaged)


def test_older_damage_is_in_nobodys_way(tmp_path: Path, small: State) -> None:
    """A kill while an old checkpoint is deleted leaves half of it."""
    saved(tmp_path, small, 3, 4).close()
    (tmp_path / "ckpts" / "3" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(tmp_path / "ckpts" / "3" / "learned")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    found = checkpoints.restore_newest(jax.eval_shape(lambda: small), fits)
    assert found is not None
    assert (found[0], found[2]) == (4, {})
    checkpoints.save(5, moved(small, 5), "of: 5")
    assert saved_steps(tmp_path) == [5]
    checkpoints.close()


def test_one_that_was_saved_without_fingerprints(tmp_path: Path, small: State) -> None:
    """As this project did at first."""
    checkpoints = saved(tmp_path, small, 3)
    path = tmp_path / "ckpts" / "3" / "_CHECKPOINT_METADATA"
    about = json.loads(path.read_text())
    about["custom_metadata"] = {"configuration": "of: 3"}
    path.write_text(json.dumps(about))
    (tmp_path / "ckpts" / "3" / "files.json").unlink()
    assert (checkpoints.configuration(3), checkpoints.inputs(3)) == ("of: 3", {})
    assert int(checkpoints.restore(3, jax.eval_shape(lambda: small)).step) == int(small.step) + 3
    checkpoints.close()


def test_reading_sweeps_nothing(tmp_path: Path, small: State) -> None:
    """Somebody may look at a run that is just saving."""
    saved(tmp_path, small, 3).close()
    half_made = tmp_path / "ckpts" / "4.orbax-checkpoint-tmp"
    half_made.mkdir()
    checkpoints = Checkpoints(tmp_path)
    template = jax.eval_shape(lambda: small)
    learned = checkpoints.restore_learned(3, Learned(template.components, template.ci))
    np.testing.assert_array_equal(jax.tree.leaves(learned)[0], jax.tree.leaves(moved(small, 3))[0])
    checkpoints.close()
    assert half_made.exists()
    checkpoints.sweep()
    assert saved_steps(tmp_path) == [3]
    assert not half_made.exists()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_fails(tmp_path: Path, small: State, capfd: pytest.CaptureFixture[str]) -> None:
    """Files may not grow beyond a size: what was saved before is as it was, and nothing half-made counts. The exception
    says why; orbax and its storage library print nothing of their own."""
    saved(tmp_path, small, 3).close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ckpts" / "3").rglob("*")}
    limits, failing = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CannotWrite, match=r"the checkpoint of step 4 could not be saved: File too large: /"):
            failing.save(4, small, "of: 4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # TensorStore still writes below the folder of step 4, so that until this process ends it cannot be swept for good.
    failing.save(5, moved(small, 5), "of: 5")
    failing.close()
    assert Checkpoints(tmp_path).steps() == [3, 5]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ckpts" / "3").rglob("*")} == before
    assert capfd.readouterr() == ("", "")


def test_other_errors_of_libraries_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nothing can raise, such as an exception in a destructor."""
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    for _ in range(2):
        Checkpoints(tmp_path)

    async def printing() -> None: ...

    told: list[Any] = [
        SimpleNamespace(exc_value=RuntimeError(text), object=of)
        for text, of in (("Event loop is closed", None), ("out of paper", None), ("out of ink", printing()))
    ]
    for error in told:
        sys.unraisablehook(error)
    assert reported == told[1:]
    told[2].object.close()
