"""Where metrics go: `metrics.jsonl`, wandb, and the terminal."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)  # fmt: skip

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError

Row = Mapping[str, Any]
METRICS_FILE = "metrics.jsonl"


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`, none where there is no such file. A last line that was cut off by a kill is left out.

    Errors: ``UserError`` for a broken line anywhere else, with its number.
    """
    path = run_folder / METRICS_FILE
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(row, dict) or "step" not in row:
            raise UserError(f"{path}:{number}: expected an object with a key 'step', got {line[:80]}")
        rows.append(row)
    return rows


class MetricsFile:
    """Appends rows; opened at ``step``, it first cuts off every row of that step or later (T5)."""

    def __init__(self, run_folder: Path, step: int) -> None:
        self.path = run_folder / METRICS_FILE
        kept = [row for row in read_metrics(run_folder) if row["step"] < step]
        written = self.path.with_suffix(".tmp")
        written.write_text("".join(_line(row) for row in kept))
        os.replace(written, self.path)
        self._file = self.path.open("a")

    def write(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=True) + "\n"


class Wandb:
    """wandb as the configuration and WANDB_MODE say. A connection that fails never ends the run; a misuse does."""

    def __init__(self, config: RunConfig, run_folder: Path, console: Console) -> None:
        self._run: Any = None
        self._console = console
        settings = config.torch.wandb
        if settings is None or os.environ.get("WANDB_MODE") == "disabled":
            return
        import wandb

        wrapper = config.wrapper
        try:
            self._run = wandb.init(
                project=settings.project, entity=settings.entity, name=wrapper.run_name, id=wrapper.run_id,
                group=wrapper.wandb_group, tags=list(wrapper.wandb_tags), dir=str(run_folder), resume="allow",
                config={"wrapper": wrapper.model_dump(mode="json"), **config.torch.model_dump(mode="json")},
            )  # fmt: skip
        except wandb.errors.UsageError as error:
            raise UserError(f"wandb: {error} (run with WANDB_MODE=offline or disabled to do without)") from error
        except (wandb.errors.Error, OSError) as error:
            console.print(f"[yellow]wandb cannot be reached, the run goes on without it: {error}[/]")

    def write(self, row: Row, figures: Mapping[str, Path]) -> None:
        if self._run is None:
            return
        import wandb

        try:
            images = {name: wandb.Image(str(path)) for name, path in figures.items()}
            self._run.log({**row, **images}, step=row["step"])
        except (wandb.errors.Error, OSError) as error:
            self._console.print(f"[yellow]wandb lost its connection, the run goes on without it: {error}[/]")
            self._run = None

    def close(self, failed: bool) -> None:
        if self._run is None:
            return
        import wandb

        try:
            self._run.finish(exit_code=int(failed))
        except (wandb.errors.Error, OSError) as error:
            self._console.print(f"[yellow]wandb could not be told that the run ended: {error}[/]")


class Terminal:
    """A progress bar on a terminal; on anything else a line every ``seconds``."""

    def __init__(self, console: Console, what: str, total: int, done: int = 0, seconds: float = 10.0) -> None:
        self._console, self._what, self._total, self._seconds = console, what, total, seconds
        self._done, self._last_line = done, 0.0
        self._first: tuple[int, float] | None = None
        self._progress = Progress(
            SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task(what, total=total, completed=done, text="")

    def __enter__(self) -> "Terminal":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, done: int) -> None:
        # The clock starts here: what comes before the first step (an evaluation, compiling) comes once.
        self._first = self._first or (done, time.monotonic())
        self._done = done
        self._progress.update(self._task, completed=done)

    def show(self, text: str) -> None:
        """Short news beside the bar."""
        self._progress.update(self._task, text=text)
        now = time.monotonic()
        if self._console.is_terminal or now - self._last_line < self._seconds:
            return
        self._last_line = now
        first, start = self._first or (self._done, now)
        rate = (self._done - first) / max(now - start, 1e-9)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 else ""
        self._console.print(f"{self._what} {self._done}/{self._total}{left}  {text}", markup=False)


def brief(row: Row, prefix: str = "train/loss/") -> str:
    """The loss terms of a row on one line."""
    terms = {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}
    return "  ".join(f"{name} {_number(value)}" for name, value in terms.items())


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)
