"""Harvests a run: counts what each of its components does on a large amount of text, on any number of devices and
processes.

The data are cut into blocks of rows, and block b belongs to process b mod n. Processes share nothing but the folder:
each saves its counts, and the first one merges them when every block is done. Each device works on whole blocks, so the
results do not depend on the number of devices.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from param_decomp_jax.sharding.placement import batch_sharding, from_host
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.folders import is_of_the_disk, not_written
from param_decomp_lab.harvest.counting import BlockCounter, SiteBlock
from param_decomp_lab.harvest.device import BatchValues, SiteSums, SiteValues, batch_values
from param_decomp_lab.harvest.files.plan import HARVESTS, HarvestPlan
from param_decomp_lab.harvest.files.tables import PLAN_FILE
from param_decomp_lab.harvest.firings import find_firings
from param_decomp_lab.harvest.plan import HarvestRequest, Source, as_inputs, make_plan
from param_decomp_lab.harvest.publish import publish
from param_decomp_lab.harvest.share import Share
from param_decomp_lab.harvest.state import HarvestState, blocks_done, last_save
from param_decomp_lab.runs.identity import what_became_of
from param_decomp_lab.runs.lock import only_job
from param_decomp_lab.runs.opened import OpenedRun

SAVE_EVERY_S = 60.0
SHARE_FOR_SAVING = 0.05
POLL_S = 2.0
SILENCE_S = 900.0
"""After this time without a save, another process is assumed to have ended."""


def harvest(
    run: OpenedRun,
    request: HarvestRequest | None = None,
    share: Share | None = None,
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Path | None:
    """Harvests an opened run; returns the folder of the harvest, in the run's.

    Blocks that an interrupted harvest of the same kind has done are not done again. Returns None if ``stop`` asked to
    stop, after saving everything, and in every process but the first. An existing harvest is kept.

    Raises UserError for what cannot be harvested, and CannotWrite.
    """
    request, share, console = request or HarvestRequest(), share or Share(), console or Console(quiet=True)
    source = Source(run, request)
    plan = make_plan(run, request, source)
    out = run.folder / HARVESTS / plan.name
    if (out / PLAN_FILE).is_file():
        return out if share.number == 0 else None
    work = out.with_name(f".{plan.name}.work")
    mine = work / f"process-{share.number}"
    with _watched(run.folder) as check_folder:
        try:
            for folder in (out.parent, work, mine):  # not its parents: the run's folder may be gone
                folder.mkdir(exist_ok=True)
            with only_job(mine, console):
                if (out / PLAN_FILE).is_file():  # made meanwhile
                    shutil.rmtree(work, ignore_errors=True)
                    return out if share.number == 0 else None
                sizes = [site.C for site in plan.sites], plan.examples, plan.around
                state = HarvestState.restore(mine / "state", *sizes)
                state.sweep()
                harvester = Harvester(run, plan, source, state)
                with _progress(console, plan, share) as report:
                    if not harvester.run(share, work, report, stop):
                        return None
                    if share.number > 0:
                        return None
                    if not _wait_for_others(plan, work, report, stop):
                        return None
                for folder in _process_folders(work):
                    if folder != mine:
                        state.merge(folder / "state")
                console.print("writing the harvest …", highlight=False)
                check_folder()
                publish(run, plan, source, state, out)
        except OSError as error:
            check_folder()
            if is_of_the_disk(error):
                raise not_written(work, error, "the harvest so far is kept") from error
            if isinstance(error, FileNotFoundError) and not mine.is_dir():
                raise CannotWrite(f"{work} was removed while the harvest went on; start it again") from error
            raise
        except UserError:
            if (out / PLAN_FILE).is_file():  # by the job that this one has waited for
                return out if share.number == 0 else None
            check_folder()
            raise
    shutil.rmtree(work, ignore_errors=True)
    return out


@contextmanager
def _watched(folder: Path) -> Iterator[Callable[[], None]]:
    """Yields a function that raises CannotWrite if the run's folder is not where it was when the block began."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CannotWrite(f"{folder} cannot be opened: {error.strerror}") from error

    def check() -> None:
        became = what_became_of(folder, descriptor)
        if became is not None:
            raise CannotWrite(
                f"the run folder {folder} {became} during the harvest, so nothing more is saved; what had been saved "
                "moved with the folder. Start the harvest again where the run is now"
            )

    try:
        yield check
    finally:
        os.close(descriptor)


