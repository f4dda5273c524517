"""Finds the files of a run of the PyTorch project: its configuration and one of its checkpoints."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import cache_folder
from param_decomp_lab.safe_io.paths import checked_path
from param_decomp_lab.safe_io.printable import first_few, printable
from param_decomp_lab.weights.torch_files import settings_files
from param_decomp_lab.weights.wandb_run import fetch_chosen, parse_run_path

CONFIGURATIONS = ("experiment_config.yaml", "run_meta.yaml", "final_config.yaml")
"""Names of the file with a run's configuration over time, the latest first."""
_CHECKPOINT = re.compile(r"model_(\d+)\.(pth|pt|safetensors)")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run. ``source``: the run as the user named it, or its folder. ``checkpoint``: that of ``step``."""

    source: str
    folder: Path
    configuration: Path
    checkpoint: Path
    step: int


def find_run_files(text: str, step: int | None, console: Console) -> RunFiles:
    """Finds the files of the run ``text``: a folder, or a run on wandb, whose files are fetched into the cache.

    ``step``: of the checkpoint; None for the newest. Raises UserError if ``text`` is not such a run, or has no such
    checkpoint, and CannotFetch.
    """
    run = parse_run_path(text)
    if not text.startswith(("wandb:", "https:")):
        folder = checked_path(text, "RUN")
        if folder.is_dir():
            return _in_folder(folder, [path.name for path in folder.iterdir()], str(folder.resolve()), step)
    if run is None:
        raise UserError(f"{printable(text, 200)}: is neither a folder on this machine nor wandb:entity/project/id")
    folder = cache_folder("weights") / "wandb" / run.entity / run.project / run.id / "files"
    names = fetch_chosen(run, folder, "RUN", console, lambda names: _wanted(names, str(run), step))
    return _in_folder(folder, names, str(run), step)


def _wanted(names: Iterable[str], where: str, step: int | None) -> list[str]:
    """Selects the needed files of a run on wandb."""
    top = [name for name in names if "/" not in name]
    return [*settings_files(top), _configuration(top, where), _checkpoint(top, where, step)[0]]


def _in_folder(folder: Path, names: Iterable[str], source: str, step: int | None) -> RunFiles:
    names = list(names)
    configuration, (checkpoint, found) = _configuration(names, source), _checkpoint(names, source, step)
    return RunFiles(source, folder, folder / configuration, folder / checkpoint, found)


def _configuration(names: Iterable[str], where: str) -> str:
    there = set(names)
    found = [name for name in CONFIGURATIONS if name in there]
    if found:
        return found[0]
    if there & {"launch_config.yaml", "ckpts"}:
        raise UserError(
            f"{where}: was trained with JAX; only earlier runs of the PyTorch project, which have model_<step>.pth, "
            "can be imported"
        )
    raise UserError(f"{where}: is not a run of the PyTorch project: it has none of {', '.join(CONFIGURATIONS)}")


def _checkpoint(names: Iterable[str], where: str, step: int | None) -> tuple[str, int]:
    """Returns the name of the checkpoint of ``step``, or of the newest, and its step."""
    found = {int(match[1]): name for name in sorted(names) if (match := _CHECKPOINT.fullmatch(name))}
    if not found:
        raise UserError(f"{where}: has no checkpoint (model_<step>.pth)")
    if step is not None and step not in found:
        steps = ", ".join(first_few(map(str, sorted(found))))
        raise UserError(f"{where}: has no checkpoint of step {step}; it has those of {steps}")
    chosen = max(found) if step is None else step
    return found[chosen], chosen
