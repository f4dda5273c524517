"""Told to stop at any moment between `pd train` and its end, a run leaves in time, with 75, and loses nothing."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from param_decomp_lab.config import load_config
from param_decomp_lab.launch.local import free_port
from param_decomp_lab.processes.group import Processes
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.folder import make_run_folder
from param_decomp_lab.runs.lock import LOCK_FILE
from param_decomp_lab.setup import Setup, set_up
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests.lab.several import CHILD, ended, started
from tests.lab.test_processes import SMALL
from tests.lab.tiny_run import LIGHT, Process, Tiny, pd_here, rows, saved_steps

EVALUATED = (
    *LIGHT,
    "eval={batch_size: 8, n_steps: 2, every: 4, slow_every: 12, metrics: [{type: CI_L0, groups: null}]}",
    "cadence={train_log_every: 1, save_every: 4}",
)
RUN, UNDISTURBED = "p-00000001", "p-00000002"


def stuck_in(function: str, number: int = 0) -> list[str]:
    """Arguments of a `pd` that gets stuck, as in native code, where process ``number`` should call the function."""
    return [*CHILD, "pd", json.dumps({"stuck": [number, function]})]


def stopped_where_stuck(tiny: Tiny, function: str, arguments: list[str | Path], at_most: float) -> str:
    """What a run said that was told to stop where it was stuck."""
    with started([*stuck_in(function), *map(str, arguments)], 1, 8, tiny.environment()) as (process,):
        process.wait_until(lambda: "stuck" in process.text(), function)
        sent = time.monotonic()
        assert process.stop(signal.SIGTERM) == 75, process.text()
        assert time.monotonic() - sent < at_most
        return process.text()


def undisturbed(tiny: Tiny, folder: Path, *settings: str) -> list[dict[str, Any]]:
    outcome = pd_here(*tiny.train(folder, 2, *settings))
    assert outcome.status == 0, outcome
    return rows(folder / UNDISTURBED)


@pytest.fixture(scope="module")
def evaluated(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `EVALUATED` that nothing disturbs."""
    folder = tmp_path_factory.mktemp("evaluated")
    undisturbed(tiny, folder, *EVALUATED)
    return folder / UNDISTURBED


