"""Computes the description length of a grouping (semantics, section 15)."""

import math

import numpy as np
from jaxtyping import Int64


def grouping_cost(
    active: Int64[np.ndarray, " k"], ranks: Int64[np.ndarray, " k"], n_positions: int, alpha: float
) -> float:
    """Computes G2 in bits per position. ``active``: number of positions at which each group is active; ``ranks``: its
    number of members.
    """
    shares = active / n_positions
    return float((shares * (math.log2(max(len(active), 1)) + alpha * ranks)).sum())
