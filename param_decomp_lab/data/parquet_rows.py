"""Reads rows of token ids from Parquet files of any origin. A row is decoded with its whole row group."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int, Int32

from param_decomp_lab.data.meta import COLUMN
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.printable import first_few

# Data sets up to this size stay in memory once decoded; of larger ones, only the row groups read last.
CACHE_BYTES = 1 << 30
MOST_PER_BYTE = 1 << 14
"""The most rows that a byte of a file can encode. Text needs more than a bit per token; identical rows need less."""


class ParquetRows:
    """The rows of Parquet files with a column ``input_ids`` of fixed-length rows, numbered through ``files``.
    ``seq_len``: tokens in each.

    Raises UserError for a file that is not Parquet, lacks the column or has no rows, and for rows that are not integers
    or differ in length.
    """

    def __init__(self, source: str, files: Sequence[Path]) -> None:
        self.source = source
        self._files = [(path, _metadata(path)) for path in files]
        # A row group is decoded as a whole: (file number, number within the file).
        self._groups = [(f, g) for f, (_, shard) in enumerate(self._files) for g in range(shard.num_row_groups)]
        sizes = [self._files[f][1].row_group(g).num_rows for f, g in self._groups]
        self._sizes = sizes
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if len(self) == 0:
            raise UserError(f"{self.source} holds no rows: tokenize some text into it")
        first = next(n for n, size in enumerate(sizes) if size)
        self.seq_len = self._decode(first, None).shape[1]
        if self.seq_len == 0:
            raise UserError(
                f"{self._files[self._groups[first][0]][0]}: its rows hold no tokens; tokenize the text again"
            )
        for number, size in enumerate(sizes):
            if _n_values(self._files[self._groups[number][0]][1], self._groups[number][1]) != size * self.seq_len:
                self._decode(number, self.seq_len)  # raises the error that says what is wrong with it
        kept = max(1, CACHE_BYTES // (max(sizes) * self.seq_len * 4))
        self.rows_per_read = max(sizes) if kept < len(sizes) else 1
        """Rows that are decoded to read one, on average."""
        self._group = lru_cache(maxsize=kept)(lambda number: self._decode(number, self.seq_len))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, ids: Int[np.ndarray, "B"] | Sequence[int]) -> Int32[np.ndarray, "B T"]:
        """Returns the rows with the given numbers, in that order. Raises UserError if one differs in length from the
        others.
        """
        ids = np.asarray(ids, np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(self)), "no such row"
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        out = np.empty((len(ids), self.seq_len), np.int32)
        for number in np.unique(numbers):
            here = numbers == number
            out[here] = self._group(int(number))[ids[here] - self._starts[number]]
        return out

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError for a token id outside ``0 .. vocab_size - 1``, with the file and row. Reads the statistics,
        and tokens only where statistics are missing.
        """
        for number in range(len(self._groups)):
            if self._within(number, vocab_size):
                continue
            ids = self._decode(number, self.seq_len)
            wrong = np.argwhere((ids < 0) | (ids >= vocab_size))
            if len(wrong):
                row, column = wrong[0]
                file, group = self._groups[number]
                path, shard = self._files[file]
                row_in_file = row + sum(shard.row_group(g).num_rows for g in range(group))
                raise UserError(
                    f"{path}, row {row_in_file}, position {column}: token id {ids[row, column]} is not in the model's "
                    f"vocabulary (0 to {vocab_size - 1}); tokenize the text with the model's own tokenizer"
                )

    def _within(self, number: int, vocab_size: int) -> bool:
        """Whether the statistics of a row group show that its ids are in the vocabulary."""
        known = self._range(number)
        return known is not None and known[0] >= 0 and known[1] < vocab_size

    def _range(self, number: int) -> tuple[int, int] | None:
        """Returns the smallest and the largest id of a row group from its statistics; None without them."""
        file, group = self._groups[number]
        metadata = self._files[file][1]
        statistics = metadata.row_group(group).column(_leaf(metadata)).statistics
        return None if statistics is None or not statistics.has_min_max else (statistics.min, statistics.max)

    def _decode(self, number: int, seq_len: int | None) -> Int32[np.ndarray, "rows T"]:
        file, group = self._groups[number]
        path, shard = self._files[file]
        try:
            parquet = pq.ParquetFile(
                regular_file(path, "a shard"), metadata=shard, memory_map=True, page_checksum_verification=True
            )
            column = parquet.read_row_group(group, columns=[COLUMN]).column(COLUMN).combine_chunks()
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} cannot be read ({error}): it is damaged; copy or tokenize it again") from error
        flat, n_rows = column.flatten(), len(column)
        if n_rows != self._sizes[number]:
            raise UserError(
                f"{path}, row group {group}: holds {n_rows} rows, its footer says {self._sizes[number]}; it is "
                "damaged: copy or tokenize it again"
            )
        width = seq_len if seq_len is not None else len(flat) // max(1, n_rows)
        lengths = np.asarray(pa.compute.fill_null(pa.compute.list_value_length(column), 0))
        ragged = np.flatnonzero(lengths != width)
        if len(ragged):
            raise UserError(
                f"{path}, row {ragged[0]} of row group {group}: has {lengths[ragged[0]]} tokens where others have "
                f"{width}; all rows must be of one length, as `pd data tokenize` makes them"
            )
        if flat.null_count:
            raise UserError(f"{path}, row group {group}: holds missing tokens (nulls); tokenize the text again")
        ids = flat.to_numpy(zero_copy_only=False)
        known = self._range(number)
        # `check` trusts the statistics, so the ids that are read must agree with them: these files have no checksums.
        if known is not None and ids.size and (ids.min() < known[0] or ids.max() > known[1]):
            raise UserError(
                f"{path}, row group {group}: holds token ids {ids.min()} to {ids.max()}, and {known[0]} to {known[1]} "
                "were written: it is damaged; copy or tokenize it again"
            )
        # Ids past int32 would wrap around into valid ones.
        return np.clip(ids, -1, np.iinfo(np.int32).max).astype(np.int32).reshape(n_rows, width)


