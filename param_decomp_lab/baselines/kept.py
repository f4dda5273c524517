"""Saves and finds the comparison of a run with its baselines in the run's folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from param_decomp_lab.baselines.matching import shares
from param_decomp_lab.baselines.result import LAMBDA, ON_OFF, OWN, Comparison
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.runs.position_attack import comparison_file
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.ui.numbers import number


class Kept(NamedTuple):
    """A saved comparison. ``data``: the rows on which it was measured, in words."""

    comparison: Comparison
    data: str


def keep(file: Path, kept: Kept) -> None:
    """Saves a comparison. Raises OSError."""
    raw = {"data": kept.data, **asdict(kept.comparison)}
    write_whole(file, json.dumps(raw, indent=1, ensure_ascii=False) + "\n")


def find_comparison(run_folder: Path, step: int) -> Kept | None:
    """Returns the saved comparison of a step; None if it was not measured. Raises UserError for a file that is damaged,
    or lacks what this version saves: older files lack the smaller number of parts, from before baselines were matched
    exactly.
    """
    file = comparison_file(run_folder, step)
    if not file.exists():
        return None
    raw = read_json(file, "a comparison with baselines", dict)
    data = raw.pop("data", None)
    again = f"`pd eval {run_folder} --baselines --step {step}` makes it again"
    try:
        comparison = TypeAdapter(Comparison).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where}: {first['msg']}; {again}") from None
    points = comparison.points
    has_own = {(LAMBDA, 0.0), (ON_OFF, 0.0)} <= {(p.chosen, p.number) for p in points if p.parts == OWN}
    if not isinstance(data, str) or not has_own or not comparison.to_mix.keys() - {OWN}:
        raise UserError(f"{file}: has no comparison at the decomposition's own L0; {again}")
    l0, of_parts = comparison.own.l0, comparison.to_mix.values()
    if any(found.keys() != shares(l0).keys() for found in of_parts):
        parts = " and with ".join(map(str, shares(l0)))
        raise UserError(f"{file}: lacks points with {parts} parts on, which L0 {number(l0)} takes; {again}")
    attacked = (comparison.own, comparison.own_on_off, *(p for found in of_parts for p in found.values()))
    n_attacks = len(comparison.lengths)
    if {len(p.attacked) for p in attacked} != {n_attacks}:
        raise UserError(f"{file}: not every point at L0 {number(l0)} was attacked {n_attacks} times; {again}")
    return Kept(comparison, data)
