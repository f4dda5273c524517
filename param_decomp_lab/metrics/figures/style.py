"""Styles all figures: colours that colour-blind readers can distinguish (Okabe and Ito), light grids, no frames.

It does not change ``pyplot`` or ``rcParams``, so a figure looks the same whatever ran before it.
"""

from matplotlib.axes import Axes

INK = "#1d2329"
QUIET = "#65707b"
GRID = "#e6e9ec"
BLUE = "#0072B2"
VERMILION = "#D55E00"


def style_axes(axes: Axes, size: float) -> None:
    """Styles the frame, ticks and grid of one panel. ``size``: the font size of its tick labels in points."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b9c1c8")
        axes.spines[side].set_linewidth(0.8)
    axes.minorticks_off()
    axes.tick_params(colors=QUIET, labelsize=size, length=2.5, width=0.8, color="#b9c1c8", pad=2)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def title_axes(axes: Axes, name: str, detail: str, size: float, panels: int = 1) -> None:
    """Writes the name of the panel in bold above a fainter line of detail, both flush with the panel's left edge.

    The name shrinks rather than overlap that of the next named panel: it has the width of ``panels`` panels.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    width_pt = panels * axes.get_position().width * figure.get_figwidth() * 72
    name_size = min(size, width_pt * 1.12 / (0.6 * max(len(name), 1)))
    above = size * 1.5 if detail else 3.0
    for text, offset, points, colour, weight in (
        (name, above, name_size, INK, "bold"),
        (detail, 3.0, size - 1, QUIET, "normal"),
    ):
        axes.annotate(
            text,
            xy=(0, 1),
            xycoords="axes fraction",
            xytext=(0, offset),
            textcoords="offset points",
            fontsize=points,
            color=colour,
            fontweight=weight,
            va="bottom",
            annotation_clip=False,
        )
