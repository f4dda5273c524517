"""Draws a grid of heat maps, one stack for each site, whose cells are whole pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import wrap

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from param_decomp_lab.metrics.figures.grid import n_columns
from param_decomp_lab.metrics.figures.style import INK, QUIET, style_axes

DPI = 110
MAX_WIDTH, MAX_HEIGHT = 520, 310
"""The largest size of one map, in pixels."""
MIN_HEIGHT = 120
"""The least height of a row of stacks and, if possible, of a map with many more columns than rows."""
MAX_CELL = 36
"""Side of a cell in pixels, if the matrix is small."""
MIN_CELL_HEIGHT = 3
"""The least height of a cell if there is room, since a lone cell of one pixel is easily overlooked."""
MIN_STACK_WIDTH = 300
"""The least width of a stack in pixels: its line of detail is longer than a map of 5 columns is wide."""
MIN_FIGURE_WIDTH = 600
"""The least width of a figure, which fits the longest title."""
FONT_SIZE = 7.5


@dataclass(frozen=True)
class HeatMap:
    """The size in pixels of a map with this number of ``columns``, and the number of entries per cell in each
    direction.
    """

    columns: int
    width: int
    height: int
    rows_per_cell: int
    columns_per_cell: int

    @property
    def pixels_per_column(self) -> float:
        return self.width / self.columns


def heat_map_sizes(rows: Sequence[int], columns: int) -> list[HeatMap]:
    """Returns the sizes of maps that are stacked and share their columns; map i has ``rows[i]`` rows.

    Cells are square if there is room, else narrow or low; a cell that would be below a pixel stands for several
    entries.
    """
    columns_per_cell = ceil(columns / MAX_WIDTH)
    cells_x = ceil(columns / columns_per_cell)
    rows_per_cell = [ceil(n / MAX_HEIGHT) for n in rows]
    cells_y = [ceil(n / per_cell) for n, per_cell in zip(rows, rows_per_cell, strict=True)]
    square = MAX_HEIGHT // max(cells_y)
    width = min(MAX_CELL, MAX_WIDTH // cells_x, max(square, MIN_STACK_WIDTH // cells_x))
    heights = [min(MAX_CELL, MAX_HEIGHT // n, max(width, MIN_CELL_HEIGHT, MIN_HEIGHT // n)) for n in cells_y]
    return [
        HeatMap(columns, cells_x * width, n * height, per_cell, columns_per_cell)
        for n, height, per_cell in zip(cells_y, heights, rows_per_cell, strict=True)
    ]


def stack_grid(
    names: Sequence[str],
    stacks: Sequence[Sequence[HeatMap]],
    title: str,
    subtitle: str,
    *,
    beside: int = 0,
    gap: int = 0,
    right: int = 15,
) -> tuple[Figure, list[list[Axes]]]:
    """Returns an empty figure and the axes of its maps: site i has ``stacks[i]``, from top to bottom.

    ``beside``: pixels kept free at the right of every stack for a colour bar; ``gap``: between the maps of a stack;
    ``right``: at the right of the whole figure.
    """
    assert names, "a figure needs at least one site"
    n = n_columns(names)
    rows = [range(start, min(start + n, len(names))) for start in range(0, len(names), n)]
    widths = [
        max(MIN_STACK_WIDTH, *(size.width + beside for stack in stacks[i::n] for size in stack)) for i in range(n)
    ]
    tall = [sum(size.height for size in stack) + gap * (len(stack) - 1) for stack in stacks]
    heights = [max(MIN_HEIGHT, *(tall[i] for i in row)) for row in rows]
    left, top, bottom, between_x, between_y = 60, 125, 50, 48, 80
    width = max(left + right + sum(widths) + between_x * (n - 1), MIN_FIGURE_WIDTH)
    height = top + bottom + sum(heights) + between_y * (len(rows) - 1)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(16 / width, 1 - 18 / height, title, fontsize=12, fontweight="bold", color=INK, va="top")
    lines = wrap(subtitle, int((width - 33) / DPI * 72 / (8.5 * 0.54)))
    figure.text(16 / width, 1 - 46 / height, "\n".join(lines), fontsize=8.5, color=QUIET, va="top")
    axes: list[list[Axes]] = []
    for number, row in enumerate(rows):
        for column, i in enumerate(row):
            x = left + sum(widths[:column]) + between_x * column
            y = height - top - sum(heights[:number]) - between_y * number
            axes.append([])
            for size in stacks[i]:
                y -= size.height
                place = (x / width, y / height, size.width / width, size.height / height)
                axes[-1].append(figure.add_axes(place))
                y -= gap
    return figure, axes


def draw_heat_map(
    axes: Axes, values: Float[np.ndarray, "rows columns"], size: HeatMap, colours: Colormap, low: float, high: float
) -> AxesImage:
    """Draws ``values`` into ``axes``, with one colour for each cell and row 0 at the top. A cell of several entries
    shows the strongest.
    """
    cells = strongest(strongest(values, size.rows_per_cell).T, size.columns_per_cell).T
    extent = (-0.5, cells.shape[1] * size.columns_per_cell - 0.5, cells.shape[0] * size.rows_per_cell - 0.5, -0.5)
    image = axes.imshow(cells, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest", extent=extent)
    style_axes(axes, FONT_SIZE - 0.5)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color("#b9c1c8")
        spine.set_linewidth(0.8)
    # A locator would put halves beside a single row.
    if len(values) <= 2:
        axes.set_yticks(range(len(values)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(max(2, min(size.height // 24, 8)), integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(max(2, min(size.width // 36, 8)), integer=True))
    return image


def style_bar(axes: Axes) -> None:
    """Styles the frame and tick labels of an upright colour bar."""
    style_axes(axes, FONT_SIZE - 0.5)
    for spine in axes.spines.values():
        spine.set_color("#b9c1c8")
        spine.set_linewidth(0.8)


def label_columns(axes: Axes, order: Integer[np.ndarray, "columns"], size: HeatMap) -> None:
    """Labels every column with the number of its component if that fits, else with positions in the order."""
    digits = len(str(max(order, default=0)))
    if size.pixels_per_column >= max(20, 7 * digits - 1):
        axes.set_xticks(range(len(order)), [str(component) for component in order])
        axes.set_xlabel("component", fontsize=FONT_SIZE, color=QUIET, labelpad=1)
    else:
        several = f", strongest of {size.columns_per_cell}" if size.columns_per_cell > 1 else ""
        axes.set_xlabel("place of the component in this order" + several, fontsize=FONT_SIZE, color=QUIET, labelpad=1)


def strongest(values: Float[np.ndarray, "rows columns"], per_cell: int) -> Float[np.ndarray, "cells columns"]:
    """Returns the entry of greatest magnitude in every column, for each ``per_cell`` consecutive rows."""
    if per_cell == 1:
        return values
    rows, columns = values.shape
    cells = np.zeros((ceil(rows / per_cell) * per_cell, columns), dtype=values.dtype)
    cells[:rows] = values
    cells = cells.reshape(-1, per_cell, columns)
    return np.take_along_axis(cells, np.abs(cells).argmax(axis=1, keepdims=True), axis=1)[:, 0]
