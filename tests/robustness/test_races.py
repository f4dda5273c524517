"""Commands that write to one place at once, lose their folder, or fill a disk: races of `tests/robustness/races.py`."""

from pathlib import Path

import pytest

from tests.robustness import races
from tests.robustness.forked import BROKEN, Ended
from tests.robustness.forking import run_forking

QUICK = ("tokenize", "import", "report")
FEW = 1


def results(out: Path, commands: tuple[str, ...], count: int) -> list[races.Result]:
    chosen = [word for name in commands for word in ("--command", name)]
    run_forking("races", "--races", count, "--out", out, *chosen)
    return races.read(out)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[races.Result]:
    return results(tmp_path_factory.mktemp("races") / "few.jsonl", QUICK, FEW)


@pytest.mark.slow
@pytest.mark.one_part
@pytest.mark.parametrize("kind", races.KINDS)
def test_a_few_races(few: list[races.Result], kind: str) -> None:
    found = [result for result in few if result.kind == kind]
    if kind == "disk" and not found and not races.can_mount():
        pytest.skip("mounting a small disk takes root")
    assert len(found) == FEW * len(QUICK)
    assert [f"{r.wrong}: {r.what}: {r.again}: {r.said}" for r in found if r.wrong] == []


@pytest.mark.acceptance
def test_fifty_of_each(tmp_path: Path) -> None:
    found = results(tmp_path / "many.jsonl", tuple(races.WRITERS), 50)
    assert [f"{r.wrong}: {r.what}: {r.again}: {r.said}" for r in found if r.wrong] == []


# ---- the checks themselves ----


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (Ended(BROKEN, 1.0, 0, b"Traceback (most recent call last):\nOSError: full\n"), "traceback: OSError: full"),
        (Ended(75, 1.0, 0, b"error: x"), "status 75"),
        (Ended(2, 1.0, 0, b""), "status 2 without a message"),
        (Ended(2, 1.0, 0, b"error: \x1b[31m"), "printed '\\x1b'"),
        (Ended(1, 1.0, 0, b"error: " + b"x" * 30_000), "said 30,007 bytes"),
        (Ended(-9, 181.0, 0, b""), "not done after 180 s"),
    ],
)
def test_a_bad_end_is_found(ended: Ended, says: str) -> None:
    assert races.badly_ended(ended) == [says]


def test_a_refusal_and_a_success_are_good_ends() -> None:
    assert races.badly_ended(Ended(2, 1.0, 0, b"error: out exists\n")) == []
    assert races.badly_ended(Ended(0, 1.0, 0, b"done\n")) == []


@pytest.mark.parametrize(
    ("lies", "won", "left", "wrong"),
    [
        ({"out/a": "1", "out/b": "1"}, [0], "a whole result", []),
        ({"out/a": "2", "out/b": "2"}, [0, 1], "a whole result", []),
        ({}, [], "nothing", []),
        ({"out/a": "1", "out/b": "2"}, [0, 1], "a part", ["no whole result"]),
        ({"out/a": "1"}, [], "a part", ["no whole result"]),
        ({"out/a": "1", "out/b": "1"}, [1], "a whole result", ["the result of a command that failed"]),
        ({".out.partial-1/a": "1"}, [], "nothing", ["left behind: .out.partial-1"]),
    ],
)
def test_what_lies_at_the_place(
    tmp_path: Path, lies: dict[str, str], won: list[int], left: str, wrong: list[str]
) -> None:
    course, whole = races.Course(tmp_path), tmp_path / "whole"
    for variant in range(2):
        for name in ("a", "b"):
            (whole / str(variant)).mkdir(parents=True, exist_ok=True)
            (whole / str(variant) / name).write_text(str(variant + 1))
        course.results["tokenize", variant] = races.files(whole / str(variant))
    place = tmp_path / "place"
    place.mkdir()
    for name, content in lies.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(content)
    found, said = course.left(races.WRITERS["tokenize"], place, won)
    assert found == left
    assert [text[: len(expected)] for text, expected in zip(said, wrong, strict=True)] == wrong
