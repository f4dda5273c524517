"""Examples of where the components of a site fire: those of largest λ, and a uniform sample of all."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int, Int8, Int32, UInt8, UInt64

from param_decomp_lab.harvest.firings import Firings

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

    def add(self, kind: Kind, found: Firings, keys: UInt64[np.ndarray, " n"], first_row: int, length: int) -> None:
        """Takes the firings of one block that belong here. ``keys``: of each firing. ``first_row``: number of the
        block's first row. ``length``: positions in a row."""
        worst = self.rank.max(axis=1)
        if kind == "top":
            # Almost all fall at the first comparison; the ranks of the rest are worth computing.
            likely = np.flatnonzero(found.importance >= _importance_of(worst)[found.component])
            rank = by_importance(found.importance[likely], keys[likely])
            among = np.flatnonzero(rank < worst[found.component[likely]])
            better, rank = likely[among], rank[among]
        else:
            better = np.flatnonzero(keys < worst[found.component])
            rank = keys[better]
        if not len(better):
            return
        component = found.component[better]
        row = found.position[better] // length
        if kind == "top":
            order = np.lexsort((rank, row, component))
            first = order[place_in_group(component[order].astype(np.int64) * (1 << 31) + row[order]) < PER_ROW]
        else:
            first = np.arange(len(better))
        order = first[np.lexsort((rank[first], component[first]))]
        order = order[place_in_group(component[order]) < self.rank.shape[1]]
        self._take(found, better[order], rank[order], first_row, length)

    def _take(self, found: Firings, chosen: np.ndarray, rank: np.ndarray, first_row: int, length: int) -> None:
        """Puts these firings, sorted by component and rank and at most K of each component, in the place of worse."""
        where, slot, new = self._make_room(found.component[chosen], rank)
        accepted, rank = chosen[new], rank[new]
        # In parts: what surrounds the examples of a whole block takes more memory than all that is kept.
        for first in range(0, len(accepted), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            self._put(found, accepted[part], where[part], slot[part], rank[part], first_row, length)

    def _put(
        self,
        found: Firings,
        firings: np.ndarray,
        where: np.ndarray,
        slot: np.ndarray,
        rank: np.ndarray,
        first_row: int,
        length: int,
    ) -> None:
        """Fills slots of the components ``where``."""
        row, position = np.divmod(found.position[firings], np.int32(length))
        width = self.importances.shape[2]
        around = position[:, None] + np.arange(width, dtype=np.int32) - width // 2
        inside = (around >= 0) & (around < length)
        at = row[:, None] * length + np.clip(around, 0, length - 1)
        gathered = found.gather(at.astype(np.int32), found.component[firings])
        importances, activations = (np.where(inside, x, np.float32(0)) for x in gathered)
        scale = np.abs(activations).max(axis=1)
        self.rank[where, slot] = rank
        self.row[where, slot], self.position[where, slot] = first_row + row, position
        self.importance[where, slot] = found.importance[firings]
        self.activation[where, slot] = found.activation[firings]
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


def by_importance(importance: Float32[np.ndarray, " n"], keys: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Ranks by which the largest importance comes first, and equal ones in the order of the keys' lower halves: in that
    of whole keys, a component whose importances are all 1 would have the same examples as its uniform sample."""
    # The bits of floats that are not negative are in the order of the floats.
    smaller = np.uint64(0xFFFFFFFF) - importance.astype(np.float32).view(np.uint32)
    return (smaller.astype(np.uint64) << np.uint64(32)) | (keys & np.uint64(0xFFFFFFFF))


def _importance_of(rank: UInt64[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
    """The importance in the ranks of `by_importance`; 0 of an empty slot."""
    return (np.uint64(0xFFFFFFFF) - (rank >> np.uint64(32))).astype(np.uint32).view(np.float32)


def place_in_group(sorted_groups: np.ndarray) -> np.ndarray:
    """Of each element of a sorted array, how many equal ones are before it."""
    n = len(sorted_groups)
    starts = (
        np.flatnonzero(np.concatenate([[True], sorted_groups[1:] != sorted_groups[:-1]])) if n else np.zeros(0, int)
    )
    return np.arange(n) - np.repeat(starts, np.diff(np.append(starts, n)))
