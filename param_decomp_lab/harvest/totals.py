"""Sums over the data for each component of a site, such that sums over parts of the data add up to the same bits."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, UInt32

from param_decomp_lab.harvest.device import AnyArray, SiteSums
from param_decomp_lab.harvest.files.tables import ACTIVATION_BINS, IMPORTANCE_BINS

UNIT = 2.0**-26
"""Sums are kept as integer multiples of this, because adding integers gives the same result in every order, unlike
floats.
"""


@dataclass
class Totals:
    """Totals of every component of a site, over the positions harvested so far.

    ``importance_sum`` and ``activation_sum`` (of |a|) are over all positions, ``firing_activation_sum`` over those
    where the component fires; all in `UNIT`. ``firings_at_one``: the firings with λ of `AT_ONE` or more.
    ``importance_max`` is over the firings, ``activation_max`` (of |a|) over all positions.
    """

    firings: Int64[np.ndarray, " C"]
    firings_at_one: Int64[np.ndarray, " C"]
    importance_sum: Int64[np.ndarray, " C"]
    activation_sum: Int64[np.ndarray, " C"]
    firing_activation_sum: Int64[np.ndarray, " C"]
    importance_max: Float32[np.ndarray, " C"]
    activation_max: Float32[np.ndarray, " C"]
    importance_histogram: UInt32[np.ndarray, "C bins"]
    activation_histogram: UInt32[np.ndarray, "C bins"]

    @classmethod
    def zeros(cls, C: int) -> "Totals":
        whole, wide = np.zeros(C, np.int64), np.zeros(C, np.float32)
        return cls(
            whole.copy(), whole.copy(), whole.copy(), whole.copy(), whole.copy(), wide.copy(), wide.copy(),
            np.zeros((C, IMPORTANCE_BINS), np.uint32), np.zeros((C, ACTIVATION_BINS), np.uint32),
        )  # fmt: skip

    def add(self, sums: SiteSums, firing_activation_sum: Float64[np.ndarray, " C"]) -> None:
        """Adds the sums of one block. `Firings.count` adds everything else directly into the arrays."""
        self.importance_sum += _whole(sums.importance_sum)
        self.activation_sum += _whole(sums.activation_sum)
        self.firing_activation_sum += _whole(firing_activation_sum)
        np.maximum(self.activation_max, sums.activation_max, out=self.activation_max)

    def merge(self, other: "Totals") -> None:
        """Adds the totals of other positions."""
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            mine[...] = np.maximum(mine, theirs) if name.endswith("_max") else mine + theirs


def _whole(sums: Float[AnyArray, " C"]) -> Int64[np.ndarray, " C"]:
    return np.rint(np.asarray(sums, np.float64) / UNIT).astype(np.int64)
