"""A figure of a step's memory over its schedule."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from param_decomp_aot.timeline import REST, Timeline, bands, moments, phases
from param_decomp_lab.metrics.figures.style import INK, QUIET, VERMILION, style_axes

GIB = 2**30
COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5BB5", "#B5A100", "#8C564B", "#1B4F72",
)  # fmt: skip
"""Okabe and Ito's, and four more for bands after these."""

GREY = "#aab2b9"
BASE = "#dfe3e7"
SIZE = 8.0


def timeline_figure(
    timeline: Timeline, title: str = "", *, pool: int | None = None, capacity: int | None = None, n_bands: int = 10
) -> Figure:
    """Draws the bytes alive on one device at each instruction of the schedule: arguments at the bottom, and above them
    temporaries by their origin in the code. Lines mark the usable ``pool`` and the card's ``capacity``, in bytes.
    """
    figure = Figure(figsize=(11, 5.4), dpi=150, facecolor="white")
    axes = figure.add_axes((0.06, 0.1, 0.67, 0.74))
    style_axes(axes, SIZE)
    at = moments(timeline, 2000)
    found = bands(timeline, n_bands)
    colors = {name: GREY if name == REST else COLORS[i % len(COLORS)] for i, name in enumerate(found)}

    below = np.full(len(at), timeline.base / GIB)
    axes.fill_between(
        at, 0, below, color=BASE, linewidth=0, step="mid", label=_label("arguments, results, constants", timeline.base)
    )
    for name, band in found.items():
        above = below + band[at] / GIB
        label = _label(name, int(band[timeline.peak]))
        axes.fill_between(at, below, above, color=colors[name], linewidth=0, step="mid", label=label)
        below = above
    axes.plot(at, below, color=INK, linewidth=0.7, drawstyle="steps-mid")
    axes.set_xlim(0, max(1, timeline.live.size - 1))
    _limits(axes, timeline, pool, capacity)
    _mark_peak(axes, timeline)
    _name_phases(axes, timeline)

    axes.set_ylabel("GiB on one device", fontsize=SIZE, color=QUIET)
    axes.set_xlabel("instruction of the schedule (the body of a loop once)", fontsize=SIZE, color=QUIET)
    handles, labels = axes.get_legend_handles_labels()
    legend = axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.015, 1.0), frameon=False, fontsize=SIZE,
        title="GiB at the peak", title_fontproperties={"size": SIZE, "weight": "bold"}, alignment="left",
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(INK)
    figure.text(0.06, 0.955, title or "Memory over a step", fontsize=12, color=INK, fontweight="bold", va="center")
    peak = timeline.base + int(timeline.live.max(initial=0))
    detail = (
        f"peak {peak / GIB:.2f} GiB alive, {timeline.planned / GIB:.2f} GiB set aside"
        f" · {timeline.base / GIB:.2f} GiB of it from beginning to end"
    )
    figure.text(0.06, 0.915, detail, fontsize=SIZE, color=QUIET, va="center")
    return figure


def _label(name: str, n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}  {name}"


def _limits(axes: Axes, timeline: Timeline, pool: int | None, capacity: int | None) -> None:
    """Draws the lines; a limit far above the used memory is written as text instead."""
    used = timeline.planned / GIB
    lines = {"pool": pool, "card": capacity}
    near = {name: n / GIB for name, n in lines.items() if n is not None and n / GIB < 2 * used}
    far = {name: n / GIB for name, n in lines.items() if n is not None and name not in near}
    axes.set_ylim(0, 1.1 * max([used, *near.values()], default=1.0) or 1.0)
    for name, y in near.items():
        axes.axhline(y, color=VERMILION, linewidth=1.1, linestyle="--" if name == "pool" else "-")
        axes.annotate(
            f"{name} {y:.1f} GiB", (0, y), xycoords=("axes fraction", "data"), xytext=(3, 2),
            textcoords="offset points", ha="left", va="bottom", fontsize=SIZE, color=VERMILION,
        )  # fmt: skip
    if far:
        words = ", ".join(f"{name} {y:.1f} GiB" for name, y in far.items())
        axes.annotate(
            f"above this axis: {words}", (1, 1), xycoords="axes fraction", xytext=(-3, -3),
            textcoords="offset points", ha="right", va="top", fontsize=SIZE, color=VERMILION,
        )  # fmt: skip


def _mark_peak(axes: Axes, timeline: Timeline) -> None:
    if not timeline.live.size:
        return
    x, y = timeline.peak, (timeline.base + int(timeline.live[timeline.peak])) / GIB
    axes.plot([x], [y], marker="v", color=INK, markersize=5, clip_on=False, zorder=5)
    right = x > 0.85 * timeline.live.size
    axes.annotate(
        f"peak {y:.2f} GiB", (x, y), xytext=(-7 if right else 7, 5), textcoords="offset points",
        ha="right" if right else "left", va="bottom", fontsize=SIZE, color=INK, fontweight="bold",
    )  # fmt: skip


def _name_phases(axes: Axes, timeline: Timeline) -> None:
    """Draws a strip above the panel that names the phases of the program where there is room."""
    n = max(1, timeline.live.size - 1)
    width_pt = axes.get_position().width * 11 * 72
    for i, (first, last, name) in enumerate(phases(timeline)):
        span = axes.axvspan(
            first, last + 1, ymin=1.008, ymax=1.035, color=(BASE, GREY)[i % 2], linewidth=0, clip_on=False
        )
        span.set_in_layout(False)
        if width_pt * (last + 1 - first) / n > 0.5 * (SIZE - 1.5) * len(name):
            axes.annotate(
                name, ((first + last + 1) / 2, 1.04), xycoords=("data", "axes fraction"), ha="center", va="bottom",
                fontsize=SIZE - 1.5, color=QUIET, annotation_clip=False,
            )  # fmt: skip
