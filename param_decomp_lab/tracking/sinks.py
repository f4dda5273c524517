"""Destinations of metrics: `metrics.jsonl` and the terminal. (wandb: `wandb_sink.py`.)"""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from param_decomp_lab.errors import CannotWrite
from param_decomp_lab.folders import write_whole
from param_decomp_lab.runs.folder import resume_command
from param_decomp_lab.runs.identity import Displaced, what_became_of
from param_decomp_lab.runs.metrics_file import METRICS_FILE, Row, read_metrics
from param_decomp_lab.runs.unwritable import why_not_written


class MetricsFile:
    """Appends rows to `metrics.jsonl`. When opened at ``step``, it first removes every row of that step or later (T5).

    Rows that cannot be written (the disk is full) are kept, and written together with the next one, so nothing is lost
    if the disk has space again in time. The file never keeps a partial row. ``last``: the step of the last row that the
    file keeps, or -1. ``earlier``: called with each row that it keeps.
    """

    def __init__(
        self,
        run_folder: Path,
        step: int,
        console: Console | None = None,
        earlier: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self.path = run_folder / METRICS_FILE
        self._console = console or Console(quiet=True)
        kept = [row for row in read_metrics(run_folder) if row["step"] < step]
        self.last = int(kept[-1]["step"]) if kept else -1
        for row in kept:
            earlier(row)
        write_whole(self.path, "".join(_line(row) for row in kept))
        self._file = self.path.open("ab", buffering=0)
        self._whole = self.path.stat().st_size
        self._waiting: list[bytes] = []

    def write(self, row: Row) -> None:
        """Raises Displaced, as `settle` does, if the file was replaced or removed."""
        self._refuse_displaced()
        self._waiting.append(_line(row).encode())
        try:
            self._append()
        except OSError as error:
            if len(self._waiting) == 1:
                why = why_not_written(error, self.path.parent) or str(error)
                said = f"rows of metrics cannot be written and wait until they can: {why}"
                self._console.print(Text(said, "yellow"), soft_wrap=True)

    def settle(self) -> None:
        """Returns when every row is on the disk. Raises CannotWrite if one cannot be written."""
        self._refuse_displaced()
        try:
            self._append()
            os.fsync(self._file.fileno())
        except OSError as error:
            why = why_not_written(error, self.path.parent) or str(error)
            raise CannotWrite(f"{len(self._waiting)} rows of {METRICS_FILE} cannot be written: {why}") from error

    def _refuse_displaced(self) -> None:
        became = what_became_of(self.path, self._file.fileno())
        if became is not None:
            raise Displaced(
                f"{self.path} {became} during the run, which stops without saving. Put it back, and resume with "
                f"`{resume_command(self.path.parent)}`"
            )

    def close(self) -> None:
        with suppress(OSError):
            self._append()
        if self._waiting:
            said = f"{len(self._waiting)} rows of {METRICS_FILE} could not be written and are lost"
            self._console.print(Text(said, "yellow"), soft_wrap=True)
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), self._whole)
        self._file.close()

    def _append(self) -> None:
        while self._waiting:
            if os.fstat(self._file.fileno()).st_size > self._whole:
                self._file.truncate(self._whole)  # a row of which only a part fitted
            left = memoryview(self._waiting[0])
            while left:
                left = left[self._file.write(left) :]
            self._whole += len(self._waiting.pop(0))


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=True) + "\n"


def brief(row: Row, prefix: str = "train/loss/") -> str:
    """Formats the loss terms of a row on one line, without their parts (R6)."""
    terms = {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}
    return "  ".join(f"{name} {_number(value)}" for name, value in terms.items() if "/" not in name)


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)
