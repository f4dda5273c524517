"""Prints the result of a probe: tables, and the verdict as the last line."""

import os
from collections.abc import Iterable
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from param_decomp_aot.buffers import Buffer
from param_decomp_aot.roofline import Precision
from param_decomp_aot.scopes import stage
from param_decomp_lab.probe.answer import GIB, ProbeAnswer
from param_decomp_lab.probe.measure import MeasuredProgram
from param_decomp_lab.probe.subject import STEP
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.numbers import duration
from param_decomp_lab.ui.tables import plain_table

PRECISIONS = get_args(Precision)
WIDTH = 112
VERDICTS = {"fits": ("fits", "bold green"), "does_not_fit": ("does not fit", "bold red")}


def show(answer: ProbeAnswer, console: Console, n_buffers: int = 16) -> None:
    """Prints the whole answer."""
    console.print(_overview(answer))
    console.print("", _parts(answer))
    console.print(_arguments(answer))
    console.print(_buffers(answer, n_buffers))
    console.print(_work(answer))
    console.print(verdict_line(answer), soft_wrap=True)


def table_console() -> Console:
    """Returns the console for the answer, wide enough for its tables if the output has no width (a file, a pipe)."""
    console = PlainConsole()
    return console if console.is_terminal or "COLUMNS" in os.environ else PlainConsole(width=WIDTH)


def verdict_line(answer: ProbeAnswer) -> Text:
    """``fits: 14.4 of 159.1 GiB (9 %), most of it in the training step``."""
    words, style = VERDICTS[answer.verdict]
    need, usable = answer.peak / GIB, answer.pool.usable / GIB
    line = Text.assemble((words, style), f": {need:.1f} of {usable:.1f} GiB ({need / usable:.0%}) on each GPU")
    line.append(f", needed by the {answer.largest}" if len(answer.parts) > 1 else f", the {STEP} alone was asked about")
    if answer.limit_bound:
        assert answer.unlimited is not None
        line.append(f"; limit-bound: {answer.unlimited.peak / GIB:.1f} GiB if XLA saw no limit")
    return line


