"""Reads and writes the shards of `pd data tokenize`: Arrow files in which each row is stored, and read, by itself.

A shard is an Arrow IPC file of two columns: ``input_ids``, rows of ``seq_len`` unsigned integers, as wide as the
vocabulary needs, and ``crc32``, the checksum of each row's bytes. Nothing is compressed, so a random row costs only its
own bytes (a Parquet file gives a row only with its whole group). The metadata of each record batch has its smallest and
its largest id.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Int, Int32, UInt

from param_decomp_lab.data.meta import COLUMN
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.printable import printable

SUFFIX = ".arrow"
CHECKSUM = "crc32"
TOKENS_PER_BATCH = 1 << 20
"""Tokens in a record batch, unless a single row has more."""
MOST_ROWS_PER_BATCH = 1024


def schema(seq_len: int, vocab_size: int) -> pa.Schema:
    """Returns the schema of a shard. ``vocab_size`` decides how wide an id is."""
    width = next(kind for kind in (pa.uint8(), pa.uint16(), pa.uint32()) if vocab_size <= 1 << kind.bit_width)
    ids = pa.list_(pa.field("item", width, nullable=False), seq_len)
    return pa.schema([pa.field(COLUMN, ids, nullable=False), pa.field(CHECKSUM, pa.uint32(), nullable=False)])


class ArrowShard:
    """Writes one shard. ``file`` appears, complete, when it is closed, and replaces a file of that name."""

    def __init__(self, file: Path, seq_len: int, vocab_size: int) -> None:
        self.rows = 0
        self._file, self._schema = file, schema(seq_len, vocab_size)
        self._unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        self._sink = pa.OSFile(str(self._unfinished), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    def write(self, ids: Int[np.ndarray, "rows T"]) -> None:
        """Adds rows as one record batch."""
        kind = self._schema.field(COLUMN).type
        stored = np.ascontiguousarray(ids, kind.value_type.to_pandas_dtype())
        column = pa.FixedSizeListArray.from_arrays(pa.array(stored.ravel()), type=kind)
        checksums = pa.array(np.array([zlib.crc32(row) for row in stored], np.uint32))
        batch = pa.record_batch([column, checksums], schema=self._schema)
        self._writer.write_batch(batch, custom_metadata={"min": str(stored.min()), "max": str(stored.max())})
        self.rows += len(stored)

    def close(self) -> None:
        """Completes the file, which is on the disk when this returns."""
        self._writer.close()
        self._sink.close()
        with open(self._unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._unfinished, self._file)

    def discard(self) -> None:
        """Removes the unfinished file, even if writing has become impossible."""
        with suppress(OSError, pa.ArrowException):
            self._sink.close()
        with suppress(OSError):
            self._unfinished.unlink()


def rows_per_batch(seq_len: int) -> int:
    """Returns the number of rows in a record batch."""
    return min(MOST_ROWS_PER_BATCH, max(1, TOKENS_PER_BATCH // seq_len))


@dataclass(frozen=True)
class _Batch:
    """The place of a record batch in its file. ``ids``, ``checksums``: offsets in bytes. ``smallest``, ``largest``: the
    range of its ids.
    """

    file: int
    rows: int
    ids: int
    checksums: int
    smallest: int
    largest: int


class ArrowRows:
    """The rows of shards that `pd data tokenize` wrote, numbered through ``files``. ``seq_len``: tokens in each.

    Raises UserError for a file of another kind or an incomplete one, and for rows of different lengths.
    """

    rows_per_read = 1
    """Rows that are decoded to read one."""

    def __init__(self, source: str, files: Sequence[Path]) -> None:
        self.source, self._files = source, tuple(files)
        self._batches: list[_Batch] = []
        self._widths: list[np.dtype[np.unsignedinteger]] = []
        lengths = []
        for number, file in enumerate(self._files):
            length, width, batches = _open_shard(file, number)
            lengths.append(length)
            self._widths.append(width)
            self._batches += batches
        self.seq_len: int = lengths[0]
        other = next((n for n, length in enumerate(lengths) if length != self.seq_len), None)
        if other is not None:
            raise UserError(
                f"{self._files[other]}: has rows of {lengths[other]} tokens, {self._files[0].name} has rows of "
                f"{self.seq_len}; all must be of one length, as `pd data tokenize` makes them"
            )
        self._starts = np.concatenate([[0], np.cumsum([batch.rows for batch in self._batches], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def most_ids(self) -> int:
        """Returns how many token ids the type of the rows can represent."""
        return 1 << 8 * max(width.itemsize for width in self._widths)

    def rows(self, ids: Int[np.ndarray, "B"] | Sequence[int]) -> Int32[np.ndarray, "B T"]:
        """Returns the rows with the given numbers, in that order. Raises UserError for a row that has changed since it
        was written.
        """
        ids = np.asarray(ids, np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(self)), "no such row"
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        out = np.empty((len(ids), self.seq_len), np.int32)
        order = np.argsort(ids, kind="stable")
        files = np.array([self._batches[numbers[n]].file for n in order], np.int64)
        for file in np.unique(files):
            with self._opened(int(file)) as descriptor:
                for n in order[files == file]:
                    batch = self._batches[numbers[n]]
                    out[n] = self._row(descriptor, batch, int(ids[n] - self._starts[numbers[n]]))
        return out

    @contextmanager
    def _opened(self, file: int) -> Iterator[int]:
        # Files are opened for each call because a data set may have more shards than a process may have files open.
        path = self._files[file]
        try:
            descriptor = os.open(regular_file(path, "a shard"), os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); copy or tokenize it again") from error

    def _row(self, descriptor: int, batch: _Batch, row: int) -> UInt[np.ndarray, "T"]:
        ids = np.empty(self.seq_len, self._widths[batch.file])
        checksum = np.empty(1, np.dtype("<u4"))
        read = os.preadv(descriptor, [ids.data], batch.ids + row * ids.nbytes)
        read += os.preadv(descriptor, [checksum.data], batch.checksums + row * checksum.nbytes)
        whole = read == ids.nbytes + checksum.nbytes and zlib.crc32(ids.data) == checksum[0]
        # `check` trusts the range in the batch's metadata, so the ids that are read must agree with it.
        if not whole or ids.min() < batch.smallest or ids.max() > batch.largest:
            first = next(b for b in self._batches if b.file == batch.file)
            number = row + sum(b.rows for b in self._batches[self._batches.index(first) : self._batches.index(batch)])
            raise UserError(
                f"{self._files[batch.file]}, row {number}: its tokens are not those that were written: it is damaged; "
                "copy or tokenize it again"
            )
        return ids

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError, with the file and row, for a token id that is not below ``vocab_size``. Reads only rows of
        a record batch that has such an id.
        """
        for number, batch in enumerate(self._batches):
            if batch.largest < vocab_size:
                continue
            rows = self.rows(range(int(self._starts[number]), int(self._starts[number + 1])))
            wrong = np.argwhere(rows >= vocab_size)
            if len(wrong):
                row, column = wrong[0]
                before = int(self._starts[number]) - self._starts[self._first_of(batch.file)]
                raise UserError(
                    f"{self._files[batch.file]}, row {before + row}, position {column}: token id {rows[row, column]} "
                    f"is not in the model's vocabulary (0 to {vocab_size - 1}); tokenize the text with the model's own "
                    "tokenizer"
                )

    def _first_of(self, file: int) -> int:
        return next(n for n, batch in enumerate(self._batches) if batch.file == file)


