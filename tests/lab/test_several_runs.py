"""Runs of several processes that are stopped, refused, broken, or go on with other devices."""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock

from param_decomp_lab.runs.ending import read_ending
from param_decomp_lab.runs.lock import LOCK_FILE
from param_decomp_lab.runs.metrics_file import read_metrics
from tests.lab.several import CHILD, Ended, ended, run, started
from tests.lab.test_processes import SMALL, assert_alike, options, train
from tests.lab.tiny_run import PD, ROOT, Tiny, pd_here, rows, saved_arrays, saved_steps
from tests.lab.toy_run import CONFIG as TOY
from tests.lab.toy_run import SMALL as SMALL_TOY

pytestmark = pytest.mark.slow
TWO, FOUR = "mesh={fsdp: 2}", "mesh={fsdp: 4}"


def statuses(found: list[Ended]) -> list[int]:
    return [process.status for process in found]


@pytest.fixture(scope="session")
def runs(tiny: Tiny, shared_folder: Path) -> Path:
    """A folder of runs of two processes of two devices each: p-00000001, which nothing disturbed, and p-00000002, which
    was told to stop."""
    folder = shared_folder / "several"
    with FileLock(shared_folder / "several.lock"):
        if not folder.exists():
            assert statuses(train(tiny, options(), tiny.train(folder, 1, FOUR, *SMALL))) == [0, 0]
            assert statuses(train(tiny, options(term=[0, 12]), tiny.train(folder, 2, FOUR, *SMALL))) == [75, 75]
    return folder


def test_resumed_run_is_identical(tiny: Tiny, runs: Path, tmp_path: Path) -> None:
    """T5, in two processes: stopped by SIGTERM to one of them, resumed, stopped by one to the other, resumed."""
    undisturbed, run_folder = runs / "p-00000001", tmp_path / "p-00000002"
    shutil.copytree(runs / run_folder.name, run_folder)
    again = train(tiny, options(term=[1, 4]), ["train", "--resume", run_folder])
    assert statuses(again) == [75, 75], again
    assert len(saved_steps(run_folder)) == 2
    assert statuses(train(tiny, options(), ["train", "--resume", run_folder])) == [0, 0]
    assert rows(run_folder) == rows(undisturbed)
    want, got = (saved_arrays(folder, 40) for folder in (undisturbed, run_folder))
    assert want.keys() == got.keys()
    assert [name for name in want if want[name].tobytes() != got[name].tobytes()] == []
    assert (run_folder / "examples.json").read_bytes() == (undisturbed / "examples.json").read_bytes()