@pytest.mark.slow
def test_while_python_imports(tiny: Tiny, tmp_path: Path) -> None:
    """As soon as there is a handler at all."""
    with tiny.started(*tiny.train(tmp_path, 1, *LIGHT)) as process:
        status = Path(f"/proc/{process.popen.pid}/status")

        def handled() -> bool:
            (caught,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt"))
            return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

        process.wait_until(handled, "a handler")
        assert process.stop(signal.SIGTERM) == 75
        text = process.text()
    if "stopped and saved at step 0" in text:  # a quick machine has come so far in the seconds it had
        assert saved_steps(tmp_path / RUN) == [0]
    else:
        assert "there was nothing to save" in text


@pytest.mark.slow
def test_while_weights_are_loaded(tiny: Tiny, tmp_path: Path) -> None:
    text = stopped_where_stuck(
        tiny, "param_decomp_lab.training.run.set_up", tiny.train(tmp_path, 1, *LIGHT), at_most=20
    )
    assert "stopped while loading the target and the data; there was nothing to save\n" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("function", ["training.loop.compile_steps", "eval.evaluation.Evaluation.compile"])
def test_while_compiling(tiny: Tiny, tmp_path: Path, function: str) -> None:
    """Compiling is native code that nothing interrupts; the run begins anew when it is resumed."""
    start = tiny.train(tmp_path, 1, *EVALUATED, "pd.faithfulness_warmup_steps=3")
    text = stopped_where_stuck(tiny, f"param_decomp_lab.{function}", start, at_most=20)
    run = tmp_path / RUN
    assert f"stopped while compiling; there was nothing to save; resume with `pd train --resume {run}`\n" in text
    assert saved_steps(run) == []
    resumed = pd_here("train", "--resume", run)
    assert resumed.status == 0, resumed
    assert "has no checkpoint yet: starting from the beginning" in resumed.out
    assert rows(run) == undisturbed(tiny, tmp_path, *EVALUATED, "pd.faithfulness_warmup_steps=3")


@pytest.mark.slow
def test_while_a_checkpoint_is_read(tiny: Tiny, evaluated: Path, tmp_path: Path) -> None:
    run = tmp_path / UNDISTURBED
    shutil.copytree(evaluated, run)
    resume: list[str | Path] = ["train", "--resume", run]
    text = stopped_where_stuck(tiny, "param_decomp_lab.runs.checkpoints.store.Checkpoints.restore", resume, at_most=20)
    assert "stopped while reading a checkpoint; there was nothing to save; resume with" in text
    assert (run / LOCK_FILE).read_bytes() == b""  # on another machine one would believe a name in there
    assert rows(run) == rows(evaluated)
    assert saved_steps(run) == [4, 8, 12]


@pytest.mark.slow
def test_during_a_save(tiny: Tiny, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is being saved is the last one: a second save would take as long again."""
    save = Checkpoints.save

    def interrupted(self: Checkpoints, step: int, *arguments: Any) -> None:
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    stopped = pd_here(*tiny.train(tmp_path, 1, *EVALUATED))
    monkeypatch.undo()
    run = tmp_path / RUN
    assert stopped.status == 75, stopped
    assert f"stopped and saved at step 8; resume with `pd train --resume {run}`" in stopped.out
    assert saved_steps(run) == [4, 8]
    assert [row["step"] for row in rows(run)] == list(range(8))
    assert pd_here("train", "--resume", run).status == 0
    assert rows(run) == rows(evaluated)


def told_at_read(number: int) -> Callable[[ResolvedConfig, Console, Processes], Setup]:
    """A `set_up` whose run gets SIGTERM when it has read so many evaluation batches and asks for the next."""

    def interrupted(resolved: ResolvedConfig, console: Console, processes: Processes) -> Setup:
        setup = set_up(resolved, console, processes)
        reads: list[int] = []

        def batches(batch: int) -> jax.Array:
            if len(reads) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            reads.append(batch)
            return setup.eval(batch)

        return replace(setup, eval=batches)

    return interrupted


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, 4])
def test_in_an_evaluation(
    tiny: Tiny, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """SIGTERM while the second evaluation (step 4) is at its first batch, then at its second and last.

    The batch before those of the evaluations is the one that they are compiled for.
    """
    monkeypatch.setattr("param_decomp_lab.training.run.set_up", told_at_read(batch))
    stopped = pd_here(*tiny.train(tmp_path, 1, *EVALUATED, "cadence={train_log_every: 1}"))
    monkeypatch.undo()
    run = tmp_path / RUN
    assert stopped.status == 75, stopped
    if batch == 3:
        assert "stopped while evaluating and saved at step 4; resume with" in stopped.out
        assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
        assert saved_steps(run) == [4]
    else:  # nothing was left to abandon: that evaluation counts, and the next step is the first that is not made
        assert "stopped and saved at step 5; resume with" in stopped.out
        assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
        assert saved_steps(run) == [5]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as before the run

    resumed = pd_here("train", "--resume", run)
    assert resumed.status == 0, resumed
    assert rows(run) == rows(evaluated)


BEFORE_EXAMPLES = 1 + 4 * 2
"""Batches read before the finishing: one to compile, two of each evaluation."""


@pytest.mark.slow
@pytest.mark.parametrize("read", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_while_finishing(
    tiny: Tiny, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    """SIGTERM at the first batch of the last statistics, and at the first of the examples: the rest is left to a
    resumption, which takes no step and compiles none."""
    monkeypatch.setattr("param_decomp_lab.training.run.set_up", told_at_read(BEFORE_EXAMPLES + read))
    stopped = pd_here(*tiny.train(tmp_path, 1, *EVALUATED))
    monkeypatch.undo()
    run = tmp_path / RUN
    assert stopped.status == 75, stopped
    assert "stopped after the last step, which is saved; the report is not written; resume with" in stopped.out
    assert saved_steps(run) == [4, 8, 12]
    left = rows(run)
    assert not (run / "report.html").exists()

    resumed = pd_here("train", "--resume", run)
    assert resumed.status == 0, resumed
    assert "resuming" in resumed.out
    assert "compiled the step" not in resumed.out
    assert rows(run) == left == rows(evaluated)
    assert (run / "report.html").exists()
    assert (run / "examples.json").read_bytes() == (evaluated / "examples.json").read_bytes()


def test_a_run_folder_is_there_whole_or_not_at_all(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it makes its folder, a run can be started again under the same id."""

    def killed() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("param_decomp_lab.runs.folder._environment", killed)
    with pytest.raises(KeyboardInterrupt):
        make_run_folder(tmp_path / RUN, load_config(tiny.config).with_run_id(RUN))
    assert list(tmp_path.iterdir()) == []


# ---- several processes ----


def both_stopped(
    tiny: Tiny, command: list[str], arguments: list[str | Path], when: Callable[[list[Process]], bool], told: int
) -> list[str]:
    """What two processes said of which one was told to stop; both have left with 75."""
    with started([*command, *map(str, arguments)], 2, 1, tiny.environment()) as processes:
        processes[0].wait_until(lambda: when(processes), "the moment")
        sent = time.monotonic()
        processes[told].popen.send_signal(signal.SIGTERM)
        found = ended(processes)
        assert time.monotonic() - sent < 60
    assert [process.status for process in found] == [75, 75], found
    return [process.text for process in found]


TWO = ("mesh={fsdp: 2}", *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_of_two_processes_one_compiles(tiny: Tiny, tmp_path: Path, told: int) -> None:
    """The other is in its first step and waits for it. Either is told; both leave, with the same words."""
    texts = both_stopped(
        tiny,
        stuck_in("param_decomp_lab.training.loop.compile_steps", number=1),
        tiny.train(tmp_path, 1, *TWO, "eval=null"),
        lambda processes: "stuck" in processes[1].text() and "compiled the step" in processes[0].text(),
        told,
    )
    assert "process 0: ended, because process 1 of 2 stopped while compiling; there was nothing to save" in texts[0]
    assert "process 1 of 2 stopped while compiling; there was nothing to save; resume with" in texts[1]
    assert saved_steps(tmp_path / RUN) == []


@pytest.mark.slow
def test_of_two_processes_one_loads(tiny: Tiny, tmp_path: Path) -> None:
    texts = both_stopped(
        tiny,
        stuck_in("param_decomp_lab.training.run.set_up", number=1),
        tiny.train(tmp_path, 1, *TWO),
        lambda processes: "stuck" in processes[1].text(),
        told=0,
    )
    assert any("stopped while loading the target and the data; there was nothing to save" in text for text in texts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_while_others_have_not_come(tiny: Tiny, tmp_path: Path) -> None:
    """Process 0 waits in JAX for another that nobody has started; it leaves alone."""
    port = free_port()
    place = ("--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", "0")

    def listens() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) == 0

    with tiny.started(*tiny.train(tmp_path, 1, *TWO), *place) as process:
        process.wait_until(listens, "the coordination service")
        assert process.stop(signal.SIGTERM) == 75
        assert "stopped while starting; there was nothing to save" in process.text()
    assert list(tmp_path.iterdir()) == []
