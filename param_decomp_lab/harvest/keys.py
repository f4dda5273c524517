"""Computes random keys of positions and firings as a pure function of what they belong to, so that every process draws
the same keys.

The k firings with the smallest keys are a uniform sample, so samples of parts of the data can be merged.
"""

from typing import Any

import numpy as np
from jaxtyping import UInt64

POSITIONS, FIRINGS = 0, 1
"""Purposes of keys: choosing positions, and choosing examples among the firings."""

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stream(seed: int, *which: int) -> int:
    """Returns the number of an independent stream of keys."""
    mixed = seed & _MASK
    for number in which:
        mixed = int(_mix(np.array([(mixed + (number + 1) * _STEP) & _MASK], np.uint64))[0])
    return mixed


def keys(stream: int, numbers: Any) -> UInt64[np.ndarray, " n"]:
    """Returns a key for each of ``numbers`` (integers from 0 up): uniform over all 64 bits, without repetitions."""
    # A bijection of 64 bits (SplitMix64's; Steele, Lea and Flood, 2014), applied to a sequence that contains each
    # number once.
    with np.errstate(over="ignore"):
        return _mix((np.asarray(numbers).astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP) + np.uint64(stream))


def _mix(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
