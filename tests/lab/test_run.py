"""A run goes on after whatever stopped it as if nothing had (T5), and stops itself when a loss is not finite (N3)."""

import errno
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures import save_figure
from param_decomp_lab.processes.stop_signal import StopSignal
from param_decomp_lab.runs.ending import read_ending
from param_decomp_lab.runs.listing import read_run
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.training.loop import Loop
from param_decomp_lab.training.recorder import Recorder
from tests.lab.tiny_run import LIGHT, SAVE_EVERY, STEPS, Tiny, pd_here, rows, saved_arrays, saved_steps


def assert_same_run(run: Path, undisturbed: Path) -> None:
    """T5: every row once and equal to the last bit, and so is everything that the last checkpoint holds."""
    expected = rows(undisturbed)
    steps = [row["step"] for row in expected]
    assert [row["step"] for row in rows(run)] == steps == sorted(set(steps))
    for row, same in zip(rows(run), expected, strict=True):
        assert row == same
    assert saved_steps(run) == saved_steps(undisturbed)
    want, got = (saved_arrays(folder, STEPS) for folder in (undisturbed, run))
    assert want.keys() == got.keys()
    assert [name for name in want if want[name].tobytes() != got[name].tobytes()] == []
    assert (run / "examples.json").read_bytes() == (undisturbed / "examples.json").read_bytes()


def kill_after(tiny: Tiny, arguments: list[str | Path], run: Path, checkpoint: int, seed: int) -> None:
    """kill -9 at a random moment after the checkpoint appears."""
    delay = random.Random(seed).uniform(0, 0.4)
    with tiny.started(*arguments) as process:
        process.wait_until((run / "ckpts" / str(checkpoint)).exists, f"checkpoint {checkpoint}")
        time.sleep(delay)
        status = process.stop(signal.SIGKILL)
    written = [row["step"] for row in rows(run)]
    print(f"seed {seed}: killed {delay:.3f} s after checkpoint {checkpoint}, at {saved_steps(run)}, row {written[-1:]}")
    assert status == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.always
def test_killed_and_stopped_run_is_identical(tiny: Tiny, finished: Path, tmp_path: Path) -> None:
    """kill -9, resume, SIGTERM, resume: the last one is the resumption of a resumed run."""
    start = tiny.train(tmp_path, 1)
    run = tmp_path / "p-00000001"
    kill_after(tiny, start, run, SAVE_EVERY, seed=random.randrange(10**6))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 75, "train/loss/tot')  # the kill came in the middle of a line

    with tiny.started("train", "--resume", run) as process:
        process.wait_until((run / "ckpts" / str(2 * SAVE_EVERY)).exists, "another checkpoint")
        assert process.stop(signal.SIGTERM) == 75
        at = saved_steps(run)[-1]
        # After a step, in the evaluation that follows the save, or right after the save.
        assert re.search(rf"stopped (\w+ )*(saved at step {at}|at step {at}, which is saved);", process.text())
        assert 2 * SAVE_EVERY <= at < STEPS

    last = tiny.pd(*start, "--resume", run)
    assert last.returncode == 0, last.stderr
    assert f"resuming {run} at step {at} of {STEPS}" in last.stdout
    assert_same_run(run, finished)


