"""Computes charts of errors against L0, with one point for each run, for the page's template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from param_decomp_lab.compare.fronts import Front, RunPoint
from param_decomp_lab.ui.charts import Scatter, axis
from param_decomp_lab.ui.numbers import number


@dataclass(frozen=True)
class Dot:
    """A run, at percentages of the plot from the left and the top. ``kind``: its class in the style sheet."""

    run: int
    left: float
    top: float
    color: str
    kind: str
    text: str


@dataclass(frozen=True)
class FrontChart:
    """``bars``: colours and paths of error bars of seeds. ``front``: a step curve, below which there are no runs, as a
    path; empty without a front. Paths are in a box of 1000 x 1000.
    """

    title: str
    unit: str
    axes: Scatter
    dots: list[Dot]
    bars: list[tuple[str, str]]
    front: str


def front_chart(front: Front, labels: Sequence[str], colors: Mapping[int, str]) -> FrontChart:
    """Returns the chart of a front. ``labels``, ``colors``: those of the runs, by index."""
    axes = Scatter(axis([point.l0 for point in front.points]), axis([point.error for point in front.points]))
    dots = [
        Dot(
            point.run, *axes.place(point.l0, point.error), colors[point.run], _kind(point, front),
            f"{labels[point.run]}: L0 {number(point.l0)}, {front.name} {number(point.error)}"
            + ("" if point.finished else ", unfinished"),
        )
        for point in front.points
    ]  # fmt: skip
    bars = []
    for spread in front.spreads:
        (mean_x, left, right), (mean_y, low, high) = spread.l0, spread.error
        across, up = axes.path([(left, mean_y), (right, mean_y)]), axes.path([(mean_x, low), (mean_x, high)])
        bars.append((colors[spread.runs[0]], across + up))
    by_run = {point.run: point for point in front.points}
    steps = _steps([by_run[run] for run in front.front], axes)
    return FrontChart(front.name, front.unit, axes, dots, bars, steps)


def _kind(point: RunPoint, front: Front) -> str:
    if not point.finished:
        return "unfinished"
    return "best" if point.run in front.front else "finished"


def _steps(points: Sequence[RunPoint], axes: Scatter) -> str:
    """Returns the path from the top down along the front, and to the right edge."""
    if not points:
        return ""
    places = [axes.place(point.l0, point.error) for point in points]
    down = "".join(f"H{10 * left:.1f}V{10 * top:.1f}" for left, top in places)
    return f"M{10 * places[0][0]:.1f} 0{down}H1000"
