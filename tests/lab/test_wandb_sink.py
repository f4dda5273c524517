"""wandb gets every row once, when it can; a run never waits for it. The library is the real one, the server is not."""

import io
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.local import free_port
from param_decomp_lab.metrics.figures.save import save_figure
from param_decomp_lab.tracking import wandb_sink
from param_decomp_lab.tracking.sinks import MetricsFile
from param_decomp_lab.tracking.wandb_sink import Login, Wandb, send_to_wandb
from tests.cases import slow_but
from tests.lab.tiny_run import LIGHT, PD, ROOT, TIMEOUT, Tiny, pd_here, rows
from tests.lab.wandb_server import Server, environment, wandb_server

ID = "p-01234567"
LONG = 200.0
"""Seconds; the machine may be busy, and what sends takes some to start."""


@pytest.fixture
def logged(tiny: Tiny) -> RunConfig:
    config = load_config(tiny.config, ["wandb={project: tiny}", "wandb_tags=[a, b]", "wandb_group=g"])
    return config.with_run_id(ID)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "figures").mkdir(parents=True)
    return tmp_path / "run"


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=300), text


def write(folder: Path, first: int, last: int) -> None:
    """The rows that a run writes which begins at ``first`` and is stopped at ``last``."""
    metrics = MetricsFile(folder, first)
    add(metrics, first, last)
    metrics.close()


def add(metrics: MetricsFile, first: int, last: int) -> None:
    for step in range(first, last):
        metrics.write({"step": step, "train/loss/total": step / 3, "train/loss/other": float("nan")})


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps(server: Server, run_id: str = ID) -> list[int]:
    return [row["_step"] for row in server.runs[run_id].rows] if run_id in server.runs else []


