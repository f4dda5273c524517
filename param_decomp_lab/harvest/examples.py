"""Keeps examples of firings for each component of a site: those of largest ``λ · |a|``, and a uniform sample of all."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from jaxtyping import Float32, Int, Int8, Int32, Int64, UInt8, UInt64

from param_decomp_lab.harvest.firings import Firings, Ranked, Selected

Kind = Literal["top", "uniform"]
AROUND = 20
"""Tokens shown to each side of an example."""
PER_ROW = 2
"""The most top examples of one sign from one row. The uniform sample has no such limit, or it would not be uniform."""
AT_ONCE = 1 << 14
EMPTY = np.uint64(np.iinfo(np.uint64).max)
NEGATIVE = np.uint64(1)
"""The bit of a top example's rank that says a < 0."""


@dataclass
class Examples:
    """A uniform sample of the firings of every component, in K slots: those with the lowest ``rank``, a random key. An
    empty slot has rank `EMPTY`.

    ``importances`` and ``activations`` cover ``width`` positions around the example: λ in 255ths, and the activation in
    127ths of ``scale``, the largest |a| among them; 0 beyond the ends of the row.
    """

    rank: UInt64[np.ndarray, "C K"]
    row: Int32[np.ndarray, "C K"]
    position: Int32[np.ndarray, "C K"]
    importance: Float32[np.ndarray, "C K"]
    activation: Float32[np.ndarray, "C K"]
    scale: Float32[np.ndarray, "C K"]
    importances: UInt8[np.ndarray, "C K width"]
    activations: Int8[np.ndarray, "C K width"]

    @classmethod
    def empty(cls, C: int, K: int, around: int) -> Self:
        whole, wide, width = np.zeros((C, K), np.int32), np.zeros((C, K), np.float32), 2 * around + 1
        return cls(
            np.full((C, K), EMPTY), whole.copy(), whole.copy(), wide.copy(), wide.copy(), wide.copy(),
            np.zeros((C, K, width), np.uint8), np.zeros((C, K, width), np.int8),
        )  # fmt: skip

    @property
    def worst(self) -> UInt64[np.ndarray, "..."]:
        """The rank that a firing of each component must be below to take the place of an example."""
        worst: np.ndarray = self.rank.max(axis=1)
        return worst

    def add(self, found: Firings, ranked: Ranked, first_row: int, length: int) -> None:
        """Adds those of a block's firings that belong among the examples. ``first_row``: index of the block's first
        row. ``length``: positions in a row.
        """
        if not len(ranked.number):
            return
        better, rank = found.select(ranked.number), ranked.rank
        component, row = better.component, better.position // length
        order = self._candidates(component, row, rank)
        order = order[place_in_group(component[order]) < self.rank.shape[1]]
        self._take(found, Selected(*(x[order] for x in better)), rank[order], first_row, length)

    def _candidates(
        self, component: Int32[np.ndarray, " n"], row: Int32[np.ndarray, " n"], rank: UInt64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " k"]:
        """Returns the firings of a block that may be taken, by component, and in their original order within each."""
        del row
        return np.lexsort((rank, component))

    def _best_first(self, rank: UInt64[np.ndarray, "n m"]) -> Int64[np.ndarray, "n m"]:
        """Returns, for each row, the order in which examples are kept; empty slots come last."""
        return np.argsort(rank, axis=1, kind="stable")

    def _take(self, found: Firings, better: Selected, rank: np.ndarray, first_row: int, length: int) -> None:
        """Replaces worse examples by these firings, which are sorted by component, at most K for each."""
        where, slot, new = self._make_room(better.component, rank)
        accepted, rank = Selected(*(x[new] for x in better)), rank[new]
        # In parts, because the contexts of all examples of a block take more memory than everything that is kept.
        for first in range(0, len(rank), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            of_part = Selected(*(x[part] for x in accepted))
            self._put(found, of_part, where[part], slot[part], rank[part], first_row, length)

    def _put(
        self,
        found: Firings,
        firings: Selected,
        where: np.ndarray,
        slot: np.ndarray,
        rank: np.ndarray,
        first_row: int,
        length: int,
    ) -> None:
        """Fills slots of the components ``where``."""
        row, position = np.divmod(firings.position, np.int32(length))
        width = self.importances.shape[2]
        around = position[:, None] + np.arange(width, dtype=np.int32) - width // 2
        inside = (around >= 0) & (around < length)
        at = row[:, None] * length + np.clip(around, 0, length - 1)
        gathered = found.gather(at.astype(np.int32), firings.component)
        importances, activations = (np.where(inside, x, np.float32(0)) for x in gathered)
        scale = np.abs(activations).max(axis=1)
        self.rank[where, slot] = rank
        self.row[where, slot], self.position[where, slot] = first_row + row, position
        self.importance[where, slot] = firings.importance
        self.activation[where, slot] = firings.activation
        self.scale[where, slot] = scale
        # A firing stays visible, even with a tiny λ.
        self.importances[where, slot] = np.ceil(np.clip(importances, 0, 1) * 255).astype(np.uint8)
        safe = np.where(scale > 0, scale, 1)[:, None]
        self.activations[where, slot] = np.rint(activations / safe * 127).astype(np.int8)

    def _make_room(
        self, component: Int[np.ndarray, " n"], rank: UInt64[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the component and slot that each accepted candidate takes, and its index. Candidates are sorted by
        component, at most K for each.
        """
        K = self.rank.shape[1]
        changed, group = np.unique(component, return_inverse=True)
        candidates = np.full((len(changed), K), EMPTY)
        column = place_in_group(component)
        candidates[group, column] = rank
        order = self._best_first(np.concatenate([self.rank[changed], candidates], axis=1))
        chosen = np.zeros((len(changed), 2 * K), bool)
        np.put_along_axis(chosen, order[:, :K], True, axis=1)
        freed_row, slot = np.nonzero(~chosen[:, :K])
        taken_row, taken_column = np.nonzero(chosen[:, K:])
        number = np.full((len(changed), K), -1)
        number[group, column] = np.arange(len(component))
        return changed[freed_row], slot, number[taken_row, taken_column]

    def merge(self, other: Self) -> None:
        """Merges ``other``, which has examples from other rows, and keeps the better ones."""
        order = np.argsort(other.rank, axis=1, kind="stable")
        component, place = np.nonzero(np.take_along_axis(other.rank, order, axis=1) != EMPTY)
        slots = order[component, place]
        where, slot, new = self._make_room(component, other.rank[component, slots])
        source = component[new], slots[new]
        for name, mine in vars(self).items():
            mine[where, slot] = getattr(other, name)[source]


class TopExamples(Examples):
    """The firings of largest ``λ · |a|``: the ``K // 2`` best with a ≥ 0 and the ``K // 2`` best with a < 0; slots that
    stay free get the best remaining ones. A component with only one sign of a thus has K examples, in the same memory.

    Ranks order by ``λ · |a|``, with ties broken at random, and contain the sign (`NEGATIVE`).
    """

    @property
    def worst(self) -> UInt64[np.ndarray, "C 2"]:
        """The rank to beat for a ≥ 0, and for a < 0."""
        half, taken = self.rank.shape[1] // 2, self.rank != EMPTY
        negative = (self.rank & NEGATIVE).astype(bool)
        signs = [taken & ~negative, taken & negative]
        n = [mine.sum(axis=1) for mine in signs]
        last = [np.where(mine, self.rank, 0).max(axis=1) for mine in signs]
        full = taken.all(axis=1)
        # Examples of one sign beyond its half also give way to those of the other sign.
        beyond = [np.where(n[other] > half, last[other], 0) for other in (1, 0)]
        worst = [np.where(full & (n[s] >= half), np.maximum(last[s], beyond[s]), EMPTY) for s in (0, 1)]
        return np.stack(worst, axis=1).astype(np.uint64)

    def _candidates(
        self, component: Int32[np.ndarray, " n"], row: Int32[np.ndarray, " n"], rank: UInt64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " k"]:
        signed = component.astype(np.int64) * 2 + (rank & NEGATIVE).astype(np.int64)
        order = np.lexsort((rank, row, signed))
        few = order[place_in_group(signed[order] * (1 << 31) + row[order]) < PER_ROW]
        by_sign = few[np.lexsort((rank[few], signed[few]))]
        later = place_in_group(signed[by_sign]) >= self.rank.shape[1] // 2
        return by_sign[np.lexsort((rank[by_sign], later, component[by_sign]))]

    def _best_first(self, rank: UInt64[np.ndarray, "n m"]) -> Int64[np.ndarray, "n m"]:
        order = super()._best_first(rank)
        ranked = np.take_along_axis(rank, order, axis=1)
        negative = (ranked & NEGATIVE).astype(bool)
        place = np.where(negative, np.cumsum(negative, axis=1), np.cumsum(~negative, axis=1))
        later = np.where(ranked == EMPTY, 2, place > self.rank.shape[1] // 2)
        return np.take_along_axis(order, np.argsort(later, axis=1, kind="stable"), axis=1)


def place_in_group(sorted_groups: np.ndarray) -> np.ndarray:
    """Returns how many equal elements come before each element of a sorted array."""
    n = len(sorted_groups)
    starts = (
        np.flatnonzero(np.concatenate([[True], sorted_groups[1:] != sorted_groups[:-1]])) if n else np.zeros(0, int)
    )
    return np.arange(n) - np.repeat(starts, np.diff(np.append(starts, n)))
