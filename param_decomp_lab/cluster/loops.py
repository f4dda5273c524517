"""The loops of clustering, compiled (Numba): finding the pairs that may be merged, and merging.

Among 100,000 components of which 100 fire at each position, almost every pair fires together somewhere. A pair whose
merge pays fires together often: at a share of at least 2α/(log2 k + 2α) of the firings of the rarer component. A sample
of those firings is therefore enough to rule out nearly all other pairs. A merge joins two sorted lists of positions,
and counts where the groups near them are active together with the new group.

All loops are in this file, because Numba's cache on disk is only invalidated by a change of a function's own file, not
of the functions it calls.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64, UInt8

from param_decomp_lab.compilation import compiled

SAMPLE = 512
"""The number of firings of a component that are searched for others that fire there. A component whose merge pays fires
at 50 or more of them on average, with 100,000 components and α = 1.
"""
PASSED = 0.5
"""A pair is counted exactly if its count in the sample is at least this share of what would make it near."""


class Pairs(NamedTuple):
    """Pairs of components near each other: their own parts (G4), the indices of both, and the number of positions at
    which both fire.
    """

    own: Float64[np.ndarray, " pairs"]
    first: Int32[np.ndarray, " pairs"]
    second: Int32[np.ndarray, " pairs"]
    together: Int64[np.ndarray, " pairs"]

    def neighbours(self, n: int) -> tuple[Int64[np.ndarray, " n_plus_1"], Int32[np.ndarray, " twice_pairs"]]:
        """Returns the components near each of n components: ends, and their indices."""
        of = np.concatenate([self.first, self.second])
        order = np.argsort(of, kind="stable")
        members = np.concatenate([self.second, self.first])[order]
        return np.concatenate([[0], np.cumsum(np.bincount(of, minlength=n))]), members


@compiled
def own_part(
    active_i: int, rank_i: int, active_j: int, rank_j: int, together: int, log_k: float, alpha: float
) -> float:
    """Computes the part of G4 that depends only on the two merged groups, times the number of positions.

    ``together``: number of positions at which both are active. ``log_k``: log2(k − 1) for k groups before the merge.
    """
    costs = alpha * (float(active_i) * rank_j + float(active_j) * rank_i)
    return costs - together * (log_k + alpha * (rank_i + rank_j))


@compiled
def numbering_part(total: int, k: int) -> float:
    """Computes the part of G4 that the shorter indices of all groups save, times the number of positions. ``total``:
    the number of active positions, summed over groups.
    """
    return float(total * np.log2((k - 1) / k))


@compiled
def needed(active_i: int, rank_i: int, active_j: int, rank_j: int, log_k: float, alpha: float) -> float:
    """Returns the number of positions at which two groups must be active together for their merge to pay: there, their
    own part (G4) is 0.
    """
    ranks = log_k + alpha * (rank_i + rank_j)
    return alpha * (float(active_i) * rank_j + float(active_j) * rank_i) / ranks if ranks > 0 else 0.0


@compiled
def is_near(
    active_i: int, rank_i: int, active_j: int, rank_j: int, together: int, log_k: float, alpha: float, near: float
) -> bool:
    return together > 0 and together >= near * needed(active_i, rank_i, active_j, rank_j, log_k, alpha)


@compiled
def count_together(here: UInt8[np.ndarray, " positions"], column: Int32[np.ndarray, " m"]) -> int:
    """Counts the positions of ``column`` at which ``here`` is 1."""
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
    """Returns the columns of `Pairs`, from the firings by component and by position. ``progress``: see `merging.py`."""
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
            # Each pair is found from its rarer component.
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


@compiled
def merge_groups(
    ends: Int64[np.ndarray, " n_plus_1"],
    positions: Int32[np.ndarray, " firings"],
    n_positions: int,
    pairs: Pairs,
    near_ends: Int64[np.ndarray, " n_plus_1"],
    near_members: Int32[np.ndarray, " twice_pairs"],
    alpha: float,
    nearness: float,
    draw: float,
    seed: int,
    progress: Int64[np.ndarray, "2"],
) -> tuple[Any, ...]:
    """Merges groups and returns the merges. Each group occupies a slot, the index of one of its components.
    ``near_members``: for each slot, the slots near it.
    """
    np.random.seed(seed)
    n = len(ends) - 1
    columns = [positions[ends[i] : ends[i + 1]] for i in range(n)]
    near = [near_members[near_ends[i] : near_ends[i + 1]] for i in range(n)]
    rank, node = np.ones(n, np.int64), np.arange(n)
    slot_of = np.arange(n).astype(np.int32)  # of the group that absorbed a slot
    slot = np.full(2 * n, -1, np.int32)  # of each node that is currently a group
    slot[:n] = np.arange(n)
    here, seen = np.zeros(n_positions, np.uint8), np.full(n, -1, np.int64)
    # While its groups are unchanged, a pair's own part can only rise, since k falls. An entry of the heap is thus a
    # lower bound.
    heap = [
        (pairs.own[t], np.random.random(), pairs.first[t], pairs.second[t], pairs.together[t])
        for t in range(len(pairs.own))
        if pairs.own[t] < 0
    ]
    heapq.heapify(heap)
    k, total = n, len(positions)
    merged = np.empty((max(n - 1, 0), 4), np.int64)
    change = np.empty(max(n - 1, 0), np.float64)
    n_merges = 0
    while k > 1 and not progress[1]:
        log_k = np.log2(k - 1)
        number = int(np.random.exponential(draw)) if draw > 0 else 0
        best = heap[:0]
        while len(heap) > 0 and len(best) <= number:
            bound, tie, a, b, x = heapq.heappop(heap)
            if slot[a] < 0 or slot[b] < 0:
                continue
            i, j = slot[a], slot[b]
            own = own_part(len(columns[i]), rank[i], len(columns[j]), rank[j], x, log_k, alpha)
            if own >= 0:
                continue
            if len(heap) > 0 and own > bound and own > heap[0][0]:
                heapq.heappush(heap, (own, tie, a, b, x))
            else:
                best.append((own, tie, a, b, x))
        if len(best) == 0:
            break
        # The remainder of a geometric number modulo the number of pairs has the distribution that the ranks need.
        chosen = number % len(best)
        for t in range(len(best)):
            if t != chosen:
                heapq.heappush(heap, best[t])
        own, _, a, b, x = best[chosen]
        kept, gone = slot[a], slot[b]
        union = _union(columns[kept], columns[gone], x)
        change[n_merges] = (numbering_part(total, k) + own) / n_positions
        merged[n_merges, 0], merged[n_merges, 1] = a, b
        merged[n_merges, 2], merged[n_merges, 3] = len(union), x
        new = n + n_merges
        n_merges += 1
        slot[a] = slot[b] = -1
        slot[new], node[kept] = kept, new
        rank[kept] += rank[gone]
        columns[kept], columns[gone] = union, union[:0]
        slot_of[gone] = kept
        total -= x
        k -= 1
        log_k = np.log2(max(k - 1, 1))
        here[union] = 1
        neighbours = np.empty(len(near[kept]) + len(near[gone]), np.int32)
        n_near = 0
        for members in (near[kept], near[gone]):
            for member in members:
                e = member
                while slot_of[e] != e:
                    e = slot_of[e]
                if e == kept or seen[e] == new:
                    continue
                seen[e] = new
                x = count_together(here, columns[e])
                own = own_part(len(union), rank[kept], len(columns[e]), rank[e], x, log_k, alpha)
                if own < 0:
                    heapq.heappush(heap, (own, np.random.random(), np.int32(node[e]), np.int32(new), x))
                if is_near(len(union), rank[kept], len(columns[e]), rank[e], x, log_k, alpha, nearness):
                    neighbours[n_near] = e
                    n_near += 1
        near[kept], near[gone] = neighbours[:n_near].copy(), neighbours[:0]
        here[union] = 0
        progress[0] = n_merges
    done = merged[:n_merges]
    sides = done[:, :2].astype(np.int32)
    return sides[:, 0].copy(), sides[:, 1].copy(), done[:, 2].copy(), done[:, 3].copy(), change[:n_merges].copy()


@compiled
def _union(
    one: Int32[np.ndarray, " a"], other: Int32[np.ndarray, " b"], together: int
) -> Int32[np.ndarray, " a_plus_b_minus_together"]:
    union = np.empty(len(one) + len(other) - together, np.int32)
    i = j = size = 0
    while i < len(one) and j < len(other):
        union[size] = min(one[i], other[j])
        i, j = i + (one[i] == union[size]), j + (other[j] == union[size])
        size += 1
    union[size : size + len(one) - i] = one[i:]
    union[size + len(one) - i :] = other[j:]
    return union
