"""Computes one point for each run, and the front: the runs that no other run beats in both coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from param_decomp_lab.compare.records import Record


@dataclass(frozen=True)
class RunPoint:
    """A run's last evaluation (P1). ``run``: its index among the runs. ``finished``: whether it has finished; only such
    runs can be on a front.
    """

    run: int
    l0: float
    error: float
    finished: bool


@dataclass(frozen=True)
class Spread:
    """The mean and range over runs that differ only in their seeds."""

    runs: tuple[int, ...]
    l0: tuple[float, float, float]
    error: tuple[float, float, float]


@dataclass(frozen=True)
class Front:
    """One error against L0. ``unit``: of the error; empty if it has none. ``front``: indices of the runs on it, by L0
    (P2). ``spreads``: those of seeds (P3).
    """

    name: str
    unit: str
    points: tuple[RunPoint, ...]
    front: tuple[int, ...]
    spreads: tuple[Spread, ...]


def fronts(records: Sequence[Record], groups: Sequence[Sequence[int]]) -> list[Front]:
    """Returns a front for every error that any run has. ``groups``: runs that differ only in their seeds
    (`seed_groups`).
    """
    names = dict.fromkeys(name for record in records for name in record.errors)
    return [_front(name, records, groups) for name in names]


def _front(name: str, records: Sequence[Record], groups: Sequence[Sequence[int]]) -> Front:
    points = []
    for number, record in enumerate(records):
        l0, error = record.l0, record.error(name)
        if l0 is not None and error is not None and isfinite(l0.last):
            points.append(RunPoint(number, l0.last, error, record.finished))
    finished = [point for point in points if point.finished]
    on = on_front([(point.l0, point.error) for point in finished])
    by_run = {point.run: point for point in finished}
    spreads = []
    for group in groups:
        own = [by_run[number] for number in group if number in by_run]
        if len(own) > 1:
            runs = tuple(point.run for point in own)
            spreads.append(Spread(runs, _spread([p.l0 for p in own]), _spread([p.error for p in own])))
    ordered = sorted((finished[n] for n in on), key=lambda point: (point.l0, point.run))
    unit = "KL in nats" if any(name in record.errors and record.of_text for record in records) else ""
    return Front(name, unit, tuple(points), tuple(point.run for point in ordered), tuple(spreads))


def on_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points for which no other point is as low in both coordinates and lower in one. Equal
    points are on the front together.
    """
    order = sorted(range(len(points)), key=lambda n: points[n])
    found: list[int] = []
    best = float("inf")
    for n in order:
        if points[n][1] < best or (found and points[n] == points[found[-1]]):
            found.append(n)
            best = points[n][1]
    return sorted(found)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return sum(values) / len(values), min(values), max(values)
