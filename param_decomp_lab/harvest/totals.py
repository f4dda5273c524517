"""What is summed up of each component of a site, so that sums of parts of the data add up to the same bits."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int32, Int64, UInt32

from param_decomp_lab.harvest.firings import Firings
from param_decomp_lab.harvest_files.tables import ACTIVATION_BINS, IMPORTANCE_BINS, OCTAVES

UNIT = 2.0**-26
"""Sums are kept as whole multiples of this: integers add up to the same in every order, floats do not."""


@dataclass
class Totals:
    """Of every component of a site, over the positions harvested so far.

    ``importance_sum`` and ``activation_sum`` (of |a|) are over all positions, ``firing_activation_sum`` over those
    where the component fires; all in `UNIT`. ``importance_max`` is over the firings, ``activation_max`` (of |a|) over
    all positions.
    """

    firings: Int64[np.ndarray, " C"]
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
            whole.copy(), whole.copy(), whole.copy(), whole.copy(), wide.copy(), wide.copy(),
            np.zeros((C, IMPORTANCE_BINS), np.uint32), np.zeros((C, ACTIVATION_BINS), np.uint32),
        )  # fmt: skip

    def add(
        self,
        found: Firings,
        importance_sum: Float[np.ndarray, " C"],
        activation_sum: Float[np.ndarray, " C"],
        activation_max: Float[np.ndarray, " C"],
    ) -> None:
        """Adds one block; the sums and the largest |a| are over all of its positions."""
        C = len(self.firings)
        self.firings += np.bincount(found.component, minlength=C)
        self.importance_sum += _whole(importance_sum)
        self.activation_sum += _whole(activation_sum)
        size = np.abs(found.activation)
        self.firing_activation_sum += _whole(np.bincount(found.component, size, C))
        np.maximum.at(self.importance_max, found.component, found.importance)
        np.maximum(self.activation_max, activation_max, out=self.activation_max)
        _count(self.importance_histogram, found.component, importance_bin(found.importance))
        _count(self.activation_histogram, found.component, activation_bin(found.activation))

    def merge(self, other: "Totals") -> None:
        """Adds what was summed up of other positions."""
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            mine[...] = np.maximum(mine, theirs) if name.endswith("_max") else mine + theirs


def importance_bin(importance: Float32[np.ndarray, " n"]) -> np.ndarray:
    """Number of the bin of each λ > 0."""
    return np.clip(np.ceil(importance * np.float32(IMPORTANCE_BINS)).astype(np.int32) - 1, 0, IMPORTANCE_BINS - 1)


def activation_bin(activation: Float32[np.ndarray, " n"]) -> np.ndarray:
    """Number of the bin of each activation."""
    # Sign and exponent of a float32 are its first nine bits; the exponent is the whole part of its logarithm.
    return _BIN_OF_FIRST_BITS[activation.view(np.uint32) >> np.uint32(23)]


def _bins_of_first_bits() -> Int32[np.ndarray, "512"]:
    sign, exponent = np.divmod(np.arange(512, dtype=np.int32), 256)
    place = np.clip(exponent - 127, OCTAVES[0], OCTAVES[-1]) - OCTAVES[0]
    return np.where(sign == 1, len(OCTAVES) - 1 - place, len(OCTAVES) + place).astype(np.int32)


_BIN_OF_FIRST_BITS = _bins_of_first_bits()


def _count(histogram: UInt32[np.ndarray, "C bins"], component: np.ndarray, bins: np.ndarray) -> None:
    C, n_bins = histogram.shape
    places = component * np.int32(n_bins) + bins
    if len(places) * 4 > histogram.size:
        histogram += np.bincount(places, minlength=histogram.size).reshape(C, n_bins).astype(np.uint32)
    else:
        np.add.at(histogram.reshape(-1), places, np.uint32(1))


def _whole(sums: Float[np.ndarray, " C"]) -> Int64[np.ndarray, " C"]:
    return np.rint(np.asarray(sums, np.float64) / UNIT).astype(np.int64)
