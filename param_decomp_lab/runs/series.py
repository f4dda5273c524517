"""The rows of ``metrics.jsonl``, turned into one series of values over steps for every key."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import isfinite, nan
from typing import Any

from param_decomp_lab.ui.charts import Series

STEP_TIME = "train/perf/step_time_s"


def series_by_key(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """One series per key, over the rows that have it. Rows of the same step are merged; the later row wins.

    ``null`` and the strings that JSON writers use for non-finite numbers count as such; other values are not a series.
    """
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        step = int(row["step"])
        for key, value in row.items():
            if key == "step":
                continue
            parsed = _as_float(value)
            if parsed is not None:
                points.setdefault(key, {})[step] = parsed
    return {
        key: Series(tuple(step for step, _ in ordered), tuple(value for _, value in ordered))
        for key, ordered in ((key, sorted(values.items())) for key, values in points.items())
    }


def training_seconds(series: Mapping[str, Series]) -> float | None:
    """Seconds spent in training steps: every logged step time stands for the steps since the log row before it."""
    times = series.get(STEP_TIME)
    if times is None:
        return None
    steps = (-1, *times.steps) if times.steps[0] >= 0 else times.steps
    spans = [after - before for before, after in pairwise(steps)]
    return sum(span * value for span, value in zip(spans, times.values, strict=True) if isfinite(value))


def _as_float(value: Any) -> float | None:
    match value:
        case None:
            return nan
        case bool():
            return None
        case int() | float():
            return float(value)
        case str() if value.lower() in {"nan", "inf", "-inf", "infinity", "-infinity"}:
            return float(value)
        case _:
            return None
