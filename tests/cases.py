"""Which cases of a matrix are among the fast tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

from tests.machines import chosen


def slow_but(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """These cases, to parametrise a test by: all are marked `slow` but those in ``fast``."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


same_roundings = pytest.mark.skipif(
    chosen().noise != 0,
    reason="is about programs that round alike: in two processes, or on each of several devices as on one",
)
"""For tests of equal bits, where `rounding_noise.py` differs by design."""
