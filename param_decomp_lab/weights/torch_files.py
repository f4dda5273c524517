"""Selects the needed files among those of a training: settings, the newest checkpoint, a tokenizer."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.weights.hub import TOKENIZER_FILES

SETTINGS_FILES = (
    "model_config.yaml", "final_config.yaml", "tms_train_config.yaml", "resid_mlp_train_config.yaml", "config.yaml",
)  # fmt: skip
"""Names of settings files, the most informative ones first."""
CHECKPOINTS = (".pt", ".pth", ".safetensors")


def settings_files(names: Iterable[str]) -> list[str]:
    """Returns the files that may have the settings of the model, in the order in which to search."""
    known = [name for name in names if PurePosixPath(name).name in SETTINGS_FILES and "/" not in name]
    return sorted(known, key=lambda name: SETTINGS_FILES.index(name))


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """Returns the files of a tokenizer."""
    return [name for name in names if name in TOKENIZER_FILES]


def newest_checkpoint(names: Iterable[str], where: str) -> str:
    """Returns the checkpoint of the final model, or else that with the most steps, at the top or one folder below.

    ``where``: the place of the files, for errors. Raises UserError if there is none, or if no name tells which of
    several is the newest.
    """
    near = [PurePosixPath(name) for name in sorted(names) if name.endswith(CHECKPOINTS) and name.count("/") < 2]
    found = [str(path) for path in near if not re.search("optim|sched|rng", path.name)]
    if not found:
        raise UserError(f"{where}: has no checkpoint ({', '.join(CHECKPOINTS)})")
    final = [name for name in found if "final" in PurePosixPath(name).stem]
    left = final or found
    if len(left) > 1:
        numbers = {name: re.findall(r"\d+", PurePosixPath(name).stem) for name in left}
        last = max((int(digits[-1]) for digits in numbers.values() if digits), default=-1)
        left = [name for name, digits in numbers.items() if last == (int(digits[-1]) if digits else -1)]
    if len(left) == 2 and len({PurePosixPath(name).stem for name in left}) == 1:
        left = [name for name in left if name.endswith(".safetensors")]  # the same checkpoint in two formats
    if len(left) != 1:
        raise UserError(
            f"{where}: has several checkpoints, and their names do not say which is the newest "
            f"({', '.join(first_few(found))}); name one of them"
        )
    return left[0]
