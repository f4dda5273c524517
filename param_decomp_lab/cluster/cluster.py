"""Finds the groups of a harvest, from its sampled firings to a published grouping."""

import os
from contextlib import suppress

import numpy as np
from rich.console import Console

from param_decomp_lab.cluster.activity import Activity, harvested_activity
from param_decomp_lab.cluster.agreement import agreement
from param_decomp_lab.cluster.cost import grouping_cost
from param_decomp_lab.cluster.merging import History, Merger
from param_decomp_lab.cluster.publish import publish
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Groups, Harvest
from param_decomp_lab.harvest.files.groups import CLUSTERS, CLUSTERS_FILE, SeedResult, labels_at
from param_decomp_lab.ui.progress import Report, progress


def cluster(harvest: Harvest, request: ClusterRequest | None = None, console: Console | None = None) -> Groups:
    """Finds the groups of a harvest and writes them into its folder. If it was done before with the same options, those
    groups are returned and become the newest. Raises UserError if no component fires often enough or the harvest is
    damaged, and CannotWrite.
    """
    request, console = request or ClusterRequest(), console or Console(quiet=True)
    out = harvest.folder / CLUSTERS / request.options.name
    if (out / CLUSTERS_FILE).is_file():
        with suppress(OSError):  # the folder may be read-only
            os.utime(out)
        return Groups(out, harvest.index, harvest.n_sampled)
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
    with progress(console) as report:
        histories = _merge(activity, request, report)
    seed, results = compare(histories, len(components), before)
    publish(out, request.options, components, activity.firings, histories[seed], seed, results, before)
    return Groups(out, harvest.index, harvest.n_sampled)


def _merge(activity: Activity, request: ClusterRequest, report: Report) -> list[History]:
    merger, n = Merger(activity, request.alpha), len(activity)
    pairs = merger.find_pairs(lambda done: report("counting pairs", done, n))

    def merge(seed: int) -> History:
        draw = request.draw if seed else 0.0
        return merger.merge(pairs, seed, draw, lambda done: report(f"merging, seed {seed}", done, n))

    return [merge(seed) for seed in range(request.seeds)]


def compare(histories: list[History], n: int, cost_before: float) -> tuple[int, list[SeedResult]]:
    """Returns the seed of least cost (the first one on a tie), and the results of every seed."""
    costs = [cost_before + float(history.change.sum()) for history in histories]
    seed = int(np.argmin(costs))
    labels = [labels_at(history.first, history.second, n, len(history.first)) for history in histories]
    results = [
        SeedResult(int(mine.max()) + 1, cost, *agreement(labels[seed], mine))
        for mine, cost in zip(labels, costs, strict=True)
    ]
    return seed, results
