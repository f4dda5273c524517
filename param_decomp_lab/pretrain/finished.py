"""What every finished pretraining leaves behind, and whether one was made by a given recipe."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.yaml_text import dump_yaml, read_mapping
from param_decomp_lab.schema.strict import Strict

RECIPE_FILE = "recipe.yaml"
SUMMARY_FILE = "summary.json"


def identity(recipe: Strict, *elsewhere: str) -> dict[str, Any]:
    """What decides the weights: not where they go, nor how often something is logged, nor the keys ``elsewhere``."""
    return recipe.model_dump(mode="json", exclude={"out", "log_every", *elsewhere})


def write_finished(folder: Path, made_of: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Into ``folder``: ``made_of``, which is all that decided the weights, and the figures of the result."""
    (folder / RECIPE_FILE).write_text(dump_yaml(dict(made_of)))
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")


def find_finished(folder: Path, made_of: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of the model in ``folder`` if it is made of the same, None if there is none.

    Raises UserError, with the differences, when it is made of something else.
    """
    if not (folder / SUMMARY_FILE).is_file() or not (folder / RECIPE_FILE).is_file():
        return None
    there = dict(_flat(read_mapping(folder / RECIPE_FILE, "the recipe")))
    here = dict(_flat(made_of))
    differences = [
        f"  {key}: {there.get(key, '(absent)')} there, {here.get(key, '(absent)')} here"
        for key in dict.fromkeys([*here, *there])
        if there.get(key) != here.get(key) or (key in there) != (key in here)
    ]
    if differences:
        raise UserError(
            "\n".join([f"{folder} holds a model of another recipe:", *differences])
            + "\nGive another `out`, or replace it with `pd pretrain RECIPE --overwrite`"
        )
    return read_json(folder / SUMMARY_FILE, "the summary of a pretraining", dict)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
