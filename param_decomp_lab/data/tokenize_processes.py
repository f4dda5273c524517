"""Runs the processes that tokenize the units of a plan, and shows their progress."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from param_decomp_lab.data.meta import SPLITS, Split
from param_decomp_lab.data.plan import TokenizePlan
from param_decomp_lab.data.tokenize_unit import tokenize_unit
from param_decomp_lab.data.tokenizers import Tokenizer, load_tokenizer
from param_decomp_lab.data.unfinished import Unfinished
from param_decomp_lab.errors import CannotWrite

LOOK_S = 0.25
"""Seconds between two checks of the progress."""


class Stopped(Exception):
    """Raised in a process that tokenizes when the others were interrupted or failed."""


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenize_units(
    plan: TokenizePlan, work: Unfinished, processes: int, part: tuple[int, int] | None, console: Console | None
) -> None:
    """Tokenizes those units of ``part`` that are needed and have no record yet. Raises UserError for text that cannot
    be read."""
    number, count = part or (0, 1)
    todo = _Todo(plan, work, range(number, len(plan.units), count))
    n_left = min(len(todo.left()), processes)
    with _Progress(plan, todo, console) as progress:
        if n_left <= 1:
            tokenizer = _tokenizer(plan)
            for unit in todo:
                record = tokenize_unit(plan, tokenizer, unit, work.data, progress.add)
                record.save(work.record_file(unit))
                todo.finished(unit)
        else:
            _in_processes(plan, work, todo, n_left, progress)


def _tokenizer(plan: TokenizePlan) -> Tokenizer | None:
    return None if plan.tokenizer is None else load_tokenizer(plan.tokenizer)


class _Todo:
    """The units of a part that need to be done, in order. Whether a unit is needed is decided when it is due."""

    def __init__(self, plan: TokenizePlan, work: Unfinished, units: range) -> None:
        self._plan, self._work, self._units = plan, work, units
        self._rows: dict[int, dict[Split, int]] = {}
        self._look()

    def left(self) -> list[int]:
        return [unit for unit in self._units if unit not in self._rows]

    def __iter__(self) -> Iterator[int]:
        for unit in self.left():
            limited = self._plan.settings.tokens is not None or self._plan.settings.eval_tokens is not None
            if limited:
                self._look()  # other parts have progressed
            before = {split: sum(rows[split] for n, rows in self._rows.items() if n < unit) for split in SPLITS}
            if not limited or self._plan.is_needed(unit, before):
                yield unit

    def finished(self, unit: int) -> None:
        """Notes that ``unit`` now has a record."""
        written = self._work.record(unit).written
        self._rows[unit] = {split: written[split].rows if split in written else 0 for split in SPLITS}

    def done_bytes(self) -> int:
        return sum(self._plan.units[unit].size for unit in self._units if unit in self._rows)

    def done_tokens(self) -> int:
        """Returns the number of tokens of the training split, in all parts."""
        return sum(rows["train"] for rows in self._rows.values()) * self._plan.settings.seq_len

    def all_bytes(self) -> int:
        return sum(self._plan.units[unit].size for unit in self._units)

    def _look(self) -> None:
        for unit in self._work.done() - self._rows.keys():
            self.finished(unit)


class _Progress:
    """Shows a bar with tokens per second; nothing without a console."""

    def __init__(self, plan: TokenizePlan, todo: _Todo, console: Console | None) -> None:
        self._limit, self._todo, self._began = plan.settings.tokens, todo, time.monotonic()
        self._before, self._tokens_before = todo.done_bytes(), todo.done_tokens()
        self._chars = self._tokens = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=console is None)
        total = self._limit or todo.all_bytes()
        self._task = self._bar.add_task("tokenizing", total=total or None, rate="")

    def __enter__(self) -> "_Progress":
        self._bar.start()
        self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            total = self._bar.tasks[self._task].total
            self._bar.update(self._task, completed=total or 0)
        self._bar.stop()

    def add(self, chars: int, tokens: int) -> None:
        self.show(self._chars + chars, self._tokens + tokens)

    def show(self, chars: int, tokens: int) -> None:
        """Updates the bar. ``chars``, ``tokens``: since the beginning."""
        self._chars, self._tokens = chars, tokens
        self._show()

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._began, 1e-3)
        if self._limit is None:
            # A unit's bytes are counted when it is done; until then its characters, which are fewer.
            done = max(self._todo.done_bytes(), self._before + self._chars)
        else:
            done = self._tokens_before + self._tokens
        rate = f"{self._tokens / seconds:,.0f} tokens/s" if self._tokens else ""
        self._bar.update(self._task, completed=done, rate=rate)


def _in_processes(plan: TokenizePlan, work: Unfinished, todo: _Todo, processes: int, progress: _Progress) -> None:
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", 3)  # characters, tokens, whether to stop
    pool = ProcessPoolExecutor(processes, context, _begin, (plan, work, shared))
    try:
        waiting = iter(todo)
        running: dict[Future[None], int] = {}
        while True:
            # One unit more than there are processes, so that none waits; not all units, since a limit may be reached.
            while len(running) <= processes and (unit := next(waiting, None)) is not None:
                running[pool.submit(_tokenize, unit)] = unit
            if not running:
                break
            for future in wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED).done:
                future.result()
                todo.finished(running.pop(future))
            progress.show(shared[0], shared[1])
    except BrokenProcessPool as error:
        raise CannotWrite(
            "a tokenizing process was killed, perhaps because memory ran out: take fewer (--processes) and run the "
            "same command again to continue"
        ) from error
    finally:
        shared[2] = 1
        pool.shutdown(cancel_futures=True)


_work: dict[str, Any] = {}
"""What `_begin` passed to a process that tokenizes."""


def _begin(plan: TokenizePlan, work: Unfinished, shared: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles interrupts, and tells this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work.update(plan=plan, work=work, shared=shared, tokenizer=_tokenizer(plan))


def _end_with_parent() -> None:
    """Ends this process when its parent is killed; otherwise, it would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _tokenize(unit: int) -> None:
    plan, work, shared = _work["plan"], _work["work"], _work["shared"]

    def report(chars: int, tokens: int) -> None:
        if shared[2]:
            raise Stopped
        with shared.get_lock():
            shared[0] += chars
            shared[1] += tokens

    record = tokenize_unit(plan, _work["tokenizer"], unit, work.data, report)
    record.save(work.record_file(unit))
