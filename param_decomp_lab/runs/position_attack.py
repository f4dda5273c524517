"""The attack with a mask for each position, read from what `pd eval --baselines` leaves in a run's folder."""

import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.folder import EVALUATIONS
from param_decomp_lab.safe_io.json_text import read_json

BASELINES_NAME = "baselines"
"""The name of the comparison's file, before its step."""
OWN = "decomposition"
LAMBDA = "λ as masks"
"""How the points are called that are the decomposition's own, with λ as masks."""


@dataclass(frozen=True)
class PositionAttack:
    """``error``: KL, or the mean squared error of a toy, after ``n_steps`` steps of the longest attack, at ``step`` of
    the run."""

    step: int
    n_steps: int
    error: float


def comparison_file(run_folder: Path, step: int) -> Path:
    """Where the comparison with baselines at a step is kept."""
    return run_folder / EVALUATIONS / f"{BASELINES_NAME}_{step}.json"


def find_position_attack(run_folder: Path) -> PositionAttack | None:
    """That of the newest step that was compared with baselines. None where there is none, where it was not attacked,
    or where its file is damaged, which the page of baselines then says."""
    try:
        names = [path.name for path in (run_folder / EVALUATIONS).iterdir()]
    except OSError:
        return None
    pattern = re.compile(rf"{BASELINES_NAME}_(\d{{1,18}})\.json")
    steps = [int(found[1]) for name in names if (found := pattern.fullmatch(name))]
    if not steps:
        return None
    step = max(steps)
    try:
        raw: dict[str, Any] = read_json(comparison_file(run_folder, step), "a comparison with baselines", dict)
        own = next(p for p in raw["points"] if p["parts"] == OWN and p["chosen"] == LAMBDA)
        n_steps, error = int(raw["lengths"][-1]), float(own["attacked"][-1])
    except (UserError, OSError, KeyError, IndexError, TypeError, ValueError, StopIteration, OverflowError):
        return None
    # Where there is no error at all, rounding can leave a KL a little below 0.
    return PositionAttack(step, n_steps, max(error, 0.0)) if isfinite(error) else None
