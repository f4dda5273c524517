"""Charts as numbers that templates draw as SVG: axes and their ticks, places of points, and line charts, which
`charts.html` draws.

The plot is an SVG that stretches with the page while its labels are HTML, so that a chart is readable at any width, and
its points travel along as JSON for the few lines of JavaScript that show values under the pointer.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from param_decomp_lab.ui.numbers import number

LOG_RATIO = 20.0
"""Positive values that spread over more than this factor get a log axis."""
MAX_POINTS = 400
SCALE = 1000.0
"""Side of the SVG's view box."""

FARTHEST = 1e100
"""Largest magnitude that is drawn as it is, and 1 / the smallest."""


@dataclass(frozen=True)
class Series:
    """The values of one metric, in order of steps. Never empty; a value may be NaN or infinite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The (step, value) pairs that can be drawn."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if isfinite(value)]


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart. ``path`` is SVG path data in a box of 1000 × 1000; ``color`` any CSS colour."""

    name: str
    color: str
    path: str
    last: str
    dashed: bool


@dataclass(frozen=True)
class Tick:
    """A tick at ``at`` percent of the axis (from the left, or from the top)."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Everything that the template needs to draw one chart."""

    title: str
    note: str
    lines: list[ChartLine]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    log: bool
    legend: bool
    ramp: str
    """What the lines are, if they are coloured from the first to the last and need that key."""
    points: str
    """JSON for the pointer: domain and, per line, name, colour and [step, value] pairs."""


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, logarithmic or linear. ``ticks``: at percents of it from ``low``."""

    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``."""
        low, high = self.low, self.high
        return log10(value / low) / log10(high / low) if self.log else (value - low) / (high - low)

    @property
    def ticks(self) -> list[Tick]:
        values = _ticks(self.low, self.high, self.log)
        # As many digits as tell them apart: 2.65·10⁻⁵ and 2.7·10⁻⁵.
        labels = next(
            found
            for digits in (1, 2, 3, 16)
            if len(set(found := [_tick_label(value, digits) for value in values])) == len(values) or digits == 16
        )
        return [Tick(100 * self.share(value), label) for value, label in zip(values, labels, strict=True)]

    @property
    def ticks_from_the_top(self) -> list[Tick]:
        return [Tick(100 - tick.at, tick.label) for tick in self.ticks]


def axis(values: Sequence[float], from_zero: bool = False) -> Axis:
    """An axis for finite values: logarithmic when all are positive and spread over decades, else linear (from 0 with
    ``from_zero``)."""
    low, high = min(values), max(values)
    log = low > 0 and high > LOG_RATIO * low
    return Axis(*_domain(low, high, log, from_zero), log)


@dataclass(frozen=True)
class Scatter:
    """The axes of points. Places are percents of the plot, from the left and from the top."""

    x: Axis
    y: Axis

    def place(self, x: float, y: float) -> tuple[float, float]:
        return 100 * self.x.share(x), 100 - 100 * self.y.share(y)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """The line through them, as SVG path data in a box of 1000 × 1000."""
        places = (self.place(*point) for point in points)
        return "M" + "L".join(f"{SCALE * left / 100:.1f} {SCALE * top / 100:.1f}" for left, top in places)

    @property
    def x_ticks(self) -> list[Tick]:
        return self.x.ticks

    @property
    def y_ticks(self) -> list[Tick]:
        return self.y.ticks_from_the_top


