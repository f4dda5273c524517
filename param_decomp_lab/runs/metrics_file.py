"""Reads the rows of `metrics.jsonl` in a run folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import read_lines
from param_decomp_lab.safe_io.json_text import BadNumber, bounded_int
from param_decomp_lab.safe_io.printable import shortened

Row = Mapping[str, Any]
METRICS_FILE = "metrics.jsonl"
ROW_BYTES = 1 << 20
"""Longest line of a `metrics.jsonl` in bytes: a row of a thousand sites takes a tenth of it."""


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.jsonl`; none if the file is missing. Text after the last line end is left out unless
    it is a complete row: the run is writing it, or was killed while writing.

    Raises UserError if it is not a regular file, and for a line that is not a row or not UTF-8, with its number.
    """
    path = run_folder / METRICS_FILE
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_lines(path, "the metrics", ROW_BYTES), start=1):
        try:
            rows.append(parse_row(line.decode()))
        except ValueError as error:
            if not line.endswith(b"\n"):
                break
            why: object = error
            if isinstance(error, UnicodeDecodeError):
                why = f"cannot read the metrics: not UTF-8 text ({error.reason})"
            raise UserError(f"{path}:{number}: {why}") from error
    return rows


def parse_row(line: str | bytes) -> dict[str, Any]:
    """Parses a row of `metrics.jsonl`, whose values may be NaN. Raises ValueError for anything else; the step of a row
    is an integer from 0 up.
    """
    # Not `parse_json`: a long run has a million rows, and the checks of every number would take longer than reading it.
    try:
        row = json.loads(line, parse_int=bounded_int)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except BadNumber:
        raise
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from error
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError(f"expected an object with a key 'step', got {shortened(repr(row), 80)}")
    if type(row["step"]) is not int or not 0 <= row["step"] < 2**31:
        given = shortened(json.dumps(row["step"]), 40)
        raise ValueError(f"the step should be a whole number from 0 up, not {given}")
    return row
