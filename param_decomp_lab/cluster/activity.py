"""Stores where components fire in sparse form: the positions of each component, and the components at each position."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64
from scipy.sparse import csc_array

from param_decomp_lab.harvest.files import Harvest


@dataclass(frozen=True)
class Activity:
    """The positions at which each of n components fires (G1), ascending: those of component i are
    ``positions[ends[i]:ends[i + 1]]``, out of ``n_positions``."""

    ends: Int64[np.ndarray, " n_plus_1"]
    positions: Int32[np.ndarray, " firings"]
    n_positions: int

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def firings(self) -> Int64[np.ndarray, " n"]:
        """How often each component fires."""
        return np.diff(self.ends)

    def by_position(self) -> tuple[Int64[np.ndarray, " positions_plus_1"], Int32[np.ndarray, " firings"]]:
        """Returns the same data by position: ends, and the components that fire at each position, ascending."""
        ones = np.ones(len(self.positions), np.int8)
        columns = csc_array((ones, self.positions, self.ends), shape=(self.n_positions, len(self)))
        rows = columns.tocsr()
        return rows.indptr.astype(np.int64), rows.indices.astype(np.int32, copy=False)

    def choose(self, chosen: Int64[np.ndarray, " m"]) -> "Activity":
        """Returns the activity of the components ``chosen``, which are in ascending order."""
        if len(chosen) == len(self):
            return self
        firings = self.firings[chosen]
        ends = np.concatenate([[0], np.cumsum(firings)])
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], firings)
        return Activity(ends, self.positions[np.repeat(self.ends[chosen], firings) + within], self.n_positions)


def harvested_activity(harvest: Harvest) -> Activity:
    """Returns where each component of a harvest, numbered across all sites, fires among the sampled positions. Raises
    UserError for a damaged harvest.
    """
    ends, positions = harvest.sampled_firings()
    return Activity(ends, positions, harvest.n_sampled)
