"""A run's folder: its configuration and the environment it was made in."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError

CONFIG_FILE = "config.yaml"


def refuse_taken(folder: Path) -> None:
    """UserError when there is a run in ``folder`` already."""
    if folder.exists():
        raise UserError(
            f"{folder} is there already; continue it with `pd train --resume {folder}` or take another run_id"
        )


def make_run_folder(folder: Path, config: RunConfig) -> None:
    """Makes the folder with what is known before the first step. UserError where it cannot be written."""
    try:
        (folder / "figures").mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(config.to_yaml())
        (folder / "environment.json").write_text(json.dumps(_environment(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"out_dir: cannot write the run folder {folder}: {error.strerror or error}") from error


def refuse_unseen(folder: Path) -> None:
    """UserError where process 0 has made a run folder that this one does not see."""
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"out_dir: {folder} is not seen here; it must lie where all processes can read and write")


def _environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "command": sys.argv,
        "git_commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: version(name) for name in ("param-decomp", "jax", "equinox", "optax", "orbax-checkpoint", "numpy")
        },
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [device.device_kind for device in jax.devices()],
        "cpu_count": os.cpu_count(),
    }
