"""`pd fit`: the best run of a configuration that fits on given GPUs, and the configuration to start it with."""

import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.overrides import parse_overrides
from param_decomp_lab.display.notes import print_notes
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.compiler import refuse_another_version
from param_decomp_lab.probe.frontier import draw, points_table
from param_decomp_lab.probe.search import Kind, Point, best, search
from param_decomp_lab.probe.subject import EVALUATIONS
from param_decomp_lab.probe.subprocess import probe_apart
from param_decomp_lab.probe.vary import evaluating_less, kinds, parse_vary
from param_decomp_lab.probe.write_config import write_config

PROBE_GIB = 4.5
"""RAM of one `pd probe`, at most (docs/measurements/probe.md)."""


EVALUATION_KEYS = {"eval", "eval.batch_size", "eval.n_steps"}
"""Where the user gives one, the evaluation stays as it is."""


@dataclass(frozen=True)
class Question:
    """``overrides``: `--set` of the user's, which hold for every run, but that the mesh is stretched over the GPUs.
    ``options``: of `pd probe`, passed on."""

    path: Path
    overrides: tuple[str, ...]
    gpu: str
    n_gpus: int
    per_node: int
    options: tuple[str, ...] = ()

    @property
    def said(self) -> set[str]:
        """Keys that the user has set."""
        return {".".join(override.path) for override in parse_overrides(self.overrides)}

    def sets(self, kind: Kind, batch: int) -> list[str]:
        """Assignments that make a point of the configuration."""
        given = [*kind.settings, ("pd.batch_size", batch)]
        return [*self.overrides, *(f"{key}={json.dumps(value)}" for key, value in given)]


@dataclass(frozen=True)
class Found:
    """``best``: asked about once more with all its parts; None where nothing fits."""

    points: list[Point]
    best: Point | None


def fit(question: Question, vary: Sequence[str], console: Console) -> Found:
    """Asks `pd probe` about as few runs as tell. What was asked before is in its cache: an interrupted search goes on.

    UserError for what cannot be asked.
    """
    refuse_another_version()
    config, told = load_config(question.path, question.overrides), parse_vary(vary)
    every = valid_kinds(question, config, told)
    count = workers(len(every))
    console.print(f"{len(every)} kinds of runs, {count} compiled at a time", highlight=False)

    def ask(kind: Kind, batch: int) -> Point:
        point = _ask(question, kind, batch, ("--quick",))
        console.print(_said(point), highlight=False, soft_wrap=True)
        return point

    points = search(every, ask, count)
    while (chosen := best(points)) is not None:
        whole = _all_parts(question, config, chosen, told, console)
        points = [whole if point is chosen else point for point in points]
        if whole.verdict == "fits":
            return Found(points, whole)
        smaller = [batch for batch in chosen.kind.batches if batch < chosen.batch]
        if smaller and not any(p.kind == chosen.kind and p.batch == max(smaller) for p in points):
            points.append(_ask(question, chosen.kind, max(smaller), ("--quick",)))
    return Found(points, None)


def valid_kinds(question: Question, config: RunConfig, vary: Mapping[str, Sequence[Any]]) -> list[Kind]:
    """What may be asked about. UserError where one of these runs is none."""
    every = kinds(config, question.n_gpus, vary, question.said)
    for kind in every:
        for batch in kind.batches:
            load_config(question.path, question.sets(kind, batch))
    return every


def _all_parts(
    question: Question, config: RunConfig, chosen: Point, vary: Mapping[str, Any], console: Console
) -> Point:
    """``chosen`` with all parts of the run. Where the evaluation alone keeps it from fitting, with smaller batches in
    that, unless the user has said how large they are."""

    def ask(kind: Kind, why: str) -> Point:
        console.print(f"{kind.name}, batch {chosen.batch:,}: {why} …", highlight=False)
        point = _ask(question, kind, chosen.batch, ())
        console.print(_said(point), highlight=False, soft_wrap=True)
        return point

    given = {*vary} | question.said
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


def report(question: Question, found: Found, out: Path, console: Console) -> bool:
    """Prints the runs, draws them, and writes the best one's configuration as ``out``; False where nothing fits."""
    table, chosen = points_table(found.points, found.best), found.best
    console.print(table)
    title = f"{question.path.stem} on {question.n_gpus} {question.gpu.upper()}"
    picture = out.with_suffix(".png")
    if chosen is None or chosen.answer is None:
        draw(found.points, None, title, picture)
        console.print(f"picture {picture}", highlight=False, soft_wrap=True)
        console.print("[bold red]nothing fits[/]; vary smaller batches, leaner memory, or take more GPUs")
        return False
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    answer = chosen.answer
    nodes = question.n_gpus // question.per_node
    where = ("--gpu", question.gpu, "--nodes", str(nodes), "--gpus-per-node", str(question.per_node))
    asked = shlex.join(("pd", "probe", out.name, *where, *question.options))
    need = f"needs {answer['peak_gib']:.1f} of {answer['pool_gib']:.1f} GiB of each GPU ({answer['largest_part']})"
    if answer["limit_bound"]:
        need += f"; limit-bound: {answer['peak_gib_unlimited']:.1f} GiB if XLA saw no limit, so it recomputes by itself"
    header = (f"The best run on {question.n_gpus} {question.gpu.upper()} of those below; {need}.", f"  {asked}", "")
    write_config(
        question.path, question.sets(chosen.kind, chosen.batch), out, [*header, *text.getvalue().rstrip().splitlines()]
    )
    draw(found.points, chosen, title, picture)
    print_notes(answer["notes"], console)
    console.print(f"wrapper {out}\npicture {picture}", highlight=False, soft_wrap=True)
    console.print(f"[bold green]fits[/]: {chosen.kind.name}, batch {chosen.batch:,}, {need}", soft_wrap=True)
    return True


def _ask(question: Question, kind: Kind, batch: int, options: Sequence[str]) -> Point:
    where = ("--gpu", question.gpu, "--gpus-per-node", str(question.per_node))
    told = probe_apart(question.path, question.sets(kind, batch), (*where, *question.options, *options))
    if told.status == 2:
        raise UserError(told.why)
    return Point(kind, batch, told.answer, "" if told.answer is not None else told.why.splitlines()[-1])


def workers(n_kinds: int) -> int:
    """Compiles at a time: of the processors, and of the RAM that is free."""
    return max(1, min(n_kinds, os.cpu_count() or 1, int(_free_gib() // PROBE_GIB)))


def _free_gib() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    except (OSError, StopIteration):
        return PROBE_GIB


def _said(point: Point) -> str:
    if point.answer is None:
        return f"{point.kind.name}, batch {point.batch:,}: cannot be told ({point.why})"
    words = {"fits": "fits", "does_not_fit": "does not fit"}[point.verdict]
    return f"{point.kind.name}, batch {point.batch:,}: {point.answer['peak_gib']:.1f} GiB, {words}"
