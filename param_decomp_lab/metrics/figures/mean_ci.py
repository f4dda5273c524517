"""Draws the mean causal importance of every component, sorted, which shows where the live ones end."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.grid import if_experts, site_grid
from param_decomp_lab.metrics.figures.style import BLUE, QUIET, VERMILION, title_axes

FLOOR = 1e-7
"""Means below this are drawn at the bottom edge of the log panel."""


def mean_ci_per_component(means: Mapping[str, Float[np.ndarray, "C"]]) -> Figure:
    """Draws the components of each site sorted by descending mean λ: linear scale on the left, log scale on the right.

    ``means``: site name -> mean of λ over positions, one number per component. A sharp step between live and dead
    components shows that a decomposition has settled.
    """
    grid = site_grid(
        list(means),
        "Mean causal importance per component",
        "Components sorted by mean λ: linear on the left, log on the right. Components at exactly zero are orange."
        + if_experts(means, "Means are over all positions; those of experts, too."),
        panels=2,
    )
    for i, (name, values) in enumerate(means.items()):
        ordered = np.sort(np.asarray(values, dtype=np.float64))[::-1]
        zeros = int((ordered <= 0).sum())
        linear, log = grid.panels[i]
        x = np.arange(len(ordered) + 1)
        for axes, floor in ((linear, 0.0), (log, FLOOR)):
            axes.set_xlim(0, max(len(ordered), 1))
            # A polygon and a line, because `stairs` takes 0.1 s at C = 2000, and each site has two panels.
            y = np.maximum(np.append(ordered, ordered[-1:]), floor)[: len(x)]
            axes.fill_between(x, y, floor, step="post", color=BLUE, alpha=0.25, linewidth=0)
            axes.plot(x, y, drawstyle="steps-post", color=BLUE, linewidth=1.1)
            axes.tick_params(labelbottom=True)
            axes.set_xticks(sorted({0, len(ordered)}))
            if zeros:
                start = len(ordered) - zeros
                axes.axvspan(start, len(ordered), ymax=0.03, color=VERMILION, linewidth=0)
        top = float(ordered[0]) if len(ordered) and ordered[0] > 0 else 1.0
        linear.set_ylim(0, top * 1.08)
        linear.locator_params(axis="y", nbins=4)
        log.set_yscale("log")
        log.set_ylim(min(FLOOR, top / 10), max(top * 2, 1.0))
        log.set_yticks([1.0, 1e-2, 1e-4, 1e-6])
        log.minorticks_off()
        above = [int((ordered > threshold).sum()) for threshold in (0.1, 0.001)]
        title_axes(linear, name, f"{above[0]} above 0.1 · C = {len(ordered)}", grid.size, panels=2)
        title_axes(log, "", f"{above[1]} above 0.001 · {zeros} at 0", grid.size)
        if grid.bottom[i]:
            for axes in (linear, log):
                axes.set_xlabel("component", fontsize=grid.size, color=QUIET, labelpad=0)
    return grid.figure
