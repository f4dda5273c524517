"""Compares where components of two harvests fire: whether the harvests are of the same rows, and how much the firings
overlap.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Num

from param_decomp_lab.harvest.files.reading import Harvest

PLACES = 4096
"""The number of firings of a component at which others are searched for."""


class Overlap(NamedTuple):
    """``jaccard``: of the sampled positions at which either of two components fires, the share at which both do."""

    site: str
    number: int
    jaccard: float


def same_rows(one: Harvest, other: Harvest) -> bool:
    """Whether both harvests are of the same rows, and keep the firings at the same sampled positions."""
    return one is other or one.rows_digest == other.rows_digest


def pair_overlaps(
    one: Harvest, other: Harvest, site: str, numbers: Int[np.ndarray, " n"], other_numbers: Int[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Computes P6 for component ``numbers[i]`` of ``one`` and ``other_numbers[i]`` of ``other``: the Jaccard index of
    the sampled positions at which they fire. The harvests must be of the same rows, and no number may occur twice.
    """
    n_sampled = one.n_sampled
    keys, counts = [], []
    for harvest, mine in ((one, numbers), (other, other_numbers)):
        ends, places = harvest.site_firings(site)
        pair = np.full(len(ends) - 1, -1)
        pair[mine] = np.arange(len(mine))
        each = np.diff(ends)
        of_place = np.repeat(pair, each)
        kept = of_place >= 0
        keys.append(of_place[kept] * n_sampled + places[kept])
        counts.append(each[mine])
    both = np.bincount(np.intersect1d(keys[0], keys[1], assume_unique=True) // n_sampled, minlength=len(numbers))
    return _jaccard(both, counts[0], counts[1])


def nearest_by_firing(one: Harvest, site: str, number: int, other: Harvest, most: int = 12) -> list[Overlap]:
    """Returns the components of ``other`` with the largest overlap with a component of ``one``, for harvests of the
    same rows; components without overlap are left out. They are chosen at up to `PLACES` of its firings, a uniform
    sample.
    """
    places = one.firing_places(site, number)
    firing, n_read = other.firing_at(places[:PLACES])
    found, both = np.unique(firing, return_counts=True)
    estimate = np.asarray(both * (len(places) / max(n_read, 1)))
    jaccard = _jaccard(estimate, np.asarray(len(places)), other.sampled_counts[found])
    chosen = found[np.lexsort((found, -jaccard))[:most]]
    named = [Overlap(name, c, overlap(one, site, number, other, name, c)) for name, c in other.index.named(chosen)]
    return sorted(named, key=lambda row: -row.jaccard)


def overlap(one: Harvest, site: str, number: int, other: Harvest, other_site: str, other_number: int) -> float:
    """Returns the Jaccard index of the positions at which two components fire, as in `pair_overlaps`."""
    mine, theirs = one.firing_places(site, number), other.firing_places(other_site, other_number)
    both = np.asarray(len(np.intersect1d(mine, theirs)))
    return float(_jaccard(both, np.asarray(len(mine)), np.asarray(len(theirs))))


def _jaccard(
    both: Num[np.ndarray, "*n"], one: Int[np.ndarray, "*n"], other: Int[np.ndarray, "*n"]
) -> Float64[np.ndarray, "*n"]:
    either = one + other - both
    found: np.ndarray = both / np.maximum(either, 1)
    return found
