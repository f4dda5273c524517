"""Converts the output of a training of the PyTorch project, on wandb or on this machine, to a folder that can be
decomposed.

Such folders are kept in a cache, ``$XDG_CACHE_HOME/param-decomp/weights`` (by default under ``~/.cache``).
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written
from param_decomp_lab.safe_io.paths import checked_path
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.weights.import_torch import find_files, import_torch
from param_decomp_lab.weights.safetensors_files import missing_files
from param_decomp_lab.weights.target_folder import CONFIG_FILE, read_architecture
from param_decomp_lab.weights.wandb_run import WandbRun, fetch_files, parse_run_path


@dataclass(frozen=True)
class TorchRun:
    """A training of the PyTorch project. ``place``: a run on wandb, or a checkpoint or folder on this machine.
    ``where``: the key that names it.
    """

    place: WandbRun | Path
    where: str

    def __str__(self) -> str:
        return str(self.place)

    def cached(self) -> Path | None:
        """Returns the folder with the target, if it has been made."""
        folder = self._cache() / "target"
        return folder if (folder / CONFIG_FILE).is_file() and not missing_files(folder) else None

    def architecture(self) -> Architecture | None:
        """Returns the architecture from files on this machine; None if they are missing. Raises UserError for what
        cannot be read.
        """
        if isinstance(self.place, Path):
            return find_files(self.place).architecture()
        cached = self.cached()
        return None if cached is None else read_architecture(cached)

    def missing(self) -> str:
        """Says what is not on this machine yet, and how to get it."""
        what = "not fetched yet" if isinstance(self.place, WandbRun) else "not converted yet"
        return f"{self}: {what}; `pd train` does it, or `pd weights fetch`"

    def fetch(self, console: Console) -> Path:
        """Returns the folder with the target, and makes it if needed. Raises UserError and CannotFetch."""
        cached = self.cached()
        if cached is not None:
            return cached
        cache = self._cache()
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(cache, error, "choose another place with XDG_CACHE_HOME") from error
        with FileLock(cache / ".lock"):
            if self.cached() is None:
                source = self.place
                if isinstance(source, WandbRun):
                    fetch_files(source, cache / "files", self.where, console)
                    source = cache / "files"
                import_torch(source, cache / "target", console, overwrite=True)
        return cache / "target"

    def _cache(self) -> Path:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "param-decomp" / "weights"
        if isinstance(self.place, WandbRun):
            return root / "wandb" / self.place.entity / self.place.project / self.place.id
        files = find_files(self.place)
        settings = [] if files.settings is None else [Path(files.settings.where)]
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in
                 (*files.checkpoints, *settings)]  # fmt: skip
        return root / "local" / f"{self.place.stem}-{hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}"


def find_run(text: str, where: str) -> Path | TorchRun:
    """Returns what a ``run_path`` names: a folder in our own layout, a checkpoint or folder of torch, or a run on
    wandb.

    Raises UserError for anything else. ``where``: the key, for errors.
    """
    run = parse_run_path(text)
    if not text.startswith(("wandb:", "https:")):
        path = checked_path(text, where)
        if path.is_dir() and (path / CONFIG_FILE).is_file() and not missing_files(path):
            return path
        if path.exists():
            return TorchRun(path, where)
    if run is None:
        raise UserError(
            f"{where}: {printable(repr(text), 200)} is neither a folder or a checkpoint on this machine nor "
            "wandb:entity/project/id; or give target: {folder: <path>} in the wrapper, or, for a toy, target: "
            "{pretrain: <recipe YAML>}"
        )
    return TorchRun(run, where)
