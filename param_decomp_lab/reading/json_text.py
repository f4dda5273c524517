"""JSON from outside: of bounded depth, with finite numbers of bounded length."""

import json
import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.reading.files import SMALL, read_text

MAX_DEPTH = 64
"""Of lists and mappings in one another. More than any file of ours or of Hugging Face has, and within what recursive
code can walk."""
MAX_DIGITS = 40
"""Of a whole number; the largest that a file of ours holds has 20."""


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str, name: str) -> Any:
    """The value of a JSON text. ``name``: of the text, for errors. Raises UserError: it is not JSON, is nested deeper
    than MAX_DEPTH, has a number that is not finite or of more than MAX_DIGITS digits, or half of a surrogate pair."""
    try:
        value = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_float)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise UserError(f"{name}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{name}: nested deeper than {MAX_DEPTH} levels") from error
    for depth, _ in enumerate(_levels(value)):
        if depth > MAX_DEPTH:
            raise UserError(f"{name}: nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(text) and is_unencodable(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{name}: not valid JSON: half of a surrogate pair, which is no text")
    return value


def read_json(path: Path, what: str, limit: int = SMALL) -> Any:
    """The value in a JSON file of at most ``limit`` bytes. ``what``: description of the file, for errors. Raises
    UserError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, what, limit), str(path))


def read_json_object(path: Path, what: str, limit: int = SMALL) -> dict[str, Any]:
    """The object in a JSON file; UserError for any other value, too."""
    value = read_json(path, what, limit)
    if not isinstance(value, dict):
        raise UserError(f"{path}: {what} should be a JSON object; this file holds {_kind(value)}")
    return value


def _levels(value: Any) -> Iterator[list[Any]]:
    """The lists and mappings at each depth, without recursion."""
    level = [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        yield level
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


def is_unencodable(text: str) -> bool:
    """Whether ``text`` has halves of surrogate pairs, which no file, terminal or path can take."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:MAX_DIGITS]} is not a finite number")
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")
