"""Run folders of an earlier version (`make_old_run.py`): today's code lists, opens, evaluates, exports, reports on and
resumes them, and finds what the code of then found."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.make_old_run import EXPECTED, OLD_RUN, STEPS, STOPPED, Tree, copy_of, observe


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    folder = tmp_path_factory.mktemp("old") / "run"
    copy_of(OLD_RUN, folder)
    return observe(folder)


EXPECTATIONS: Tree = json.loads(EXPECTED.read_text())


def unlike(found: Any, expected: Any, where: str = "") -> list[str]:
    """Places in which the two differ: numbers by more than the rounding of another machine's sums."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [line for key in expected for line in unlike(found[key], expected[key], f"{where} / {key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for n, pair in pairs for line in unlike(*pair, f"{where} / {n}")]
    if type(found) is type(expected) is float:
        # Differences of cross-entropies lose the digits that the two have in common.
        same = found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        same = type(found) is type(expected) and found == expected
    return [] if same else [f"{where}: {found!r}, not {expected!r}"]


@pytest.mark.slow
@pytest.mark.always
@pytest.mark.parametrize("question", EXPECTATIONS)
def test_as_then(found: Tree, question: str) -> None:
    assert unlike(found[question], EXPECTATIONS[question], question) == []


def test_there_is_something_to_compare() -> None:
    resumed, importances = EXPECTATIONS["resumed"], EXPECTATIONS["importances"]
    assert (resumed["from step"], resumed["checkpoints"][-1]) == (STOPPED, STEPS)
    assert any("adversaries" in name for name in resumed["arrays"])
    values = [x for run in importances.values() for site in run["importances"].values() for x in flat(site)]
    assert sum(0 < x < 1 for x in values) > len(values) / 4
    assert all(EXPECTATIONS["reported"].values())


def flat(values: Any) -> list[float]:
    return [x for part in values for x in flat(part)] if isinstance(values, list) else [values]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": 1.0}, {"a": 1.001}),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": [1, 2]}, {"a": [1]}),
        ([[1.0], ["x"]], [[1.0], ["y"]]),
        ([1], [1.0]),
        (float("nan"), 1.0),
    ],
)
def test_differences_are_seen(found: Any, expected: Any) -> None:
    assert len(unlike(found, expected)) == 1
    assert unlike(expected, expected) == []


def test_the_folder_is_small_and_names_no_machine() -> None:
    files: list[Path] = [path for path in OLD_RUN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 300_000
    for path in files:
        assert b"/home/" not in path.read_bytes(), path
        assert b"/work/" not in path.read_bytes(), path
