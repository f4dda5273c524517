"""Computes the batch at a step as a pure function of (seed, step), so resuming neither repeats batches nor replays
earlier ones.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Int32, Int64

from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.errors import UserError


class Batches:
    """Endless batches of rows; every epoch takes each row once, in its own order.

    Positions ``step · B .. step · B + B - 1`` of the endless stream of epochs make up the batch at ``step``; the order
    within an epoch depends on (seed, epoch) alone.

    ``batch_size``: B, rows in the global batch. ``reshuffle``: if False, every epoch has the order of the first.
    ``lo``, ``hi``: the part of each batch that this process gets (by default all of it). Raises UserError if the data
    have fewer rows than one batch.
    """

    def __init__(
        self,
        data: TokenRows,
        batch_size: int,
        seed: int,
        *,
        reshuffle: bool = True,
        lo: int = 0,
        hi: int | None = None,
    ) -> None:
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.lo, self.hi = lo, batch_size if hi is None else hi
        assert 0 <= self.lo < self.hi <= batch_size
        if len(data) < batch_size:
            raise UserError(
                f"{data.source} has {len(data)} rows, less than one batch of {batch_size}; "
                "give more data or a smaller batch size"
            )
        # A batch spans at most two epochs.
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(seed, epoch if reshuffle else 0, len(data)))

    def rows(self, step: int) -> Int64[np.ndarray, "local"]:
        """Returns the row numbers of the batch at ``step``, from ``lo`` to ``hi``."""
        positions = step * self.batch_size + np.arange(self.lo, self.hi, dtype=np.int64)
        epochs, within = np.divmod(positions, len(self.data))
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = self._order(int(epoch))[within[here]]
        return rows

    def __getitem__(self, step: int) -> Int32[np.ndarray, "local T"]:
        """Returns the token ids of the batch at ``step``."""
        return self.data.rows(self.rows(step))

    def stretch(self, first: int, n: int) -> Int32[np.ndarray, "n local T"]:
        """Returns batches ``first`` to ``first + n - 1``, whose rows are read together."""
        rows = np.concatenate([self.rows(step) for step in range(first, first + n)])
        return self.data.rows(rows).reshape(n, self.hi - self.lo, -1)


def epoch_order(seed: int, epoch: int, n_rows: int) -> Int64[np.ndarray, "rows"]:
    """Returns a permutation of the rows. It sorts raw Philox output, which is the same in every version of NumPy
    (``permutation`` may not be).
    """
    mask = (1 << 64) - 1
    draws = np.random.Philox(key=np.array([seed & mask, epoch & mask], np.uint64)).random_raw(n_rows)
    return np.argsort(draws, kind="stable")