@pytest.mark.slow
def test_stop_in_the_warm_up_saves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Half a warm-up is no start: resumed, the run begins at the beginning."""
    run = tmp_path / "p-00000001"
    with tiny.started(*tiny.train(tmp_path, 1, *LIGHT, "pd.faithfulness_warmup_steps=100000000")) as process:
        process.wait_until(lambda: "faithfulness warm-up" in process.text(), "the warm-up")
        assert process.stop(signal.SIGTERM) == 75
        assert "stopped in the faithfulness warm-up; nothing was saved" in process.text()
    assert saved_steps(run) == []
    assert not (run / "metrics.jsonl").exists()
    with tiny.started("train", "--resume", run) as process:
        process.wait_until(lambda: "faithfulness warm-up" in process.text(), "the warm-up")
        assert process.stop(signal.SIGINT) == 75
        assert "no checkpoint yet: starting from the beginning" in process.text()


def test_stop_that_comes_right_after_the_look_at_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives between the two looks at it must not end the run unsaved."""
    asked: list[int] = []

    def requested(self: StopSignal) -> bool:
        asked.append(len(asked))
        return len(asked) > 1

    monkeypatch.setattr(StopSignal, "__call__", requested)
    stopped = pd_here(*tiny.train(tmp_path, 1, *LIGHT, "cadence={train_log_every: 1}"))
    assert stopped.status == 75, stopped
    assert "stopped and saved at step 1" in stopped.out
    assert saved_steps(tmp_path / "p-00000001") == [1]


@pytest.mark.slow
def test_the_warm_up_is_to_be_saved(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all is compiled nobody leaves without a save: neither in the first evaluation nor in a save of step 0. A
    resumed run may, in the evaluation that it makes again."""
    safe: list[tuple[str, bool]] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(loop: Any, *arguments: Any) -> Any:
            safe.append((name, loop._job.stop._nothing_new is not None))
            return original(loop, *arguments)

        return call

    monkeypatch.setattr(Loop, "_evaluate", noted("evaluate", Loop._evaluate))
    monkeypatch.setattr(Loop, "_save", noted("save", Loop._save))
    settings = (*LIGHT, "pd.faithfulness_warmup_steps=1", "milestones={every: 6}", "pd.steps=12")
    settings += ("eval={batch_size: 8, n_steps: 1, every: 6, slow_every: 6, slow_on_first_step: false, metrics: []}",)
    assert pd_here(*tiny.train(tmp_path, 1, *settings)).status == 0
    # Asked at every step, evaluated at steps 0, 6 and 12.
    assert safe[:3] == [("save", False), ("evaluate", True), ("evaluate", False)]
    safe.clear()
    without = (*settings, "milestones=[]")
    assert pd_here(*tiny.train(tmp_path, 2, *without)).status == 0
    assert safe[0] == ("evaluate", False)
    safe.clear()
    shutil.rmtree(tmp_path / "p-00000001" / "ckpts" / "12")
    assert pd_here("train", "--resume", tmp_path / "p-00000001").status == 0
    assert safe[:2] == [("save", True), ("evaluate", True)]


@pytest.mark.slow
def test_a_figure_that_cannot_be_written(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out, and that is told; no step is lost."""

    def full(figure: Figure, path: Path) -> None:
        if "ci_histograms" not in path.name:
            return save_figure(figure, path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("param_decomp_lab.eval.evaluation.save_figure", full)
    metrics = "metrics: [{type: CIHistograms, n_batches_accum: 1}, {type: CIMeanPerComponent}]"
    evaluation = f"eval={{batch_size: 8, n_steps: 1, every: 12, slow_every: 12, {metrics}}}"
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, evaluation))
    assert outcome.status == 0, outcome
    run = tmp_path / "p-00000001"
    assert f"note: {run}/figures/ci_histograms_0.png cannot be written: No space left on device" in outcome.err
    assert {path.name for path in (run / "figures").iterdir()} >= {"mean_ci_per_component_0.png"}
    assert not list((run / "figures").glob("ci_histograms*"))
    assert (run / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the folder", "the rows"])
def test_what_a_run_writes_to_is_taken_away(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """At step 5, which is noticed when rows are due, and when the run is told to stop. Nothing is made anew, and put
    back, the run goes on."""
    run, moved = tmp_path / "p-00000001", tmp_path / "moved"
    add = Recorder.add

    def taken_away(recorder: Recorder, first: int, *arguments: Any) -> None:
        add(recorder, first, *arguments)
        if first == 5 and what == "the folder":
            run.rename(moved)
        elif first == 5:
            (run / "metrics.jsonl").rename(moved)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "add", taken_away)
    every = 1 if what == "the folder" else 100
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, f"cadence={{train_log_every: {every}, save_every: 4}}"))
    monkeypatch.undo()
    assert outcome.status == 1, outcome
    assert f"was renamed to {moved} during the run, which stops without saving" in outcome.err
    assert "Traceback" not in outcome.err
    assert "stopped and saved" not in outcome.out
    if what == "the folder":
        assert not run.exists()
        assert read_ending(moved) is None
        moved.rename(run)
    else:
        assert not (run / "metrics.jsonl").exists()
        moved.rename(run / "metrics.jsonl")
    assert saved_steps(run) == [4]
    resumed = pd_here("train", "--resume", run)
    assert resumed.status == 0, resumed
    assert [row["step"] for row in rows(run)] == [*range(0, 12, every), *([11] if every > 1 else [])]


