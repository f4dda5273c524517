"""Merges groups until no merge pays (semantics, section 15)."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from param_decomp_lab.cluster.activity import Activity
from param_decomp_lab.cluster.loops import Pairs, find_pairs, merge_groups

NEAR = 0.5
"""Groups are near each other if they are active together at this share, or more, of the positions that a merge would
need to pay. A new group is compared only with groups that were near its parts; 0 compares all that are ever active
together.
"""
REPORT_EVERY_S = 0.5


class History(NamedTuple):
    """Merges in order. Component i is node i; merge m makes node n + m from the nodes ``first`` and ``second``.
    ``active``: positions at which the new group is active; ``together``: positions at which both were. ``change``: the
    change of the cost (G3), in bits per position.
    """

    first: Int32[np.ndarray, " merges"]
    second: Int32[np.ndarray, " merges"]
    active: Int64[np.ndarray, " merges"]
    together: Int64[np.ndarray, " merges"]
    change: Float64[np.ndarray, " merges"]


class Merger:
    """Merges the components of ``activity``, all of which fire, from several seeds. ``near``: see `NEAR`."""

    def __init__(self, activity: Activity, alpha: float, near: float = NEAR) -> None:
        assert (activity.firings > 0).all(), "a component that never fires joins nothing (G5)"
        # The types are fixed, since the loops would be compiled again for others.
        self._activity, self._alpha, self._near = activity, float(alpha), float(near)

    def find_pairs(self, report: Callable[[int], None] = lambda done: None) -> Pairs:
        """Returns the pairs that are near each other at the beginning. ``report``: receives the number of components
        done.
        """
        a, by_position = self._activity, self._activity.by_position()
        return Pairs(
            *_watched(lambda done: find_pairs(a.ends, a.positions, *by_position, self._alpha, self._near, done), report)
        )

    def merge(
        self, pairs: Pairs, seed: int = 0, draw: float = 0.0, report: Callable[[int], None] = lambda done: None
    ) -> History:
        """Merges until no pair pays (G6). ``draw``: 0 takes the best pair each time, with ties broken at random;
        otherwise the pair of rank n is drawn with a probability proportional to exp(−n / draw). ``report``: receives
        the number of merges done.
        """
        a, near = self._activity, pairs.neighbours(len(self._activity))
        settings = self._alpha, self._near, float(draw), int(seed)
        found = _watched(
            lambda done: merge_groups(a.ends, a.positions, a.n_positions, pairs, *near, *settings, done), report
        )
        return History(*found)


def _watched(loop: Callable[[np.ndarray], tuple[Any, ...]], report: Callable[[int], None]) -> tuple[Any, ...]:
    """Runs ``loop`` in a separate thread and returns its result, so that this thread can report and be interrupted. The
    loop counts its progress in the first entry of the array it gets, and stops when the second is 1.
    """
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
