"""Text from outside, so that a terminal shows it and does nothing else."""

import re

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # of terminals; tabs and ends of lines stay
    "\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"  # turn the direction of what follows
    "\u2028\u2029\ud800-\udfff]"  # other ends of lines; halves of characters, which cannot be encoded
)
LONGEST = 10_000
"""Characters of a message."""


def printable(text: str) -> str:
    r"""``text`` with control characters as escapes such as ``\x1b``, as Python writes them."""
    return _CONTROLS.sub(_escape, text)


def one_line(text: str) -> str:
    """`printable`, and ends of lines as escapes, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shortened(text: str, longest: int = LONGEST) -> str:
    """``text``, or its beginning and its end, and how much was left out between."""
    if len(text) <= longest:
        return text
    end = longest // 5
    return f"{text[: longest - end]} … ({len(text) - longest:,} characters left out) … {text[-end:]}"


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if "\udc80" <= character <= "\udcff":  # a byte of a name that is not UTF-8 (PEP 383)
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