@pytest.mark.parametrize(("fsdp", "count"), [(4, 1), (1, 1), (8, 1), (2, 2)])
def test_goes_on_with_other_processes_and_devices(
    tiny: Tiny, runs: Path, tmp_path: Path, fsdp: int, count: int
) -> None:
    """Saved by two processes of two devices; gone on with by one of four, of one, of eight, and by two of one: within
    1e-5 of the run that nobody stopped, and what was changed is on record."""
    undisturbed, run_folder = runs / "p-00000001", tmp_path / "p-00000002"
    shutil.copytree(runs / run_folder.name, run_folder)
    (at,) = saved_steps(run_folder)
    settings = () if fsdp == 4 else ("--set", f"mesh.fsdp={fsdp}")
    found = train(tiny, options(), ["train", "--resume", run_folder, *settings], count, fsdp // count)
    assert statuses(found) == [0] * count, found
    assert_alike(rows(run_folder), rows(undisturbed), 1e-5)
    want, got = saved_arrays(undisturbed, 40), saved_arrays(run_folder, 40)
    for name in want:
        assert np.linalg.norm(got[name] - want[name]) <= 1e-5 * np.linalg.norm(want[name]), name  # D4
    changes = [f"mesh.fsdp: 4 -> {fsdp}"] if settings else []
    assert all(f"changed since step {at}: {change}" in found[0].text for change in changes)
    assert yaml.safe_load((run_folder / "config.yaml").read_text())["wrapper"]["mesh"]["fsdp"] == fsdp
    first, second = map(json.loads, (run_folder / "history.jsonl").read_text().splitlines())
    assert (first["step"], first["changes"], first["processes"], len(first["devices"])) == (0, [], 2, 4)
    assert (second["step"], second["changes"]) == (at, changes)
    assert (second["processes"], len(second["devices"])) == (count, fsdp)


def test_stop_in_the_warm_up(tiny: Tiny, tmp_path: Path) -> None:
    """One is told; both leave, and nothing is saved."""
    arguments = tiny.train(tmp_path, 1, TWO, *SMALL, "pd.faithfulness_warmup_steps=100000000")
    with started([*PD, *map(str, arguments)], 2, 1, tiny.environment()) as processes:
        processes[0].wait_until(lambda: "faithfulness warm-up" in processes[0].text(), "the warm-up")
        processes[1].popen.send_signal(signal.SIGTERM)
        found = ended(processes)
    assert statuses(found) == [75, 75], found
    assert "stopped in the faithfulness warm-up; nothing was saved" in found[0].text
    assert saved_steps(tmp_path / "p-00000001") == []


def test_stop_in_an_evaluation(tiny: Tiny, tmp_path: Path) -> None:
    """Process 1 is told at the first of twenty batches: both abandon the evaluation and save."""
    evaluation = "eval={batch_size: 8, n_steps: 20, every: 4, slow_every: 40, metrics: [{type: CI_L0, groups: null}]}"
    arguments = tiny.train(tmp_path, 1, TWO, *SMALL, evaluation)
    # Reads: one to compile, the evaluation of step 0, four steps, the evaluation of step 4.
    found = train(tiny, options(term=[1, 1 + 20 + 4 + 1]), arguments, devices=1)
    assert statuses(found) == [75, 75], found
    assert "stopped while evaluating and saved at step 4; resume with" in found[0].text
    assert saved_steps(tmp_path / "p-00000001") == [4]
    assert [row["step"] for row in rows(tmp_path / "p-00000001")] == [0, 1, 2, 3]


def test_failure_on_the_way(tiny: Tiny, tmp_path: Path) -> None:
    """What breaks in one process is told by it, and ends the other too, within seconds. By then the run's folder tells
    of it and is free: `srun --kill-on-bad-exit` kills the others as soon as one has gone."""
    arguments = [*CHILD, "pd", options(fail=[1, 8]), *map(str, tiny.train(tmp_path, 1, TWO, *SMALL))]
    with started(arguments, 2, 1, tiny.environment()) as (first, second):
        assert second.popen.wait(200) == 1, second.text()
        first.popen.kill()
        assert "OSError: the disk is gone" in second.text()
        assert "process 0: ended, because process 1 of 2 failed" in first.text()
    folder = tmp_path / "p-00000001"
    ending = read_ending(folder)
    assert ending is not None
    assert ending[0] == "failed"  # as it was told, or as its own collective has failed meanwhile
    assert (folder / LOCK_FILE).read_bytes() == b""


def test_refusals(tiny: Tiny, tmp_path: Path) -> None:
    """Status 2 everywhere, the reason once, and before any step."""

    def refused(*arguments: str | Path, says: str, count: int = 2) -> None:
        found = run([*PD, *map(str, arguments)], count, 1, tiny.environment())
        assert statuses(found) == [2] * count, found
        assert says in found[0].text.replace("\n", " "), found
        assert all("error" not in process.text for process in found[1:])

    (tmp_path / "p-00000001").mkdir()
    refused(*tiny.train(tmp_path, 1, TWO), says="p-00000001 exists already")
    refused(*tiny.train(tmp_path, 2, "mesh={fsdp: 4}"), says="needs 4 devices, 2 processes have 2 together (cpu)")
    refused(
        *tiny.train(tmp_path, 2), says="mesh: takes 1 devices, those of 1 processes, but 2 processes have 2 together"
    )
    refused(*tiny.train(tmp_path, 2, "pd.stepz=3"), says="pd.stepz")
    refused("train", "--resume", tmp_path, says="is not a run folder")
    assert not (tmp_path / "p-00000002").exists()


def test_one_was_told_something_else(tiny: Tiny, tmp_path: Path) -> None:
    pd = shlex.join([*PD, *map(str, tiny.train(tmp_path, 1, TWO))])
    found = run(["sh", "-c", f'exec {pd} --set run_name=of_$CHILD_NUMBER "$@"', "pd"], 2, 1, tiny.environment())
    assert statuses(found) == [2, 2], found
    text = " ".join(found[0].text.split())
    assert "process 1 of 2: all processes of a run take the same configuration" in text
    assert "run_name: of_0 -> of_1" in text.replace('"', "")
    assert not (tmp_path / "p-00000001").exists()


def test_a_data_error_that_one_process_meets(tiny: Tiny, tmp_path: Path) -> None:
    """A user's mistake that shows only on the way, and only to one of them."""
    found = train(tiny, options(damage=[1, 8]), tiny.train(tmp_path, 1, TWO, *SMALL), devices=1)
    assert statuses(found) == [2, 2], found
    assert "error: process 1 of 2: " in found[1].text
    assert "it is damaged" in found[1].text
    assert "Traceback" not in found[1].text


def test_ten_steps_and_an_evaluation_of_everything(tiny: Tiny, finished: Path, tmp_path: Path) -> None:
    """D3 with every kind of state and metric, two processes of two devices each against one device."""
    two = tmp_path / "p-00000001"
    arguments = tiny.train(tmp_path, 1, "mesh={replica: 2, fsdp: 2}")
    with started([*PD, *map(str, arguments)], 2, 2, tiny.environment()) as processes:
        processes[0].wait_until(lambda: any(row["step"] > 9 for row in read_metrics(two)), "step 10")
    assert_alike(rows(two)[:4], rows(finished)[:4], 1e-5)


@pytest.fixture(scope="session")
def often_saved(tiny: Tiny, shared_folder: Path) -> Path:
    """A run of two processes with a checkpoint for every tenth step."""
    folder, cadence = shared_folder / "often-saved", "cadence={train_log_every: 1, save_every: 10}"
    with FileLock(shared_folder / "often-saved.lock"):
        if not folder.exists():
            assert statuses(train(tiny, options(), tiny.train(folder, 1, TWO, *SMALL, cadence), devices=1)) == [0, 0]
    return folder / "p-00000001"


@pytest.mark.parametrize("damage", ["truncated", "unlisted"])
def test_all_go_on_from_the_same_checkpoint(tiny: Tiny, often_saved: Path, tmp_path: Path, damage: str) -> None:
    """The newest one is damaged where process 1 alone reads it: both take the one before."""
    whole, damaged = often_saved, tmp_path / often_saved.name
    shutil.copytree(whole, damaged)
    checkpoint = damaged / "ckpts" / "40"
    # All of its files: what the end of one holds may be written again in another, and is not read then.
    for file in (checkpoint / "learned" / "ocdbt.process_1" / "d").iterdir():
        os.truncate(file, file.stat().st_size // 10)
    if damage == "unlisted":
        (checkpoint / "files.json").unlink()
    found = train(tiny, options(), ["train", "--resume", damaged], devices=1)
    assert statuses(found) == [0, 0], found
    assert f"resuming {damaged} at step 30 of 40" in found[0].text
    assert "a damaged checkpoint was renamed to damaged-40, and the one before it is used" in found[0].text
    assert rows(damaged) == rows(whole)
    assert saved_steps(damaged) == saved_steps(whole)
    want, got = saved_arrays(whole, 40), saved_arrays(damaged, 40)
    assert [name for name in want if want[name].tobytes() != got[name].tobytes()] == []


def test_a_second_job_of_two_processes(tiny: Tiny, tmp_path: Path) -> None:
    """Refused in both of its processes, while the first job goes on."""
    endless = tiny.train(tmp_path, 1, TWO, *SMALL, "pd.steps=1000000", "eval=null")
    run_folder = tmp_path / "p-00000001"
    with started([*PD, *map(str, endless)], 2, 1, tiny.environment()) as processes:
        processes[0].wait_until(lambda: bool(read_metrics(run_folder)), "a row")
        second = run([*PD, "train", "--resume", str(run_folder)], 2, 1, tiny.environment())
        assert statuses(second) == [2, 2], second
        assert f"another job is in {run_folder}: process {processes[0].popen.pid} on" in second[0].text
        assert "error" not in second[1].text
        processes[1].popen.send_signal(signal.SIGTERM)
        assert statuses(ended(processes)) == [75, 75]


def test_a_toy_whose_target_is_not_there_yet(tiny: Tiny, tmp_path: Path) -> None:
    """Process 0 trains it, once; drawn batches and the probe's matrices are those of one process."""
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "configs/toys/targets/tms_5-2-id.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"out": str(tmp_path / "target")}))

    def settings(number: int, mesh: str) -> list[str]:
        where = (f"target={{pretrain: {tmp_path / 'recipe.yaml'}}}", f"out_dir={tmp_path}", f"run_id=p-{number:08x}")
        return [word for one in (*SMALL_TOY, *where, mesh) for word in ("--set", one)]

    found = train(tiny, options(), ["train", str(TOY), *settings(1, "mesh={fsdp: 4}")])
    assert statuses(found) == [0, 0], found
    assert sum("pretrained:" in process.text for process in found) == 1
    alone = pd_here("train", TOY, *settings(2, "mesh={}"))
    assert alone.status == 0, alone
    two, one = (tmp_path / f"p-{number:08x}" for number in (1, 2))
    assert_alike(rows(two), rows(one), 1e-5)
    assert {path.name for path in (two / "figures").iterdir()} == {path.name for path in (one / "figures").iterdir()}
