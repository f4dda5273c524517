"""Compares components with the ground truth of toy models (section 11).

Causal importances come as a matrix ``[features, C]``: row j is λ of one site while feature j alone is on. All
computations are in NumPy on the host, and do not depend on the order of a site's components.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

OFF_ABOVE = 0.1
"""Section 11: a component that should be off for a feature counts as an error above this importance."""

ON_BELOW = 0.9
"""Section 11: a component that should be on for a feature counts as an error below this importance."""

DEAD_BELOW = 0.01
"""Section 11: a version shorter than this share of the feature's vector is left out."""

TIE = 1e-9
"""The weight of an error, so that of matchings with equal totals the one with fewer errors is chosen. Over 100
features, errors cannot outweigh a difference of 2e-7 in the total, about the last bit of one fp32 importance.
"""


@dataclass(frozen=True)
class Matching:
    """The matching of components to features with the greatest total importance.

    Feature ``features[i]`` (ascending) has component ``components[i]``; there are min(features, C) pairs, so a site
    with fewer components than features leaves features out. ``columns`` has every component once: the matched ones in
    the order of their features, then the others by decreasing total importance.
    """

    features: Integer[np.ndarray, "pairs"]
    components: Integer[np.ndarray, "pairs"]
    columns: Integer[np.ndarray, "C"]


def match_components(importances: Float[np.ndarray, "features C"]) -> Matching:
    """Returns the Hungarian matching of section 11; ties in the total go to the matching with fewer errors."""
    from scipy.optimize import linear_sum_assignment  # half a second at every start, needed only for toys

    assert np.isfinite(importances).all(), "importances are numbers (N3)"
    fewer_errors = (importances > OFF_ABOVE).astype(np.float64) + ~(importances < ON_BELOW)
    features, components = linear_sum_assignment(importances.astype(np.float64) + TIE * fewer_errors, maximize=True)
    by_total = dense_columns(importances)
    return Matching(features, components, np.concatenate([components, by_total[~np.isin(by_total, components)]]))


def identity_ci_error(importances: Float[np.ndarray, "features C"], n_features: int) -> int:
    """Counts errors of the ``identity`` pattern of section 11, in which every feature has its own component. 0 is
    perfect.

    After matching, entries > 0.1 off the diagonal plus entries < 0.9 on it. A component without a matched feature is
    off the diagonal in every row: it should always be off. A feature without a component (C < ``n_features``) has 0 on
    its diagonal and is one error, as if the site had further components that are never on.

    ``n_features``: as in the configuration; the caller must check that the probe has this many rows.
    """
    assert len(importances) == n_features, f"{len(importances)} features were probed, the pattern has {n_features}"
    matching = match_components(importances)
    diagonal = np.zeros(importances.shape, dtype=bool)
    diagonal[matching.features, matching.components] = True
    wrongly_on = (importances[~diagonal] > OFF_ABOVE).sum()
    wrongly_off = (importances[diagonal] < ON_BELOW).sum()
    return int(wrongly_on + wrongly_off) + n_features - len(matching.features)


def dense_ci_error(importances: Float[np.ndarray, "features C"], k: int) -> int:
    """Counts errors of the ``dense`` pattern of section 11, in which ``k`` components are used, by any features. 0 is
    perfect.

    With columns sorted by decreasing total, errors are those of the first k columns without an entry >= 0.9, plus all
    entries > 0.1 in the other columns. If k > C, each of the k - C missing components is an error, like one that is
    never on.
    """
    by_total = importances[:, dense_columns(importances)]
    unused = (by_total[:, :k].max(axis=0, initial=0) < ON_BELOW).sum()
    wrongly_on = (by_total[:, k:] > OFF_ABOVE).sum()
    return int(unused + wrongly_on) + max(k - importances.shape[1], 0)


def dense_columns(importances: Float[np.ndarray, "features C"]) -> Integer[np.ndarray, "C"]:
    """Returns components by decreasing total importance; ties go to the one that would have more errors if it were not
    used.
    """
    assert np.isfinite(importances).all(), "importances are numbers (N3)"
    # Added without rounding, because another order of features could change the last bit and break ties.
    totals = np.array([math.fsum(column) for column in importances.T])
    counted_in_the_rest = (importances > OFF_ABOVE).sum(axis=0)
    counted_in_front = importances.max(axis=0) < ON_BELOW
    return np.lexsort((counted_in_front.astype(np.int64) - counted_in_the_rest, -totals))


@dataclass(frozen=True)
class BestVersions:
    """The component, for each feature j, whose version ``V[j, c] U[c, :]`` of it points most nearly along ``W[j, :]``.

    ``component``: its number; −1 if every version is too short to count. ``cosine``: between the two. ``norm_ratio``:
    length of the version over that of ``W[j, :]``. Both are 0 without a component, and NaN for a feature that the
    target does not represent at all: ``W[j, :]`` exactly zero.
    """

    component: Integer[np.ndarray, "n"]
    cosine: Float[np.ndarray, "n"]
    norm_ratio: Float[np.ndarray, "n"]


def best_versions(
    W: Float[np.ndarray, "n h"], V: Float[np.ndarray, "n C"], U: Float[np.ndarray, "C h"]
) -> BestVersions:
    """Returns the best component of every feature of a TMS by cosine (section 11)."""
    W, V, U = (np.asarray(matrix, dtype=np.float64) for matrix in (W, V, U))
    lengths = np.abs(V) * np.linalg.norm(U, axis=1)
    target_lengths = np.linalg.norm(W, axis=1)
    represented = target_lengths > 0
    # A feature that W does not represent has no length to compare with. Its versions count as dead, and are NaN below.
    counts = (lengths >= DEAD_BELOW * target_lengths[:, None]) & represented[:, None]
    products = lengths * target_lengths[:, None]
    cosines = np.divide(V * (W @ U.T), products, out=np.full_like(V, -np.inf), where=counts)
    best, found = cosines.argmax(axis=1), counts.any(axis=1)
    feature = np.arange(len(W))
    nothing = np.where(represented, 0.0, np.nan)
    ratios = np.divide(lengths, target_lengths[:, None], out=np.zeros_like(V), where=counts)
    cosine = np.where(found, cosines[feature, best], nothing)
    norm_ratio = np.where(found, ratios[feature, best], nothing)
    return BestVersions(np.where(found, best, -1), cosine, norm_ratio)


def mmcs_and_ml2r(
    W: Float[np.ndarray, "n h"], V: Float[np.ndarray, "n C"], U: Float[np.ndarray, "C h"]
) -> tuple[float, float]:
    """Returns the mean max cosine similarity and mean L2 ratio of a TMS's ``linear1`` (section 11); both are 1 at best.

    The means leave out a feature that the target does not represent at all (``W[j, :]`` exactly zero).
    """
    best = best_versions(W, V, U)
    assert not np.isnan(best.cosine).all(), "every row of W is zero"
    return float(np.nanmean(best.cosine)), float(np.nanmean(best.norm_ratio))
