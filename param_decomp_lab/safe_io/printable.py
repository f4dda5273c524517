"""Makes text from outside safe to show: without control characters, and of limited length."""

import re
from collections.abc import Iterable, Sequence

MESSAGE_CHARACTERS = 10_000
"""Longest error message."""
SHOWN = 12
"""Entries of a long list that a message shows."""

# C0 and C1 controls except the line feed; marks that reverse or hide text; line separators; lone surrogates.
UNPRINTABLE = "\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff"
"""Characters that are escaped when shown, as the inside of a regular expression's brackets."""
_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")


def printable(text: str, limit: int = MESSAGE_CHARACTERS) -> str:
    """Returns ``text`` with control characters as visible escapes (`\\x1b`), shortened in the middle to ``limit``
    characters.

    Line feeds stay. Rich's markup is left alone: print the result with `markup=False`, as `rich.text.Text`, or escaped.
    """
    text = shortened(text, limit)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shortened(text: str, limit: int) -> str:
    """Returns ``text``, or if it is too long its two ends with the number of omitted characters between them."""
    if len(text) <= limit:
        return text
    ends = limit // 2
    return f"{text[:ends]} … ({len(text) - 2 * ends:,} more characters) … {text[-ends:]}"


def first_few(entries: Iterable[str], limit: int = SHOWN) -> list[str]:
    """Returns the first ``limit`` entries, each made printable, and if there are more, a last entry
    that counts them.
    """
    every = list(entries)
    few = [printable(entry, 1000) for entry in every[:limit]]
    return [*few, f"… and {len(every) - limit:,} more"] if len(every) > limit else few


def few_names(names: Sequence[str]) -> str:
    """Lists the first three names and says how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
