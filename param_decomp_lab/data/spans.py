"""Cuts files of text, in several formats, into spans that are read independently and in any order.

Long text files and files of JSON lines are cut at line breaks, Parquet files at row groups; a compressed file is one
span.
"""

import io
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.records import BadRecord, Column, column_documents, record_document, require_column
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.json_text import TITLES, parse_json
from param_decomp_lab.safe_io.printable import printable

Format = Literal["text", "json", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[str, Format] = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
"""Formats by the ending of a file's name, without that of a compression; any other ending means text."""
COMPRESSIONS = (".gz", ".zst", ".bz2")
EXPANSION = 4
"""How much larger text usually is than its compressed file."""
READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 28
"""The most bytes of a line of JSON, or of a file that is one JSON list."""
ROWS_AT_ONCE = 256


class Span(Protocol):
    """A part of the input. Spans are sent to other processes."""

    @property
    def size(self) -> int:
        """The approximate size in bytes."""

    @property
    def identity(self) -> str:
        """A text that differs if the content does."""

    def documents(self, column: Column) -> Iterator[Document | BadRecord]:
        """Yields the documents, and a BadRecord for each record without one. Raises UserError for
        what cannot be read.
        """


@dataclass(frozen=True)
class MemorySpan:
    """Documents in memory."""

    held: tuple[Document, ...]

    @property
    def size(self) -> int:
        return sum(len(document.content) for document in self.held if isinstance(document.content, str))

    @property
    def identity(self) -> str:
        return repr([(document.source, document.content) for document in self.held])

    def documents(self, column: Column) -> Iterator[Document | BadRecord]:
        return iter(self.held)


@dataclass(frozen=True)
class FileSpan:
    """A part of a file. ``start``, ``stop``: bytes of a file of text or JSON lines, row groups of a Parquet file; a
    line belongs to the span in which it begins. ``changed``: when the file was last changed, in nanoseconds.
    """

    file: str
    format: Format
    start: int
    stop: int
    size: int
    changed: int

    @property
    def identity(self) -> str:
        return f"{self.file}\0{self.format} {self.start} {self.stop} {self.size} {self.changed}"

    def documents(self, column: Column) -> Iterator[Document | BadRecord]:
        match self.format:
            case "text":
                yield Document(self.file, self._text(), begins=self.start == 0)
            case "json":
                yield from self._json_documents(column)
            case "parquet":
                yield from self._parquet_rows(column)

    def _text(self) -> Iterator[str]:
        decoder = getincrementaldecoder("utf-8")()
        with _opened(self.file) as file:
            at = _seek_line(file, self.start)
            while at < self.stop and (chunk := file.read(min(READ_BYTES, self.stop - at))):
                at += len(chunk)
                yield decoder.decode(chunk)
            if self.start < self.stop <= at:
                file.seek(at - 1)  # the previous byte tells whether a line continues here
                for number, part in enumerate(_line_parts(file)):
                    yield decoder.decode(part[1:] if number == 0 else part)
            yield decoder.decode(b"", final=True)

    def _json_documents(self, column: Column) -> Iterator[Document | BadRecord]:
        with _opened(self.file) as file:
            at = _seek_line(file, self.start)
            number = 0
            # The first line belongs to the first span, even if that is shorter than a byte order mark.
            while (at < self.stop or self.start == number == 0) and (line := file.readline(LONGEST_LINE + 1)):
                number += 1
                where = f"{self.file}, line {number}" if self.start == 0 else f"{self.file}, at byte {at}"
                at += len(line)
                if self.start == 0 and number == 1 and line.lstrip().startswith(b"["):
                    yield from _json_list(self.file, line + file.read(LONGEST_LINE + 1 - len(line)), column)
                    return
                if len(line) > LONGEST_LINE:
                    at += sum(map(len, _line_parts(file)))
                    yield BadRecord(f"{where}: longer than {LONGEST_LINE:,} bytes, the most that a record may have")
                elif line.strip():
                    yield _json_document(where, line, column)

    def _parquet_rows(self, column: Column) -> Iterator[Document | BadRecord]:
        with _explained(self.file):
            file = pq.ParquetFile(regular_file(Path(self.file), "a text"), memory_map=True)
            require_column(self.file, file.schema_arrow.names, column)
            first = 1 + sum(file.metadata.row_group(group).num_rows for group in range(self.start))
            batches = file.iter_batches(
                ROWS_AT_ONCE, row_groups=list(range(self.start, self.stop)), columns=[column.name], use_threads=False
            )
            for batch in batches:
                yield from column_documents(self.file, first, batch.column(0), column)
                first += len(batch)


@contextmanager
def _opened(file: str) -> Iterator[io.BufferedReader]:
    """Opens a file, decompressed according to the ending of its name. Raises UserError for damaged content, or if it is
    not a regular file.
    """
    regular_file(Path(file), "a text")
    with _explained(file):
        packed = file.endswith(COMPRESSIONS)
        with io.BufferedReader(pa.input_stream(file, compression="detect")) if packed else open(file, "rb") as opened:
            yield opened


@contextmanager
def _explained(file: str) -> Iterator[None]:
    """A block that reads ``file``; raises UserError for errors in it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text ({error}); convert it, or leave it out (a glob such as 'texts/*.txt')"
        ) from error
    except (OSError, EOFError, pa.ArrowException) as error:
        why = printable(getattr(error, "strerror", None) or str(error), 300)
        raise UserError(f"cannot read {file}: {why}") from error


def _seek_line(file: io.BufferedReader, start: int) -> int:
    """Moves to the first line that begins at ``start`` or later, and returns its offset. The first line of a file
    begins after the byte order mark that some programs put before UTF-8.
    """
    if start == 0:
        marked = file.peek(len(BOM_UTF8)).startswith(BOM_UTF8)
        return len(file.read(len(BOM_UTF8))) if marked else 0
    file.seek(start - 1)
    return start - 1 + sum(map(len, _line_parts(file)))


def _line_parts(file: io.BufferedReader) -> Iterator[bytes]:
    """Yields the rest of a line, of any length, in parts."""
    while part := file.readline(READ_BYTES):
        yield part
        if part.endswith(b"\n"):
            return


def _json_document(where: str, line: bytes, column: Column) -> Document | BadRecord:
    try:
        return record_document(where, parse_json(line.decode("utf-8"), where, dict), column)
    except UnicodeDecodeError as error:
        return BadRecord(f"{where} is not UTF-8 text ({error})")
    except BadRecord as error:
        return error
    except UserError as error:
        return BadRecord(str(error))


def _json_list(file: str, content: bytes, column: Column) -> Iterator[Document | BadRecord]:
    if len(content) > LONGEST_LINE:
        raise UserError(f"{file}: is one list of more than {LONGEST_LINE:,} bytes; write a record per line (.jsonl)")
    for number, record in enumerate(parse_json(content.decode("utf-8"), file, list)):
        if not isinstance(record, dict):
            yield BadRecord(f"{file}: entry {number} should be an object, not {TITLES[type(record)]}")
            continue
        try:
            yield record_document(f"{file}, entry {number}", record, column)
        except BadRecord as error:
            yield error


def format_of(file: str) -> Format:
    """Returns the format of a file by the ending of its name."""
    path = Path(file)
    return ENDINGS.get((path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix.lower(), "text")


def file_spans(files: Iterable[Path], fmt: Format | None, span_bytes: int) -> list[FileSpan]:
    """Cuts the ``files``, in order, into spans of at most about ``span_bytes``. ``fmt``: None goes by the endings.
    Raises UserError.
    """
    spans = []
    for file in files:
        about = file.stat()
        spans += _spans_of(str(file), fmt or format_of(str(file)), about.st_size, about.st_mtime_ns, span_bytes)
    return spans


def _spans_of(file: str, fmt: Format, size: int, changed: int, span_bytes: int) -> list[FileSpan]:
    if fmt == "parquet":
        return _parquet_spans(file, changed, span_bytes)
    if file.endswith(COMPRESSIONS):
        return [FileSpan(file, fmt, 0, 1 << 62, EXPANSION * size, changed)]
    n = 1 if fmt == "json" and _is_json_list(file) else max(1, -(-size // span_bytes))
    bounds = [size * part // n for part in range(n + 1)]
    return [FileSpan(file, fmt, start, stop, stop - start, changed) for start, stop in pairwise(bounds)]


def _is_json_list(file: str) -> bool:
    with _opened(file) as opened:
        return opened.read(READ_BYTES).removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _parquet_spans(file: str, changed: int, span_bytes: int) -> list[FileSpan]:
    try:
        metadata = pq.ParquetFile(regular_file(Path(file), "a text"), memory_map=True).metadata
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} is not a whole Parquet file ({printable(str(error), 300)}): copy it again") from error
    spans, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= span_bytes or group == metadata.num_row_groups - 1:
            spans.append(FileSpan(file, "parquet", start, group + 1, size, changed))
            start, size = group + 1, 0
    return spans


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """Returns the files that ``inputs`` (files, folders, globs) match, each once, sorted within each input; hidden
    files in folders are left out. Raises UserError for an input that matches no file.
    """
    files: dict[str, None] = {}
    for given in map(str, inputs):
        if not given.strip():  # an unset variable; Path("") would be the working directory
            raise UserError("an input is empty; give a text file, a folder or a glob (. for the working directory)")
        path = Path(given)
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file())
            found = [file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        elif path.is_file():
            found = [path]
        else:
            root = Path(path.anchor) if path.is_absolute() else Path()
            pattern = str(path.relative_to(root)) if path.is_absolute() else given
            try:
                found = [file for file in root.glob(pattern) if file.is_file()] if pattern not in ("", ".") else []
            except ValueError as error:  # such as a**b
                raise UserError(f"{given} is not a glob ({error}); write for instance 'corpus/**/*.txt'") from error
        if not found:
            raise UserError(f"{given}: no such text file, no folder with files, and no glob that matches one")
        files |= dict.fromkeys(str(file) for file in sorted(found))
    return [Path(file) for file in files]
