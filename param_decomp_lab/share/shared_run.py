"""The run that is shared: its folder, one of its harvests, and what tokens are called."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Example, Harvest, chosen_harvest
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.plan import HARVESTS
from param_decomp_lab.runs.folder import CONFIG_FILE

MARKER = "pd-share.json"
"""In every folder that `pd share` makes: what is in it, and from where."""


@dataclass(frozen=True)
class ShownExample:
    """An example as other tools show it. ``values``: λ of each of the ``tokens``; it fires at ``tokens[at]``."""

    tokens: list[str]
    values: list[float]
    at: int


@dataclass(frozen=True)
class SharedRun:
    folder: Path
    harvest: Harvest

    @cached_property
    def labels(self) -> Labels:
        return Labels(self.folder, self.harvest.plan.step)

    def shown(self, example: Example) -> ShownExample:
        """The tokens around an example, or a toy's input as one token: its active features with their values."""
        if self.harvest.plan.inputs == "features":
            row = self.harvest.row(example.row)
            named = zip(self.harvest.names(example.tokens), example.tokens, strict=True)
            text = ", ".join(f"{name} = {row[feature]:.3g}" for name, feature in named)
            return ShownExample([text], [rounded(example.importance)], 0)
        values = [rounded(value) for value in example.importances.tolist()]
        return ShownExample(self.harvest.names(example.tokens), values, example.position - example.first)

    @property
    def about(self) -> dict[str, Any]:
        """For `MARKER`."""
        plan = self.harvest.plan
        return {"run": plan.run, "step": plan.step, "harvest": self.harvest.folder.resolve().name}


def open_shared(run: Path, harvest: str | None) -> SharedRun:
    """From a run's folder, whose newest harvest (or the one of this name) it is then, or from that of a harvest. Raises
    UserError where there is none, or a harvest without its run."""
    found = chosen_harvest(run, harvest)
    folder = found.folder.resolve().parent
    if folder.name != HARVESTS:
        raise UserError(f"{run} is a harvest without its run, where labels and graphs are kept")
    if not (folder.parent / CONFIG_FILE).is_file():
        raise UserError(f"{folder.parent} is not the folder of a run: it has no {CONFIG_FILE}")
    return SharedRun(folder.parent, found)


def rounded(value: float) -> float:
    """To six significant digits: files are a third of the size."""
    return float(f"{value:.6g}")


def usable_name(text: str) -> str:
    """For a file or an address: letters, digits, dots, hyphens and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "unnamed"
