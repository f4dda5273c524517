"""Examples of where the components of a site fire: those of largest λ, and a uniform sample of all."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int, Int8, Int32, UInt8, UInt64

from param_decomp_lab.harvest.firings import Firings, Ranked, Selected

Kind = Literal["top", "uniform"]
AROUND = 20
"""Tokens shown to each side of an example."""
PER_ROW = 2
"""At most so many of the examples of largest λ are from one row. The uniform sample has no limit, to be uniform."""
AT_ONCE = 1 << 14
EMPTY = np.uint64(np.iinfo(np.uint64).max)


@dataclass
class Examples:
    """For every component, K slots with the examples of lowest ``rank``; an empty slot has rank `EMPTY`.

    Ranks are random keys for a uniform sample; for the examples of largest λ they order by λ, equal ones at random.
    ``importances`` and ``activations`` are of ``width`` positions around the example: λ in 255ths, and the activation
    in 127ths of ``scale``, the largest |a| among them; 0 beyond the ends of the row.
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
    def empty(cls, C: int, K: int, around: int) -> "Examples":
        whole, wide, width = np.zeros((C, K), np.int32), np.zeros((C, K), np.float32), 2 * around + 1
        return cls(
            np.full((C, K), EMPTY), whole.copy(), whole.copy(), wide.copy(), wide.copy(), wide.copy(),
            np.zeros((C, K, width), np.uint8), np.zeros((C, K, width), np.int8),
        )  # fmt: skip

    @property
    def worst(self) -> UInt64[np.ndarray, " C"]:
        """The rank that a firing must be below to take the place of an example."""
        return self.rank.max(axis=1)

    def add(self, kind: Kind, found: Firings, ranked: Ranked, first_row: int, length: int) -> None:
        """Takes those of some firings of one block that belong here. ``first_row``: number of the block's first row.
        ``length``: positions in a row."""
        if not len(ranked.number):
            return
        better, rank = found.select(ranked.number), ranked.rank
        component, row = better.component, better.position // length
        if kind == "top":
            order = np.lexsort((rank, row, component))
            first = order[place_in_group(component[order].astype(np.int64) * (1 << 31) + row[order]) < PER_ROW]
        else:
            first = np.arange(len(rank))
        order = first[np.lexsort((rank[first], component[first]))]
        order = order[place_in_group(component[order]) < self.rank.shape[1]]
        self._take(found, Selected(*(x[order] for x in better)), rank[order], first_row, length)

    def _take(self, found: Firings, better: Selected, rank: np.ndarray, first_row: int, length: int) -> None:
        """Puts these firings, sorted by component and rank and at most K of each component, in the place of worse."""
        where, slot, new = self._make_room(better.component, rank)
        accepted, rank = Selected(*(x[new] for x in better)), rank[new]
        # In parts: what surrounds the examples of a whole block takes more memory than all that is kept.
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
        # What fires stays visible, however small.
        self.importances[where, slot] = np.ceil(np.clip(importances, 0, 1) * 255).astype(np.uint8)
        safe = np.where(scale > 0, scale, 1)[:, None]
        self.activations[where, slot] = np.rint(activations / safe * 127).astype(np.int8)

    def _make_room(
        self, component: Int[np.ndarray, " n"], rank: UInt64[np.ndarray, " n"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots that candidates take: component and slot of each, and which candidate; candidates are sorted by
        component and rank, at most K of each component."""
        K = self.rank.shape[1]
        changed, group = np.unique(component, return_inverse=True)
        candidates = np.full((len(changed), K), EMPTY)
        column = place_in_group(component)
        candidates[group, column] = rank
        order = np.argsort(np.concatenate([self.rank[changed], candidates], axis=1), axis=1, kind="stable")
        chosen = np.zeros((len(changed), 2 * K), bool)
        np.put_along_axis(chosen, order[:, :K], True, axis=1)
        freed_row, slot = np.nonzero(~chosen[:, :K])
        taken_row, taken_column = np.nonzero(chosen[:, K:])
        number = np.full((len(changed), K), -1)
        number[group, column] = np.arange(len(component))
        return changed[freed_row], slot, number[taken_row, taken_column]

    def merge(self, other: "Examples") -> None:
        """Takes the better ones of ``other``, which are of other rows."""
        order = np.argsort(other.rank, axis=1, kind="stable")
        component, place = np.nonzero(np.take_along_axis(other.rank, order, axis=1) != EMPTY)
        slots = order[component, place]
        where, slot, new = self._make_room(component, other.rank[component, slots])
        source = component[new], slots[new]
        for name, mine in vars(self).items():
            mine[where, slot] = getattr(other, name)[source]


def place_in_group(sorted_groups: np.ndarray) -> np.ndarray:
    """Of each element of a sorted array, how many equal ones are before it."""
    n = len(sorted_groups)
    starts = (
        np.flatnonzero(np.concatenate([[True], sorted_groups[1:] != sorted_groups[:-1]])) if n else np.zeros(0, int)
    )
    return np.arange(n) - np.repeat(starts, np.diff(np.append(starts, n)))
