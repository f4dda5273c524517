"""`--sweep`: one run for each value of a key, or for each combination of values of several keys."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.yaml_text import parse_yaml

UNSWEPT = ("run_id", "out_dir")
"""Keys that cannot be swept: every run gets its own id, and all share one folder."""


@dataclass(frozen=True)
class SweepChoice:
    """The keys and values that one run of a sweep sets."""

    values: tuple[tuple[str, Any], ...] = ()

    @property
    def sets(self) -> tuple[str, ...]:
        """The assignments in the syntax of `--set`."""
        return tuple(f"{key}={json.dumps(value)}" for key, value in self.values)

    def __str__(self) -> str:
        return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.values)


def choices(sweeps: Sequence[str], sets: Sequence[str]) -> list[SweepChoice]:
    """Returns all combinations of the values in ``sweeps`` (``key=a,b,c``), the last key changing fastest; one empty
    choice without sweeps. ``sets``: assignments that hold for all runs.

    UserError for invalid syntax and for a key given twice.
    """
    fixed = {text.partition("=")[0].strip() for text in sets}
    found: dict[str, list[tuple[str, Any]]] = {}
    for text in sweeps:
        key, values = _parse(text)
        if key in found:
            raise UserError(f"--sweep {text}: {key} is given twice; put all its values into one")
        if key in fixed:
            raise UserError(f"--sweep {text}: {key} is given by --set too; leave out one of the two")
        found[key] = [(key, value) for value in values]
    if found and "run_id" in fixed:
        raise UserError("--set run_id: each run of a sweep gets an id of its own; leave it out")
    return [SweepChoice(values) for values in itertools.product(*found.values())]


def _parse(text: str) -> tuple[str, list[Any]]:
    key, equals, values_text = text.partition("=")
    key = key.strip()
    if not key or not equals or not values_text.strip():
        raise UserError(f"--sweep {text}: should be key=values, such as pd.seed=0,1,2")
    if key in UNSWEPT:
        raise UserError(f"--sweep {text}: {key} cannot be swept; each run gets an id of its own, in one out_dir")
    # A list in YAML: commas within brackets and quotes belong to a value.
    values = parse_yaml(f"[{values_text}]", f"--sweep {text}")
    if not values:
        raise UserError(f"--sweep {text}: has no values")
    duplicate = next((value for n, value in enumerate(values) if value in values[:n]), None)
    if duplicate is not None:
        raise UserError(f"--sweep {text}: {json.dumps(duplicate)} is given twice, which would be the same run")
    return key, values
