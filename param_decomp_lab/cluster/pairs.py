"""Finding the pairs of components that may be merged, among the many that fire together by chance.

Of 100,000 components with 100 firings at a position, almost every pair fires together somewhere. A pair that pays does
so often: at the share 2α/(log2 k + 2α) or more of the firings of the rarer one. So a sample of its firings is enough to
pass over nearly all the others.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64, UInt8

from param_decomp_lab.cluster.cost import own_part
from param_decomp_lab.compiled import compiled

NEAR = 0.5
"""Groups are near each other where they are active together at this share, or more, of the positions that a merge would
need. A new group is compared with those that were near its parts; 0 compares all that are active together."""
SAMPLE = 512
"""Firings of a component that are looked at for others that fire there. One that pays fires at 50 of them or more, on
average, with 100,000 components and α 1."""
PASSED = 0.5
"""A pair is counted whole if it is found at this share, or more, of what would be near."""


class Pairs(NamedTuple):
    """Pairs of components near each other: their own parts (G4), both numbers, and the positions at which both fire."""

    own: Float64[np.ndarray, " pairs"]
    first: Int32[np.ndarray, " pairs"]
    second: Int32[np.ndarray, " pairs"]
    together: Int64[np.ndarray, " pairs"]

    def neighbours(self, n: int) -> tuple[Int64[np.ndarray, " n_plus_1"], Int32[np.ndarray, " twice_pairs"]]:
        """Of each of n components those near it: ends, and their numbers."""
        of = np.concatenate([self.first, self.second])
        order = np.argsort(of, kind="stable")
        members = np.concatenate([self.second, self.first])[order]
        return np.concatenate([[0], np.cumsum(np.bincount(of, minlength=n))]), members


@compiled
def needed(active_i: int, rank_i: int, active_j: int, rank_j: int, log_k: float, alpha: float) -> float:
    """The positions that two groups are to be active at together for their merge to pay: their own part (G4) is 0."""
    ranks = log_k + alpha * (rank_i + rank_j)
    return alpha * (float(active_i) * rank_j + float(active_j) * rank_i) / ranks if ranks > 0 else 0.0


@compiled
def is_near(
    active_i: int, rank_i: int, active_j: int, rank_j: int, together: int, log_k: float, alpha: float, near: float
) -> bool:
    return together > 0 and together >= near * needed(active_i, rank_i, active_j, rank_j, log_k, alpha)


@compiled
def count_together(here: UInt8[np.ndarray, " positions"], column: Int32[np.ndarray, " m"]) -> int:
    """At how many positions of ``column`` there is a 1 in ``here``."""
    count = 0
    for p in column:
        count += here[p]
    return count


@compiled
def find_pairs(
    ends: Int64[np.ndarray, " n_plus_1"],
    positions: Int32[np.ndarray, " firings"],
    row_ends: Int64[np.ndarray, " positions_plus_1"],
    rows: Int32[np.ndarray, " firings"],
    alpha: float,
    near: float,
    progress: Int64[np.ndarray, "2"],
) -> tuple[Any, ...]:
    """The columns of `Pairs`, from what fires by component and by position. ``progress``: see `merging.py`."""
    np.random.seed(0)
    n = len(ends) - 1
    log_k = np.log2(max(n - 1, 1))
    firings = np.diff(ends)
    here = np.zeros(len(row_ends) - 1, np.uint8)
    found, touched = np.zeros(n, np.int32), np.empty(n, np.int32)
    size, room = 0, 1 << 16
    own, first, second = np.empty(room, np.float64), np.empty(room, np.int32), np.empty(room, np.int32)
    both = np.empty(room, np.int64)
    for i in range(n):
        if progress[1]:
            break
        column = positions[ends[i] : ends[i + 1]]
        whole = len(column) <= SAMPLE or near == 0
        sample = column if whole else np.random.choice(column, SAMPLE, replace=False)
        n_touched = 0
        for p in sample:
            for t in range(row_ends[p], row_ends[p + 1]):
                j = rows[t]
                if found[j] == 0:
                    touched[n_touched] = j
                    n_touched += 1
                found[j] += 1
        share = len(sample) / len(column)
        if not whole:
            here[column] = 1
        for t in range(n_touched):
            j = touched[t]
            x = np.int64(found[j])
            found[j] = 0
            # Each pair is found from its rarer side.
            if firings[j] < firings[i] or (firings[j] == firings[i] and j <= i):
                continue
            least = near * needed(firings[i], 1, firings[j], 1, log_k, alpha)
            if x < least * share * (1.0 if whole else PASSED):
                continue
            if not whole:
                x = count_together(here, positions[ends[j] : ends[j + 1]])
                if x < least:
                    continue
            if size == room:
                room *= 2
                own, first = _longer(own), _longer(first)
                second, both = _longer(second), _longer(both)
            own[size] = own_part(firings[i], 1, firings[j], 1, x, log_k, alpha)
            first[size], second[size], both[size] = i, j, x
            size += 1
        if not whole:
            here[column] = 0
        progress[0] = i + 1
    return own[:size].copy(), first[:size].copy(), second[:size].copy(), both[:size].copy()


@compiled
def _longer(x):  # type: ignore[no-untyped-def]
    longer = np.empty(2 * len(x), x.dtype)
    longer[: len(x)] = x
    return longer
