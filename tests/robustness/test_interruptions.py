"""`interruptions.py` in small: one run, interrupted once in each phase, is the one that nothing disturbed."""

import random
import signal
from pathlib import Path

import pytest

from tests.lab.test_processes import SMALL
from tests.lab.tiny_run import Tiny
from tests.robustness import interruptions
from tests.robustness.interruptions import PHASES, Event, Interruption, durations, experiment, phase_at, plan


@pytest.mark.slow
def test_four_interruptions(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "STEPS", 100)
    # Seven processes and more: with the script's own terms and metrics each compiles for half a minute.
    monkeypatch.setattr(interruptions, "SETTINGS", (*SMALL, *interruptions.SETTINGS[1:], "pd.steps=100"))
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    found, same = experiment(tiny, tmp_path / "runs", 4, seed)
    assert {one.met for one in found} >= set(PHASES)
    assert same.arrays > 10


@pytest.mark.parametrize("seed", range(20))
def test_plan(seed: int) -> None:
    """Every phase has its share and both signals; warm-up comes first."""
    planned = plan(21, random.Random(seed))
    assert len(planned) == 21
    for name in PHASES:
        kinds = [kind for phase, kind in planned if phase == name]
        assert len(kinds) >= 5
        assert set(kinds) == {signal.SIGTERM, signal.SIGKILL}
    warmups = sum(name == "warm-up" for name, _ in planned)
    assert {name for name, _ in planned[:warmups]} == {"warm-up"}
    assert planned == plan(21, random.Random(seed))


SAID = [
    Event(0, "begin", "warm-up"), Event(10, "end", "warm-up"),
    Event(10, "begin", "step"), Event(20, "begin", "compile"), Event(30, "end", "compile"),
    Event(40, "did", "1"), Event(50, "did", "2"), Event(60, "did", "3"),
    Event(62, "begin", "save 3"), Event(70, "end", "save 3"),
    Event(80, "did", "4"), Event(90, "begin", "evaluation"), Event(100, "end", "evaluation"), Event(110, "end", "step"),
]  # fmt: skip


def test_where_a_process_was() -> None:
    assert phase_at(SAID, 5) == ("warm-up", 0)
    assert phase_at(SAID, 25) == ("compile", 20)
    assert phase_at(SAID, 55) == ("step", 50)
    assert phase_at(SAID, 65) == ("save", 62)
    assert phase_at(SAID, 75) == ("step", 60)
    assert phase_at(SAID, 95) == ("evaluation", 90)
    assert phase_at([], 5) == ("start", 5)
    lengths = durations(SAID)
    assert lengths == pytest.approx({"warm-up": 1e-8, "step": 1e-8, "evaluation": 1e-8, "save": 8e-9})


def interruption(**more: object) -> Interruption:
    given = {"number": 1, "signal": signal.SIGKILL, "meant": "step", "met": "step", "after_s": 0.0, "left_s": 0.0}
    return Interruption(**(given | {"status": -9, "done": 25, "saved": 20, "resumed": 20} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"resumed": 10},  # an older checkpoint than the last one
        {"done": 35},  # more than between two saves
        {"status": 1},
        {"signal": signal.SIGTERM, "status": 75},  # told to stop, it should have saved step 25
        {"met": "warm-up"},  # with 25 steps done
    ],
)
def test_what_is_not_allowed(wrong: dict[str, object]) -> None:
    interruption().check()
    interruption(signal=signal.SIGTERM, status=75, saved=25, resumed=25).check()
    interruption(met="warm-up", done=0, saved=None, resumed=None).check()
    with pytest.raises(AssertionError):
        interruption(**wrong).check()
