"""Where components of two harvests fire at the same positions: whether both are of the same rows, and how far they
overlap there."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Num

from param_decomp_lab.harvest.files.reading import Harvest

PLACES = 4096
"""Firings of a component at which those that fire with it are looked for."""


class Overlap(NamedTuple):
    """``jaccard``: of the sampled positions at which either of two components fires, the share at which both do."""

    site: str
    number: int
    jaccard: float


def same_rows(one: Harvest, other: Harvest) -> bool:
    """Whether both harvests are of the same rows, and keep what fires at the same positions of them."""
    return one is other or one.rows_digest == other.rows_digest


def pair_overlaps(
    one: Harvest, other: Harvest, site: str, numbers: Int[np.ndarray, " n"], other_numbers: Int[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """P6 of component ``numbers[i]`` of ``one`` and ``other_numbers[i]`` of ``other``: the Jaccard index of where they
    fire, at the sampled positions. The harvests are of the same rows, and no number is there twice."""
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
    """The components of ``other`` with the largest overlap with a component of ``one``, of harvests of the same rows;
    those without any are left out. Chosen at up to `PLACES` of its firings, a uniform sample of them."""
    places = one.firing_places(site, number)
    firing, n_read = other.firing_at(places[:PLACES])
    found, both = np.unique(firing, return_counts=True)
    estimate = np.asarray(both * (len(places) / max(n_read, 1)))
    jaccard = _jaccard(estimate, np.asarray(len(places)), other.sampled_counts[found])
    chosen = found[np.lexsort((found, -jaccard))[:most]]
    named = [Overlap(name, c, overlap(one, site, number, other, name, c)) for name, c in other.index.named(chosen)]
    return sorted(named, key=lambda row: -row.jaccard)


def overlap(one: Harvest, site: str, number: int, other: Harvest, other_site: str, other_number: int) -> float:
    """The Jaccard index of where two components fire, as of `pair_overlaps`."""
    mine, theirs = one.firing_places(site, number), other.firing_places(other_site, other_number)
    both = np.asarray(len(np.intersect1d(mine, theirs)))
    return float(_jaccard(both, np.asarray(len(mine)), np.asarray(len(theirs))))


def _jaccard(
    both: Num[np.ndarray, "*n"], one: Int[np.ndarray, "*n"], other: Int[np.ndarray, "*n"]
) -> Float64[np.ndarray, "*n"]:
    either = one + other - both
    found: np.ndarray = both / np.maximum(either, 1)
    return found
