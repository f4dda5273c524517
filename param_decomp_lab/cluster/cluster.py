"""Finding the groups of a harvest: from the firings it has kept to a published grouping."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from param_decomp_lab.cluster.activity import Activity, harvested_activity
from param_decomp_lab.cluster.agreement import agreement
from param_decomp_lab.cluster.cost import grouping_cost
from param_decomp_lab.cluster.merging import History, Merger
from param_decomp_lab.cluster.publish import publish
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest_files import Groups, Harvest, harvests_of
from param_decomp_lab.harvest_files.groups import CLUSTERS, CLUSTERS_FILE, SeedResult, labels_at
from param_decomp_lab.harvest_files.tables import PLAN_FILE

Report = Callable[[str, int, int], None]
"""Gets what is being done, how much of it is done, and how much there is at most."""


def cluster(harvest: Harvest, request: ClusterRequest | None = None, console: Console | None = None) -> Groups:
    """The groups of a harvest, in its folder. Those that were found before with the same options are returned, and are
    the newest from now on. Raises UserError where no component fires often enough, and for a damaged harvest; and
    CannotWrite."""
    request, console = request or ClusterRequest(), console or Console(quiet=True)
    out = harvest.folder / CLUSTERS / request.options.name
    if (out / CLUSTERS_FILE).is_file():
        with suppress(OSError):  # where nothing may be written
            os.utime(out)
        return Groups(out, harvest)
    activity = harvested_activity(harvest)
    least = max(1.0, request.min_density * activity.n_positions)
    components = np.flatnonzero(activity.firings >= least)
    if not len(components):
        raise UserError(
            f"no component of {harvest.folder} fires at a share of {request.min_density:g} of its "
            f"{activity.n_positions:,} sampled positions; lower --min-density, or harvest more with `pd harvest`"
        )
    activity = activity.choose(components)
    before = grouping_cost(activity.firings, np.ones(len(components), np.int64), activity.n_positions, request.alpha)
    with _progress(console) as report:
        histories = _merge(activity, request, report)
    seed, results = compare(histories, len(components), before)
    publish(out, request.options, components, activity.firings, histories[seed], seed, results, before)
    return Groups(out, harvest)


def _merge(activity: Activity, request: ClusterRequest, report: Report) -> list[History]:
    merger, n = Merger(activity, request.alpha), len(activity)
    pairs = merger.find_pairs(lambda done: report("counting pairs", done, n))

    def merge(seed: int) -> History:
        draw = request.draw if seed else 0.0
        return merger.merge(pairs, seed, draw, lambda done: report(f"merging, seed {seed}", done, n))

    return [merge(seed) for seed in range(request.seeds)]


def compare(histories: list[History], n: int, cost_before: float) -> tuple[int, list[SeedResult]]:
    """The seed of least cost, the first of equal ones; and of each what is said of it."""
    costs = [cost_before + float(history.change.sum()) for history in histories]
    seed = int(np.argmin(costs))
    labels = [labels_at(history.first, history.second, n, len(history.first)) for history in histories]
    results = [
        SeedResult(int(mine.max()) + 1, cost, *agreement(labels[seed], mine))
        for mine, cost in zip(labels, costs, strict=True)
    ]
    return seed, results


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
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


def chosen_harvest(folder: Path, name: str | None) -> Harvest:
    """The harvest ``name`` of a run, by default the newest; or ``folder`` itself, if it is one. Raises UserError if
    there is none."""
    if (folder / PLAN_FILE).is_file():
        if name is not None and name != folder.resolve().name:
            raise UserError(
                f"--harvest: {folder} is a harvest itself; give the run's folder to choose among its harvests"
            )
        return Harvest(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run folder, or a harvest")
    found = {path.name: path for path in harvests_of(folder)}
    if name is not None and name not in found:
        raise UserError(f"--harvest: {folder} has no harvest '{name}'; it has {', '.join(found)}")
    return Harvest(found[name] if name is not None else next(iter(found.values())))
