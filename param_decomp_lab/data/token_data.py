"""Reads rows of token ids from the shards of a folder on demand."""

import glob
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from param_decomp_lab.data import arrow_rows
from param_decomp_lab.data.arrow_rows import ArrowRows, shard_rows
from param_decomp_lab.data.parquet_rows import ParquetRows, file_rows
from param_decomp_lab.errors import UserError

PARQUET = ".parquet"


class TokenData:
    """All rows of a folder (or glob, or one file) of shards: Arrow files of `pd data tokenize`, or Parquet files with
    a column ``input_ids`` of fixed-length rows.

    Rows are numbered through the shards in the order of their names. ``len(data)``: number of rows; ``seq_len``: tokens
    in each; ``source``: as given; ``rows_per_read``: rows that are decoded to read one.

    Raises UserError for a missing or damaged shard, one without the column or without rows, and for rows that are not
    integers or differ in length.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = str(source)
        files = find_shards(self.source)
        kind = ArrowRows if files[0].suffix == arrow_rows.SUFFIX else ParquetRows
        self._rows: ArrowRows | ParquetRows = kind(self.source, files)
        if len(self) == 0:
            raise UserError(f"{self.source} holds no rows: tokenize some text into it")
        self.seq_len, self.rows_per_read = self._rows.seq_len, self._rows.rows_per_read

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: Int[np.ndarray, "B"] | Sequence[int]) -> Int32[np.ndarray, "B T"]:
        """Returns the rows with the given numbers, in that order. Raises UserError for a damaged row."""
        return self._rows.rows(ids)

    def check(self, vocab_size: int, max_len: int | None = None, limit: str = "") -> None:
        """Raises UserError for data that a model cannot take: a token id outside ``0 .. vocab_size - 1`` (with its file
        and row), or rows longer than ``max_len`` tokens. Reads the ranges of ids that the shards record, and tokens
        only if they record none. ``limit``: the key that sets ``max_len``, if it can still be changed.
        """
        if max_len is not None and self.seq_len > max_len:
            raise UserError(
                f"{self.source}: rows have {self.seq_len} tokens, the model takes at most {max_len}; "
                f"tokenize with a seq_len of {max_len}" + (f", or raise {limit}" if limit else "")
            )
        self._rows.check_ids(vocab_size)


def count_rows(source: str | Path) -> tuple[int, int | None]:
    """Returns the number of rows, and the tokens in each if the type has it, from the shards' footers alone.

    Raises UserError for a missing or damaged shard, and one without the column or with other values than integers.
    """
    files = find_shards(str(source))
    counts = [shard_rows(file) if file.suffix == arrow_rows.SUFFIX else file_rows(file) for file in files]
    return sum(rows for rows, _ in counts), counts[0][1]


def find_shards(source: str) -> list[Path]:
    """Returns the shards of a folder, a glob or a file, all of one kind. A glob of ``*.parquet`` that matches nothing
    stands for the Arrow shards of the same names, which newer versions of `pd data tokenize` write. Raises UserError if
    there are none.
    """
    path = Path(source)
    if path.is_dir():
        found = _in_folder(path)
        inside = sorted(p.name for p in path.iterdir() if p.is_dir() and _in_folder(p))
        hint = f" (it has {' and '.join(f'{source}/{name}' for name in inside)}: give one of them)" if inside else ""
    else:
        found, hint = _glob(source), ""
        if not found and source.endswith(PARQUET):
            found = _glob(source.removesuffix(PARQUET) + arrow_rows.SUFFIX)
    if not found:
        raise UserError(f"no shards of tokens at {source}{hint}; `pd data tokenize` makes folders of them")
    of_arrow = {file.suffix == arrow_rows.SUFFIX for file in found}
    if len(of_arrow) > 1:
        raise UserError(f"{source} holds both Arrow and Parquet files, two data sets in one place; remove one of them")
    return found


def _in_folder(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in (arrow_rows.SUFFIX, PARQUET))


def _glob(pattern: str) -> list[Path]:
    return [Path(file) for file in sorted(glob.glob(pattern))]
