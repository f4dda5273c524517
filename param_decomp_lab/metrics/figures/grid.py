"""Makes a grid with one panel for each site that is readable for 1 site and for 224."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.style import INK, QUIET, style_axes

MAX_COLUMNS = 8
MANY = 24
"""With more sites than this, the panels are smaller."""


@dataclass(frozen=True)
class SiteGrid:
    """A figure with ``panels[i]`` the axes of site i (from left to right where a site has several).

    ``bottom[i]`` and ``left[i]`` say whether there is no panel below it, or to its left, so that it needs tick labels.
    ``size`` is the font size in points.
    """

    figure: Figure
    panels: list[list[Axes]]
    bottom: list[bool]
    left: list[bool]
    size: float


def site_grid(names: Sequence[str], title: str, subtitle: str, *, panels: int = 1, share_y: bool = False) -> SiteGrid:
    """Returns an empty grid for the sites ``names`` in canonical order, with ``panels`` axes beside each other for each
    site.

    At least one site is required. With ``share_y``, only the leftmost panels keep their y labels.
    """
    assert names, "a figure needs at least one site"
    columns = n_columns(names)
    rows = ceil(len(names) / columns)
    many = len(names) > MANY
    width, height = (
        ((1.55, 0.95) if panels == 1 else (2.3, 0.95)) if many else ((2.7, 1.5) if panels == 1 else (3.4, 1.5))
    )
    if columns * (width + 0.3) < 5.2:
        width = 5.2 / columns - 0.3
    size = 6.0 if many else 7.5
    between_x, between_y = (0.22 if share_y else 0.42), (0.52 if many else 0.72)
    margin_left, margin_right, margin_top, margin_bottom = 0.55, 0.2, 1.1, 0.5
    total_width = margin_left + margin_right + columns * width + (columns - 1) * between_x
    total_height = margin_top + margin_bottom + rows * height + (rows - 1) * between_y

    figure = Figure(figsize=(total_width, total_height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    edge = 0.15 / total_width
    figure.text(edge, 1 - 0.16 / total_height, title, fontsize=12, fontweight="bold", color=INK, va="top")
    lines = wrap(subtitle, int((total_width - 0.3) * 72 / (8.5 * 0.56)))
    figure.text(edge, 1 - 0.42 / total_height, "\n".join(lines), fontsize=8.5, color=QUIET, va="top")

    axes: list[list[Axes]] = []
    inner_gap = 0.36
    panel_width = (width - (panels - 1) * inner_gap) / panels
    for i in range(len(names)):
        row, column = divmod(i, columns)
        x = margin_left + column * (width + between_x)
        y = total_height - margin_top - height - row * (height + between_y)
        axes.append([])
        for panel in range(panels):
            place = (
                (x + panel * (panel_width + inner_gap)) / total_width,
                y / total_height,
                panel_width / total_width,
                height / total_height,
            )
            axes[-1].append(figure.add_axes(place))
            style_axes(axes[-1][-1], size)
    return SiteGrid(
        figure=figure,
        panels=axes,
        bottom=[i + columns >= len(names) for i in range(len(names))],
        left=[i % columns == 0 for i in range(len(names))],
        size=size + 0.5,
    )


def if_experts(names: Iterable[str], sentence: str) -> str:
    """Returns `` sentence`` if some of the sites are matrices of experts, which exist only where a token takes the
    expert.
    """
    return f" {sentence}" if any(".experts." in name for name in names) else ""


def n_columns(names: Sequence[str]) -> int:
    """Returns the number of columns of the grid: whole layers in a row if every layer has the same kinds of sites, else
    about a square.
    """
    kinds = [name.rsplit(".", 1)[-1] for name in names]
    period = len(set(kinds))
    if period <= MAX_COLUMNS and len(names) % period == 0 and kinds == kinds[:period] * (len(names) // period):
        columns = period
        while columns + period <= MAX_COLUMNS and ceil(len(names) / columns) > 1.5 * columns:
            columns += period
        if len(names) / columns <= 12 or columns > MAX_COLUMNS // 2:
            return columns
    return min(MAX_COLUMNS, ceil(sqrt(len(names))))
