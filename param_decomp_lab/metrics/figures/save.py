"""Saves figures."""

import os
from pathlib import Path

from matplotlib.figure import Figure


def figure_path(run_folder: Path, name: str, step: int) -> Path:
    """Returns the path of the figure ``name`` of step ``step``: ``figures/<name>_<step>.png``."""
    return run_folder / "figures" / f"{name}_{step}.png"


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG atomically, so that ``path`` never has half an image. Creates its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(unfinished, format="png", metadata={"Software": None})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
