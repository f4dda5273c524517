"""Merging groups until no merge pays (semantics, section 15)."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from param_decomp_lab.cluster.activity import Activity
from param_decomp_lab.cluster.loops import Pairs, find_pairs, merge_groups

NEAR = 0.5
"""Groups are near each other where they are active together at this share, or more, of the positions that a merge would
need. A new group is compared with those that were near its parts; 0 compares all that are active together."""
REPORT_EVERY_S = 0.5


class History(NamedTuple):
    """Merges in order. Component i is node i; the merge of number m makes node n + m of the nodes ``first`` and
    ``second``. ``active``: positions at which the new group is active; ``together``: at which both were. ``change``: of
    the cost (G3), in bits a position."""

    first: Int32[np.ndarray, " merges"]
    second: Int32[np.ndarray, " merges"]
    active: Int64[np.ndarray, " merges"]
    together: Int64[np.ndarray, " merges"]
    change: Float64[np.ndarray, " merges"]


class Merger:
    """Merges the components of ``activity``, all of which fire, from several seeds. ``near``: see `NEAR`."""

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
        found = _watched(
            lambda done: merge_groups(a.ends, a.positions, a.n_positions, pairs, *near, *settings, done), report
        )
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
