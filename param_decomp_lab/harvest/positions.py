"""Keeps a uniform sample of the positions, with all firings there and the target's predictions."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float16, Int32, Int64

from param_decomp_lab.harvest import keys
from param_decomp_lab.harvest.firings import Firings


@dataclass
class BlockPositions:
    """The chosen positions of one block, in ascending order.

    ``positions``: indices in the whole harvest. ``tokens``: those read there; 0 of a toy. ``components``, by site:
    those that fire at the first position, then at the second, and so on; ``negative``: whether with a < 0; ``counts``:
    how many fire at each. ``outputs``, ``values``: the target's largest predictions.
    """

    positions: Int64[np.ndarray, " s"]
    tokens: Int32[np.ndarray, " s"]
    outputs: Int32[np.ndarray, "s k"]
    values: Float16[np.ndarray, "s k"]
    counts: dict[int, Int32[np.ndarray, " s"]] = field(default_factory=dict)
    components: dict[int, Int32[np.ndarray, " f"]] = field(default_factory=dict)
    negative: dict[int, Bool[np.ndarray, " f"]] = field(default_factory=dict)

    def add(self, site: int, found: Firings, chosen: Int64[np.ndarray, " s"]) -> None:
        """Adds the firings at the positions ``chosen``, numbered within the block."""
        self.counts[site], self.components[site], self.negative[site] = found.components_at(chosen)


def choose_positions(stream: int, first: int, n: int, n_valid: int, size: int) -> Int64[np.ndarray, " s"]:
    """Returns the indices within a block of the ``size`` positions to keep: those with the smallest keys.

    ``first``: index of the block's first position in the whole harvest. ``n``: positions of a block, of which the first
    ``n_valid`` are valid; the others are chosen only after all valid ones.
    """
    drawn = keys.keys(stream, first + np.arange(n))
    drawn[n_valid:] = np.iinfo(np.uint64).max
    return np.sort(np.argsort(drawn, kind="stable")[:size])
