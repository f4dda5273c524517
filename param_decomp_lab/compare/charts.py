"""Errors against L0, one point a run, as numbers that the page's template draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from param_decomp_lab.compare.fronts import Front, RunPoint
from param_decomp_lab.ui.charts import SCALE, Axis, Tick, axis
from param_decomp_lab.ui.numbers import number


@dataclass(frozen=True)
class Dot:
    """A run, at percents of the plot from the left and the top. ``kind``: of its class in the style sheet."""

    run: int
    left: float
    top: float
    color: str
    kind: str
    text: str


@dataclass(frozen=True)
class Bars:
    """Error bars of seeds, as a path."""

    color: str
    path: str


@dataclass(frozen=True)
class Scatter:
    """``front``: the steps below which no run is, as a path in a box of 1000 x 1000; empty without a front."""

    title: str
    unit: str
    dots: list[Dot]
    bars: list[Bars]
    front: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    log: bool


def scatter(front: Front, labels: Sequence[str], colors: Mapping[int, str]) -> Scatter:
    """The chart of a front. ``labels``, ``colors``: of the runs, by number."""
    x = axis([point.l0 for point in front.points])
    y = axis([point.error for point in front.points])
    dots = [
        Dot(
            point.run, 100 * x.share(point.l0), 100 - 100 * y.share(point.error),
            colors[point.run], _kind(point, front),
            f"{labels[point.run]}: L0 {number(point.l0)}, {front.name} {number(point.error)}"
            + ("" if point.finished else ", unfinished"),
        )
        for point in front.points
    ]  # fmt: skip
    by_run = {point.run: point for point in front.points}
    bars = []
    for spread in front.spreads:
        (mean_x, left, right), (mean_y, low, high) = spread.l0, spread.error
        across = f"M{_at(left, mean_y, x, y)}L{_at(right, mean_y, x, y)}"
        bars.append(Bars(colors[spread.runs[0]], f"{across}M{_at(mean_x, low, x, y)}L{_at(mean_x, high, x, y)}"))
    return Scatter(
        front.name, front.unit, dots, bars, _steps([by_run[run] for run in front.front], x, y),
        x.ticks, [Tick(100 - tick.at, tick.label) for tick in y.ticks], y.log,
    )  # fmt: skip


def _kind(point: RunPoint, front: Front) -> str:
    if not point.finished:
        return "unfinished"
    return "best" if point.run in front.front else "finished"


def _steps(points: Sequence[RunPoint], x: Axis, y: Axis) -> str:
    """From the top down along the front, and on to the right edge."""
    if not points:
        return ""
    path = f"M{SCALE * x.share(points[0].l0):.1f} 0"
    for point in points:
        path += f"H{SCALE * x.share(point.l0):.1f}V{SCALE * (1 - y.share(point.error)):.1f}"
    return path + f"H{SCALE:.0f}"


def _at(l0: float, error: float, x: Axis, y: Axis) -> str:
    return f"{SCALE * x.share(l0):.1f} {SCALE * (1 - y.share(error)):.1f}"
