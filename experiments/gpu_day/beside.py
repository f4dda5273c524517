"""What is done without the card while something is measured on it: weights and text are made, steps are compiled as
`pd probe` does it, and their arithmetic is counted."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_day.cards import table_name
from experiments.gpu_day.children import ON_CPU, Children
from experiments.gpu_day.decomposition import Inputs, NotPrepared, prepare
from experiments.gpu_day.items import Decomposition, Item, Step
from experiments.gpu_day.results import Results


@dataclass(frozen=True)
class Asked:
    """What the command was asked for. ``decompose_s``: how long the decomposition is to be; None: as long as time is
    left, within the item's own limit. ``beside``: processes that compile without the card meanwhile."""

    parts: Sequence[str]
    json: Path
    page: Path
    work: Path
    seconds: float
    decompose_s: float | None
    smollm2: Path | None
    text: Path | None
    beside: int
    toy: bool


def say(left_s: float, text: str) -> None:
    """A line with the time that is left."""
    left = max(0, round(left_s))
    print(f"[{left // 60:d}:{left % 60:02d} left] {text}", flush=True)


class Beside:
    """Threads, each of which waits for one process at a time. ``ends``: as of `time.monotonic`."""

    def __init__(self, asked: Asked, results: Results, children: Children, ends: float) -> None:
        self._asked, self._results, self._children, self._ends = asked, results, children, ends
        self._pool = ThreadPoolExecutor(max(1, asked.beside))
        self._futures: list[Future[Any]] = []
        self.has_begun = False

    @property
    def _left_s(self) -> float:
        return self._ends - time.monotonic()

    def begin(self, items: Sequence[Item], device: str) -> Future[Inputs] | None:
        """All that is missing yet for ``items``. Gives the weights and text of a decomposition among them."""
        self.has_begun = True
        inputs: Future[Inputs] | None = None
        for item in items:
            if isinstance(item, Decomposition) and not self._results.is_done(item):
                inputs = self._submit(self._prepare, item)
        steps = [item for item in items if isinstance(item, Step) and not item.needs]
        if any(not self._results.has("counted", item) for item in steps):
            self._submit(self._count, steps)
        card = None if self._asked.toy or not self._asked.beside else table_name(device)
        if card is not None:
            self.begin_plans(steps, card)
        return inputs

    def begin_plans(self, steps: Sequence[Step], card: str) -> None:
        """Those that are missing yet. ``card``: by its name in ``cards.csv``."""
        for item in steps:
            if not self._results.has("planned", item):
                self._submit(self._plan, item, card)

    def wait(self) -> None:
        """Until all has come to an end, or no time is left. Raises what should not have happened."""
        wait(self._futures, timeout=max(1.0, self._left_s))
        for future in self._futures:
            if future.done() and not isinstance(future.exception(), NotPrepared | None):
                future.result()

    def close(self) -> None:
        """Waits for what has begun, and begins nothing any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, work: Any, *arguments: Any) -> Future[Any]:
        self._futures.append(self._pool.submit(work, *arguments))
        return self._futures[-1]

    def _prepare(self, item: Decomposition) -> Inputs:
        asked = self._asked
        try:
            return prepare(item, self._children, asked.work, asked.smollm2, asked.text, asked.toy)
        except NotPrepared as error:
            say(self._left_s, f"    {item.name}: {error}; the other parts go on")
            raise

    def _count(self, steps: Sequence[Step]) -> None:
        found = self._children.do("count", min(900.0, self._left_s), "", ON_CPU)
        for item in steps:
            if item.name in found:
                self._results.add("counted", item.name, {**found[item.name], "asked": item.asked})
        if "failed" in found:
            say(self._left_s, f"    the arithmetic could not be counted: {found['failed']}")

    def _plan(self, item: Step, card: str) -> None:
        found = self._children.do("plan", min(600.0, self._left_s), item.name, ON_CPU, "--card", card)
        self._results.add("planned", item.name, {**found, "asked": item.asked})
        told = f"{found['plan']['peak'] / 2**30:.3f} GiB" if "plan" in found else found["failed"]
        say(self._left_s, f"    {item.name}: pd probe plans {told}")
