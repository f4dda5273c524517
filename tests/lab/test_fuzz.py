"""Damaged files of every format, at random from a seed: what the program makes of them (`experiments/fuzz.py`)."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from experiments import fuzz, fuzz_faults
from experiments.fuzz_formats import FORMATS, Command, Format, WrongNumbers
from tests.lab.tiny_run import ROOT

SEED = 1


def results(out: Path, cases: int, workers: int) -> list[fuzz.Result]:
    """In a process of its own: this one may have started a backend of JAX, which forked ones could not use."""
    command = [sys.executable, "-m", "experiments.fuzz", "--seed", str(SEED), "--cases", str(cases)]
    command += ["--workers", str(workers), "--out", str(out)]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return fuzz.read(out)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[fuzz.Result]:
    return results(tmp_path_factory.mktemp("fuzz") / "few.jsonl", 20, 1)


@pytest.mark.parametrize("name", FORMATS)
def test_twenty_cases(few: list[fuzz.Result], name: str) -> None:
    found = [result for result in few if result.format == name]
    assert len(found) == 20
    assert [f"{r.wrong}: {r.fault}: {r.again}" for r in found if r.wrong] == []


@pytest.mark.acceptance
def test_three_hundred_cases_of_each(tmp_path: Path) -> None:
    found = results(tmp_path / "many.jsonl", 300, 2)
    assert len(found) == 300 * len(FORMATS)
    assert [f"{r.wrong}: {r.fault}: {r.again}" for r in found if r.wrong] == []
