"""The figure of the memory study: what each lever does to the peak, as bars."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from param_decomp_lab.eval.figures.style import BLUE, INK, QUIET, VERMILION, style_axes

SIZE = 8.0
LINEAR = 1.0
"""GiB up to which the axis is linear; logarithmic beyond."""


def save_figure(file: Path, differences: Mapping[str, float]) -> None:
    lever_figure(differences).savefig(file, dpi=150)


def lever_figure(differences: Mapping[str, float]) -> Figure:
    """``differences``: peak less the reference's in GiB, by lever, drawn from top to bottom in this order."""
    height = 1.0 + 0.23 * len(differences)
    figure = Figure(figsize=(9, height), facecolor="white")
    axes = figure.add_axes((0.4, 0.42 / height, 0.56, 1 - 0.95 / height))
    style_axes(axes, SIZE)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#e6e9ec", linewidth=0.7)
    axes.tick_params(axis="y", length=0)
    places = range(len(differences))
    values = list(differences.values())
    axes.barh(places, values, height=0.62, color=[VERMILION if v > 0 else BLUE for v in values], linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xscale("symlog", linthresh=LINEAR, linscale=0.6)
    largest = max(LINEAR, *(abs(v) for v in values))
    axes.set_xlim(min(-2 * LINEAR, 4 * min(values)), 4 * largest)
    marks = [m for m in (1, 10, 100, 1000) if m < 4 * largest]
    left = [-m for m in reversed(marks) if -m > axes.get_xlim()[0]]
    axes.set_xticks([*left, 0, *marks], [*(f"−{-m}" for m in left), "0", *(f"+{m}" for m in marks)])
    axes.minorticks_off()
    axes.set_yticks(places, [name.replace("`", "") for name in differences], color=INK)
    axes.set_ylim(len(differences) - 0.4, -0.6)
    for place, value in zip(places, values, strict=True):
        # Numbers of bars too short to see stand on the side of costs.
        axes.annotate(
            f"{value:+.1f}".replace("-", "−") if abs(value) >= 0.05 else "0", (value, place),
            xytext=(-3 if value <= -0.05 else 3, 0), textcoords="offset points", va="center",
            ha="right" if value <= -0.05 else "left", fontsize=SIZE - 1, color=QUIET,
        )  # fmt: skip
    top = 1 - 0.2 / height
    figure.text(0.02, top, "Peak against the reference's", fontsize=11, color=INK, fontweight="bold", va="center")
    said = "GiB of one GPU; the axis is logarithmic beyond ±1"
    figure.text(0.96, top, said, fontsize=SIZE, color=QUIET, va="center", ha="right")
    return figure
