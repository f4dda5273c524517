"""Damaged files of every format, at random from a seed: what the program makes of them (`tests/robustness/fuzz.py`)."""

from pathlib import Path
from random import Random

import pytest

from tests.robustness import fuzz, fuzz_faults
from tests.robustness.forked import Ended
from tests.robustness.forking import run_forking
from tests.robustness.fuzz_formats import FORMATS, Command, Format, WrongNumbers

SEED = 1


def results(out: Path, cases: int, workers: int) -> list[fuzz.Result]:
    run_forking("fuzz", "--seed", SEED, "--cases", cases, "--workers", workers, "--out", out)
    return fuzz.read(out)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[fuzz.Result]:
    return results(tmp_path_factory.mktemp("fuzz") / "few.jsonl", 6, 1)


@pytest.mark.slow
@pytest.mark.always
@pytest.mark.parametrize("name", FORMATS)
def test_six_cases(few: list[fuzz.Result], name: str) -> None:
    found = [result for result in few if result.format == name]
    assert len(found) == 6
    assert [f"{r.wrong}: {r.fault}: {r.again}" for r in found if r.wrong] == []


@pytest.mark.parametrize(
    ("cases", "workers"),
    [pytest.param(20, 1, marks=pytest.mark.slow), pytest.param(300, 2, marks=pytest.mark.acceptance)],
)
def test_more_cases_of_each(tmp_path: Path, cases: int, workers: int) -> None:
    found = results(tmp_path / "many.jsonl", cases, workers)
    assert len(found) == cases * len(FORMATS)
    assert [f"{r.wrong}: {r.fault}: {r.again}" for r in found if r.wrong] == []


# ---- the fuzzer itself ----

FINE = Ended(2, 0.1, 0, b"error: config.json is not JSON\n")
READS = Command("reads", lambda fault, whole: None, writes=("out",))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("work", "outside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("as it was")
    return tmp_path


def wrong(place: Path, ended: Ended = FINE, *, refused: bool = False, act: str = "") -> list[str]:
    before = fuzz.contents(place)
    if act:
        (place / act).write_text(fuzz_faults.SECRET if act == "work/out" else "changed")
    return fuzz.find_wrong(place, READS, fuzz_faults.Fault("a fault", "file", refused), ended, before, 20.0)


def test_a_refusal_is_as_it_must_be(place: Path) -> None:
    assert wrong(place, refused=True) == []
    assert wrong(place, Ended(0, 0.1, 0, b"table\n\tof numbers\n")) == []


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (Ended(1, 0.1, 0, b"x\nTraceback (most recent call last):\n  File\nKeyError: 3\n"), "traceback: KeyError"),
        (Ended(fuzz.WRONG, 0.1, 0, b"\nother numbers\n"), "accepted, but other numbers"),
        (Ended(-11, 0.1, 0, b""), "status -11"),
        (Ended(3, 0.1, 0, b""), "status 3"),
        (Ended(-9, 20.1, 0, b""), "not done after 20 s"),
        (Ended(2, 0.1, 3 << 30, b""), "took 3.2 GB"),
        (Ended(2, 0.1, 0, b"error: \x1b[31m"), "printed '\\x1b'"),
        (Ended(2, 0.1, 0, b"error: \xff"), "printed '\\udcff'"),
        (Ended(2, 0.1, 0, b"x" * 13_000), "said 13,000 bytes"),
        (Ended(2, 0.1, 0, fuzz_faults.SECRET.encode()), "what lies outside"),
    ],
)
def test_what_is_wrong_is_found(place: Path, ended: Ended, says: str) -> None:
    (found,) = wrong(place, ended)
    assert found.startswith(says)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("work/file", "work/file was changed"),
        ("outside/file", "outside/file was changed"),
        ("beside", "beside was made"),
        ("work/out", "what lies outside of the folder was read and shown"),
    ],
)
def test_what_a_case_does_to_files_is_found(place: Path, act: str, says: str) -> None:
    assert wrong(place, act=act) == [says]


def test_what_must_be_refused_is(place: Path) -> None:
    assert wrong(place, Ended(0, 0.1, 0, b""), refused=True) == ["accepted"]


def test_numbers_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor's flipped bit, which the file cannot show, changes what is read; one that is read otherwise is found."""
    read = FORMATS["safetensors"]
    read.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    (command,) = read.commands
    whole = command.act(fuzz_faults.Fault("nothing", "none"), None)
    file = Path("model/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    command.act(fuzz_faults.Fault("a bit flipped", file.name), whole)
    monkeypatch.setattr("tests.robustness.fuzz_formats._tensors", lambda file: {"x": bytes(len(content))})
    with pytest.raises(WrongNumbers, match="other numbers"):
        command.act(fuzz_faults.Fault("a bit flipped", file.name), whole)


@pytest.mark.parametrize("name", ["safetensors", "schema", "run"])
def test_a_case_follows_from_its_number(tmp_path: Path, name: str) -> None:
    found: Format = FORMATS[name]
    told = []
    for folder in ("one", "other"):
        (tmp_path / folder / "outside").mkdir(parents=True)
        found.make(tmp_path / folder / "work")
        told.append((found.damage(tmp_path / folder / "work", Random(7)), fuzz.contents(tmp_path / folder)))
    assert told[0] == told[1]
