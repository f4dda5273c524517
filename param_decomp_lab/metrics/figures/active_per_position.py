"""Draws how many components are active at each position of a row."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.style import BLUE, INK, QUIET, VERMILION, style_axes

COLORS = (INK, BLUE, VERMILION)
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
SIZE = 7.5


def active_per_position(counts: Float[np.ndarray, "T thresholds"], thresholds: Sequence[float]) -> Figure:
    """Draws a line for each of up to three thresholds: the number of components of all sites with λ above it at each
    position, averaged over rows.
    """
    width, height = 6.4, 3.7
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    title, subtitle = (
        "Active components at each position",
        "Number of components of all sites with λ above a threshold, mean over the rows of the evaluation.",
    )
    figure.text(0.15 / width, 1 - 0.16 / height, title, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.15 / width, 1 - 0.42 / height, subtitle, fontsize=8.5, color=QUIET, va="top")
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.62))
    style_axes(axes, SIZE)
    positions = np.arange(len(counts))
    marker = "o" if len(counts) == 1 else ""
    n = len(thresholds)
    for values, threshold, color, dashes in zip(counts.T, thresholds, COLORS[:n], DASHES[:n], strict=True):
        label = f"λ > {threshold:g}, mean {values.mean():.4g}"
        axes.plot(positions, values, color=color, linestyle=dashes, linewidth=1.2, marker=marker, label=label)
    axes.set_xlim(0, max(len(counts) - 1, 1))
    axes.set_ylim(0, max(1.08 * float(counts.max(initial=0)), 1e-9))
    axes.locator_params(axis="x", nbins=10, integer=True)
    axes.set_xlabel("position in the row", fontsize=SIZE, color=QUIET, labelpad=2)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        ncols=len(thresholds),
        fontsize=SIZE + 0.5,
        frameon=False,
        labelcolor=INK,
    )
    return figure