@pytest.mark.slow
def test_every_row_once_across_requeues(logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted at step 9, resumed from a checkpoint of step 6: what wandb has already is not sent again."""
    with wandb_server() as server:
        use(monkeypatch, server.environment)
        terminal, text = console()
        metrics = MetricsFile(folder, 0)
        add(metrics, 0, 2)
        sink = Wandb(logged, folder, terminal)
        wait_until(lambda: steps(server) == [0, 1])  # while the run goes on
        save_figure(Figure((1, 1)), folder / "figures" / "mean_ci_4.png")  # before its row, as a run does
        add(metrics, 2, 9)
        metrics.close()
        sink.close("preempted", LONG)
        assert sink.sent
        run = server.runs[ID]
        assert steps(server) == list(range(9))
        assert (run.preempting, run.exit_code, run.group, run.tags) == (True, 1, "g", ["a", "b"])
        assert run.config["pd"]["value"]["steps"] == logged.method.pd.steps
        assert run.rows[4]["slow_eval/figures/mean_ci"]["_type"] == "image-file"
        assert [name for name in run.files if name.startswith("media/images/slow_eval/figures/mean_ci")]
        assert run.rows[3]["train/loss/total"] == 1.0
        assert math.isnan(run.rows[3]["train/loss/other"])
        assert f"wandb has the run at http://127.0.0.1:{server.port}" in text.getvalue()

        write(folder, 6, 12)
        again = Wandb(logged, folder, terminal)
        again.close("finished", LONG)
        assert again.sent
        assert list(server.runs) == [ID]
        assert steps(server) == list(range(12))
        assert run.exit_code == 0


def test_a_closed_port(logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it, the run is told once; and when there is a server, `pd wandb` sends all."""
    port = free_port()
    use(monkeypatch, environment(port))
    terminal, text = console()
    write(folder, 0, 5)
    began = time.monotonic()
    sink = Wandb(logged, folder, terminal)
    for _ in range(5):
        sink.check()
    assert time.monotonic() - began < 5
    began = time.monotonic()
    sink.close("finished", within_s=2)
    assert time.monotonic() - began < 20
    assert not sink.sent
    assert f"wandb has not got all of the run; `pd wandb {folder}` sends it" in text.getvalue()

    (folder / "config.yaml").write_text(logged.to_yaml())
    with wandb_server(port) as server:
        assert send_to_wandb(folder, terminal)
        assert steps(server) == list(range(5))
        assert server.runs[ID].exit_code == 1  # it has not come to its last step


@pytest.mark.slow
def test_a_server_that_comes_late(logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try fails; a later one, made by itself, finds the server and sends what was written meanwhile."""
    port = free_port()
    use(monkeypatch, environment(port))
    monkeypatch.setattr(wandb_sink, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(wandb_sink, "MIRROR", impatient(folder.parent))
    terminal, text = console()
    write(folder, 0, 3)
    sink = Wandb(logged, folder, terminal)
    wait_until(lambda: "wandb cannot be reached; the run continues, and it is tried again" in text.getvalue())
    with wandb_server(port) as server:
        write(folder, 3, 6)
        wait_until(lambda: steps(server) == list(range(6)))
        sink.close("finished", LONG)
        assert sink.sent
    assert text.getvalue().count("cannot be reached") == 1
    assert "wandb has the run at" in text.getvalue()
    assert len(list((folder / "wandb").glob("run-*"))) == 1  # those of the tries that failed are gone


def impatient(folder: Path) -> tuple[str, ...]:
    """The command that sends, with one second for wandb to answer."""
    program = folder / "impatient.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from param_decomp_lab.tracking import wandb_mirror\n"
        "wandb_mirror.INIT_TIMEOUT_S = 1.0\n"
        "wandb_mirror.main()\n"
    )
    return sys.executable, str(program)


@pytest.mark.parametrize("status", slow_but([401], [401, 404]))
def test_what_the_server_refuses_ends_the_run(
    logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with wandb_server() as server:
        server.refuse = status, "entity nobody not found during upsertBucket"
        use(monkeypatch, server.environment)
        write(folder, 0, 1)
        sink = Wandb(logged, folder, console()[0])

        refusals: list[str] = []

        def refused() -> bool:
            try:
                sink.check()
            except UserError as error:
                refusals.append(str(error))
            return bool(refusals)

        wait_until(refused)
        assert f"returned error {status}" in refusals[0]
        assert "entity nobody not found" in refusals[0]
        assert "WANDB_MODE=offline" in refusals[0]
        sink.close("failed")


@pytest.mark.slow
@pytest.mark.parametrize("before", [pytest.param("rows", marks=pytest.mark.slow), "trouble"])
def test_what_it_refuses_later_does_not(
    logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A key that has run out, or a proxy's own answer: hours of steps may not be saved yet."""
    with wandb_server() as server:
        server.refuse = None if before == "rows" else (503, "maintenance")
        use(monkeypatch, server.environment)
        monkeypatch.setattr(wandb_sink, "MIRROR", impatient(folder.parent))
        monkeypatch.setattr(wandb_sink, "FIRST_PAUSE_S", 0.1)
        terminal, text = console()
        write(folder, 0, 2)
        sink = Wandb(logged, folder, terminal)
        if before == "rows":
            wait_until(lambda: steps(server) == [0, 1])
            assert sink._mirror is not None
            sink._mirror.kill()
        else:
            wait_until(lambda: "tried again" in text.getvalue())
        server.refuse = 403, "permission denied"
        wait_until(lambda: "wandb refuses the run, which goes on without it" in text.getvalue())
        assert f"`pd wandb {folder}` sends it" in text.getvalue()
        sink.check()
        sink.close("finished", within_s=1)


@pytest.mark.slow
def test_a_server_in_trouble_does_not(folder: Path, logged: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with wandb_server() as server:
        server.refuse = 503, "maintenance"
        use(monkeypatch, server.environment)
        monkeypatch.setattr(wandb_sink, "MIRROR", impatient(folder.parent))
        terminal, text = console()
        write(folder, 0, 1)
        sink = Wandb(logged, folder, terminal)
        wait_until(lambda: "tried again" in text.getvalue())
        sink.check()
        sink.close("failed", within_s=1)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "nobody is logged in on this machine"),
        pytest.param("short", "API key must have 40", marks=pytest.mark.slow),
    ],
)
def test_nobody_is_logged_in(
    logged: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, says: str
) -> None:
    use(monkeypatch, {**environment(free_port()), "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")})
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY")
    else:
        monkeypatch.setenv("WANDB_API_KEY", key)
    login = Login(logged)
    with pytest.raises(UserError, match=rf"wandb: .*{says}.*WANDB_MODE=offline"):
        login.require()
    monkeypatch.setenv("WANDB_MODE", "offline")
    Login(logged).require()


