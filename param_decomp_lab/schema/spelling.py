"""Finds the valid name that a wrong one is most like."""

import difflib
from collections.abc import Iterable, Sequence

ALIKE = 0.75
"""Similarity (`difflib`'s ratio) from which an unknown key is taken for a valid one that was misspelled."""


def nearest_alike(wrong: str, valid: Iterable[str]) -> str | None:
    names = list(valid)
    if len(wrong) > 200 or not names:
        return None
    best = _nearest_name(wrong, names)
    return best if difflib.SequenceMatcher(None, _plain(wrong), _plain(best)).ratio() >= ALIKE else None


def _nearest_name(wrong: str, names: Sequence[str]) -> str:
    same = [name for name in names if _plain(name) == _plain(wrong)]
    (best,) = same[:1] or difflib.get_close_matches(wrong, names, n=1, cutoff=0.0)
    return best


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """The text `did you mean 'x'? (valid: …)` with the valid name most similar to ``wrong``."""
    names = sorted(valid)
    assert names
    return f"did you mean '{_nearest_name(wrong, names)}'? (valid: {', '.join(names)})"
