"""`tests/same_bits.py` without its runs: what the digests depend on, and what it says of two versions."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests import same_bits
from tests.lab.make_old_run import LLAMA, OLD_RUN
from tests.same_bits import SUBJECTS, Digests, Subject, metrics_digest, state_digest


def digest_of_row(folder: Path, **row: float) -> str:
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return metrics_digest(folder)


def test_metrics_to_the_last_bit_without_the_clock(tmp_path: Path) -> None:
    loss = {"train/loss/total": 0.1}
    one = digest_of_row(tmp_path, **loss, **{"train/perf/step_time_s": 1.0, "train/mem/peak_gb_per_rank": 2.0})
    assert digest_of_row(tmp_path, **loss, **{"train/perf/step_time_s": 3.0}) == one
    assert digest_of_row(tmp_path, **{"train/loss/total": float(np.nextafter(0.1, 1))}) != one
    assert digest_of_row(tmp_path, **{"train/loss/all": 0.1}) != one


def test_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every call and machine; other states, others."""
    ten = state_digest(OLD_RUN / LLAMA)
    assert ten == state_digest(OLD_RUN / LLAMA)
    monkeypatch.setattr(same_bits, "STEPS", 8)
    assert state_digest(OLD_RUN / LLAMA) != ten


@pytest.mark.parametrize("is_same", [True, False])
def test_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_same: bool
) -> None:
    old = tmp_path / "old"

    @contextmanager
    def checked_out(ref: str) -> Iterator[Path]:
        yield old

    def digests_of(subject: Subject, code: Path, inputs: Path) -> Digests:
        changed = code != old and not is_same and subject.name == "transformer"
        return "1" * 64, ("2" if changed else "3") * 64

    monkeypatch.setattr(same_bits, "checked_out", checked_out)
    monkeypatch.setattr(same_bits, "digests_of", digests_of)
    monkeypatch.setattr(same_bits, "commit_of", lambda ref: {"HEAD": "a" * 40, "before": "b" * 40}[ref])
    for name in ("write_inputs", "refuse_another"):
        monkeypatch.setattr(same_bits, name, lambda folder: None)
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["same_bits", "--against", "before", "--page", str(page)])
    if is_same:
        same_bits.main()
    else:
        with pytest.raises(SystemExit, match="different: transformer"):
            same_bits.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(SUBJECTS)
    assert page.read_text().count("**different**") == (0 if is_same else 1)
    assert page.read_text().count("| same |") == (len(SUBJECTS) if is_same else len(SUBJECTS) - 1)
