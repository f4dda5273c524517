"""The plots of the browser, as numbers that the templates draw as SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from param_decomp_lab.harvest.files import Summary
from param_decomp_lab.harvest.files.tables import IMPORTANCE_BINS, OCTAVES
from param_decomp_lab.ui.charts import Axis, Tick
from param_decomp_lab.ui.numbers import number


@dataclass(frozen=True)
class Bar:
    """A bin: ``x``, ``width``, ``height`` in a box of 100 by 100, and what it says under the pointer."""

    x: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Histogram:
    """``ticks``: labels and where they stand, 0 to 100."""

    bars: list[Bar]
    ticks: list[tuple[float, str]]
    name: str


def importance_histogram(counts: Sequence[int]) -> Histogram:
    """λ where a component fires."""
    edges = [n / IMPORTANCE_BINS for n in range(IMPORTANCE_BINS + 1)]
    names = [f"{low:.2f} < λ ≤ {high:.2f}" for low, high in pairwise(edges)]
    return Histogram(_bars(counts, names), [(0, "0"), (50, "0.5"), (100, "1")], "λ where it fires")


def activation_histogram(counts: Sequence[int]) -> Histogram:
    """a where a component fires, in octaves to both sides of 0; octaves at the ends that nothing falls in are cut."""
    n = len(OCTAVES)
    magnitudes = np.asarray(counts[:n])[::-1] + np.asarray(counts[n:])
    used = np.flatnonzero(magnitudes)
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (n // 2, n // 2 + 1)
    octaves = list(OCTAVES)[low:high]
    negative = [(-(2.0 ** (o + 1)), -(2.0**o), counts[n - 1 - (low + k)]) for k, o in enumerate(octaves)][::-1]
    positive = [(2.0**o, 2.0 ** (o + 1), counts[n + low + k]) for k, o in enumerate(octaves)]
    bins = [*negative, *positive]
    names = [f"{number(a)} to {number(b)}" for a, b, _ in bins]
    edge, least = number(2.0 ** octaves[-1] * 2), number(2.0 ** octaves[0])
    ticks: list[tuple[float, str]] = [(0, f"−{edge}"), (50, f"±{least}"), (100, edge)]
    return Histogram(_bars([count for *_, count in bins], names), ticks, "a where it fires, in octaves")


SIMILARITY_BINS = 40


def similarity_histogram(similarity: Float[np.ndarray, " n"], random: Float[np.ndarray, " r"]) -> Histogram:
    """The similarities of matched pairs, and under the pointer how many random directions there are in each bin."""
    edges = np.linspace(min(0.0, float(similarity.min(initial=0.0))), 1.0, SIMILARITY_BINS + 1)
    counts, by_chance = (np.histogram(np.clip(x, edges[0], 1.0), edges)[0].tolist() for x in (similarity, random))
    names = [
        f"{low:.2f} to {high:.2f} (of random directions {n:,})"
        for (low, high), n in zip(pairwise(edges.tolist()), by_chance, strict=True)
    ]
    least = f"{edges[0]:.1f}".replace("-", "−")
    ticks: list[tuple[float, str]] = [(0, "0" if edges[0] == 0 else least), (100, "1")]
    return Histogram(_bars(counts, names), ticks, "similarity of the pairs")


def _bars(counts: Sequence[int], names: Sequence[str]) -> list[Bar]:
    most, width = max(1, *counts), 100 / len(counts)
    return [
        Bar(round(k * width, 2), round(width, 2), round(max(1.5, 100 * count / most), 1) if count else 0.0,
            f"{name}: {count:,}")
        for k, (count, name) in enumerate(zip(counts, names, strict=True))
    ]  # fmt: skip


ACROSS, DOWN = 90, 45
"""Cells of a map, which has a mark for each that is not empty."""
ROOM = 800
"""With more components than this, those of a cell share a mark."""
MARGIN = 1.15
"""Factor between the outermost components and the edges of a map."""


@dataclass(frozen=True)
class MapMark:
    """A component of a map, or the ``count`` of those of a cell: a rectangle in a box of `ACROSS` by `DOWN`."""

    x: float
    y: float
    width: float
    shade: int
    title: str
    address: str


@dataclass(frozen=True)
class Map:
    """Density against mean λ, both by their logarithms. ``hidden``: components that never fire."""

    marks: list[MapMark]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    hidden: int
    together: bool


def site_map(
    summary: Summary,
    numbers: Int[np.ndarray, " n"],
    component_address: Callable[[int], str],
    range_address: Callable[[tuple[float, float], tuple[float, float]], str],
) -> Map:
    """The map of the chosen components. ``range_address``: of the list of components in a range of density and one of
    mean λ."""
    alive = numbers[(summary.firings[numbers] > 0) & (summary.importance_mean[numbers] > 0)]
    if not len(alive):
        return Map([], [], [], len(numbers), False)
    (x, across), (y, up) = _placed(summary.density[alive]), _placed(summary.importance_mean[alive])
    together = len(alive) > ROOM
    x_ticks, y_ticks = across.ticks, up.ticks_from_the_top
    if not together:
        marks = [
            MapMark(round(ACROSS * a, 2), round(DOWN * (1 - b), 2), 0.6, 3, f"{c}", component_address(c))
            for a, b, c in zip(x.tolist(), y.tolist(), alive.tolist(), strict=True)
        ]
        return Map(marks, x_ticks, y_ticks, len(numbers) - len(alive), False)
    column, row = (np.minimum((v * n).astype(int), n - 1) for v, n in ((x, ACROSS), (y, DOWN)))
    cells, first, counts = np.unique(column * DOWN + row, return_index=True, return_counts=True)
    marks = []
    most = math.log1p(float(counts.max()))
    for cell, one, count in zip(cells.tolist(), alive[first].tolist(), counts.tolist(), strict=True):
        a, b = divmod(cell, DOWN)
        if count == 1:
            address = component_address(one)
        else:
            # A little wider than the cell: bounds in an address are rounded.
            spans = [
                (at.low * (at.high / at.low) ** ((k - 0.01) / n), at.low * (at.high / at.low) ** ((k + 1.01) / n))
                for at, k, n in ((across, a, ACROSS), (up, b, DOWN))
            ]
            address = range_address(spans[0], spans[1])
        shade = 1 + min(4, int(5 * math.log1p(count) / most))
        marks.append(
            MapMark(a + 0.5, DOWN - b - 0.5, 1, shade, f"{one}" if count == 1 else f"{count} components", address)
        )
    return Map(marks, x_ticks, y_ticks, len(numbers) - len(alive), True)


def _placed(values: np.ndarray) -> tuple[np.ndarray, Axis]:
    """Where positive values stand on a logarithmic axis, 0 to 1."""
    low, high = float(values.min()) / MARGIN, float(values.max()) * MARGIN
    return np.log(values / low) / math.log(high / low), Axis(low, high, log=True)
