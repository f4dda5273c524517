"""Measures how well two groupings of the same components agree (semantics, section 15)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class GroupingAgreement(NamedTuple):
    """``adjusted_rand``: 1 for equal groupings, 0 by chance. ``kept``: the share of the pairs that the first keeps
    together which the second keeps together, too; 1 if the first has no pairs.
    """

    adjusted_rand: float
    kept: float


def agreement(one: Int[np.ndarray, " n"], other: Int[np.ndarray, " n"]) -> GroupingAgreement:
    """Computes G7 for two groupings, each given by the group number of each component."""
    # scikit-learn has the index, but is not a dependency. Pairs are counted, not listed.
    both = np.unique(np.stack([one, other]), axis=1, return_counts=True)[1]
    together, mine, theirs = (_pairs(counts) for counts in (both, np.bincount(one), np.bincount(other)))
    expected = mine * theirs / max(_pairs(np.asarray([len(one)])), 1.0)
    most = (mine + theirs) / 2
    index = 1.0 if most == expected else (together - expected) / (most - expected)
    return GroupingAgreement(index, together / mine if mine else 1.0)


def _pairs(counts: Int[np.ndarray, " m"]) -> float:
    """Returns the number of pairs within sets of these sizes."""
    sizes = counts.astype(float)
    return float((sizes * (sizes - 1) / 2).sum())
