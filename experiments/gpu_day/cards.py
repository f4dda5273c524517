"""The cards of this machine, as reported by `nvidia-smi`, and their rates."""

import csv
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from param_decomp_aot.roofline import Rates, card_rates
from param_decomp_lab.probe.cards import TABLE


@dataclass(frozen=True)
class Card:
    """A card. ``memory``, ``used``: in bytes, for all processes together."""

    name: str
    memory: int
    used: int
    driver: str


def cards_here() -> list[Card]:
    """Returns the cards that CUDA programs see; none without `nvidia-smi`."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", *_visible()]
    try:
        said = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return _parse(said.stdout) if said.returncode == 0 else []


def _parse(text: str) -> list[Card]:
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [Card(name, int(total) << 20, int(used) << 20, driver) for name, total, used, driver in rows]


def _visible() -> Sequence[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ["-i", visible] if visible else []


def table_name(device: str) -> str | None:
    """Returns the name of a card in ``cards.csv`` (`h200`), given its name in CUDA (NVIDIA H200); None for a card that
    is not listed, including variants with other rates."""
    rows = csv.DictReader(TABLE.read_text().splitlines())
    return next((row["name"] for row in rows if row["description"].startswith(device)), None)


def rates_of(device: str) -> Rates | None:
    """Returns the rates that the vendor promises."""
    name = table_name(device)
    return None if name is None else card_rates(TABLE.read_text())[name]
