"""Draws how often each component is active, and how many never are."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.grid import if_experts, site_grid
from param_decomp_lab.metrics.figures.style import BLUE, QUIET, VERMILION, title_axes

BINS_PER_DECADE = 5


def activation_density(densities: Mapping[str, Float[np.ndarray, "C"]]) -> Figure:
    """Draws a histogram over components of the share of positions at which λ exceeds the threshold, with a log x axis.

    ``densities``: site name -> one share in [0, 1] per component. Components that are never active (share exactly 0:
    dead) have a separate bar at the left.
    """
    grid = site_grid(
        list(densities),
        "Activation density",
        "Number of components that are active on this share of all positions (log scale). "
        "Orange: never active (dead); ↑ marks a bar that is cut off."
        + if_experts(densities, "Shares are of all positions; those of experts, too."),
    )
    positive = [float(values[values > 0].min()) for values in densities.values() if (values > 0).any()]
    first_decade = int(np.floor(np.log10(min([*positive, 0.1]) * 1.0001)))
    first_decade = max(first_decade, -8)
    edges = np.logspace(first_decade, 0, -first_decade * BINS_PER_DECADE + 1)
    edges[-1] = 1.0000001
    zero_left, zero_right = edges[0] * 10**-1.1, edges[0] * 10**-0.5
    ticks = [10.0**k for k in range(first_decade, 1, max(1, round(-first_decade / 4)))]
    for i, (name, values) in enumerate(densities.items()):
        axes = grid.panels[i][0]
        dead = int((values <= 0).sum())
        counts, _ = np.histogram(np.clip(values[values > 0], edges[0], 1.0), bins=edges)
        axes.set_xscale("log")
        axes.set_xlim(zero_left * 0.6, 1.3)
        axes.stairs(counts, edges, fill=True, color=BLUE)
        axes.stairs([dead], [zero_left, zero_right], fill=True, color=VERMILION)
        # Often, nearly all components are dead. Their bar may then leave the panel, with its number beside it, to keep
        # the others visible.
        top = max(1.35 * int(counts.max(initial=0)), min(dead, 4) * 1.25, 1.25)
        axes.set_ylim(0, top)
        middle = (zero_left * zero_right) ** 0.5
        if dead:
            axes.annotate(
                f"{dead} ↑" if dead > top else str(dead),
                (zero_right, min(dead, top)),
                xytext=(2, 0),
                textcoords="offset points",
                va="top",
                fontsize=grid.size - 1,
                color=VERMILION,
            )
        axes.locator_params(axis="y", nbins=4, integer=True)
        axes.set_xticks([middle, *ticks])
        axes.set_xticklabels(["0", *(f"$10^{{{round(np.log10(tick))}}}$" if tick < 1 else "1" for tick in ticks)])
        axes.minorticks_off()
        axes.tick_params(labelbottom=grid.bottom[i])
        title_axes(axes, name, f"{len(values) - dead} alive · {dead} dead · C = {len(values)}", grid.size)
        if grid.bottom[i]:
            axes.set_xlabel("share of positions", fontsize=grid.size, color=QUIET, labelpad=1)
    return grid.figure
