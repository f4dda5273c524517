"""The figures of a run, newest first, as data URIs."""

import base64
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from param_decomp_lab.metrics import METRICS
from param_decomp_lab.safe_io.files import read_bytes
from param_decomp_lab.safe_io.printable import first_few

MAX_FIGURE_BYTES = 1 << 26
"""Largest figure that is put into the page."""
MAX_OLDER_BYTES = 8_000_000
"""Older figures are put into the page until they take this much together; the others are named."""
REFUSED_NAMED = 12
"""Files that may not be shown, of which the page gives the names."""


def captions() -> dict[str, str]:
    """The titles that images carry, by the name of the figure, in the order of the page."""
    titles = {name: title for metric in METRICS.values() for name, title in metric.titles.items()}
    return titles | {"baselines": "The decomposition beside parts that cost no training"}


@dataclass(frozen=True)
class Figure:
    """One PNG of the run folder."""

    name: str
    step: int
    path: Path

    @property
    def caption(self) -> str:
        return captions().get(self.name, self.name.replace("_", " "))

    @property
    def titled(self) -> bool:
        """Whether the image carries its own title."""
        return self.name in captions()

    @property
    def data_uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(read_bytes(self.path, "a figure", MAX_FIGURE_BYTES)).decode(
            "ascii"
        )


@dataclass(frozen=True)
class FigureHistory:
    """The newest figure of a name, the older ones that fit into the page, and the files that do not."""

    newest: Figure
    older: list[Figure]
    left_out: list[str]


@dataclass(frozen=True)
class Figures:
    """Those that are shown, and the files that may not be."""

    shown: list[FigureHistory]
    refused: list[str]


def read_figures(folder: Path) -> Figures:
    """All ``<name>_<step>.png`` in ``folder`` by name, those with a known caption first.

    Only regular files of the run are put into the page: no link to a file elsewhere, no pipe, none too large.
    """
    found: dict[str, list[Figure]] = {}
    refused: list[str] = []
    for path in folder.glob("*.png") if folder.is_dir() else ():
        match = re.fullmatch(r"(.+)_([0-9]{1,18})", path.stem)
        if not match or path.name.startswith("."):
            continue
        if _may_be_shown(path, folder.parent):
            found.setdefault(match[1], []).append(Figure(match[1], int(match[2]), path))
        else:
            refused.append(f"{folder.name}/{path.name}")
    order = list(captions())
    room = MAX_OLDER_BYTES
    histories: list[FigureHistory] = []
    for name in sorted(found, key=lambda n: (order.index(n) if n in order else len(order), n)):
        newest, *others = sorted(found[name], key=lambda figure: -figure.step)
        older: list[Figure] = []
        left_out: list[str] = []
        for figure in others:
            size = figure.path.stat().st_size
            if size <= room:
                older.append(figure)
                room -= size
            else:
                left_out.append(f"{folder.name}/{figure.path.name}")
        histories.append(FigureHistory(newest, older, left_out))
    return Figures(histories, list(first_few(sorted(refused), REFUSED_NAMED)))


def _may_be_shown(path: Path, run: Path) -> bool:
    """Whether ``path`` is a readable regular file within the folder ``run``, of a size for the page."""
    real = Path(os.path.realpath(path))
    try:
        found = real.stat()
    except OSError:  # a link to nothing
        return False
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_size <= MAX_FIGURE_BYTES
        and real.is_relative_to(os.path.realpath(run))
        and os.access(real, os.R_OK)
    )
