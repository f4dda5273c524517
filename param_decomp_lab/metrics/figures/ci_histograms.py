"""Draws the distribution of the causal importances of every site."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.grid import if_experts, site_grid
from param_decomp_lab.metrics.figures.style import BLUE, QUIET, title_axes


def ci_histograms(
    counts: Mapping[str, Integer[np.ndarray, "bins"]],
    edges: Float[np.ndarray, "bins+1"],
    of_experts: str = "Of experts, over the positions that take them.",
) -> Figure:
    """Draws a histogram of the lower causal importances λ of each site over all components and positions, with log
    counts.

    ``counts``: site name -> number of (position, component) pairs in every bin; ``edges``: the bins' limits, shared.
    ``of_experts``: added to the subtitle if some sites are experts'. A healthy decomposition has nearly everything in
    the first bin and a separate heap at 1.
    """
    grid = site_grid(
        list(counts),
        "Causal importances",
        "How often λ takes each value, over positions and components (log scale). "
        "Quiet line: share in the first and in the last bin." + if_experts(counts, of_experts),
        share_y=True,
    )
    top = max(max((int(values.max(initial=0)) for values in counts.values()), default=1), 1)
    for i, (name, values) in enumerate(counts.items()):
        axes = grid.panels[i][0]
        axes.set_yscale("log")
        axes.set_ylim(0.6, top * 2.5)
        axes.set_xlim(float(edges[0]), float(edges[-1]))
        axes.stairs(np.maximum(values, 1e-9), edges, baseline=0.6, fill=True, color=BLUE)
        axes.minorticks_off()
        axes.tick_params(labelbottom=grid.bottom[i], labelleft=grid.left[i])
        total = int(values.sum())
        detail = f"{values[0] / total:.1%} lowest · {values[-1] / total:.1%} highest" if total else "nothing counted"
        title_axes(axes, name, detail, grid.size)
        if grid.bottom[i]:
            axes.set_xlabel("λ", fontsize=grid.size, color=QUIET, labelpad=1)
    return grid.figure
