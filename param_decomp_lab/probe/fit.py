"""`pd fit`: finds the fastest or the largest run that fits on given GPUs, and writes the configuration to start it."""

import io
import itertools
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.overrides import parse_overrides
from param_decomp_lab.config.write import write_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.compiler import refuse_another_version
from param_decomp_lab.probe.fastest import Space, fastest
from param_decomp_lab.probe.frontier import draw, draw_times, points_table, times_table
from param_decomp_lab.probe.layouts import spaces
from param_decomp_lab.probe.search import Goal, SearchPoint, Variant, best, search
from param_decomp_lab.probe.subject import EVALUATIONS
from param_decomp_lab.probe.subprocess import probe_in_subprocess
from param_decomp_lab.probe.vary import evaluating_less, kinds, parse_vary, sets_mesh
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.warnings import print_warnings

PROBE_GIB = 4.5
"""The most RAM that one `pd probe` uses (docs/measurements/probe.md)."""


EVALUATION_KEYS = {"eval", "eval.batch_size", "eval.n_steps"}
"""If the user sets one of these keys, the evaluation stays unchanged."""


@dataclass(frozen=True)
class FitRequest:
    """The arguments of `pd fit`. ``overrides``: the user's `--set`, which hold for every run, except that the mesh is
    stretched over the GPUs. ``options``: those passed on to `pd probe`. ``minutes``: the time after which, for
    ``speed``, no new probes start.
    """

    path: Path
    overrides: tuple[str, ...]
    gpu: str
    n_gpus: int
    per_node: int
    options: tuple[str, ...] = ()
    goal: Goal = "batch"
    minutes: float = float("inf")

    @property
    def set_keys(self) -> set[str]:
        """Returns the keys that the user has set."""
        return {".".join(override.path) for override in parse_overrides(self.overrides)}

    def sets(self, kind: Variant, batch: int) -> list[str]:
        """Returns the assignments that turn the configuration into a point."""
        given = [*kind.settings, ("pd.batch_size", batch)]
        return [*self.overrides, *(f"{key}={json.dumps(value)}" for key, value in given)]


@dataclass(frozen=True)
class FitResult:
    """The results. ``best``: probed again with all parts of the run; None if nothing fits."""

    points: list[SearchPoint]
    best: SearchPoint | None


def fit(request: FitRequest, vary: Sequence[str], console: Console) -> FitResult:
    """Runs `pd probe` on as few runs as possible. Earlier results are in its cache, so an interrupted search continues.

    Raises UserError for invalid requests.
    """
    refuse_another_version()
    config, varied = own_config(request), parse_vary(vary)
    search_for = _search_for_speed if request.goal == "speed" else _search_for_batch
    points = search_for(request, config, varied, console)
    while (chosen := best(points, request.goal)) is not None:
        whole = _probe_all_parts(request, config, chosen, varied, console)
        points = [whole if point is chosen else point for point in points]
        if whole.verdict == "fits":
            return FitResult(points, whole)
        smaller = [batch for batch in chosen.kind.batches if batch < chosen.batch]
        if smaller and not any(p.kind == chosen.kind and p.batch == max(smaller) for p in points):
            points.append(_probe_point(request, chosen.kind, max(smaller), ("--quick",)))
    return FitResult(points, None)


def _search_for_batch(
    request: FitRequest, config: RunConfig, vary: Mapping[str, Sequence[Any]], console: Console
) -> list[SearchPoint]:
    every = valid_kinds(request, config, vary)
    count = workers(len(every))
    console.print(f"{len(every)} kinds of runs, {count} compiled at a time", highlight=False)
    return search(every, partial(_ask, request, console), count)


def _search_for_speed(
    request: FitRequest, config: RunConfig, vary: Mapping[str, Sequence[Any]], console: Console
) -> list[SearchPoint]:
    every = valid_spaces(request, config, vary)
    count, end = workers(os.cpu_count() or 1), time.monotonic() + 60 * request.minutes
    n_layouts = sum(prod(len(choice.levels) for choice in space.choices) for space in every)
    console.print(
        f"{n_layouts:,} layouts in all, {count} compiled at a time; times are predicted of a step",
        highlight=False,
        soft_wrap=True,
    )
    n_asked, ask = 0, partial(_ask, request, console)

    def ask_all(kinds: Sequence[Variant]) -> list[SearchPoint]:
        nonlocal n_asked
        console.print(f"{n_asked} asked about, {len(kinds)} next", highlight=False)
        n_asked += len(kinds)
        with ThreadPoolExecutor(count) as pool:
            points = pool.map(lambda kind: None if time.monotonic() > end else ask(kind, kind.batches[0]), kinds)
            return [point for point in itertools.takewhile(lambda point: point is not None, points) if point]

    points = fastest(every, ask_all)
    if time.monotonic() > end:
        console.print(f"stopped after {request.minutes:g} minutes", highlight=False)
    return points


def _ask(request: FitRequest, console: Console, kind: Variant, batch: int) -> SearchPoint:
    point = _probe_point(request, kind, batch, ("--quick",))
    console.print(_describe_point(point), highlight=False, soft_wrap=True)
    return point


def own_config(request: FitRequest) -> RunConfig:
    """Returns the user's configuration. For speed, its mesh is ignored unless set with `--set`, since the batch need
    not be divisible by it.
    """
    if request.goal == "batch" or sets_mesh(request.set_keys):
        return load_config(request.path, request.overrides)
    return load_config(request.path, (*request.overrides, "mesh={replica: 1, fsdp: 1}"))


