"""Merging groups until no merge pays (semantics, section 13).

The loop is compiled (Numba): it takes a pair, joins two sorted lists of positions, and counts where the groups near
them are active with the new one.
"""

import heapq
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from param_decomp_lab.cluster.activity import Activity
from param_decomp_lab.cluster.cost import numbering_part, own_part
from param_decomp_lab.cluster.pairs import NEAR, Pairs, count_together, find_pairs, is_near
from param_decomp_lab.compiled import compiled

REPORT_EVERY_S = 0.5


class History(NamedTuple):
    """Merges in order. Component i is node i; the merge of number m makes node n + m of the nodes ``first`` and
    ``second``. ``active``: positions at which the new group is active; ``together``: at which both were. ``change``: of
    the cost, in bits a position."""

    first: Int32[np.ndarray, " merges"]
    second: Int32[np.ndarray, " merges"]
    active: Int64[np.ndarray, " merges"]
    together: Int64[np.ndarray, " merges"]
    change: Float64[np.ndarray, " merges"]


class Merger:
    """Merges the components of ``activity``, all of which fire, from several seeds. ``near``: see `pairs.py:NEAR`."""

    def __init__(self, activity: Activity, alpha: float, near: float = NEAR) -> None:
        assert (activity.firings > 0).all(), "a component that never fires joins nothing (G5)"
        # Of one type each: for another, the loops would be compiled again.
        self._activity, self._alpha, self._near = activity, float(alpha), float(near)

    def find_pairs(self, report: Callable[[int], None] = lambda done: None) -> Pairs:
        """The pairs that are near each other at the beginning. ``report``: gets how many components are done."""
        a, by_position = self._activity, self._activity.by_position()
        return Pairs(
            *_watched(lambda done: find_pairs(a.ends, a.positions, *by_position, self._alpha, self._near, done), report)
        )

    def merge(
        self, pairs: Pairs, seed: int = 0, draw: float = 0.0, report: Callable[[int], None] = lambda done: None
    ) -> History:
        """Merges until no pair pays (G6). ``draw``: 0 takes the best pair each time, of equal ones one at random; else
        the pair of rank n is drawn with a probability in proportion to exp(−n / draw). ``report``: gets how many merges
        are done."""
        a, near = self._activity, pairs.neighbours(len(self._activity))
        settings = self._alpha, self._near, float(draw), int(seed)
        found = _watched(lambda done: _merge(a.ends, a.positions, a.n_positions, pairs, *near, *settings, done), report)
        return History(*found)


def _watched(loop: Callable[[np.ndarray], tuple[Any, ...]], report: Callable[[int], None]) -> tuple[Any, ...]:
    """What ``loop`` returns, which counts what is done in the array it gets, and ends when there is a 1 in its second
    place. It runs in a thread of its own, so that this one can report, and be interrupted."""
    progress = np.zeros(2, np.int64)
    found: list[tuple[Any, ...]] = []
    thread = threading.Thread(target=lambda: found.append(loop(progress)))
    thread.start()
    try:
        while thread.is_alive():
            thread.join(REPORT_EVERY_S)
            report(int(progress[0]))
    finally:
        progress[1] = 1
        thread.join()
    return found[0]


@compiled
def _merge(
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
    """A group has a slot: the number of one of its components. ``near_members``: of each slot those near it."""
    np.random.seed(seed)
    n = len(ends) - 1
    columns = [positions[ends[i] : ends[i + 1]] for i in range(n)]
    near = [near_members[near_ends[i] : near_ends[i + 1]] for i in range(n)]
    rank, node = np.ones(n, np.int64), np.arange(n)
    slot_of = np.arange(n).astype(np.int32)  # of the group that has taken a slot in
    slot = np.full(2 * n, -1, np.int32)  # of a node that is a group now
    slot[:n] = np.arange(n)
    here, seen = np.zeros(n_positions, np.uint8), np.full(n, -1, np.int64)
    # A pair's own part only rises while its groups stay as they are, since k falls: an entry of the heap is a bound.
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
        # Of a geometric number, the rest modulo the pairs that are there is distributed as the ranks should be.
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
