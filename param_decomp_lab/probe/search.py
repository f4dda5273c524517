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
    """What is varied besides the batch: values of the configuration's keys, such as ``mesh`` and ``memory.preset``."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    batches: tuple[int, ...]


@dataclass(frozen=True)
class SearchPoint:
    """A probed run. ``answer``: the output of `pd probe --json`; None if it could not be determined."""

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
        """The memory that the run needs on a GPU; infinite if it could not be determined."""
        return float("inf") if self.answer is None else float(self.answer["peak_gib"])

    @property
    def pool_gib(self) -> float:
        """The usable memory of a GPU."""
        return 0.0 if self.answer is None else float(self.answer["pool_gib"])

    @property
    def terms(self) -> Mapping[str, float]:
        """The seconds that each resource adds to a step."""
        times = {} if self.answer is None else self.answer["roofline_s"]
        return {name: float(seconds) for name, seconds in times.items() if name != "overlapping"}

    @property
    def step_s(self) -> float:
        """A step's predicted time, in seconds; infinite if it could not be determined."""
        return float("inf") if self.answer is None else float(self.answer["step_s"])

    @property
    def overlapping_s(self) -> float:
        """A step's seconds if everything overlapped, which is a lower bound."""
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
    """Returns every probed point, in the order of ``kinds``, then by batch. ``ask`` is called from threads."""
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda kind: largest_that_fits(kind, ask), kinds))
    return [point for points in found for point in sorted(points, key=lambda p: p.batch)]


def largest_that_fits(kind: Variant, ask: Ask) -> list[SearchPoint]:
    """Bisects the batches of a kind, assuming that memory grows with the batch.

    A probe without an answer ends the search of this kind, since memory is not the cause.
    """
    batches = sorted(kind.batches)
    asked: list[SearchPoint] = []
    low, high = -1, len(batches)  # the largest place known to fit, the smallest known not to
    while high - low > 1:
        # The largest one first: if it fits, no other probe is needed.
        place = high - 1 if not asked else (low + high) // 2
        point = ask(kind, batches[place])
        asked.append(point)
        if point.verdict == "unknown":
            break
        low, high = (place, high) if point.verdict == "fits" else (low, place)
    return asked


def best(points: Sequence[SearchPoint], goal: Goal = "batch") -> SearchPoint | None:
    """Returns the best point that fits: for ``batch`` the one with most tokens in a step, for ``speed`` the fastest.
    Ties for ``batch`` are broken by predicted time, then all by size, the smallest first.
    """
    fitting = [point for point in points if point.verdict == "fits"]
    tokens = (lambda p: p.tokens) if goal == "batch" else (lambda p: 0)
    return max(fitting, key=lambda p: (tokens(p), p.tokens_per_s, -p.peak_gib), default=None)


def frontier(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """Returns the points that fit and that no other one beats in both tokens per step and tokens/s."""
    fitting = [point for point in points if point.verdict == "fits"]

    def beaten(p: SearchPoint) -> bool:
        return any(
            q.tokens >= p.tokens
            and q.tokens_per_s >= p.tokens_per_s
            and (q.tokens, q.tokens_per_s) != (p.tokens, p.tokens_per_s)
            for q in fitting
        )

    return [point for point in fitting if not beaten(point)]