class Harvester:
    """Runs the blocks of one process."""

    def __init__(self, run: OpenedRun, plan: HarvestPlan, source: Source, state: HarvestState) -> None:
        self._run, self._plan, self._source, self._state = run, plan, source, state
        self._counter = BlockCounter(plan, state)
        self._names = tuple(site.name for site in plan.sites)
        by_block = batch_sharding(run.mesh, (run.mesh.size,))
        self._program = jax.jit(partial(batch_values, run.problem), static_argnums=(5, 6), out_shardings=by_block)
        self._devices = run.mesh.size

    def run(self, share: Share, work: Path, report: Callable[[int], None], stop: Callable[[], bool]) -> bool:
        """Does the remainder of this process's share and saves; returns False if it was stopped before the end."""
        done = set().union(*(blocks_done(folder / "state") for folder in _process_folders(work)))
        todo = [block for block in range(share.number, self._plan.n_blocks, share.count) if block not in done]
        report(len(self._state.done))
        batches = [todo[first : first + self._devices] for first in range(0, len(todo), self._devices)]
        saved_at, save_took, stopped = time.monotonic(), 0.0, False
        with (
            ThreadPoolExecutor(max(1, min(len(self._names), os.cpu_count() or 1))) as pool,
            jax.set_mesh(self._run.mesh),
        ):
            # The devices work on one batch while the host counts the one before.
            ahead: tuple[list[int], np.ndarray, BatchValues] | None = None
            for batch in [*batches, []]:
                next_one = self._start(batch) if batch else None
                if ahead is not None:
                    self._count(*ahead, pool)
                    report(len(self._state.done))
                ahead = next_one
                stopped = stop()
                due = max(SAVE_EVERY_S, save_took / SHARE_FOR_SAVING)
                if stopped:
                    break
                if time.monotonic() - saved_at > due:
                    began = time.monotonic()
                    self._state.save()
                    saved_at = time.monotonic()
                    save_took = saved_at - began
        self._state.save()
        return not stopped

    def _start(self, blocks: list[int]) -> tuple[list[int], np.ndarray, BatchValues]:
        """Starts the devices on some blocks, one each; devices without a block get the first one again."""
        plan = self._plan
        filled = blocks + [blocks[0]] * (self._devices - len(blocks))
        inputs = np.concatenate([self._source.block(plan, block) for block in filled])
        valid = np.asarray([len(plan.rows_of_block(block)) for block in filled], np.int32)
        sampled = np.stack([self._counter.sampled(block) for block in filled]).astype(np.int32)
        run = self._run
        placed = [from_host(x, batch_sharding(run.mesh, x.shape)) for x in (inputs, valid, sampled)]
        values = self._program(run.learned, run.weights, *placed, self._names, plan.outputs)
        return blocks, inputs, values

    def _count(self, blocks: list[int], inputs: np.ndarray, values: BatchValues, pool: ThreadPoolExecutor) -> None:
        sizes, outputs = (np.asarray(x) for x in values.outputs)
        rows, threshold = self._plan.block_rows, self._plan.threshold
        for n, block in enumerate(blocks):
            n_valid = len(self._plan.rows_of_block(block)) * self._plan.length
            self._counter.add(
                block,
                as_inputs(self._plan, inputs[n * rows : (n + 1) * rows]),
                outputs[n],
                sizes[n],
                [partial(_site_block, values.sites[name], n, n_valid, threshold) for name in self._names],
                pool,
            )


def _site_block(values: SiteValues, n: int, n_valid: int, threshold: float) -> SiteBlock:
    """Returns what one device has found in the first ``n_valid`` positions of its block."""

    def part(x: Any) -> Any:
        return next(shard.data for shard in x.addressable_shards if (shard.index[0].start or 0) == n)

    found = find_firings(part(values.importance), part(values.activation), n_valid, threshold)
    return SiteBlock(found, SiteSums(*(np.asarray(part(x))[0] for x in values.sums)))


def _process_folders(work: Path) -> list[Path]:
    return sorted(work.glob("process-*"))


def _wait_for_others(plan: HarvestPlan, work: Path, report: Callable[[int], None], stop: Callable[[], bool]) -> bool:
    """Waits until all blocks are done; returns False if it was stopped. Raises CannotWrite if another process ended."""
    while True:
        folders = _process_folders(work)
        done = set().union(*(blocks_done(folder / "state") for folder in folders))
        report(len(done))
        if len(done) == plan.n_blocks:
            return True
        newest = max((saved.stat().st_mtime for folder in folders if (saved := last_save(folder / "state"))), default=0)
        if time.time() - newest > SILENCE_S:
            raise CannotWrite(
                f"{plan.n_blocks - len(done)} of {plan.n_blocks} blocks are not done, and no process has saved for "
                f"{SILENCE_S / 60:.0f} minutes; start all of them again (finished blocks are kept in {work})"
            )
        if stop():
            return False
        time.sleep(POLL_S)


@contextmanager
def _progress(console: Console, plan: HarvestPlan, share: Share) -> Iterator[Callable[[int], None]]:
    """Shows how many positions are done and how fast: a bar on a terminal, else a line each half minute."""
    per_block = plan.block_rows * plan.length
    whose = f"process {share.number} of {share.count}: " if share.count > 1 else ""
    began, shown, first = time.monotonic(), time.monotonic(), -1

    def line(done: int) -> str:
        speed = (done - max(first, 0)) * per_block / max(1e-9, time.monotonic() - began)
        return f"{whose}{min(plan.n_positions, done * per_block):,} of {plan.n_positions:,}  {speed:,.0f} a second"

    if not console.is_terminal:

        def report(done: int) -> None:
            nonlocal shown, first
            first = done if first < 0 else first
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                console.print(line(done), highlight=False, soft_wrap=True)

        yield report
        return
    columns = TextColumn("harvest {task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=plan.n_blocks)

        def report_bar(done: int) -> None:
            nonlocal first
            first = done if first < 0 else first
            bar.update(task, completed=done, description=line(done))

        yield report_bar