def shard_rows(file: Path) -> tuple[int, int]:
    """Returns the number of rows of a shard, and the tokens in each. Raises UserError for anything but a complete
    shard.
    """
    length, _, batches = _open_shard(file, 0)
    return sum(batch.rows for batch in batches), length


def _open_shard(file: Path, number: int) -> tuple[int, np.dtype[np.unsignedinteger], list[_Batch]]:
    """Returns the tokens in a row, the type of an id, and the places of the record batches. Reads no tokens."""
    try:
        with pa.memory_map(str(regular_file(file, "a shard"))) as mapped:
            size = mapped.size()
            reader = pa.ipc.open_file(mapped)
            length, width = _row_type(file, reader.schema)
            batches = []
            for n in range(reader.num_record_batches):
                batch, about = reader.get_batch_with_custom_metadata(n)
                batches.append(_batch(file, number, batch, about, _address(mapped, size), size))
    except (OSError, ValueError, pa.ArrowException) as error:
        why = printable(str(error), 300)
        raise UserError(f"{file} is not a whole Arrow file ({why}): copy or tokenize it again") from error
    return length, width, batches


def _address(mapped: pa.MemoryMappedFile, size: int) -> int:
    """Returns the address of the mapped file in this process's memory."""
    mapped.seek(0)
    return int(mapped.read_buffer(size).address)


def _row_type(file: Path, found: pa.Schema) -> tuple[int, np.dtype[np.unsignedinteger]]:
    kind = found.field(COLUMN).type if found.names == [COLUMN, CHECKSUM] else None
    if kind is None or not pa.types.is_fixed_size_list(kind) or not pa.types.is_unsigned_integer(kind.value_type):
        raise UserError(
            f"{file} was not written by `pd data tokenize` (its columns: {printable(', '.join(found.names), 200)}); "
            "give Parquet files, or tokenize the text again"
        )
    if kind.list_size < 1:
        raise UserError(f"{file}: its rows hold no tokens; tokenize the text again")
    return kind.list_size, np.dtype(kind.value_type.to_pandas_dtype())


def _batch(file: Path, number: int, batch: pa.RecordBatch, about: pa.KeyValueMetadata, start: int, size: int) -> _Batch:
    batch.validate()  # raises an ArrowException where a buffer is shorter than its column
    ids, checksums = batch.columns
    values = ids.values
    places = []
    for array in (values, checksums):
        buffer = array.buffers()[1]
        place = buffer.address - start + array.offset * array.type.bit_width // 8
        if array.null_count or ids.offset or not 0 <= place <= size - len(array) * array.type.bit_width // 8:
            raise UserError(f"{file} is damaged: copy or tokenize it again")
        places.append(place)
    stated = dict(about or {})
    smallest, largest = (int(stated.get(key, "-1")) for key in (b"min", b"max"))
    if not 0 <= smallest <= largest < 1 << values.type.bit_width:
        raise UserError(f"{file} does not say which ids it holds: it is damaged; copy or tokenize it again")
    return _Batch(number, len(batch), places[0], places[1], smallest, largest)
