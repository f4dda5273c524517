"""Draws which components each feature of a toy model needs."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.heat_maps import (
    DPI,
    FONT_SIZE,
    draw_heat_map,
    heat_map_sizes,
    label_columns,
    stack_grid,
    style_bar,
)  # fmt: skip
from param_decomp_lab.metrics.figures.style import QUIET, title_axes
from param_decomp_lab.metrics.ground_truth import OFF_ABOVE, ON_BELOW

# The colours step where errors begin and end, so a perfect recovery of an identity is nearly white or nearly black
# everywhere.
IMPORTANCE = LinearSegmentedColormap.from_list(
    "importance",
    [
        (0.0, "#ffffff"),
        (OFF_ABOVE, "#f3f1ee"),
        (OFF_ABOVE, "#f9d9a6"),
        (0.4, "#E69F00"),
        (0.65, "#7f93a0"),
        (ON_BELOW, "#3f8fc4"),
        (ON_BELOW, "#0c4a75"),
        (1.0, "#002a47"),
    ],
    N=1001,
)


def permuted_ci(
    importances: Mapping[str, Float[np.ndarray, "features C"]],
    orders: Mapping[str, Integer[np.ndarray, "C"]],
    details: Mapping[str, str] | None = None,
) -> Figure:
    """Draws heat maps of λ, feature x component, with the components in the given order.

    ``importances``: site name -> λ while one feature at a time is on (section 11). ``orders``: site name -> every
    component once (``Matching.columns`` or ``dense_columns``). ``details``: site name -> a note, such as "identity:
    error 0". `n_shown` decides how many components are drawn, and the panel says how many are left out.
    """
    shown = {name: n_shown(values, orders[name]) for name, values in importances.items()}
    sizes = [heat_map_sizes([len(values)], shown[name]) for name, values in importances.items()]
    figure, stacks = stack_grid(
        list(importances),
        sizes,
        "Causal importance of each component for each feature",
        "λ when one feature at a time is on: a row for every feature, a column for every component. "
        f"The colours step at {OFF_ABOVE} and {ON_BELOW}.",
        right=75,
    )
    for name, [size], [axes] in zip(importances, sizes, stacks, strict=True):
        values, order = importances[name], orders[name]
        kept = order[: shown[name]]
        image = draw_heat_map(axes, values[:, kept], size, IMPORTANCE, 0.0, 1.0)
        label_columns(axes, kept, size)
        axes.set_ylabel("feature", fontsize=FONT_SIZE, color=QUIET, labelpad=1)
        cut = len(order) - len(kept)
        lines = [(details or {}).get(name, ""), f"{cut} further columns below {OFF_ABOVE}" if cut else ""]
        title_axes(axes, name, " · ".join(line for line in lines if line), FONT_SIZE + 0.5)
    # Long enough that its labels do not overlap beside a map of any height.
    width, height = figure.get_size_inches() * DPI
    bar = figure.add_axes(
        ((width - 60) / width, stacks[0][0].get_position().y1 - 150 / height, 10 / width, 150 / height)
    )
    figure.colorbar(image, cax=bar, ticks=[0, OFF_ABOVE, 0.5, ON_BELOW, 1])
    style_bar(bar)
    return figure


def n_shown(importances: Float[np.ndarray, "features C"], order: Integer[np.ndarray, "C"]) -> int:
    """Returns how many columns to draw: up to the last one with an entry above 0.1, but at least as many as there are
    features (or C).
    """
    above = np.flatnonzero((importances[:, order] > OFF_ABOVE).any(axis=0))
    return max(min(importances.shape), int(above.max(initial=-1)) + 1)