def valid_kinds(request: FitRequest, config: RunConfig, vary: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Returns the kinds of runs to search for the largest batch. Raises UserError if one of them is invalid."""
    every, read = kinds(config, request.n_gpus, vary, request.set_keys, request.per_node), cache(read_mapping)
    for kind in every:
        for batch in kind.batches:
            load_config(request.path, request.sets(kind, batch), read)
    return every


def valid_spaces(request: FitRequest, config: RunConfig, vary: Mapping[str, Sequence[Any]]) -> list[Space]:
    """Returns the spaces to search for the fastest step. Raises UserError if a choice makes every run invalid."""
    read = cache(read_mapping)
    memory = read(request.path, "the wrapper").get("memory")
    file_keys = memory if isinstance(memory, dict) else {}
    every = spaces(config, request.n_gpus, request.per_node, vary, request.set_keys, file_keys)
    for space in every:
        for i, choice in enumerate(space.choices):
            for level in range(len(choice.levels)):
                levels = (*space.begin[:i], level, *space.begin[i + 1 :])
                load_config(request.path, request.sets(space.kind(levels), space.batch), read)
    return every


def _probe_all_parts(
    request: FitRequest, config: RunConfig, chosen: SearchPoint, vary: Mapping[str, Any], console: Console
) -> SearchPoint:
    """Probes ``chosen`` with all parts of the run. If only the evaluation does not fit, its batches are made smaller,
    unless the user has set their size.
    """

    def ask(kind: Variant, why: str) -> SearchPoint:
        console.print(f"{kind.name}, batch {chosen.batch:,}: {why} …", highlight=False)
        point = _probe_point(request, kind, chosen.batch, ())
        console.print(_describe_point(point), highlight=False, soft_wrap=True)
        return point

    given = {*vary} | request.set_keys
    whole = ask(chosen.kind, "all parts of the run")
    while not given & EVALUATION_KEYS and whole.verdict == "does_not_fit":
        assert whole.answer is not None
        part = whole.answer["largest_part"]
        kind = evaluating_less(config, whole.kind) if part in EVALUATIONS else None
        if kind is None:
            break
        size = dict(kind.settings)["eval.batch_size"]
        whole = ask(kind, f"the {part} needs most; in batches of {size:,}, and more of them")
    return whole


def report(request: FitRequest, found: FitResult, out: Path, console: Console) -> bool:
    """Prints and draws the runs, and writes the best one's configuration as ``out``; returns False if nothing fits."""
    for_speed, chosen = request.goal == "speed", found.best
    table = (times_table if for_speed else points_table)(found.points, chosen)
    console.print(table)
    title = f"{request.path.stem} on {request.n_gpus} {Path(request.gpu).stem.upper()}"
    picture = out.with_suffix(".png")
    (draw_times if for_speed else draw)(found.points, chosen, title, picture)
    if chosen is None or chosen.answer is None:
        console.print(f"picture {picture}", highlight=False, soft_wrap=True)
        other = "a smaller batch" if for_speed else "vary smaller batches, leaner memory"
        console.print(Text.assemble(("nothing fits", "bold red"), f"; {other}, or take more GPUs"))
        return False
    text = io.StringIO()
    PlainConsole(file=text, width=120).print(table)
    answer = chosen.answer
    nodes = request.n_gpus // request.per_node
    where = ("--gpu", request.gpu, "--nodes", str(nodes), "--gpus-per-node", str(request.per_node))
    command = shlex.join(("pd", "probe", out.name, *where, *request.options))
    need = f"needs {answer['peak_gib']:.1f} of {answer['pool_gib']:.1f} GiB of each GPU ({answer['largest_part']})"
    if answer["limit_bound"]:
        need += f"; limit-bound: {answer['peak_gib_unlimited']:.1f} GiB if XLA saw no limit, so it recomputes by itself"
    adjective = "fastest" if for_speed else "largest"
    header = (
        f"The {adjective} run on {request.n_gpus} {Path(request.gpu).stem.upper()} of those below; {need}.",
        f"  {command}",
        "",
    )
    lines = [*header, *text.getvalue().rstrip().splitlines()]
    write_config(request.path, request.sets(chosen.kind, chosen.batch), out, lines, "pd fit")
    print_warnings(answer["notes"], console)
    console.print(f"wrapper {out}\npicture {picture}", highlight=False, soft_wrap=True)
    console.print(
        Text.assemble(("fits", "bold green"), f": {chosen.kind.name}, batch {chosen.batch:,}, {need}"), soft_wrap=True
    )
    return True


def _probe_point(request: FitRequest, kind: Variant, batch: int, options: Sequence[str]) -> SearchPoint:
    where = ("--gpu", request.gpu, "--gpus-per-node", str(request.per_node))
    output = probe_in_subprocess(request.path, request.sets(kind, batch), (*where, *request.options, *options))
    if output.status == 2:
        raise UserError(output.why)
    return SearchPoint(kind, batch, output.answer, "" if output.answer is not None else output.why.splitlines()[-1])


def workers(n_kinds: int) -> int:
    """Returns the number of concurrent compilations, from the processors and the free RAM."""
    return max(1, min(n_kinds, os.cpu_count() or 1, int(_free_gib() // PROBE_GIB)))


def _free_gib() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    except (OSError, StopIteration):
        return PROBE_GIB


def _describe_point(point: SearchPoint) -> str:
    if point.answer is None:
        return f"{point.kind.name}, batch {point.batch:,}: unknown ({point.why})"
    words = {"fits": "fits", "does_not_fit": "does not fit"}[point.verdict]
    return f"{point.kind.name}, batch {point.batch:,}: {point.peak_gib:.1f} GiB, {words}, {1000 * point.step_s:,.0f} ms"
