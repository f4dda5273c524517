"""JSON files for readers of all kinds: UTF-8, and numbers that JSON has."""

import gzip
import json
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError


def write_json(file: Path, value: Any) -> None:
    """Writes ``value``; compressed, if the name ends in ``.gz``. Raises UserError for numbers that are not finite."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError as error:
        raise UserError(f"{file.name}: it would have numbers that are not finite; make its source again") from error
    # Halves of surrogate pairs, which labels and texts of others can hold, have no bytes in UTF-8.
    found = text.encode("utf-8", "replace")
    if file.suffix == ".gz":
        found = gzip.compress(found, 6, mtime=0)  # without a time: the same value gives the same bytes
    file.write_bytes(found)
