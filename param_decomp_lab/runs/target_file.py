"""`target.json` of a run folder: the target's architecture, so that a run can be opened without its target."""

import json
from pathlib import Path

from param_decomp_jax.targets.architecture import Architecture, check_sizes
from param_decomp_jax.targets.registry import ARCHITECTURES
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.runs.folder import TARGET_FILE
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.weights.recorded_target import describe


def write_target(run_folder: Path, architecture: Architecture) -> None:
    """Writes `target.json`. Raises OSError."""
    write_whole(run_folder / TARGET_FILE, json.dumps(describe(architecture), indent=2) + "\n")


def read_target(run_folder: Path) -> Architecture | None:
    """The architecture in `target.json`; None for runs older than that file. Raises UserError if it is damaged."""
    file = run_folder / TARGET_FILE
    if not file.is_file():
        return None
    try:
        fields = read_json(file, "the target's architecture", dict)
        architecture = ARCHITECTURES[fields.pop("architecture")].from_fields(fields)
        check_sizes(architecture)
        return architecture
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged or of another version ({error}); remove it to read the target's own folder instead"
        ) from error
