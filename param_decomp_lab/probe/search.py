"""Finds the largest batch that fits for each kind of run, by bisection, several kinds in parallel."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["fits", "does_not_fit", "unknown"]
Goal = Literal["speed", "batch"]
"""What `pd fit` looks for: the shortest step of a given batch, or the largest batch."""


@dataclass(frozen=True)
class Variant:
    """What is varied beside the batch: values of the configuration's keys, such as ``mesh`` and ``memory.preset``."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    batches: tuple[int, ...]


@dataclass(frozen=True)
class SearchPoint:
    """A run that was asked about. ``answer``: what `pd probe --json` says; None where that could not be told."""

    kind: Variant
    batch: int
    answer: Mapping[str, Any] | None
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        return "unknown" if self.answer is None else self.answer["verdict"]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return 0 if self.answer is None else int(self.answer["tokens_per_step"])

    @property
    def peak_gib(self) -> float:
        """What the run needs of a GPU; infinite where that could not be told."""
        return float("inf") if self.answer is None else float(self.answer["peak_gib"])

    @property
    def pool_gib(self) -> float:
        """What there is of a GPU."""
        return 0.0 if self.answer is None else float(self.answer["pool_gib"])

    @property
    def terms(self) -> Mapping[str, float]:
        """What each resource adds to a step's seconds."""
        times = {} if self.answer is None else self.answer["roofline_s"]
        return {name: float(seconds) for name, seconds in times.items() if name != "overlapping"}

    @property
    def step_s(self) -> float:
        """A step's predicted time, in seconds; infinite where that could not be told."""
        return float("inf") if self.answer is None else float(self.answer["step_s"])

    @property
    def overlapping_s(self) -> float:
        """Its seconds if everything overlapped: a bound."""
        return float("inf") if self.answer is None else float(self.answer["roofline_s"]["overlapping"])

    @property
    def collectives(self) -> int:
        """Collective operations executed in a step."""
        kinds = {} if self.answer is None else self.answer["collectives"]
        return sum(int(kind["count"]) for kind in kinds.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


Ask = Callable[[Variant, int], SearchPoint]


def search(kinds: Sequence[Variant], ask: Ask, workers: int) -> list[SearchPoint]:
    """Every point that was asked about, in the order of ``kinds``, by batch. ``ask`` is called from threads."""
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda kind: largest_that_fits(kind, ask), kinds))
    return [point for points in found for point in sorted(points, key=lambda p: p.batch)]


def largest_that_fits(kind: Variant, ask: Ask) -> list[SearchPoint]:
    """Bisects the batches of a kind, taking for granted that what a batch needs grows with it.

    What cannot be told ends the search of this kind: it is not the memory's fault.
    """
    batches = sorted(kind.batches)
    asked: list[SearchPoint] = []
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


def best(points: Sequence[SearchPoint], goal: Goal = "batch") -> SearchPoint | None:
    """The best point that fits: for ``batch`` the one with most tokens in a step, for ``speed`` the fastest. Equal ones
    for ``batch`` go by predicted time, then all by size, the smallest first."""
    fitting = [point for point in points if point.verdict == "fits"]
    tokens = (lambda p: p.tokens) if goal == "batch" else (lambda p: 0)
    return max(fitting, key=lambda p: (tokens(p), p.tokens_per_s, -p.peak_gib), default=None)


def frontier(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """The points that fit and that no other one beats in both tokens of a step and tokens/s."""
    fitting = [point for point in points if point.verdict == "fits"]

    def beaten(p: SearchPoint) -> bool:
        return any(
            q.tokens >= p.tokens
            and q.tokens_per_s >= p.tokens_per_s
            and (q.tokens, q.tokens_per_s) != (p.tokens, p.tokens_per_s)
            for q in fitting
        )

    return [point for point in fitting if not beaten(point)]