@pytest.mark.slow
def test_offline_folders_are_whole(logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was resumed: the newest has all rows, and the others are out of the way of `wandb sync`."""
    use(monkeypatch, {**environment(free_port()), "WANDB_MODE": "offline"})
    terminal, text = console()
    write(folder, 0, 4)
    first = Wandb(logged, folder, terminal)
    first.close("preempted", LONG)
    time.sleep(1.1)  # the folders are named by the second
    write(folder, 2, 6)
    second = Wandb(logged, folder, terminal)
    second.close("finished", LONG)
    assert first.sent
    assert second.sent
    (made,) = (folder / "wandb").glob("offline-run-*")
    (older,) = (folder / "wandb" / "superseded").iterdir()
    assert older.name < made.name
    assert f"`wandb sync {made}` sends it" in text.getvalue()
    with wandb_server() as server:
        command = [sys.executable, "-m", "wandb", "sync", str(made)]
        variables = {**os.environ, **server.environment}
        synced = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=LONG)
        assert synced.returncode == 0, synced.stderr
        assert steps(server) == list(range(6))


def test_disabled_or_not_configured(
    tiny: Tiny, logged: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for config in (logged, load_config(tiny.config)):
        Login(config).require()
        sink = Wandb(config, folder, console()[0])
        sink.check()
        sink.close("finished")
        monkeypatch.delenv("WANDB_MODE", raising=False)
    assert not (folder / wandb_sink.LOG_FILE).exists()


OPENED = """
import sys, time
from pathlib import Path
from rich.console import Console
from param_decomp_lab.config import RunConfig
from param_decomp_lab.tracking.wandb_sink import Wandb
sink = Wandb(RunConfig.from_yaml(Path(sys.argv[1])), Path(sys.argv[2]), Console())
while sink._mirror is None:
    time.sleep(0.01)
print(sink._mirror.pid, flush=True)
time.sleep(100)
"""


def test_it_goes_with_a_run_that_is_killed(logged: RunConfig, folder: Path) -> None:
    """Else two would write to one run of wandb when the run is resumed."""
    (folder / "config.yaml").write_text(logged.to_yaml())
    write(folder, 0, 1)
    command = [sys.executable, "-c", OPENED, str(folder / "config.yaml"), str(folder)]
    variables = {**os.environ, **environment(free_port()), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        mirror = Path(f"/proc/{int(run.stdout.readline())}")
        assert mirror.exists()
        run.send_signal(signal.SIGKILL)
    wait_until(lambda: not mirror.exists() or "Z" in (mirror / "stat").read_text().split(")")[1][:3])


# ---- runs ----


def train(tiny: Tiny, folder: Path, number: int, *more: str) -> Any:
    return tiny.train(folder, number, *LIGHT, "wandb={project: tiny}", "cadence={train_log_every: 1}", *more)


def test_a_run_sends_its_rows(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wandb_server() as server:
        use(monkeypatch, server.environment)
        monkeypatch.setattr(wandb_sink, "CLOSING_S", LONG)
        outcome = pd_here(*train(tiny, tmp_path, 1))
        assert outcome.status == 0, outcome
        run = server.runs["p-00000001"]
        assert run.exit_code == 0
        sent = [{k: v for k, v in row.items() if "loss" in k} for row in run.rows]
        assert sent == [{k: v for k, v in row.items() if "loss" in k} for row in rows(tmp_path / "p-00000001")]
        assert len(sent) == 12


@pytest.mark.slow
def test_a_run_without_a_server(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    use(monkeypatch, environment(port))
    monkeypatch.setattr(wandb_sink.Wandb.close, "__defaults__", (1.0,))
    outcome = pd_here(*train(tiny, tmp_path, 1))
    assert outcome.status == 0, outcome
    run = tmp_path / "p-00000001"
    assert len(rows(run)) == 12
    assert f"wandb has not got all of the run; `pd wandb {run}` sends it" in outcome.out
    with wandb_server(port) as server:
        sent = pd_here("wandb", run)
        assert sent.status == 0, sent
        assert steps(server, run.name) == list(range(12))
        assert server.runs[run.name].exit_code == 0


@pytest.mark.slow
def test_a_misuse_ends_a_run(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a login before anything is made; refused by the server, within its first steps."""
    with wandb_server() as server:
        use(monkeypatch, {**server.environment, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")})
        server.refuse = 404, "entity nobody not found"
        process = subprocess.run(
            [*PD, *map(str, train(tiny, tmp_path / "runs", 1, "pd.steps=1000000"))],
            cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, env={**tiny.environment(), **server.environment},
        )  # fmt: skip
        assert process.returncode == 2, process
        assert "error: wandb: " in process.stderr
        assert "entity nobody not found" in process.stderr
        monkeypatch.delenv("WANDB_API_KEY")
        refused = pd_here(*train(tiny, tmp_path / "others", 2))
        assert refused.status == 2, refused
        assert "nobody is logged in on this machine; run `wandb login`" in refused.err
        assert not (tmp_path / "others").exists()
