"""Creates a run folder before the run starts, with copies of its configuration and code."""

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
from param_decomp_lab.runs.folder import CONFIG_FILE, begin_run_folder, refuse_taken
from param_decomp_lab.safe_io.json_text import read_json

LAUNCH_FILE = "launch.json"
RECIPE_FILE = "target.yaml"


def make_run(folder: Path, config: RunConfig, code: Code, details: Mapping[str, Any]) -> None:
    """Creates the run folder atomically. ``details``: of the launch, for `launch.json`.

    UserError if it exists or cannot be written.
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
    """Adds a job number to `launch.json`."""
    file = folder / LAUNCH_FILE
    try:
        described = read_json(file, "the record of the launch", dict) if file.exists() else {}
        jobs = described.get("jobs", [])
        write_whole(file, json.dumps({**described, "jobs": [*jobs, job]}, indent=2) + "\n")
    except (UserError, OSError, TypeError) as error:  # TypeError: the jobs are not a list
        raise UserError(f"{file}: job {job} cannot be recorded: {error}") from error


def add_code(folder: Path, code: Code) -> None:
    """Adds a copy of the code to a run that was started without `pd launch`."""
    try:
        with new_folder(folder / CODE, marker="slurm", overwrite=False) as partial:
            code.copy_to(partial)
    except OSError as error:
        raise UserError(f"cannot write to the run folder {folder}: {error.strerror or error}") from error


def _with_recipe(config: RunConfig, folder: Path, partial: Path) -> RunConfig:
    """Copies the recipe of a toy's target into the run folder, because it is read at every start."""
    source = config.wrapper.target
    if source is None or not isinstance(source.pretrain, Path):
        return config
    shutil.copyfile(source.pretrain, partial / RECIPE_FILE)
    kept = source.model_copy(update={"pretrain": folder / RECIPE_FILE})
    return replace(config, wrapper=config.wrapper.model_copy(update={"target": kept}))
