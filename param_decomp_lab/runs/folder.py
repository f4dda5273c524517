"""A run folder: its configuration, its environment and the history of its starts."""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, write_whole
from param_decomp_lab.version import __version__

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "ckpts"
EVALUATIONS = "evals"
"""Subfolder with the results of `pd eval`."""
HISTORY_FILE = "history.jsonl"
"""One line per start: time, host, first step, versions, and configuration changes."""
ENVIRONMENT_FILE = "environment.json"
TARGET_FILE = "target.json"
"""The target's architecture (`target_file.py`)."""
EXAMPLES_FILE = "examples.json"
COMMIT_FILE = "COMMIT"
"""In a code copy made by `pd launch`, next to the packages: the commit, and the changes since."""


def refuse_taken(folder: Path) -> None:
    """Raises UserError if ``folder`` exists already."""
    if folder.exists():
        raise UserError(f"{folder} exists already; resume it with `{resume_command(folder)}` or choose another run_id")


def resume_command(folder: Path) -> str:
    """The command that resumes the run in ``folder``, as a shell takes it."""
    return shlex.join(("pd", "train", "--resume", str(folder)))


def make_run_folder(folder: Path, config: RunConfig) -> None:
    """Creates the run folder with its configuration and environment.

    The folder appears complete or not at all, since a run that was killed halfway could neither be resumed nor started
    anew in it. Raises UserError if it cannot be written.
    """
    try:
        with new_folder(folder, marker=CONFIG_FILE, overwrite=False) as made:
            begin_run_folder(made, config)
            _write_environment(made, _environment())
    except OSError as error:
        raise UserError(f"out_dir: cannot write the run folder {folder}: {error.strerror or error}") from error


def saved_config(folder: Path) -> RunConfig:
    """The configuration of the run in ``folder``. Raises UserError if that is not a run folder."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
    return RunConfig.from_yaml(path)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of the run in ``folder``, damaged ones included; ascending."""
    checkpoints = folder / CHECKPOINTS
    if not checkpoints.is_dir():
        return []
    return sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir())


def begin_run_folder(folder: Path, config: RunConfig) -> None:
    """Writes the parts of a run folder that exist before the run starts; `pd train --resume` starts such a run."""
    (folder / "figures").mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config.to_yaml())


def record_start(folder: Path, config: RunConfig, step: int, changes: Sequence[str], set_aside: Sequence[str]) -> None:
    """Appends a line to the run's history, and writes the configuration if this start changed it.

    ``step``: the first step of this start. ``changes``: configuration changes since the state of that step was saved.
    Raises OSError.
    """
    environment = _environment()
    _write_environment(folder, environment)  # missing if `pd launch` made the folder
    line = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "step": step,
        "changes": list(changes),
        "set_aside": list(set_aside),
        **environment,
    }
    with (folder / HISTORY_FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    text = config.to_yaml()
    if (folder / CONFIG_FILE).read_text() != text:
        write_whole(folder / CONFIG_FILE, text)


def _write_environment(folder: Path, environment: dict[str, Any]) -> None:
    """Writes the environment in which the run started, unless the folder has one already."""
    if not (folder / ENVIRONMENT_FILE).exists():
        (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=2) + "\n")


def refuse_unseen(folder: Path) -> None:
    """Raises UserError if this process does not see the run folder that process 0 has made."""
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"out_dir: {folder} is not visible to this process; it must be on storage shared by all processes"
        )


def commit_of_the_code() -> str | None:
    """The commit of this code, from git or from the copy that `pd launch` made; None if the package is installed."""
    root = Path(__file__).parents[2]
    copied = root / COMMIT_FILE
    if copied.is_file():  # the copy may lie inside an unrelated checkout
        return copied.read_text().strip()
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--show-toplevel", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return None
    # An installed package may be inside another project's checkout.
    top, _, commit = told.stdout.strip().partition("\n")
    return commit if told.returncode == 0 and Path(top).resolve() == root.resolve() else None


def _environment() -> dict[str, Any]:
    import jax  # imported here, because `pd runs` needs only the file names

    return {
        "command": sys.argv,
        "git_commit": commit_of_the_code(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            "param-decomp": __version__,
            **{name: version(name) for name in ("jax", "equinox", "optax", "orbax-checkpoint", "numpy")},
        },
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [device.device_kind for device in jax.devices()],
        "cpu_count": os.cpu_count(),
    }
