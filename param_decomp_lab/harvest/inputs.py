"""The inputs of a block as they are counted: the token at a position, or a toy's active features."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Int, Int32


@dataclass(frozen=True)
class Inputs:
    """The inputs of one block: ``tokens`` of its positions, row after row, or ``features``, a position each."""

    tokens: Int32[np.ndarray, " n"] | None = None
    features: Float32[np.ndarray, "n features"] | None = None

    @cached_property
    def occurring(self) -> Int[np.ndarray, " u"]:
        """The different inputs of the block, in order."""
        if self.tokens is not None:
            return np.unique(self.tokens)
        assert self.features is not None
        return np.arange(self.features.shape[1])

    def at(self, positions: Int[np.ndarray, " m"]) -> tuple[Int[np.ndarray, " k"] | None, Int[np.ndarray, " k"]]:
        """The inputs at these positions: which of the positions each is at (None: one at each), and its place among
        those `occurring`."""
        if self.tokens is not None:
            return None, self._places[positions]
        which, feature = np.nonzero(self._active[positions])
        return which, feature.astype(np.int32)

    @cached_property
    def _places(self) -> Int32[np.ndarray, " n"]:
        assert self.tokens is not None
        return np.searchsorted(self.occurring, self.tokens).astype(np.int32)

    @cached_property
    def _active(self) -> np.ndarray:
        assert self.features is not None
        return self.features != 0
