"""`experiments/gpu_day.py`: small items to their end on a CPU, going on where it stopped, and the page."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_day import ITEMS, PARTS
from experiments.gpu_day_page import page
from param_decomp_lab.config import load_config
from tests.lab.tiny_run import ROOT

GIB = 2**30


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "experiments.gpu_day", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_small_items_to_the_end(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run("--toy", "--beside", "0", "--json", str(file))
    found = json.loads(file.read_text())
    assert list(found["measured"]) == ["tiny", "tms"]
    for item in found["measured"].values():
        assert item["plan"]["peak"] > 0
        assert item["step_s"] > 0
        assert item["finite"]
        assert item["live"]["steps"] is None
    phases = found["measured"]["tiny"]["phases"]["phases"]
    assert {"clean_pass", "losses"} <= phases.keys()
    assert found["machine"]["rates"]["matmul_flops_per_s"] > 0
    # What is there is not measured again.
    said = run("--toy", "--beside", "0", "--json", str(file), "--part", "toys")
    assert said == ""
    assert json.loads(file.read_text()) == found


def test_items() -> None:
    names = [item.name for item in ITEMS]
    assert len({*names}) == len(names)
    assert {part for item in ITEMS for part in item.parts} == {*PARTS}
    for item in ITEMS:
        config = load_config(ROOT / item.config, item.sets)
        assert config.wrapper.mesh.fsdp == 1
        assert not item.of or item.of in names[: names.index(item.name)]
    assert sum("plan" in item.parts for item in ITEMS) >= 6


def test_page() -> None:
    def item(*parts: str, **more: Any) -> dict[str, Any]:
        stepped = {"plan": {"peak": 70 * GIB}, "live": {"made": 60 * GIB, "steps": 71 * GIB}, "pool": 129 * GIB}
        times = {"driver_used": 130 * GIB, "step_s": 0.5, "leading": [16, 512], "compile_s": 30.0}
        return {"parts": parts, **stepped, **times, **more}

    profile = {
        "steps": 3, "step_s_traced": 0.6, "step_s_untraced": 0.5, "busy": 0.9, "unknown_ms": 1.0,
        "phases": {"clean_pass": 100.0, "losses": 300.0},
        "scopes": [{"phase": "losses", "way": "backward", "inner": ["up_proj"], "ms_per_step": 200.0, "share": 0.5}],
    }  # fmt: skip
    text = page(
        {
            "machine": {
                "date": "2026-01-01", "card": None, "device": "card", "cores": 2, "python": "3.12",
                "packages": {"jax": "1"},
                "rates": {"size": 64, "matmul_flops_per_s": 800e12, "copy_bytes_per_s": 4e12},
            },
            "measured": {
                "one": item("plan", "step"),
                "by phase": item("phases", phases=profile),
                "toy": item("plan", "toys", leading=[8], live={"made": None, "steps": None}, pool=None),
                "too large": {"parts": ["plan"], "failed": "out of memory: no more\nat all"},
            },
            "probed": {"one": {"plan": {"peak": 69 * GIB}}},
            "counted": {"one": {"total": 200e12}, "by phase": {"total": 1, "by_phase": {"losses": 150e12}}},
        }
    )  # fmt: skip
    assert "| one | 70.000 | 71.000 | +1.000 | 69.000 | +2.000 | 1.000 |" in text
    assert "| toy | 70.000 | – | – | – | – | – |" in text
    assert "| one | 500.0 ms | 16,384 | 200.0 | 40.4% | 50.0% | – | 30 s |" in text
    assert "| losses | 300.00 | 75.0% | 150.00 | 500 |" in text
    assert "| toy | 8 | 500.000 ms | 2.0 | 30 s |" in text
    assert "- too large: out of memory: no more\n" in text
