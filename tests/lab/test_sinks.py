"""Where metrics go: `metrics.jsonl` (T5), wandb, the terminal."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from rich.console import Console

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.sinks import METRICS_FILE, MetricsFile, Terminal, Wandb, brief, read_metrics
from tests.lab.tiny_run import Tiny


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def written(folder: Path, first: int, last: int) -> MetricsFile:
    metrics = MetricsFile(folder, first)
    for step in range(first, last):
        metrics.write({"step": step, "train/loss/total": step / 3})
    metrics.close()
    return metrics


def test_rows_of_the_step_and_later_are_cut_off(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    written(tmp_path, 0, 9)
    before = (tmp_path / METRICS_FILE).read_text().splitlines()
    MetricsFile(tmp_path, 4).close()
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == before[:4]
    written(tmp_path, 4, 9)
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == before  # to the last digit
    written(tmp_path, 0, 2)
    assert steps(tmp_path) == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, 0, 5)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text()[:-9])
    assert steps(tmp_path) == [0, 1, 2, 3]
    written(tmp_path, 4, 6)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match=rf"{METRICS_FILE}:2: not a JSON object"):
        read_metrics(tmp_path)


def test_a_row_is_there_at_once(tmp_path: Path) -> None:
    """A killed process loses no row that it has written."""
    metrics = MetricsFile(tmp_path, 0)
    metrics.write({"step": 0, "x": float("nan")})
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 1
    metrics.close()


# ---- wandb ----


@pytest.fixture
def logged(tiny: Tiny) -> RunConfig:
    config = load_config(tiny.config, ["wandb={project: tiny}", "wandb_tags=[a, b]", "wandb_group=g"])
    return config.with_run_id("p-01234567")


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


class FakeRun:
    def __init__(self, error: Exception | None = None) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.error, self.status = error, -1

    def log(self, row: dict[str, Any], step: int) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        if self.error is not None:
            raise self.error
        self.status = exit_code


def test_wandb_is_told_everything(logged: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    asked: dict[str, Any] = {}
    run = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **arguments: asked.update(arguments) or run)
    sink = Wandb(logged, tmp_path, console()[0])
    sink.write({"step": 3, "train/loss/total": 1.0}, {})
    sink.close(failed=True)
    assert (asked["project"], asked["id"], asked["resume"], asked["group"]) == ("tiny", "p-01234567", "allow", "g")
    assert asked["tags"] == ["a", "b"]
    assert json.dumps(asked["config"])
    assert run.rows == [(3, {"step": 3, "train/loss/total": 1.0})]
    assert run.status == 1


@pytest.mark.parametrize("error", [wandb.errors.CommError("down"), OSError("broken pipe"), TimeoutError("slow")])
def test_a_lost_connection_never_ends_a_run(
    logged: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def fail(**arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(wandb, "init", fail)
    terminal, text = console()
    sink = Wandb(logged, tmp_path, terminal)
    sink.write({"step": 0}, {})
    sink.close(failed=False)
    assert "goes on without it" in text.getvalue()

    monkeypatch.setattr(wandb, "init", lambda **arguments: FakeRun(error))
    terminal, text = console()
    sink = Wandb(logged, tmp_path, terminal)
    sink.write({"step": 0}, {})
    sink.write({"step": 1}, {})
    sink.close(failed=False)
    assert text.getvalue().count("goes on without it") == 1

    sink = Wandb(logged, tmp_path, terminal)
    sink.close(failed=False)  # lost only at the end


def test_a_misuse_does(logged: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def fail(**arguments: Any) -> Any:
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"api_key not configured.*WANDB_MODE=offline"):
        Wandb(logged, tmp_path, console()[0])


def test_disabled_or_not_configured(
    tiny: Tiny, logged: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "init", lambda **arguments: pytest.fail("wandb was started"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Wandb(logged, tmp_path, console()[0]).close(failed=False)
    monkeypatch.delenv("WANDB_MODE")
    sink = Wandb(load_config(tiny.config), tmp_path, console()[0])
    sink.write({"step": 0}, {})
    sink.close(failed=False)
    assert list(tmp_path.iterdir()) == []


# ---- the terminal ----


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("param_decomp_lab.sinks.time.monotonic", lambda: clock.now)
    terminal, text = console()
    with Terminal(terminal, "demo", 100, done=20) as bar:
        for step in range(21, 51):
            clock.now += 1.0
            bar.advance(step)
            bar.show(brief({"train/loss/total": 0.125, "step": step, "train/loss/A": float("inf")}))
    lines = text.getvalue().splitlines()
    assert lines[0] == "demo 21/100  total 0.125  A inf"  # nothing is known of the rate yet
    assert lines[1] == "demo 31/100, 69 s left  total 0.125  A inf"  # of this process's own steps after the first
    assert [line.split()[1] for line in lines] == ["21/100", "31/100,", "41/100,"]
