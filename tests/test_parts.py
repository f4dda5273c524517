"""`--part K/N`: no test is in none, a long matrix is in all."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts import Part, in_part

NAMES = [
    *(f"tests/core/test_a.py::test_matrix[{n}]" for n in range(75)),
    *(f"tests/core/test_a.py::test_{n}" for n in range(9)),
    *(f"tests/lab/test_wide.py::test_{n}" for n in range(5)),
    "tests/lab/test_b.py::test_sharp",
]


def items(names: list[str]) -> list[Any]:
    """As far as they are looked at: `always` by name, `one_part` by file."""

    def item(name: str) -> Any:
        marks = {"always": "sharp" in name, "one_part": "wide" in name}
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark if marks[mark] else None)

    return [item(name) for name in names]


def parts(count: int) -> list[list[str]]:
    given = items(NAMES)
    chosen = [in_part(Part(number, count), given) for number in range(1, count + 1)]
    return [[item.nodeid for item, is_in in zip(given, part, strict=True) if is_in] for part in chosen]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_every_test_is_in_one_part_and_the_marked_ones_in_all(count: int) -> None:
    found = Counter(name for part in parts(count) for name in part)
    assert found == {name: count if "sharp" in name else 1 for name in NAMES}
    assert parts(count) == parts(count)


def test_a_matrix_is_dealt_in_turn() -> None:
    found = sorted(sum("matrix" in name for name in part) for part in parts(4))
    assert found == [18, 19, 19, 19]


def test_a_file_that_shares_a_costly_fixture_stays_together() -> None:
    assert sorted(sum("wide" in name for name in part) for part in parts(4)) == [0, 0, 0, 5]


@pytest.mark.parametrize("text", ["2", "0/4", "5/4", "a/4", "1/"])
def test_a_wrong_part_is_told(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--part {text}: it must be K/N"):
        Part.parse(text)
