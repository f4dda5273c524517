"""Documents in the records of a table: rows of JSON, or a column of Arrow's. Text, or token ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.tokenizers import LARGEST_ID
from param_decomp_lab.errors import UserError
from param_decomp_lab.untrusted.json_text import TITLES
from param_decomp_lab.untrusted.printable import first_few, printable


@dataclass(frozen=True)
class Column:
    """What is read of a record. ``name``: of its column. ``tokenized``: whether that holds token ids, not text."""

    name: str
    tokenized: bool = False


TEXT = Column("text")


def record_document(where: str, record: dict[str, Any], column: Column) -> Document:
    """The document in a record. ``where``: its place, for errors. Raises UserError."""
    if column.name not in record:
        require_column(where, list(record), column)
    value = record[column.name]
    if column.tokenized:
        return Document(where, _token_ids(where, value, column.name))
    if not isinstance(value, str):
        kind = TITLES.get(type(value), "no text")
        hint = "; if it holds token ids, say so (--tokenized)" if isinstance(value, list) else ""
        raise UserError(f"{where}: {printable(column.name, 80)} should be text, not {kind}{hint}")
    return Document(where, value)


def column_documents(where: str, values: pa.Array, column: Column) -> Iterator[Document]:
    """The documents in a column of a table. ``where``: the table, for errors. Raises UserError."""
    shown, kind = f"{where}: {printable(column.name, 80)}", values.type
    if isinstance(values, pa.DictionaryArray):
        values, kind = values.dictionary_decode(), kind.value_type
    if values.null_count:
        raise UserError(f"{shown} is missing in {values.null_count} of its rows; leave them out")
    of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not column.tokenized:
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            hint = "; if it holds token ids, say so (--tokenized)" if of_lists else ""
            raise UserError(f"{shown} has type {kind}; it should be text{hint}")
        yield from (Document(where, text) for text in values.to_pylist())
        return
    if not of_lists or not pa.types.is_integer(kind.value_type):
        raise UserError(f"{shown} has type {kind}; it should be lists of token ids")
    for row in values:
        ids = row.values
        if ids.null_count:
            raise UserError(f"{shown} has token ids that are missing")
        ids = ids.to_numpy(zero_copy_only=False)
        if len(ids) and not 0 <= ids.min() <= ids.max() <= LARGEST_ID:
            raise UserError(f"{shown} should be lists of token ids, from 0 to {LARGEST_ID}")
        yield Document(where, ids.astype(np.int32))


def require_column(where: str, names: Sequence[str], column: Column) -> None:
    """Raises UserError where ``names`` lacks the column."""
    if column.name not in names:
        found = printable(", ".join(first_few([str(name) for name in names])), 300)
        raise UserError(f"{where}: has no column {printable(column.name, 80)} (it has: {found}); choose with --column")


def _token_ids(where: str, value: Any, name: str) -> Int32[np.ndarray, "n"]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= LARGEST_ID for token in value):
        raise UserError(f"{where}: {printable(name, 80)} should be a list of token ids, from 0 to {LARGEST_ID}")
    return np.asarray(value, np.int32)