def line_chart(
    title: str,
    series: Mapping[str, Series],
    colors: Sequence[str],
    *,
    x_max: int,
    note: str = "",
    dashed: Sequence[str] = (),
    from_zero: bool = False,
    ramp: str = "",
    legend: bool = True,
) -> Chart | None:
    """A chart of ``series`` (name -> values) over steps 0 … ``x_max``; None when there is nothing finite to draw.

    ``colors`` are taken in turn. The y axis is logarithmic when all values are positive and spread over decades, else
    linear (from 0 with ``from_zero``). With ``ramp``, which says what the lines are, their order is their
    legend; without ``legend`` they have none. Points that are not finite break the line and are counted in the note.
    """
    lost = sum(len(values.values) - len(values.finite) for values in series.values())
    drawn = {
        name: Series(values.steps, tuple(map(_drawable, values.values)))
        for name, values in series.items()
        if values.finite
    }
    if not drawn:
        return None
    y = axis([value for values in drawn.values() for _, value in values.finite], from_zero)
    x_max = max(x_max, 1)
    limit = MAX_POINTS if len(drawn) <= 8 else max(40, 8 * MAX_POINTS // len(drawn))

    lines: list[ChartLine] = []
    data: list[dict[str, object]] = []
    for i, (name, values) in enumerate(drawn.items()):
        points = thin(list(zip(values.steps, values.values, strict=True)), limit)
        color = colors[i % len(colors)]
        lines.append(ChartLine(name, color, _path(points, x_max, y), number(series[name].last), name in dashed))
        data.append({"n": name, "c": color, "p": [[step, float(f"{v:.4g}")] for step, v in points if isfinite(v)]})
    notes = [part for part in (note, f"{lost} not finite" if lost else "") if part]
    return Chart(
        title=title,
        note=" · ".join(notes),
        lines=lines,
        x_ticks=[Tick(100 * step / x_max, _short_step(step)) for step in _step_ticks(x_max)],
        y_ticks=y.ticks_from_the_top,
        log=y.log,
        legend=legend and len(lines) > 1 and not ramp,
        ramp=ramp,
        points=json.dumps({"x": x_max, "lo": y.low, "hi": y.high, "log": y.log, "s": data}, separators=(",", ":")),
    )


def thin(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most about ``limit`` points that keep every peak: the extremes of each run of points, and both ends."""
    if len(points) <= limit:
        return list(points)
    run = ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), run):
        members = [i for i in range(start, min(start + run, len(points))) if isfinite(points[i][1])]
        if members:
            kept |= {min(members, key=lambda i: points[i][1]), max(members, key=lambda i: points[i][1])}
        else:
            kept.add(start)
    return [points[i] for i in sorted(kept)]


def ramp_colors(n: int) -> list[str]:
    """``n`` CSS colours from the early to the late end of the page's sequential scale."""
    return [f"color-mix(in oklab, var(--late) {100 * i / max(n - 1, 1):.0f}%, var(--early))" for i in range(n)]


def _drawable(value: float) -> float:
    """The value, within what ratios and differences of two values can be computed of."""
    if not isfinite(value):
        return value
    return 0.0 if abs(value) < 1 / FARTHEST else min(max(value, -FARTHEST), FARTHEST)


def _domain(low: float, high: float, log: bool, from_zero: bool) -> tuple[float, float]:
    if log:
        margin = (high / low) ** 0.04
        return low / margin, high * margin
    if from_zero and low >= 0:
        return 0.0, high * 1.06 if high > 0 else 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        pad = abs(high) * 0.1 or 1.0
        return low - pad, high + pad
    if 0 <= low < 0.35 * high:
        return 0.0, high * 1.06
    pad = (high - low) * 0.06
    return low - pad, high + pad


def _path(points: Sequence[tuple[int, float]], x_max: int, y: Axis) -> str:
    parts: list[str] = []
    pen_up = True
    for i, (step, value) in enumerate(points):
        if not isfinite(value):
            pen_up = True
            continue
        across, down = SCALE * step / x_max, SCALE * (1 - y.share(value))
        parts.append(f"{'M' if pen_up else 'L'}{across:.1f} {down:.1f}")
        # A point without neighbours is a line of no length: its round cap is a dot.
        alone = pen_up and (i + 1 == len(points) or not isfinite(points[i + 1][1]))
        if alone:
            parts.append("h.01")
        pen_up = False
    return "".join(parts)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if not log:
        return _round_steps(low, high, 4)
    first, last = ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9)
    if last - first >= 2:
        stride = ceil((last - first) / 4)
        return [10.0**k for k in range(first, last + 1, stride)]
    candidates = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    found = [value for value in candidates if low <= value <= high]
    return found if len(found) <= 5 else [v for v in found if f"{v:.0e}"[0] == "1"] or found[::2]


def _step_ticks(x_max: int) -> list[int]:
    return [int(value) for value in _round_steps(0, x_max, 4) if float(value).is_integer()]


def _round_steps(low: float, high: float, n: int) -> list[float]:
    rough = (high - low) / n
    power = 10.0 ** floor(log10(rough))
    unit = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    start, stop = ceil(low / unit - 1e-9), floor(high / unit + 1e-9)
    return [round(i * unit, 12) if unit > 1e-9 else i * unit for i in range(start, stop + 1)]


def _tick_label(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.6g}".replace("-", "−")
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "−")
    return f"10{power}" if mantissa == "1" else f"{mantissa}·10{power}"


def _short_step(step: int) -> str:
    for size, suffix in ((1_000_000, "M"), (1_000, "k")):
        if step >= size:
            return f"{step / size:g}{suffix}"
    return str(step)
