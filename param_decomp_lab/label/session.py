"""Shared by labelling and scoring: a block in which one process asks for a run, and its output."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.label.asking import Asker, Ended
from param_decomp_lab.label.choose import Selection
from param_decomp_lab.label.endpoint import Endpoint
from param_decomp_lab.label.ledger import Ledger, open_ledger
from param_decomp_lab.label.money import NANO, dollars
from param_decomp_lab.label.place import LabelledRun

REPORT_EVERY_S = 10.0
Replace = Literal["none", "models", "all"]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Request:
    """The options of a session. ``max_cost``: dollars, for everything ever asked for this run. ``replace``: labels that
    may be replaced: none, those by models, or also people's. ``retry_failed``: whether to repeat questions without a
    usable answer.
    """

    selection: Selection
    max_cost: float
    parallel: int = 8
    replace: Replace = "none"
    retry_failed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_cost < 1e9:
            raise UserError(f"--max-cost should be dollars, from 0 up, not {self.max_cost:g}")

    @property
    def cap(self) -> int:
        """The cap in billionths of a dollar."""
        return round(self.max_cost * NANO)


@dataclass
class Session:
    ledger: Ledger
    asker: Asker
    spent_before: int


@contextmanager
def open_session(
    run: LabelledRun, endpoint: Endpoint, request: Request, console: Console, stop: Stop
) -> Iterator[Session]:
    """A block in which only this process asks for a run."""
    with open_ledger(run.folder, request.cap, console) as ledger:
        if ledger.unanswered:
            console.print(
                f"{ledger.unanswered:,} earlier requests were sent and their answers are not known; they count as "
                "spent at the most that they can have cost",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        asker = Asker(endpoint, ledger, request.parallel, stop, request.retry_failed)
        yield Session(ledger, asker, ledger.spent)


class Progress:
    """Prints a line of progress from time to time."""

    def __init__(self, console: Console, ledger: Ledger, total: int, unit: str) -> None:
        self._console, self._ledger, self._total, self._unit = console, ledger, total, unit
        self._last = time.monotonic()
        self.done = 0

    def advance(self) -> None:
        self.done += 1
        if time.monotonic() - self._last >= REPORT_EVERY_S:
            self._last = time.monotonic()
            self._console.print(
                f"{self.done:,} of {self._total:,} {self._unit}, {dollars(self._ledger.spent)} of "
                f"{dollars(self._ledger.cap)}",
                highlight=False,
            )


def say_end(console: Console, asking: Session, ended: Ended, what: str) -> None:
    counts, ledger = asking.asker.counts, asking.ledger
    console.print(
        f"{what}: {counts.asked:,} questions answered, {counts.failed:,} without a usable answer, {counts.known:,} "
        f"known before; {counts.requests:,} requests, {dollars(ledger.spent - asking.spent_before)}. "
        f"Spent on this run so far: {dollars(ledger.spent)} of {dollars(ledger.cap)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if ended == "cap":
        console.print(
            "the next request could cost more than is left; to go on, give the same command a higher --max-cost",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
