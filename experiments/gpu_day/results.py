"""The file of results: written anew after each, whole; a later call goes on from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.gpu_day.items import Item
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.safe_io.json_text import read_json

TRIES = 2
"""How often an item is begun that does not come to an end."""
LIMIT = 1 << 26
KINDS = ("measured", "planned", "counted")


class Results:
    """``all``: ``machine``; by the items' names ``measured`` on the card, ``planned`` and ``counted`` without it."""

    def __init__(self, file: Path) -> None:
        """UserError for a file that holds something else."""
        self.file = file
        self.all: dict[str, Any] = {kind: {} for kind in KINDS}
        if file.exists():
            found = read_json(file, "results of a day with a GPU", dict, LIMIT)
            if not all(isinstance(found.get(kind, {}), dict) for kind in (*KINDS, "machine")):
                raise UserError(f"{file}: does not hold results of a day with a GPU; choose another file with --json")
            self.all |= found

    def add(self, kind: str, item: Item, result: Mapping[str, Any]) -> None:
        self.all[kind][item.name] = {**result, "asked": item.asked}
        self._write()

    def describe(self, machine: Mapping[str, Any]) -> None:
        self.all["machine"] = dict(machine)
        self._write()

    def of(self, item: Item) -> dict[str, Any]:
        """What was found for just this item, to its end or not; empty if nothing was."""
        found = self.all["measured"].get(item.name, {})
        return found if found.get("asked") == item.asked else {}

    def is_done(self, item: Item) -> bool:
        """Whether nothing is to be done about it any more."""
        found = self.of(item)
        return bool(found) and ("unfinished" not in found or found.get("tries", 1) >= TRIES)

    def has(self, kind: str, item: Item) -> bool:
        """Of what is found without the card."""
        found = self.all[kind].get(item.name, {})
        return found.get("asked") == item.asked and "unfinished" not in found

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, json.dumps(self.all, indent=1) + "\n")
