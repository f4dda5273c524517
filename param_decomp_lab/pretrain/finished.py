"""What a finished pretraining leaves behind, and whether one was made by a given recipe."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from param_decomp_lab.config.yaml_io import dump_yaml, read_mapping
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.recipe import PretrainRecipe

RECIPE_FILE = "recipe.yaml"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Pretrained:
    """``held_out``: cross-entropy on the evaluation split; ``unigram_entropy``: that of its tokens; both in nats per
    token. ``seconds``: of training, compilation included. ``cached``: it was there already."""

    folder: Path
    held_out: float
    unigram_entropy: float
    seconds: float
    cached: bool = False


def write_finished(folder: Path, recipe: PretrainRecipe, data: DataMeta, result: Pretrained) -> None:
    """Into ``folder``: the recipe with the digest of its data, and the result."""
    (folder / RECIPE_FILE).write_text(dump_yaml(_identity(recipe, data)))
    summary = {key: value for key, value in asdict(result).items() if key not in ("folder", "cached")}
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")


def find_finished(recipe: PretrainRecipe, data: DataMeta) -> Pretrained | None:
    """The model in ``recipe.out`` if this recipe made it from this data, None if there is none.

    Raises UserError, with the differences, when another recipe or other data made it.
    """
    folder = Path(recipe.out)
    if not (folder / SUMMARY_FILE).is_file() or not (folder / RECIPE_FILE).is_file():
        return None
    there = dict(_flat(read_mapping(folder / RECIPE_FILE, "the recipe")))
    here = dict(_flat(_identity(recipe, data)))
    differences = [
        f"  {key}: {there.get(key, '(absent)')} there, {here.get(key, '(absent)')} here"
        for key in dict.fromkeys([*here, *there])
        if there.get(key) != here.get(key) or (key in there) != (key in here)
    ]
    if differences:
        raise UserError(
            "\n".join([f"{folder} holds a model of another recipe:", *differences])
            + "\nGive another `out`, or replace it with --overwrite"
        )
    return Pretrained(folder, cached=True, **json.loads((folder / SUMMARY_FILE).read_text()))


def _identity(recipe: PretrainRecipe, data: DataMeta) -> dict[str, Any]:
    """What decides the weights: not where they go, nor how often something is logged."""
    return {**recipe.model_dump(mode="json", exclude={"out", "data", "log_every"}), "data_sha256": data.sha256}


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