@pytest.mark.parametrize(
    ("cadence", "saved"),
    [
        ("{train_log_every: 7, save_every: 1}", [1]),
        pytest.param("{train_log_every: 1000}", [], marks=pytest.mark.slow, id="seen late"),
    ],
)
def test_not_finite(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cadence: str, saved: list[int]
) -> None:
    """N3: the step and the terms are named however late the metrics are fetched, nothing broken is saved, and the list
    of runs says why."""
    rate = "pd.components_optimizer={lr_schedule: {start_val: 1.0e+30}}"
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, rate, f"cadence={cadence}"))
    assert outcome.status == 1, outcome
    says = re.compile(r"error: not finite at step 1: CIMaskedReconLoss = nan, FaithfulnessLoss = (inf|nan)\n")
    assert says.fullmatch(outcome.err)
    run = tmp_path / "p-00000001"
    assert saved_steps(run) == saved
    if saved:
        assert [row["step"] for row in rows(run)] == [0]
    for step in saved:
        assert [name for name, array in saved_arrays(run, step).items() if not np.isfinite(array).all()] == []
    failed = read_run(run)
    assert failed.state == "failed"
    assert failed.why.startswith("not finite at step 1: ")
    monkeypatch.setenv("COLUMNS", "200")  # the reason on one line
    listed = pd_here("runs", tmp_path)
    assert listed.status == 0
    assert "not finite at step 1" in listed.out


def test_not_finite_in_the_warm_up(tiny: Tiny, tmp_path: Path) -> None:
    warmup = ("pd.faithfulness_warmup_steps=100", "pd.faithfulness_warmup_lr=1.0e+30")
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, *warmup))
    assert outcome.status == 1, outcome
    assert re.fullmatch(r"error: faithfulness is (inf|nan) in the warm-up \(lr 1e\+30\)\n", outcome.err)
    assert saved_steps(tmp_path / "p-00000001") == []


@pytest.mark.slow
@pytest.mark.always
def test_eight_devices(tiny: Tiny, finished: Path, tmp_path: Path) -> None:
    """D3: ten steps and an evaluation with the batch split over eight devices are those of one device."""
    run = tmp_path / "p-00000001"
    with tiny.started(*tiny.train(tmp_path, 1, "mesh={fsdp: 8}")) as process:
        process.wait_until(lambda: any(row["step"] > 9 for row in read_metrics(run)), "step 10")
        process.stop(signal.SIGKILL)
    got, expected = rows(run), rows(finished)
    assert [row["step"] for row in got[:4]] == [0, 3, 6, 9]
    for row, same in zip(got[:4], expected, strict=False):
        assert row.keys() == same.keys()
        for name, value in same.items():
            # Differences of cross-entropies (some 5 nats) lose the digits that the two have in common.
            tolerance = 1e-4 if "ce_unrecovered" in name else 1e-5
            assert row[name] == pytest.approx(value, rel=tolerance, abs=1e-5 if "ce_difference" in name else 0), name
