"""Parses JSON from outside: limited depth, finite numbers of limited size, the expected type at the top."""

import json
import math
import re
from pathlib import Path
from typing import Any, TypeVar

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import SETTINGS_BYTES, read_text

DEPTH = 100
"""Levels of nesting that JSON and YAML may have. Functions that recurse over parsed values rely on it."""
INTEGER = 1 << 64
"""Every integer is smaller in magnitude. Larger ones fit in no array, and not always in a float."""

Value = TypeVar("Value", dict[str, Any], list[Any])
TITLES: dict[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number",
    type(None): "null",
}  # fmt: skip

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class BadNumber(ValueError):
    """A number that cannot be used: not finite, or too large."""


def parse_json(text: str, name: str, expected: type[Value]) -> Value:
    """Returns the JSON object (``expected`` is dict) or list in ``text``. ``name``: what errors call the text.

    Raises UserError for text that is not JSON or has another type at the top, more than `DEPTH` levels, NaN,
    infinities, numbers that overflow a float, integers of 2^64 or more in magnitude, and lone surrogates.
    """
    try:
        value = json.loads(text, parse_int=bounded_int, parse_float=finite_float, parse_constant=finite_float)
    except BadNumber as error:
        raise UserError(f"{name}: {error}") from error
    except RecursionError as error:
        raise UserError(f"{name}: nested more than {DEPTH} levels deep") from error
    except ValueError as error:
        raise UserError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(value, expected):
        raise UserError(f"{name}: should be {TITLES[expected]}, not {TITLES[type(value)]}")
    if is_too_deep(text, value):
        raise UserError(f"{name}: nested more than {DEPTH} levels deep")
    if _SURROGATE.search(text) and has_surrogates(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{name}: not valid text: half of a surrogate pair")
    return value


def read_json(path: Path, what: str, expected: type[Value], limit: int = SETTINGS_BYTES) -> Value:
    """Returns the JSON object or list in a file. ``what``: description of the file, for errors; ``limit``: its size in
    bytes. Raises UserError as `read_text` and `parse_json` do.
    """
    return parse_json(read_text(path, what, limit), f"{path}: {what}", expected)


def bounded_int(text: str) -> int:
    """Raises BadNumber unless the integer is below 2^64 in magnitude."""
    # The digits are counted first because int() takes time quadratic in their number.
    if len(text) > 21 or not -INTEGER < (number := int(text)) < INTEGER:
        raise BadNumber(f"the number {text[:20]}{'…' * (len(text) > 20)} ({len(text)} characters) is too large")
    return number


def finite_float(text: str) -> float:
    """Raises BadNumber if the number is NaN or infinite, or too large for a float."""
    number = float(text)
    if not math.isfinite(number):
        raise BadNumber(f"the number {text[:20]}{'…' * (len(text) > 20)} is not finite")
    return number


def is_too_deep(text: str, value: Any) -> bool:
    """Whether ``value``, which was read from ``text``, is nested more than `DEPTH` levels deep."""
    if text.count("[") + text.count("{") <= DEPTH:
        return False
    level = [value]
    for _ in range(DEPTH):
        level = [
            entry
            for container in level
            for entry in (container.values() if isinstance(container, dict) else container)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return False
    return True


def has_surrogates(text: str) -> bool:
    """Whether ``text`` has code points that no file, terminal or path can take: halves of surrogate pairs."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
