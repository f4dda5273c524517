"""Figures on disk."""

import os
from pathlib import Path

from matplotlib.figure import Figure


def figure_path(run_folder: Path, name: str, step: int) -> Path:
    """Where the figure ``name`` of step ``step`` lives: ``figures/<name>_<step>.png``."""
    return run_folder / "figures" / f"{name}_{step}.png"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG atomically: ``path`` never holds half an image. Its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(unfinished, format="png", metadata={"Software": None})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
