"""A run's folder before anything runs: its configuration and its code, out of reach of what is edited later."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, write_whole
from param_decomp_lab.launch.code_copy import CODE, Code
from param_decomp_lab.run_folder.folder import CONFIG_FILE, begin_run_folder, refuse_taken

LAUNCH_FILE = "launch.json"
RECIPE_FILE = "target.yaml"


def make_run(folder: Path, config: RunConfig, code: Code, details: Mapping[str, Any]) -> None:
    """Makes the run's folder, whole or not at all. ``told``: what the launch was told, for `launch.json`.

    UserError where there is one already, or where it cannot be written.
    """
    refuse_taken(folder)
    try:
        with new_folder(folder, marker=CONFIG_FILE, overwrite=False) as partial:
            begin_run_folder(partial, _with_recipe(config, folder, partial))
            code.copy_to(partial / CODE)
            described = {"command": sys.argv, "commit": code.commit, "changed": list(code.changes), **details}
            (partial / LAUNCH_FILE).write_text(json.dumps(described, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"out_dir: cannot write the run folder {folder}: {error.strerror or error}") from error


def record_job(folder: Path, job: str) -> None:
    """Adds a job to those that `launch.json` names."""
    file = folder / LAUNCH_FILE
    try:
        described = json.loads(file.read_text()) if file.exists() else {}
        write_whole(file, json.dumps({**described, "jobs": [*described.get("jobs", ()), job]}, indent=2) + "\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: job {job} cannot be noted: {error}") from error


def add_code(folder: Path, code: Code) -> None:
    """Gives a run that was not launched a copy of the code to go on with."""
    try:
        with new_folder(folder / CODE, marker="slurm", overwrite=False) as partial:
            code.copy_to(partial)
    except OSError as error:
        raise UserError(f"cannot write to the run folder {folder}: {error.strerror or error}") from error


def _with_recipe(config: RunConfig, folder: Path, partial: Path) -> RunConfig:
    """The recipe of a toy's target is read at every start: it is a part of the configuration, and kept like it."""
    source = config.wrapper.target
    if source is None or source.pretrain is None:
        return config
    shutil.copyfile(source.pretrain, partial / RECIPE_FILE)
    kept = source.model_copy(update={"pretrain": folder / RECIPE_FILE})
    return replace(config, wrapper=config.wrapper.model_copy(update={"target": kept}))
