"""Draws how many components are active at each site."""

from collections.abc import Mapping

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.style import BLUE, INK, QUIET, style_axes

SIZE = 7.5
ROW = 0.2
"""Height of a site's bar in inches."""
HEAD, FOOT = 0.75, 0.5


def l0_by_site(l0: Mapping[str, float], counts: Mapping[str, int], where: str) -> Figure:
    """Draws a bar for each site: ``l0``, the mean number of active components at a position, out of ``counts`` (C).
    ``where``: the data on which it was counted, for the subtitle.
    """
    width, height = 6.4, HEAD + FOOT + max(ROW * len(l0), 0.5)
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(
        0.15 / width, 1 - 0.16 / height, "Active components at each site", fontsize=12, fontweight="bold", color=INK,
        va="top",
    )  # fmt: skip
    figure.text(0.15 / width, 1 - 0.42 / height, where, fontsize=8.5, color=QUIET, va="top")
    axes = figure.add_axes((0.36, FOOT / height, 0.58, 1 - (HEAD + FOOT) / height))
    style_axes(axes, SIZE)
    axes.grid(visible=False)
    rows = range(len(l0))
    axes.barh(rows, list(l0.values()), height=0.7, color=BLUE)
    most = max([*l0.values(), 1e-9])
    for row, (site, value) in zip(rows, l0.items(), strict=True):
        axes.annotate(
            f"{value:.3g} of {counts[site]:,}", (value, row), xytext=(3, 0), textcoords="offset points", va="center",
            fontsize=SIZE - 1, color=QUIET,
        )  # fmt: skip
    axes.set_yticks(list(rows), list(l0))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(l0) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * most)
    axes.set_xlabel("L0: components active at a position, mean", fontsize=SIZE, color=QUIET, labelpad=2)
    return figure
