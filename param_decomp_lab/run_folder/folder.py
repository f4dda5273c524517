"""A run's folder: its configuration and the environment it was made in."""

import json
import os
import platform
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

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "ckpts"
HISTORY_FILE = "history.jsonl"
"""One line for every start: when, where, from which step, with which versions, and what was changed."""
ENVIRONMENT_FILE = "environment.json"
COMMIT_FILE = "COMMIT"
"""In a copy of the code that `pd launch` has made, beside the packages: the commit, and what was changed since."""


def refuse_taken(folder: Path) -> None:
    """UserError when there is a run in ``folder`` already."""
    if folder.exists():
        raise UserError(
            f"{folder} is there already; continue it with `pd train --resume {folder}` or take another run_id"
        )


def make_run_folder(folder: Path, config: RunConfig) -> None:
    """Makes the folder with what is known before the first step; whole or not at all, since a run that is killed here
    could neither go on nor begin again in half a folder. UserError where it cannot be written."""
    try:
        with new_folder(folder, marker=CONFIG_FILE, overwrite=False) as made:
            begin_run_folder(made, config)
            _write_environment(made, _environment())
    except OSError as error:
        raise UserError(f"out_dir: cannot write the run folder {folder}: {error.strerror or error}") from error


def saved_config(folder: Path) -> RunConfig:
    """The configuration of the run in ``folder``. UserError where there is no run."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
    return RunConfig.from_yaml(path)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of the run in ``folder``, good or damaged; ascending."""
    of_run = folder / CHECKPOINTS
    if not of_run.is_dir():
        return []
    return sorted(int(path.name) for path in of_run.iterdir() if path.name.isdecimal() and path.is_dir())


def begin_run_folder(folder: Path, config: RunConfig) -> None:
    """What there is of the folder before anything runs; `pd train --resume` begins such a run."""
    (folder / "figures").mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config.to_yaml())


def record_start(folder: Path, config: RunConfig, step: int, changes: Sequence[str], set_aside: Sequence[str]) -> None:
    """A line in the run's history, and the configuration as it is now, where a start changed it. OSError.

    ``step``: that the run begins or goes on with. ``changes``: since the state of that step was saved.
    """
    environment = _environment()
    _write_environment(folder, environment)  # of a run that `pd launch` has made, and that begins now
    told = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "step": step,
        "changes": list(changes),
        "set_aside": list(set_aside),
        **environment,
    }
    with (folder / HISTORY_FILE).open("a") as file:
        file.write(json.dumps(told) + "\n")
    text = config.to_yaml()
    if (folder / CONFIG_FILE).read_text() != text:
        write_whole(folder / CONFIG_FILE, text)


def _write_environment(folder: Path, environment: dict[str, Any]) -> None:
    """Where the run began, on which devices. What a run folder says of it already stays."""
    if not (folder / ENVIRONMENT_FILE).exists():
        (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=2) + "\n")


def refuse_unseen(folder: Path) -> None:
    """UserError where process 0 has made a run folder that this one does not see."""
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"out_dir: {folder} is not seen here; it must lie where all processes can read and write")


def _commit() -> str | None:
    copied = Path(__file__).parents[1] / COMMIT_FILE
    if copied.is_file():  # and a checkout that it may lie in is another one
        return copied.read_text().strip()
    root = Path(__file__).parents[2]
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--show-toplevel", "HEAD"], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return None
    # An installed package may lie in somebody else's checkout.
    top, _, commit = told.stdout.strip().partition("\n")
    return commit if told.returncode == 0 and Path(top).resolve() == root.resolve() else None


def _environment() -> dict[str, Any]:
    import jax  # not above: `pd runs` needs the names of the files alone

    return {
        "command": sys.argv,
        "git_commit": _commit(),
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
