"""The description length of a grouping (semantics, section 13), and what a merge changes."""

import math

import numpy as np
from jaxtyping import Int64

from param_decomp_lab.compiled import compiled


def grouping_cost(
    active: Int64[np.ndarray, " k"], ranks: Int64[np.ndarray, " k"], n_positions: int, alpha: float
) -> float:
    """G2: bits at a position. ``active``: positions at which each group is active; ``ranks``: its members."""
    shares = active / n_positions
    return float((shares * (math.log2(max(len(active), 1)) + alpha * ranks)).sum())


@compiled
def own_part(
    active_i: int, rank_i: int, active_j: int, rank_j: int, together: int, log_k: float, alpha: float
) -> float:
    """G4: what a merge changes in the two groups themselves, times the number of positions.

    ``together``: positions at which both are active. ``log_k``: log2(k − 1), of k groups before the merge.
    """
    costs = alpha * (float(active_i) * rank_j + float(active_j) * rank_i)
    return costs - together * (log_k + alpha * (rank_i + rank_j))


@compiled
def numbering_part(total: int, k: int) -> float:
    """G4: what the shorter numbers of all groups save, times the number of positions. ``total``: the sum of the groups'
    active positions."""
    return float(total * np.log2((k - 1) / k))
