"""Finds the largest batch that fits for each kind of run, by bisection, several kinds in parallel."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["fits", "does_not_fit", "unknown"]


@dataclass(frozen=True)
class Kind:
    """What is varied beside the batch: values of the configuration's keys, such as ``mesh`` and ``memory.preset``."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """A run that was asked about. ``answer``: what `pd probe --json` says; None where that could not be told."""

    kind: Kind
    batch: int
    answer: Mapping[str, Any] | None
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        return "unknown" if self.answer is None else self.answer["verdict"]

    @property
    def tokens(self) -> int:
        """Of a step."""
        return 0 if self.answer is None else int(self.answer["tokens_per_step"])

    @property
    def step_s(self) -> float:
        """A step's time by the roofline, in seconds: nothing overlaps."""
        times = {} if self.answer is None else self.answer["roofline_s"] or {}
        return float(sum(seconds for name, seconds in times.items() if name != "overlapping")) or float("inf")

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


Ask = Callable[[Kind, int], Point]


def search(kinds: Sequence[Kind], ask: Ask, workers: int) -> list[Point]:
    """Every point that was asked about, in the order of ``kinds``, by batch. ``ask`` is called from threads."""
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda kind: largest_that_fits(kind, ask), kinds))
    return [point for points in found for point in sorted(points, key=lambda p: p.batch)]


def largest_that_fits(kind: Kind, ask: Ask) -> list[Point]:
    """Bisects the batches of a kind, taking for granted that what a batch needs grows with it.

    What cannot be told ends the search of this kind: it is not the memory's fault.
    """
    batches = sorted(kind.batches)
    asked: list[Point] = []
    low, high = -1, len(batches)  # the largest place known to fit, the smallest known not to
    while high - low > 1:
        # The largest one first: if that fits, nothing else has to be asked.
        place = high - 1 if not asked else (low + high) // 2
        point = ask(kind, batches[place])
        asked.append(point)
        if point.verdict == "unknown":
            break
        low, high = (place, high) if point.verdict == "fits" else (low, place)
    return asked


def best(points: Sequence[Point]) -> Point | None:
    """Of those that fit the one with most tokens in a step; of such the fastest by the roofline, then the smallest."""
    fitting = [point for point in points if point.verdict == "fits"]
    return max(fitting, key=lambda p: (p.tokens, p.tokens_per_s, -(p.answer or {})["peak_gib"]), default=None)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Of those that fit the ones that no other beats in both tokens of a step and tokens/s."""
    fitting = [point for point in points if point.verdict == "fits"]

    def beaten(p: Point) -> bool:
        return any(
            q.tokens >= p.tokens
            and q.tokens_per_s >= p.tokens_per_s
            and (q.tokens, q.tokens_per_s) != (p.tokens, p.tokens_per_s)
            for q in fitting
        )

    return [point for point in fitting if not beaten(point)]
