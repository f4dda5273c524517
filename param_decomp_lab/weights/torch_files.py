"""Which of the files that a training leaves are needed: settings, the newest checkpoint, a tokenizer."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.weights.hub import TOKENIZER_FILES

SETTINGS_FILES = (
    "model_config.yaml", "final_config.yaml", "tms_train_config.yaml", "resid_mlp_train_config.yaml", "config.yaml",
)  # fmt: skip
"""Files of settings, those first that say most about the model."""
CHECKPOINTS = (".pt", ".pth", ".safetensors")


def settings_files(names: Iterable[str]) -> list[str]:
    """Those that may hold the settings of the model, in the order in which to look."""
    known = [name for name in names if PurePosixPath(name).name in SETTINGS_FILES and "/" not in name]
    return sorted(known, key=lambda name: SETTINGS_FILES.index(name))


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """Those of a tokenizer."""
    return [name for name in names if name in TOKENIZER_FILES]


def newest_checkpoint(names: Iterable[str], where: str) -> str:
    """The checkpoint of the final model, or else the one of the most steps, at the top or one folder below it.

    ``where`` the files are, for errors. UserError where there is none, or several of which no name says which is the
    newest.
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
        left = [name for name in left if name.endswith(".safetensors")]  # the same, in two formats
    if len(left) != 1:
        raise UserError(
            f"{where}: has several checkpoints, and their names do not say which is the newest "
            f"({', '.join(first_few(found))}); name one of them"
        )
    return left[0]
