"""`pd fit`: the best run of a configuration that fits on given GPUs, and the configuration to start it with."""

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from param_decomp_lab.config import load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.apart import probe_apart
from param_decomp_lab.probe.frontier import draw, points_table
from param_decomp_lab.probe.search import Kind, Point, best, search
from param_decomp_lab.probe.vary import kinds, parse_vary
from param_decomp_lab.probe.write_config import write_config

PROBE_GIB = 4.5
"""RAM of one `pd probe`, at most (docs/measurements/probe.md)."""


@dataclass(frozen=True)
class Question:
    """``overrides``: `--set` of the user's, which hold for every run. ``options``: of `pd probe`, passed on."""

    path: Path
    overrides: tuple[str, ...]
    gpu: str
    n_gpus: int
    per_node: int
    options: tuple[str, ...] = ()

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
    config = load_config(question.path, question.overrides)
    every = kinds(config, question.n_gpus, parse_vary(vary))
    for kind in every:
        for batch in kind.batches:
            load_config(question.path, question.sets(kind, batch))
    count = workers(len(every))
    console.print(f"{len(every)} kinds of runs, {count} compiled at a time", highlight=False)

    def ask(kind: Kind, batch: int) -> Point:
        point = _ask(question, kind, batch, ("--quick",))
        console.print(_said(point), highlight=False, soft_wrap=True)
        return point

    points = search(every, ask, count)
    while (chosen := best(points)) is not None:
        console.print(f"{chosen.kind.name}, batch {chosen.batch:,}: all parts of the run …", highlight=False)
        whole = _ask(question, chosen.kind, chosen.batch, ())
        console.print(_said(whole), highlight=False, soft_wrap=True)
        points = [whole if point is chosen else point for point in points]
        if whole.verdict == "fits":
            return Found(points, whole)
        smaller = [batch for batch in chosen.kind.batches if batch < chosen.batch]
        if smaller and not any(p.kind == chosen.kind and p.batch == max(smaller) for p in points):
            points.append(_ask(question, chosen.kind, max(smaller), ("--quick",)))
    return Found(points, None)


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
    asked = f"pd probe {out.name} --gpu {question.gpu} --nodes {nodes} --gpus-per-node {question.per_node}"
    need = f"needs {answer['peak_gib']:.1f} of {answer['pool_gib']:.1f} GiB of each GPU ({answer['largest_part']})"
    header = (f"The best run on {question.n_gpus} {question.gpu.upper()} of those below; {need}.", f"  {asked}", "")
    write_config(
        question.path, question.sets(chosen.kind, chosen.batch), out, [*header, *text.getvalue().rstrip().splitlines()]
    )
    draw(found.points, chosen, title, picture)
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
