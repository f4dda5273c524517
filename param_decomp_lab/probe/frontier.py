"""Shows the results of `pd fit` as a table and a figure."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from param_decomp_lab.metrics.figures.save import save_figure
from param_decomp_lab.metrics.figures.style import BLUE, INK, QUIET, VERMILION, style_axes
from param_decomp_lab.probe.search import SearchPoint, frontier
from param_decomp_lab.ui.numbers import amount
from param_decomp_lab.ui.tables import plain_table

COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)


def points_table(points: Sequence[SearchPoint], chosen: SearchPoint | None) -> Table:
    """Returns a table of every probed run; `*` marks those that no other run beats, `→` the chosen one."""
    columns = ("batch", "tokens", "peak GiB", "", "PFLOP", "own GiB", "node GiB", "net GiB", "ms", "tokens/s")
    title = "Runs (arithmetic of all GPUs; GiB moved of one; ms: predicted of a step)"
    table = plain_table(title, ("", "left"), ("", "left"), *((column, "right") for column in columns))
    unbeaten = frontier(points)
    for point in points:
        mark = "→" if point is chosen else "*" if point in unbeaten else ""
        if point.answer is None:
            table.add_row(mark, point.kind.name, f"{point.batch:,}", "", "", f"unknown: {point.why}")
            continue
        moved = point.answer["bytes_moved"]
        sizes = (f"{moved[key] / 2**30:,.1f}" for key in ("memory", "within_node", "between_nodes"))
        table.add_row(
            mark,
            point.kind.name,
            f"{point.batch:,}",
            amount(point.tokens),
            f"{point.answer['peak_gib']:.1f}",
            {"fits": "fits", "does_not_fit": "too large"}[point.verdict],
            f"{point.answer['matmul_flops'] / 1e15:,.2f}",
            *sizes,
            f"{1000 * point.step_s:,.0f}",
            f"{point.tokens_per_s:,.0f}",
            style="bold" if point is chosen else "",
        )
    return table


def times_table(points: Sequence[SearchPoint], chosen: SearchPoint | None) -> Table:
    """Returns a table of every probed layout, fastest first; `→` marks the chosen one."""
    known = [point for point in points if point.answer is not None]
    size = f"batch {known[0].batch:,}, {amount(known[0].tokens)} tokens" if known else "nothing is known"
    columns = ("peak GiB", "", "node GiB", "net GiB", "collectives", "ms", "overlapping")
    title = f"Layouts ({size}; GiB of one GPU; ms predicted of a step, and if everything overlapped)"
    table = plain_table(title, ("", "left"), ("", "wrap"), *((column, "right") for column in columns))
    for point in sorted(points, key=lambda point: point.step_s):
        mark = "→" if point is chosen else ""
        if point.answer is None:
            table.add_row(mark, point.kind.name, "", f"unknown: {point.why}")
            continue
        moved = point.answer["bytes_moved"]
        sizes = (f"{moved[key] / 2**30:,.1f}" for key in ("within_node", "between_nodes"))
        table.add_row(
            mark,
            point.kind.name,
            f"{point.peak_gib:.1f}",
            {"fits": "fits", "does_not_fit": "too large"}[point.verdict],
            *sizes,
            f"{point.collectives:,}",
            f"{1000 * point.step_s:,.0f}",
            f"{1000 * point.overlapping_s:,.0f}",
            style="bold" if point is chosen else "",
        )
    return table


def draw_times(points: Sequence[SearchPoint], chosen: SearchPoint | None, title: str, file: Path) -> None:
    """Draws the peak against a step's predicted time, with a line to the bound if everything overlaps. Each mesh has a
    colour, and layouts that fit are filled.
    """
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    answered = [point for point in points if point.answer is not None]
    meshes = list(dict.fromkeys(_mesh_name(point) for point in answered))
    for point in answered:
        colour = COLOURS[meshes.index(_mesh_name(point)) % len(COLOURS)]
        axes.plot(
            [1000 * point.overlapping_s, 1000 * point.step_s], [point.peak_gib] * 2,
            color=colour, linewidth=1, alpha=0.25, zorder=2,
        )  # fmt: skip
        face = colour if point.verdict == "fits" else "white"
        axes.scatter(1000 * point.step_s, point.peak_gib, s=28, color=face, edgecolors=colour, zorder=3)
    for name, colour in zip(meshes, COLOURS * len(meshes), strict=False):
        axes.scatter([], [], s=28, color=colour, label=name)
    _memory_lines(axes, answered)
    if chosen is not None and chosen.answer is not None:
        axes.scatter(
            1000 * chosen.step_s, chosen.peak_gib, s=140, facecolors="none", edgecolors=INK, linewidths=1.2, zorder=4
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    style_axes(axes, 8)
    axes.set_xlabel("predicted ms a step; the line goes to where everything overlaps", fontsize=8, color=QUIET)
    axes.set_ylabel("GiB of each GPU, filled where it fits", fontsize=8, color=QUIET)
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    if meshes:
        figure.legend(frameon=False, fontsize=8, loc="outside lower left", ncols=3)
    save_figure(figure, file)


def _mesh_name(point: SearchPoint) -> str:
    return point.kind.name.partition(";")[0]


def _memory_lines(axes: Axes, answered: Sequence[SearchPoint]) -> None:
    if not answered:
        return
    answer = answered[0].answer or {}
    for value, words in ((answer["pool_gib"], "can be used"), (answer["capacity_gib"], answer["gpu"].upper())):
        axes.axhline(value, color=QUIET, linewidth=0.9, linestyle="--" if words == "can be used" else "-")
        axes.text(
            0.005, value, f"{words}, {value:.0f} GiB", transform=axes.get_yaxis_transform(),
            fontsize=7, color=QUIET, va="bottom",
        )  # fmt: skip


def draw(points: Sequence[SearchPoint], chosen: SearchPoint | None, title: str, file: Path) -> None:
    """Draws the peak against the tokens of a step, with a line for each kind of run. Runs that fit are filled."""
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    answered = [point for point in points if point.answer is not None]
    names = list(dict.fromkeys(point.kind.name for point in answered))
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        own = [point for point in answered if point.kind.name == name]
        tokens, peaks = [p.tokens for p in own], [(p.answer or {})["peak_gib"] for p in own]
        axes.plot(tokens, peaks, color=colour, linewidth=1, alpha=0.6, zorder=2)
        for fits, face in ((True, colour), (False, "white")):
            some = [i for i, p in enumerate(own) if (p.verdict == "fits") == fits]
            label = name if fits or not any(p.verdict == "fits" for p in own) else None
            axes.scatter(
                [tokens[i] for i in some],
                [peaks[i] for i in some],
                s=28,
                color=face,
                edgecolors=colour,
                zorder=3,
                label=label,
            )
    _memory_lines(axes, answered)
    if chosen is not None and chosen.answer is not None:
        axes.scatter(
            chosen.tokens, chosen.answer["peak_gib"], s=140, facecolors="none", edgecolors=INK, linewidths=1.2, zorder=4
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({p.tokens for p in answered})
    axes.set_xticks(ticks, [amount(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    style_axes(axes, 8)
    axes.set_xlabel("tokens in a step, filled where the run fits", fontsize=8, color=QUIET)
    axes.set_ylabel("GiB of each GPU", fontsize=8, color=QUIET)
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    figure.legend(frameon=False, fontsize=8, loc="outside lower left", ncols=3)
    save_figure(figure, file)
