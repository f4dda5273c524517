"""How far two groupings of the same components agree (semantics, section 15)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class GroupingAgreement(NamedTuple):
    """``adjusted_rand``: 1 for equal groupings, 0 by chance. ``kept``: of the pairs that the first keeps together, the
    share that the second does, too; 1 if the first has none."""

    adjusted_rand: float
    kept: float


def agreement(one: Int[np.ndarray, " n"], other: Int[np.ndarray, " n"]) -> GroupingAgreement:
    """G7, of groupings given by the number of each component's group."""
    # scikit-learn has the index, but is not a dependency; no pair is listed here.
    both = np.unique(np.stack([one, other]), axis=1, return_counts=True)[1]
    together, mine, theirs = (_pairs(counts) for counts in (both, np.bincount(one), np.bincount(other)))
    expected = mine * theirs / max(_pairs(np.asarray([len(one)])), 1.0)
    most = (mine + theirs) / 2
    index = 1.0 if most == expected else (together - expected) / (most - expected)
    return GroupingAgreement(index, together / mine if mine else 1.0)


def _pairs(counts: Int[np.ndarray, " m"]) -> float:
    """Pairs within sets of these sizes."""
    sizes = counts.astype(float)
    return float((sizes * (sizes - 1) / 2).sum())
