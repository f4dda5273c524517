"""Results of matching the components of two runs: for each site, and for all sites."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.cards import card

ASSIGNED = 4096
"""The largest number of components per run that is matched by an assignment: 4,096 take a few seconds and 0.5 GB for
vectors of any length. With more components, mutual nearest neighbours are paired.
"""
NEAR, HALF = 0.9, 0.5
"""The similarities above which pairs are counted."""
SITES_SHOWN = 24
"""Sites that a notebook shows."""


@dataclass(frozen=True)
class MatchedPairs:
    """Pairs of components, the most similar first (P5). ``one``, ``other``: their indices among the components that
    fire. ``cos_V``, ``cos_U``: cosines of their V and of their U. ``assigned``: whether the pairs maximize the sum of
    all similarities; if not, they are mutual nearest neighbours.
    """

    one: Int[np.ndarray, " n"]
    other: Int[np.ndarray, " n"]
    cos_V: Float[np.ndarray, " n"]
    cos_U: Float[np.ndarray, " n"]
    assigned: bool

    @property
    def similarity(self) -> Float[np.ndarray, " n"]:
        """Returns the cosine of the matrices V ⊗ U of each pair."""
        return self.cos_V * self.cos_U


@dataclass(frozen=True)
class MatchedSite:
    """The components of one site that fire in two runs, matched one to one (P5). Arrays have one entry per pair, the
    most similar first.

    ``firing``: how many components fire in each run. ``one``, ``other``: indices of the components. ``cos_V``,
    ``cos_U``: cosines of their V, and of their U. ``jaccard``: of the sampled positions at which either fires, the
    share at which both do (P6); None if the harvests are not of the same rows. ``random``: similarities of the same
    number of random directions (at most 4,096 for each run), matched one to one. ``assigned``: False if mutual nearest
    neighbours are paired, because there are too many components for an assignment.
    """

    site: str
    firing: tuple[int, int]
    one: Int[np.ndarray, " n"]
    other: Int[np.ndarray, " n"]
    cos_V: Float[np.ndarray, " n"]
    cos_U: Float[np.ndarray, " n"]
    jaccard: Float[np.ndarray, " n"] | None
    random: Float[np.ndarray, " r"]
    assigned: bool

    @classmethod
    def of(
        cls, site: str, numbers: tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]],
        pairs: MatchedPairs, random: MatchedPairs, jaccard: Float[np.ndarray, " k"] | None,
    ) -> "MatchedSite":  # fmt: skip
        """``numbers``: the indices of the components that fire in each run, into which ``pairs`` points."""
        one, other = numbers
        return cls(
            site, (len(one), len(other)), one[pairs.one], other[pairs.other], pairs.cos_V, pairs.cos_U, jaccard,
            random.similarity, pairs.assigned,
        )  # fmt: skip

    @property
    def turned(self) -> "MatchedSite":
        """Returns the same match with the two runs exchanged."""
        return replace(self, firing=self.firing[::-1], one=self.other, other=self.one)

    @property
    def similarity(self) -> Float[np.ndarray, " n"]:
        """Returns the cosine of the matrices V ⊗ U of each pair: the cosine of the V times that of the U."""
        return self.cos_V * self.cos_U

    @property
    def flipped(self) -> np.ndarray:
        """Whether the two V of each pair point in opposite directions, so that the activations have opposite signs."""
        found: np.ndarray = self.cos_V < 0
        return found

    @property
    def most(self) -> int:
        """The number of components that can be matched: the smaller of the two numbers that fire."""
        return min(self.firing)

    def share(self, above: float = NEAR) -> float:
        """Returns the share of the components that can be matched whose pair has a similarity above ``above``; NaN if
        none fire.
        """
        return _share(self.similarity, above, self.most)

    def random_share(self, above: float = NEAR) -> float:
        """The same of random directions."""
        return _share(self.random, above, len(self.random))

    @property
    def mean(self) -> float:
        """The mean similarity of the pairs; NaN without pairs."""
        return _mean(self.similarity)

    @property
    def random_mean(self) -> float:
        """The same of random directions."""
        return _mean(self.random)

    @property
    def table(self) -> pa.Table:
        """Returns the pairs, the most similar first, with columns ``component``, ``other``, ``similarity``, ``cos_V``,
        ``cos_U``, ``flipped``, ``jaccard`` (null if the harvests are not of the same rows).
        """
        n = len(self.one)
        jaccard = pa.nulls(n, pa.float64()) if self.jaccard is None else pa.array(self.jaccard, pa.float64())
        return pa.table(
            {
                "component": pa.array(self.one, pa.int32()), "other": pa.array(self.other, pa.int32()),
                "similarity": self.similarity, "cos_V": self.cos_V, "cos_U": self.cos_U,
                "flipped": pa.array(self.flipped, pa.bool_()), "jaccard": jaccard,
            }
        )  # fmt: skip

    def pair_of(self, component: int) -> int | None:
        """Returns the index of the pair with a component of the first run; None if it is in no pair."""
        found = np.flatnonzero(self.one == component)
        return int(found[0]) if len(found) else None

    def __repr__(self) -> str:
        return (
            f"MatchedSite({self.site}: {len(self.one):,} pairs, {self.share():.0%} above {NEAR} "
            f"(random {self.random_share():.0%}), mean {self.mean:.3f} (random {self.random_mean:.3f}))"
        )


@dataclass(frozen=True)
class MatchedRuns:
    """The components of two runs, matched site by site (P5). ``one``, ``other``: the runs' ids, with their steps.
    ``sites``: the sites that both have, by name. ``missing``: the sites that only the first has, and those that only
    the other has. ``same_rows``: whether both harvests are of the same rows, so that the firing overlap of pairs is
    known.
    """

    one: str
    other: str
    sites: Mapping[str, MatchedSite]
    missing: tuple[tuple[str, ...], tuple[str, ...]]
    same_rows: bool

    @property
    def table(self) -> pa.Table:
        """Returns a row for each site, with columns ``site``, ``firing`` and ``firing_other`` (components that fire in
        each run), ``pairs``, ``above_0.9``, ``above_0.5`` (shares of the components that can be matched), ``mean``, the
        same for random directions as ``random_…``, and ``jaccard``, the mean over the pairs (null if the harvests are
        not of the same rows).
        """
        rows = [
            {
                "site": found.site, "firing": found.firing[0], "firing_other": found.firing[1], "pairs": len(found.one),
                f"above_{NEAR}": found.share(NEAR), f"above_{HALF}": found.share(HALF), "mean": found.mean,
                f"random_above_{NEAR}": found.random_share(NEAR), f"random_above_{HALF}": found.random_share(HALF),
                "random_mean": found.random_mean,
                "jaccard": None if found.jaccard is None else _mean(found.jaccard),
            }
            for found in self.sites.values()
        ]  # fmt: skip
        return pa.Table.from_pylist(rows)

    def __repr__(self) -> str:
        lines = [f"MatchedRuns: {printable(self.one, 200)} and {printable(self.other, 200)}"]
        lines += [f"  {found!r}" for found in list(self.sites.values())[:SITES_SHOWN]]
        more = len(self.sites) - SITES_SHOWN
        return "\n".join([*lines, f"  and {more} more sites"] if more > 0 else lines)

    def _repr_html_(self) -> str:
        rows = self.table.slice(0, SITES_SHOWN).to_pylist()
        return card(
            "matched", one=self.one, other=self.other, rows=rows, more=max(0, len(self.sites) - SITES_SHOWN),
            near=f"above_{NEAR}", half=f"above_{HALF}",
            missing=list(zip((self.one, self.other), self.missing, strict=True)),
            all_assigned=all(found.assigned for found in self.sites.values()), same_rows=self.same_rows,
        )  # fmt: skip


def _share(similarity: Float[np.ndarray, " n"], above: float, most: int) -> float:
    return float((similarity > above).sum() / most) if most else float("nan")


def _mean(values: Float[np.ndarray, " n"]) -> float:
    return float(values.mean()) if len(values) else float("nan")
