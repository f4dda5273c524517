"""A range of the rows of a data set, with which some of them are held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int, Int32


class TokenRows(Protocol):
    """The rows from which batches are made."""

    @property
    def source(self) -> str: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def rows_per_read(self) -> int: ...

    def __len__(self) -> int: ...

    def rows(self, ids: Int[np.ndarray, "B"] | Sequence[int]) -> Int32[np.ndarray, "B T"]: ...

    def check(self, vocab_size: int, max_len: int | None = None, limit: str = "") -> None: ...


@dataclass(frozen=True)
class RowRange:
    """Rows ``first .. stop - 1`` of ``data``, numbered from 0."""

    data: TokenRows
    first: int
    stop: int

    @property
    def source(self) -> str:
        return self.data.source

    @property
    def seq_len(self) -> int:
        return self.data.seq_len

    @property
    def rows_per_read(self) -> int:
        return self.data.rows_per_read

    def __len__(self) -> int:
        return self.stop - self.first

    def rows(self, ids: Int[np.ndarray, "B"] | Sequence[int]) -> Int32[np.ndarray, "B T"]:
        return self.data.rows(np.asarray(ids, np.int64) + self.first)

    def check(self, vocab_size: int, max_len: int | None = None, limit: str = "") -> None:
        self.data.check(vocab_size, max_len, limit)
