"""A part of the tests, so that every run of CI takes some of the long matrices and a few runs take them all."""

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest


class Part(NamedTuple):
    """The ``number``-th (from 1) of ``count`` parts."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Of "2/4"; raises pytest's error for a wrong option."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(f"--part {text}: it must be K/N, the K-th (from 1) of N parts")
        return cls(int(number), int(count))


def in_part(part: Part, items: Iterable[pytest.Item]) -> list[bool]:
    """Which of these tests belong to the part.

    The cases of a test are dealt to the parts in turn, so that each gets its share of a long matrix; with which part
    the dealing begins follows from the test's name alone. A file whose tests are marked `one_part` goes to one part as
    a whole, and a test marked `always` to all.
    """
    cases: Counter[str] = Counter()
    found = []
    for item in items:
        path, *_ = item.nodeid.partition("::")
        name = item.nodeid.partition("[")[0]
        whole = item.get_closest_marker("one_part") is not None
        turn = zlib.crc32((path if whole else name).encode()) + (0 if whole else cases[name])
        cases[name] += 1
        found.append(item.get_closest_marker("always") is not None or turn % part.count == part.number - 1)
    return found
