"""How far a command has come."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Report = Callable[[str, int, int], None]
"""Gets what is being done, how much of it is done, and how much there is at most."""


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line for each thing that begins."""
    if not console.is_terminal:
        said: set[str] = set()

        def say(what: str, done: int, total: int) -> None:
            del done, total
            if what not in said:
                said.add(what)
                console.print(f"{what} …", highlight=False, soft_wrap=True)

        yield say
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


class StepsBar:
    """Steps of a training: a bar on a terminal; on anything else a line every ``seconds``."""

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

    def __enter__(self) -> "StepsBar":
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
        self._console.print(f"{self._what} {self._done}/{self._total}{left}  {text}")
