"""Prepares the inputs of a block for counting: the token at a position, or a toy's active features."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt64

from param_decomp_lab.harvest.firings import Firings
from param_decomp_lab.harvest.token_counts import pack


@dataclass(frozen=True)
class Inputs:
    """The inputs of one block: ``tokens`` of its positions, row by row, or ``features``, one row for each position."""

    tokens: Int32[np.ndarray, " n"] | None = None
    features: Float32[np.ndarray, "n features"] | None = None

    @cached_property
    def occurring(self) -> Int[np.ndarray, " u"]:
        """The different inputs of the block, in order."""
        if self.tokens is not None:
            return np.unique(self.tokens)
        assert self.features is not None
        return np.arange(self.features.shape[1])

    @cached_property
    def places(self) -> Int32[np.ndarray, " n"]:
        """The index, in `occurring`, of the input at each position; 0 for features, of which a position may have any
        number.
        """
        if self.tokens is None:
            assert self.features is not None
            return np.zeros(len(self.features), np.int32)
        return np.searchsorted(self.occurring, self.tokens).astype(np.int32)

    def table(self, C: int, n_firings: int) -> Int32[np.ndarray, "C u"]:
        """Returns a table for counting how often a component fires at an input. It has no inputs if positions have
        features, or if sorting the firings is cheaper because the table would be much larger than the counts.
        """
        n = len(self.occurring) if self.tokens is not None and C * len(self.occurring) <= 4 * n_firings else 0
        return np.zeros((C, n), np.int32)

    def counted(self, found: Firings, table: Int32[np.ndarray, "C u"]) -> UInt64[np.ndarray, " n"]:
        """Returns packed counts, from the filled table or, if it has no inputs, from the firings."""
        if table.shape[1]:
            pairs = np.flatnonzero(table)
            component, place = np.divmod(pairs, table.shape[1])
            return pack(component, self.occurring[place], table.ravel()[pairs])
        position, component = found.places()
        if self.tokens is not None:
            return pack(component, self.tokens[position], np.ones(1, np.int64))
        which, feature = np.nonzero(self._active[position])
        return pack(component[which], feature, np.ones(1, np.int64))

    @cached_property
    def _active(self) -> np.ndarray:
        assert self.features is not None
        return self.features != 0
