"""The file of results. All of it is rewritten after each result, and a later call continues from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from experiments.gpu_day.items import Item
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.safe_io.json_text import read_json

TRIES = 2
"""How often an item that does not finish is started."""
LIMIT = 1 << 26


class Results:
    """The results of a day. ``all``: has ``machine``, and by the items' names what was ``measured`` on the card and
    what was ``planned`` without it."""

    def __init__(self, file: Path) -> None:
        """Reads the file. Raises UserError if it holds something else."""
        self.file = file
        self.all: dict[str, Any] = {"measured": {}, "planned": {}}
        if file.exists():
            self.all |= read_json(file, "results of a day with a GPU", dict, LIMIT)
        if not all(isinstance(self.all.get(kind, {}), dict) for kind in ("measured", "planned", "machine")):
            raise UserError(f"{file}: does not hold results of a day with a GPU; choose another file with --json")

    def add(self, kind: Literal["measured", "planned"], item: Item, result: Mapping[str, Any]) -> None:
        self.all[kind][item.name] = {**result, "asked": item.asked}
        self.write()

    def of(self, item: Item, kind: Literal["measured", "planned"] = "measured") -> dict[str, Any]:
        """Returns what was found for exactly this item, finished or not; empty if nothing was."""
        found = self.all[kind].get(item.name, {})
        return found if found.get("asked") == item.asked else {}

    def is_done(self, item: Item) -> bool:
        """Returns whether the item needs nothing more."""
        found = self.of(item)
        return bool(found) and ("unfinished" not in found or found.get("tries", 1) >= TRIES)

    def is_planned(self, item: Item, card: str | None) -> bool:
        """Returns whether the item is planned for ``card``; with None, whether its arithmetic is counted."""
        found = self.of(item, "planned")
        return bool(found) and "unfinished" not in found and card in (None, found.get("card"))

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, json.dumps(self.all, indent=1) + "\n")
