"""Checks files that a user has named for a command's results, and refuses those that may not be written before the work
begins.
"""

import os
import re
from pathlib import Path

from param_decomp_lab.config.wrapper import RUN_ID
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import is_irregular, refuse_unwritable
from param_decomp_lab.runs.folder import CHECKPOINTS, CONFIG_FILE, EVALUATIONS
from param_decomp_lab.safe_io.yaml_text import read_mapping


def check_output_file(file: Path, option: str) -> None:
    """Raises UserError, which names the option, if ``file`` is a folder, belongs to a run or cannot be written."""
    if file.is_dir():
        raise UserError(f"{option} {file} is a folder; give the file to write")
    if is_irregular(file):
        if not os.access(file, os.W_OK):
            raise UserError(f"{option} {file} may not be written; choose another file")
        return
    run = run_around(file)
    if run is not None:
        raise UserError(
            f"{option} {file} lies in the folder of the run {run}, whose files are the run's own; choose another "
            f"place, such as {run / EVALUATIONS / file.name}"
        )
    refuse_unwritable(file.parent, f"{option} {file}")


def run_around(file: Path) -> Path | None:
    """The run folder that ``file`` is part of; None if there is none, or ``file`` is among the run's evaluations."""
    real = Path(os.path.realpath(file))
    run = next((folder for folder in real.parents if _is_run(folder)), None)
    return None if run is None or real.parent.is_relative_to(run / EVALUATIONS) else run


def _is_run(folder: Path) -> bool:
    """By its name and any of its files, or by its configuration: other folders have a `config.yaml`, too."""
    config = folder / CONFIG_FILE
    if re.fullmatch(RUN_ID, folder.name) and (config.is_file() or (folder / CHECKPOINTS).is_dir()):
        return True
    try:
        return config.is_file() and {"wrapper", "torch"} <= read_mapping(config, "a configuration").keys()
    except (UserError, OSError):
        return False
