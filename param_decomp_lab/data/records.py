"""Reads documents, as text or token ids, from the records of a table: JSON objects or a column of an Arrow table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.tokenizers import LARGEST_ID
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import TITLES
from param_decomp_lab.safe_io.printable import first_few, printable


@dataclass(frozen=True)
class Column:
    """What to read of a record. ``name``: of its column. ``tokenized``: whether the column has token ids instead of
    text.
    """

    name: str
    tokenized: bool = False


TEXT = Column("text")


class BadRecord(UserError):
    """A record without a document; others may have one. The message has its place and what is wrong."""


def record_document(where: str, record: dict[str, Any], column: Column) -> Document:
    """Returns the document in a record. ``where``: its place, for errors. Raises BadRecord."""
    if column.name not in record:
        raise BadRecord(no_column(where, list(record), column))
    value = record[column.name]
    if column.tokenized:
        return Document(where, _token_ids(where, value, column.name))
    if not isinstance(value, str):
        kind = TITLES.get(type(value), "no text")
        hint = "; if it holds token ids, say so (--tokenized)" if isinstance(value, list) else ""
        raise BadRecord(f"{where}: {printable(column.name, 80)} should be text, not {kind}{hint}")
    return Document(where, value)


def column_documents(where: str, first: int, values: pa.Array, column: Column) -> Iterator[Document | BadRecord]:
    """Yields the documents in a column of a table, and a BadRecord for each of its other rows. ``where``: the table;
    ``first``: the number of its first row, from 1. Raises UserError for a column of another type.
    """
    shown, kind = f"{where}: {printable(column.name, 80)}", values.type
    if isinstance(values, pa.DictionaryArray):
        values, kind = values.dictionary_decode(), kind.value_type
    of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not column.tokenized:
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            hint = "; if it holds token ids, say so (--tokenized)" if of_lists else ""
            raise UserError(f"{shown} has type {kind}; it should be text{hint}")
        for number, text in enumerate(values.to_pylist(), start=first):
            yield BadRecord(f"{shown} is missing in row {number}") if text is None else Document(where, text)
        return
    if not of_lists or not pa.types.is_integer(kind.value_type):
        raise UserError(f"{shown} has type {kind}; it should be lists of token ids")
    for number, row in enumerate(values, start=first):
        if not row.is_valid:
            yield BadRecord(f"{shown} is missing in row {number}")
        elif row.values.null_count:
            yield BadRecord(f"{shown} has token ids that are missing, in row {number}")
        else:
            ids = row.values.to_numpy(zero_copy_only=False)
            if len(ids) and not 0 <= ids.min() <= ids.max() <= LARGEST_ID:
                yield BadRecord(f"{shown} should be lists of token ids, from 0 to {LARGEST_ID}, not as in row {number}")
            else:
                yield Document(f"{where}, row {number}", ids.astype(np.int32))


def require_column(where: str, names: Sequence[str], column: Column) -> None:
    """Raises UserError where ``names`` lacks the column."""
    if column.name not in names:
        raise UserError(no_column(where, names, column))


def no_column(where: str, names: Sequence[str], column: Column) -> str:
    found = printable(", ".join(first_few([str(name) for name in names])), 300)
    return f"{where}: has no column {printable(column.name, 80)} (it has: {found}); choose with --column"


def _token_ids(where: str, value: Any, name: str) -> Int32[np.ndarray, "n"]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= LARGEST_ID for token in value):
        raise BadRecord(f"{where}: {printable(name, 80)} should be a list of token ids, from 0 to {LARGEST_ID}")
    return np.asarray(value, np.int32)
