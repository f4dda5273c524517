"""Pairs components of two runs by the cosine of their rank-one matrices."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from param_decomp_lab.matching.result import ASSIGNED, MatchedPairs

AT_ONCE = 1 << 23
"""The number of cosines, or of entries of vectors, that are computed at once."""


@dataclass(frozen=True)
class Fired:
    """The components of a site that fire. ``V`` [d_in, n], ``U`` [n, d_out]."""

    V: Float[np.ndarray, "d_in n"]
    U: Float[np.ndarray, "n d_out"]

    @property
    def n(self) -> int:
        return self.V.shape[1]


def pairs_of(one: Fired, other: Fired, assigned: bool | None = None) -> MatchedPairs:
    """Pairs the components of two runs at a site (P5). ``assigned``: whether by an assignment; by default, if neither
    run has more than `ASSIGNED`.
    """
    assigned = max(one.n, other.n) <= ASSIGNED if assigned is None else assigned
    if not one.n or not other.n:
        rows = columns = np.zeros(0, np.int64)
    elif assigned:
        V, U = all_cosines(one, other)
        rows, columns = assignment(np.multiply(V, U, out=V))
    else:
        rows, columns = _nearest_to_each_other(one, other)
    cos_V = _cosines(one.V.T, rows, other.V.T, columns)
    cos_U = _cosines(one.U, rows, other.U, columns)
    order = np.argsort(-cos_V * cos_U, kind="stable")
    return MatchedPairs(rows[order], columns[order], cos_V[order], cos_U[order], assigned)


def random_like(one: Fired, other: Fired, seed: int = 0) -> tuple[Fired, Fired]:
    """Draws random directions, as many as each run has components, at most `ASSIGNED`."""
    rng = np.random.default_rng(seed)

    def random(like: Fired) -> Fired:
        n = min(like.n, ASSIGNED)
        return Fired(rng.standard_normal((like.V.shape[0], n)), rng.standard_normal((n, like.U.shape[1])))

    return random(one), random(other)


def all_cosines(one: Fired, other: Fired) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, "n m"]]:
    """Returns the cosines of every V of ``one`` with every V of ``other``, and the same for U; 0 for a zero vector."""
    return _every_cosine(one.V.T, other.V.T), _every_cosine(one.U, other.U)


def _every_cosine(one: Float[np.ndarray, "n d"], other: Float[np.ndarray, "m d"]) -> Float[np.ndarray, "n m"]:
    """Computes all cosines in float64, a block of columns at a time: copies of wide matrices would take more memory
    than the cosines.
    """
    found, of_one, of_other = np.zeros((len(one), len(other))), np.zeros(len(one)), np.zeros(len(other))
    step = max(1, AT_ONCE // max(found.shape))
    for first in range(0, one.shape[1], step):
        x, y = (rows[:, first : first + step].astype(np.float64) for rows in (one, other))
        found += x @ y.T
        of_one += np.einsum("nd,nd->n", x, x)
        of_other += np.einsum("nd,nd->n", y, y)
    found /= np.maximum(np.sqrt(of_one), np.finfo(np.float64).tiny)[:, None]
    found /= np.maximum(np.sqrt(of_other), np.finfo(np.float64).tiny)
    return found


def assignment(cosines: Float[np.ndarray, "n m"]) -> tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """Returns rows and columns matched one to one so that the sum of their cosines is largest."""
    rows, columns = linear_sum_assignment(cosines, maximize=True)
    return rows, columns


def unit(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Returns the rows scaled to length 1, in float64; a zero row stays as it is."""
    wide = rows.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def _nearest_to_each_other(one: Fired, other: Fired) -> tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """Returns mutual nearest neighbours; ties go to the lower index. Computed in float32, a block of ``one`` at a time,
    because a matrix of all cosines would fill the memory.
    """
    V, U, of_V, of_U = map(_unit_float32, (one.V.T, one.U, other.V.T, other.U))
    rows = max(1, AT_ONCE // other.n)
    nearest = np.zeros(one.n, np.int64)
    best, back = np.full(other.n, -np.inf, np.float32), np.zeros(other.n, np.int64)
    for first in range(0, one.n, rows):
        block = slice(first, first + rows)
        cosines = V[block] @ of_V.T
        cosines *= U[block] @ of_U.T
        nearest[block] = cosines.argmax(axis=1)
        at = cosines.argmax(axis=0)
        values = cosines[at, np.arange(other.n)]
        better = values > best
        best[better], back[better] = values[better], first + at[better]
    mine = np.flatnonzero(back[nearest] == np.arange(one.n))
    return mine, nearest[mine]


def _unit_float32(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Like `unit`, but in float32, without a temporary float64 array."""
    found = np.array(rows, np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", found, found))
    found /= np.maximum(lengths, np.finfo(np.float32).tiny)[:, None]
    return found


def _cosines(
    one: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " k"], other: Float[np.ndarray, "m d"],
    columns: Int[np.ndarray, " k"],
) -> Float[np.ndarray, " k"]:  # fmt: skip
    """Returns the cosine of row ``rows[i]`` of ``one`` with row ``columns[i]`` of ``other``, for each i."""
    found, step = np.zeros(len(rows)), max(1, AT_ONCE // one.shape[1])
    for first in range(0, len(rows), step):
        block = slice(first, first + step)
        found[block] = np.einsum("nd,nd->n", unit(one[rows[block]]), unit(other[columns[block]]))
    return found