def _overview(answer: ProbeAnswer) -> RenderableType:
    subject, pool = answer.subject, answer.pool
    n = subject.mesh.n_devices
    nodes, rest = divmod(n, answer.per_node)
    gpus = f"{nodes} node{'s'[: nodes > 1]} × {answer.per_node}" if nodes and not rest else f"{n}"
    rows = {
        "run": subject.title,
        **subject.described,
        "GPUs": f"{gpus} {answer.card.name.upper()} of {pool.capacity / GIB:.1f} GiB, {pool.usable / GIB:.1f} to use",
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows.items():
        grid.add_row(label, Text(value))
    return grid


def _parts(answer: ProbeAnswer) -> RenderableType:
    columns = ("peak", "temporary", "arguments", "results", "elsewhere", "host", "compiled in")
    table = plain_table(
        "What each part of the run needs of a GPU (GiB)", ("", "left"), *((c, "right") for c in columns)
    )

    def row(name: str, part: MeasuredProgram, style: str) -> None:
        memory = part.memory
        sizes = part.peak, memory.temp, memory.arguments, memory.output - memory.alias, part.elsewhere, memory.host
        seconds = duration(part.lower_s + part.compile_s) if part.fresh else "cached"
        table.add_row(name, *(_gib(size) for size in sizes), seconds, style=style)

    for name, part in answer.parts.items():
        row(name, part, "bold" if name == answer.largest and len(answer.parts) > 1 else "")
    if answer.unlimited is not None:
        row(f"{STEP}, no limit", answer.unlimited, "dim")
    return table


def _arguments(answer: ProbeAnswer) -> RenderableType:
    groups = answer.parts[STEP].groups
    table = plain_table("Arguments of the step (GiB on each GPU)", ("", "left"), ("", "right"))
    for name, size in groups.items():
        table.add_row(name, _gib(size))
    return table


def _buffers(answer: ProbeAnswer, most: int) -> RenderableType:
    """Returns a table of buffers; those of the same shape and scope share one line."""
    step = answer.step
    table = plain_table(
        "Alive at the peak of the step (GiB)",
        ("", "right"),
        ("", "left"),
        ("shape on a GPU", "left"),
        ("in the code", "wrap"),
    )
    groups = _alike(b for b in step.buffers if b.role != "host")
    for group in groups[:most]:
        b, times = group[0], f"{len(group)} × " if len(group) > 1 else ""
        where = stage(b.scope, 3) or b.instruction
        table.add_row(_gib(sum(x.n_bytes for x in group)), b.role, f"{times}{b.shape}", f"{where}  {b.source}".strip())
    rest = sum(x.n_bytes for group in groups[most:] for x in group) + step.smaller
    table.add_section()
    table.add_row(_gib(rest), "", "", "in smaller buffers")
    table.add_row(_gib(step.unused), "", "", "between buffers, unused at this moment")
    table.add_row(_gib(step.planned), "", "", f"altogether; XLA says {_gib(answer.parts[STEP].memory.peak)}")
    return table


def _alike(buffers: Iterable[Buffer]) -> list[list[Buffer]]:
    groups: dict[tuple[str, ...], list[Buffer]] = {}
    for b in buffers:
        groups.setdefault((b.role, b.shape, b.scope, b.source), []).append(b)
    return sorted(groups.values(), key=lambda group: -sum(b.n_bytes for b in group))


def _work(answer: ProbeAnswer) -> RenderableType:
    step, times = answer.step, answer.roofline
    n = answer.subject.mesh.n_devices
    table = plain_table("What one GPU does in a step", ("", "left"), ("", "right"), ("at rates it reaches", "right"))

    def row(name: str, amount: str, seconds: float) -> None:
        table.add_row(name, amount, f"{1000 * seconds:,.1f} ms")

    for precision in sorted(step.flops, key=PRECISIONS.index):
        flops = f"{step.flops[precision] / n / 1e12:,.1f} TFLOP"
        row(f"matrix products, {precision}", flops, times.multiplying[precision])
    row("own memory, by products meanwhile", f"{step.products / GIB:,.1f} GiB", times.waiting_for_memory)
    row("own memory, by all else", f"{(step.hbm - step.products) / GIB:,.1f} GiB", times.memory - times.products)
    row("sent within the node", f"{step.within / GIB:,.2f} GiB", times.node_links)
    row("sent between nodes", f"{step.across / GIB:,.2f} GiB", times.network)
    if times.latency:
        row("collectives, latency", f"{sum(c.count for c in step.collectives.values()):,}", times.latency)
    lines: list[RenderableType] = [table]
    if step.collectives:
        lines.append(_collectives(answer))
    tokens = answer.subject.tokens / times.one_by_one
    each = f" ({tokens / n:,.0f} on each GPU)" if n > 1 else ""
    lines += [
        Text(f"predicted step {1000 * times.one_by_one:,.0f} ms, {tokens:,.0f} tokens/s{each}"),
        Text(
            f"at least {1000 * times.least:,.0f} ms, if all of it overlapped, bound by {times.bound_by}; "
            f"rates reached: {answer.card.rates.source}",
            style="dim",
        ),
    ]
    if answer.subject.mesh.tensor > 1:
        lines.append(Text("products that all GPUs along tensor make alike are counted as if they shared them", "dim"))
    lines += [
        Text(f"counted once, because its number of runs is unknown: {line}", style="dim") for line in step.unknown
    ]
    return Group(*lines, "")


def _collectives(answer: ProbeAnswer) -> RenderableType:
    columns = ("times", "MiB each", "GiB in the node", "GiB between", "one by one")
    table = plain_table("Collectives as executed, sent by one GPU", ("", "left"), *((c, "right") for c in columns))
    for kind, total in answer.step.collectives.items():
        table.add_row(
            kind,
            f"{total.count:,}",
            f"{total.payload / total.count / 2**20:,.1f}",
            _gib(total.within),
            _gib(total.across),
            f"{1000 * answer.collective_seconds(kind, total):,.1f} ms",
        )
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
