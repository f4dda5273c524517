"""`experiments/evidence/table1.py`: one seed of TMS 5-2 for real, and the bookkeeping on made-up runs."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments.evidence import table1
from tests.lab.tiny_run import ROOT

SCRIPT = (sys.executable, "experiments/evidence/table1.py")


def made_up(out: Path, name: str, seed: int, step: int, **values: float) -> None:
    """A run as `pd train` leaves it, as far as the table looks."""
    folder = table1.run_folder(out, name, seed)
    folder.mkdir(parents=True)
    row: dict[str, Any] = {"step": step, **{f"eval/{key}": value for key, value in values.items()}}
    row["train/perf/step_time_s"] = 0.0085
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    folder.with_suffix(".seconds").write_text("90.0")


def test_rows_of_made_up_runs(tmp_path: Path) -> None:
    sites = {"identity_ci_error/linear1": 0, "identity_ci_error/linear2": 0}
    made_up(tmp_path, "tms_5-2", 0, 10000, **{"tms/mmcs": 0.9999, "tms/ml2r": 0.995}, **sites)
    made_up(tmp_path, "tms_5-2", 1, 10000, **{"tms/mmcs": 0.9970, "tms/ml2r": 0.995}, **sites)
    made_up(tmp_path, "tms_5-2", 7, 2500, **{"tms/mmcs": 0.5, "tms/ml2r": 0.1}, **sites)
    made_up(
        tmp_path,
        "resid_mlp1",
        0,
        20000,
        **{f"identity_ci_error/layers.0.{k}": e for k, e in (("mlp_in", 0), ("mlp_out", 2))},
    )
    page = table1.figures(table1.update_results(tmp_path / "kept.json", tmp_path))
    assert "| yes | 1 min 30 s | 8.5 ms |" in page
    assert (
        "| TMS 5-2 | 2 | 0.998 ± 0.002 | 1.000 ± 0.000 | 0.995 ± 0.000 | 0.993 ± 0.002 | linear1 0, linear2 0 |" in page
    )
    lines = [line for line in page.splitlines() if line.startswith(("| TMS 5-2 | ", "| ResidMLP-1 | "))][1:]
    assert [("**no**" in line, "| yes |" in line) for line in lines] == [
        (False, True), (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert "2,500 of 10,000" in lines[2]


def test_the_device_that_a_run_ran_on_last_is_named(tmp_path: Path) -> None:
    made_up(tmp_path, "resid_mlp2_shared", 0, 25000)
    history = table1.run_folder(tmp_path, "resid_mlp2_shared", 0) / "history.jsonl"
    history.write_text('{"devices": ["cpu"]}\n{"devices": ["NVIDIA H200", "NVIDIA H200"]}\n')
    assert "| 8.5 ms, NVIDIA H200 |" in table1.figures(table1.update_results(tmp_path / "kept.json", tmp_path))


def test_figures_outlive_the_run_folders(tmp_path: Path) -> None:
    """A run that was begun again does not take the place of the finished one; one that has gone as far does."""
    kept, page = tmp_path / "page.json", tmp_path / "page.md"
    made_up(tmp_path / "a", "tms_5-2", 0, 10000, **{"tms/mmcs": 0.9999, "tms/ml2r": 0.995, "loss/total": 1.0})
    table1.write_page(page, tmp_path / "a")
    written = page.read_text()
    assert "| TMS 5-2 | 0 | 10,000 | 0.9999 |" in written
    made_up(tmp_path / "b", "tms_5-2", 0, 500, **{"tms/mmcs": 0.5, "tms/ml2r": 0.5})
    table1.write_page(page, tmp_path / "b")
    assert page.read_text() == written
    assert "loss/total" not in kept.read_text()
    made_up(tmp_path / "c", "tms_5-2", 0, 10000, **{"tms/mmcs": 0.9998, "tms/ml2r": 0.995})
    table1.write_page(page, tmp_path / "c")
    assert "| TMS 5-2 | 0 | 10,000 | 0.9998 |" in page.read_text()


def test_a_later_evaluation_counts_more_than_the_run_s_own_of_that_step(tmp_path: Path) -> None:
    for seed, step in ((0, 10000), (1, 7500)):
        made_up(tmp_path, "tms_5-2", seed, 10000, **{"tms/mmcs": 0.9999, "tms/ml2r": 0.801})
        beside = table1.run_folder(tmp_path, "tms_5-2", seed).with_suffix(".evaluated")
        beside.write_text(json.dumps({"step": step, "eval/tms/mmcs": 0.9998, "eval/tms/ml2r": 0.999}))
    found = table1.update_results(tmp_path / "kept.json", tmp_path)["tms_5-2"]
    assert [found[seed].row["eval/tms/ml2r"] for seed in (0, 1)] == [0.999, 0.801]


@pytest.mark.parametrize(
    ("experiment", "values", "wanted"),
    [
        ("tms_40-10-id", {"tms/mmcs": 1.0, "tms/ml2r": 1.034}, True),
        ("tms_40-10", {"tms/mmcs": 1.0, "tms/ml2r": 1.034}, False),
        ("tms_40-10", {"tms/mmcs": 1.0, "tms/ml2r": 1.0, "identity_ci_error/linear2": 1}, False),
        ("resid_mlp1", {"identity_ci_error/layers.0.mlp_in": 1}, False),
        ("resid_mlp1", {"identity_ci_error/layers.0.mlp_out": 3}, False),
    ],
)
def test_what_is_promised(experiment: str, values: dict[str, float], wanted: bool) -> None:
    of = next(e for e in table1.EXPERIMENTS if e.name == experiment)
    complete = {f"identity_ci_error/{site}": 0.0 for site in of.expected} | values
    row = {f"eval/{key}": value for key, value in complete.items()}
    assert table1.as_wanted(of, table1.Result(0, of.steps, row, 1.0)) == wanted


@pytest.mark.parametrize("configured", [False, True])
def test_a_run_goes_on_only_if_it_knows_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    """A run that was killed while its folder was being made has nothing to go on with."""
    folder = table1.run_folder(tmp_path, "tms_5-2", 0)
    folder.mkdir(parents=True)
    if configured:
        (folder / "config.yaml").touch()
    started: list[list[str]] = []

    class Done:
        returncode = 0

        def __init__(self, arguments: list[str], **_: Any) -> None:
            started.append(arguments)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Done)
    table1.run(tmp_path, "tms_5-2", 0, until=None)
    assert ("--resume" in started[0]) == configured
    assert folder.exists() == configured


@pytest.mark.slow
def test_an_unknown_experiment_is_named() -> None:
    done = subprocess.run((*SCRIPT, "--only", "tms_6-2"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tms_6-2 unknown; choose from tms_5-2," in done.stderr


@pytest.mark.acceptance
def test_tms_5_2_is_recovered(tmp_path: Path) -> None:
    """The published configuration, one seed; stopped on the way, it goes on, and what is finished is not run again."""
    page = tmp_path / "table1.md"
    command = (*SCRIPT, "--only", "tms_5-2", "--seeds", "0", "--out", str(tmp_path / "runs"), "--page", str(page))
    # Compiled as a user has it: the tests' own flags make programs quick to compile and ten times slower to run.
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    run = partial(subprocess.run, cwd=ROOT, env=environment, check=True)
    run((*command, "--until", "500"))
    assert " of 10,000 |" in page.read_text()
    run(command)
    row = next(line for line in page.read_text().splitlines() if line.startswith("| TMS 5-2 | 0 |"))
    assert "| 10,000 |" in row
    assert "| yes |" in row
    again = run(command, capture_output=True, text=True)
    assert "compiled" not in again.stdout
