"""Draws which components of each site are important at which token."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font

from param_decomp_lab.metrics.figures.grid import if_experts, n_columns
from param_decomp_lab.metrics.figures.heat_maps import (
    DPI,
    FONT_SIZE,
    MAX_CELL,
    MAX_HEIGHT,
    MAX_WIDTH,
    HeatMap,
    draw_heat_map,
    label_columns,
    stack_grid,
    style_bar,
)  # fmt: skip
from param_decomp_lab.metrics.figures.permuted_ci import IMPORTANCE
from param_decomp_lab.metrics.figures.style import INK, QUIET, title_axes
from param_decomp_lab.metrics.ground_truth import OFF_ABOVE, ON_BELOW

LINE = 10
"""Height in pixels of a position whose token is written beside it."""
MOST_NAMED = 96
"""The most positions of a map whose tokens are written: with more, a map would be higher than a screen."""
FEW_SITES = 32
"""With more sites than this, the maps are smaller and have no tokens."""
LONGEST = 9
"""The number of characters of a token that fit beside a map."""


def ci_heat_map(
    sites: Mapping[str, tuple[Integer[np.ndarray, "n"], Float[np.ndarray, "rows T n"]]],
    tokens: Sequence[Sequence[str]] | None,
) -> Figure:
    """Draws heat maps of λ, position x component, with the rows below each other.

    ``sites``: site name -> the components' numbers in the order of the columns, and their λ. ``tokens``: those of the
    same rows and positions, written beside the leftmost maps if there are few sites and positions; None shows only
    positions.
    """
    n_rows, n_positions, _ = next(iter(sites.values()))[1].shape
    lines = n_rows * n_positions
    named = tokens is not None and len(sites) <= FEW_SITES and lines <= MOST_NAMED
    sizes = [_size(lines, importances.shape[-1], named, len(sites) > FEW_SITES) for _, importances in sites.values()]
    figure, stacks = stack_grid(
        list(sites),
        [[size] for size in sizes],
        "Causal importances at the first positions",
        f"λ of the components of largest mean λ at the first {n_positions} position{'s' * (n_positions > 1)} of "
        f"{n_rows} row{'s, one below the other' if n_rows > 1 else ''}. The colours step at {OFF_ABOVE} and {ON_BELOW}."
        + if_experts(sites, "White where no expert is taken whose components these are."),
        right=75,
    )
    columns = n_columns(list(sites))
    for i, (name, size, [axes]) in enumerate(zip(sites, sizes, stacks, strict=True)):
        components, importances = sites[name]
        values = importances.reshape(lines, -1)
        image = draw_heat_map(axes, values, size, IMPORTANCE, 0.0, 1.0)
        label_columns(axes, components, size)
        for row in range(1, n_rows):
            axes.axhline(row * n_positions - 0.5, color=INK, linewidth=0.8)
        if i % columns == 0 and named:
            assert tokens is not None
            _name_tokens(axes, [token for row in tokens for token in row])
        elif i % columns == 0:
            _number_positions(axes, n_rows, n_positions, size)
        else:
            axes.tick_params(left=False, labelleft=False)
        above = (values > OFF_ABOVE).sum(axis=1).mean()
        title_axes(
            axes, name, f"{above:.3g} of these {values.shape[1]} above {OFF_ABOVE} per position", FONT_SIZE + 0.5
        )
    # Long enough that its labels do not overlap beside a map of any height.
    width, height = figure.get_size_inches() * DPI
    top = stacks[0][0].get_position().y1
    bar = figure.add_axes(((width - 60) / width, top - 150 / height, 10 / width, 150 / height))
    figure.colorbar(image, cax=bar, ticks=[0, OFF_ABOVE, 0.5, ON_BELOW, 1])
    style_bar(bar)
    return figure


def _size(lines: int, columns: int, named: bool, many: bool) -> HeatMap:
    """Returns the size of a site's map: a line for every named token, else the usual size, or half of it for many
    sites.
    """
    widest, highest = (MAX_WIDTH // 2, MAX_HEIGHT // 2) if many else (MAX_WIDTH, MAX_HEIGHT)
    columns_per_cell, rows_per_cell = ceil(columns / widest), 1 if named else ceil(lines / highest)
    cells_x, cells_y = ceil(columns / columns_per_cell), ceil(lines / rows_per_cell)
    width, height = min(MAX_CELL, widest // cells_x), LINE if named else min(LINE, highest // cells_y)
    return HeatMap(columns, cells_x * width, cells_y * height, rows_per_cell, columns_per_cell)


def _name_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    shown = [token if len(token) <= LONGEST else f"{token[: LONGEST - 1]}…" for token in tokens]
    axes.set_yticks(range(len(shown)), [_drawable(token) for token in shown])
    axes.tick_params(axis="y", labelsize=6, length=0)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)  # "$" is a token like any other


def _number_positions(axes: Axes, n_rows: int, n_positions: int, size: HeatMap) -> None:
    """Labels the first position of every row, and round numbers between."""
    per_row = max(1, round(size.height / n_rows / 24))
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n_positions / s <= per_row), n_positions)
    places = [
        (row * n_positions + p, p)
        for row in range(n_rows)
        for p in range(0, n_positions, step)
        if p == 0 or n_positions - p >= step / 2
    ]
    axes.set_yticks([place for place, _ in places], [str(p) for _, p in places])
    several = f", strongest of {size.rows_per_cell}" if size.rows_per_cell > 1 else ""
    axes.set_ylabel(f"position{several}", fontsize=FONT_SIZE, color=QUIET, labelpad=1)


@cache
def _font() -> FT2Font:
    return FT2Font(findfont(FontProperties()))


def _drawable(text: str) -> str:
    """Returns the text with boxes for characters that the font of figures lacks."""
    return "".join(c if _font().get_char_index(ord(c)) else "□" for c in text)