def file_rows(file: Path) -> tuple[int, int | None]:
    """Returns the number of rows of a Parquet file, and the tokens in each if the type has it, from the footer alone.
    Raises UserError for a file that is not Parquet, lacks the column or has other values than integers.
    """
    metadata = _metadata(file)
    kind = metadata.schema.to_arrow_schema().field(COLUMN).type
    return metadata.num_rows, kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _leaf(metadata: pq.FileMetaData) -> int:
    """Returns the index of the column's leaf among those of the file. The path would be ambiguous, since `input_ids.a`
    can be a column name, too.
    """
    leaf = 0
    for field in metadata.schema.to_arrow_schema():
        if field.name == COLUMN:
            break
        leaf += _n_leaves(field.type)
    return leaf


def _n_leaves(kind: pa.DataType) -> int:
    """Returns the number of Parquet columns that one of this type takes."""
    return sum(_n_leaves(kind.field(n).type) for n in range(kind.num_fields)) or 1


def _n_values(metadata: pq.FileMetaData, group: int) -> int:
    """Returns the number of tokens in a row group according to the footer, in which a row without
    tokens counts as one.
    """
    return int(metadata.row_group(group).column(_leaf(metadata)).num_values)


def _metadata(path: Path) -> pq.FileMetaData:
    try:
        file = pq.ParquetFile(regular_file(path, "a shard"), memory_map=True)
        names = file.schema_arrow.names
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a whole Parquet file ({error}): copy or tokenize it again") from error
    if COLUMN not in names:
        found = ", ".join(first_few(names))
        raise UserError(f"{path} has no column {COLUMN} (its columns: {found}); tokenize the text first")
    if names.count(COLUMN) > 1:
        raise UserError(f"{path} has {names.count(COLUMN)} columns {COLUMN}; it must be one")
    kind = file.schema_arrow.field(COLUMN).type
    of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not of_lists or not pa.types.is_integer(kind.value_type):
        raise UserError(f"{path}: column {COLUMN} has type {kind}; it must hold lists of integers, one per row")
    _refuse_absurd_counts(path, file.metadata)
    _refuse_damaged_descriptions(path, file)
    return file.metadata


def _refuse_absurd_counts(path: Path, metadata: pq.FileMetaData) -> None:
    """Raises UserError for counts in the footer that contradict each other or the size of the file."""
    size = path.stat().st_size
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    for group, n in enumerate(rows):
        if not 0 <= n <= MOST_PER_BYTE * size:
            raise UserError(
                f"{path}, row group {group}: its footer says {n} rows, which cannot be in {size:,} bytes; it is "
                "damaged: copy or tokenize it again"
            )
    if sum(rows) != metadata.num_rows:
        raise UserError(
            f"{path}: its footer says {metadata.num_rows} rows, its row groups {sum(rows)}; it is damaged: copy or "
            "tokenize it again"
        )


def _refuse_damaged_descriptions(path: Path, file: pq.ParquetFile) -> None:
    """Raises UserError for a row group whose description of the column is damaged: pyarrow (26) crashes when such a
    description is accessed (`row_group(n).column(m)`), but raises an exception when a row is read, so a row is read
    first. This takes 0.3 ms for each 131,072 tokens.
    """
    for group in range(file.num_row_groups):
        try:
            next(file.iter_batches(batch_size=1, row_groups=[group], columns=[COLUMN], use_threads=False), None)
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{path}, row group {group}: its description is damaged ({error}): copy or tokenize it again"
            ) from error
