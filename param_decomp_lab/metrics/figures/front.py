"""Draws runs by L0 and error, and the front: the runs that no other run beats in both."""

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.style import BLUE, INK, QUIET, VERMILION, style_axes

SIZE = 7.5
FEW = 16
"""The most runs that are named in the figure."""


def front_of_runs(
    points: Sequence[tuple[str, float, float]], front: Sequence[tuple[float, float]], error: str, unit: str
) -> Figure:
    """Draws the runs. ``points``: label, L0 and error of each run. ``front``: L0 and error of the runs on the front, by
    L0, joined by a line. ``error``, ``unit``: of the vertical axis.
    """
    width, height = 6.4, 4.0
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    title, subtitle = "L0 and error of each run", "Orange: on the front, as no other run is as low in both."
    figure.text(0.15 / width, 1 - 0.16 / height, title, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.15 / width, 1 - 0.42 / height, subtitle, fontsize=8.5, color=QUIET, va="top")
    axes = figure.add_axes((0.12, 0.12, 0.84, 0.68))
    style_axes(axes, SIZE)
    axes.plot([x for x, _ in front], [y for _, y in front], color=VERMILION, linewidth=1.1, drawstyle="steps-post")
    on_front = set(front)
    for label, x, y in points:
        axes.plot([x], [y], "o", markersize=5, color=VERMILION if (x, y) in on_front else BLUE)
        if len(points) <= FEW:
            text = axes.annotate(
                label, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=SIZE - 0.5, color=QUIET
            )
            text.set_parse_math(False)  # a name may have any character
    if points and min(y for *_, y in points) > 0:
        axes.set_yscale("log")
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel("L0: components active at a position, mean over sites", fontsize=SIZE, color=QUIET, labelpad=2)
    axes.set_ylabel(f"{error}, {unit}" if unit else error, fontsize=SIZE, color=QUIET, labelpad=2)
    return figure
