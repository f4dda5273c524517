"""Describes the GPUs that can be probed, and how much of their memory a run can use."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import param_decomp_aot
from param_decomp_aot.roofline import Rates, reached_rates
from param_decomp_aot.topology import card_memory, target_configs
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION
from param_decomp_lab.safe_io.files import read_text
from param_decomp_lab.schema.spelling import nearest

TABLE = Path(param_decomp_aot.__file__).parent / "gpus" / "cards.csv"
LATENCIES = TABLE.with_name("collectives.csv")
REACHED = {
    "reached_bf16_flops": "bf16_flops",
    "reached_tf32_flops": "tf32_flops",
    "reached_fp32_flops": "fp32_flops",
    "reached_memory_Bps": "memory_bandwidth_Bps",
}
"""Columns with the rates that a card reaches, and the matching columns with those of its data sheet."""
MEASURED = "h200"
"""The card whose ratios of reached rates to the data sheet are used for other cards."""


@dataclass(frozen=True)
class Card:
    """A GPU. ``description``: XLA's; ``rates``: the rates that it reaches."""

    name: str
    description: str
    rates: Rates


def find_card(gpu: str) -> Card:
    """Returns the card that `--gpu` names: a row of the table ``gpus/cards.csv``, or a CSV file with the same columns
    and one row. Raises UserError for an unknown card, and for a file that does not describe a card.
    """
    own = gpu.lower().endswith(".csv")
    table = _own_card(Path(gpu)) if own else TABLE.read_text()
    known = target_configs(table)
    name = next(iter(known)) if own else gpu.lower()
    if name.startswith("mi") and name not in known:
        raise UserError(
            f"--gpu {gpu}: cannot be probed; programs are compiled for NVIDIA's cards, and runs on AMD's are untested"
        )
    if name not in known:
        raise UserError(f"--gpu {gpu}: unknown; {nearest(name, known)}; or the CSV file of a card (docs/probe.md)")
    return Card(name, known[name], reached_rates(table)[name])


@dataclass(frozen=True)
class MemoryPool:
    """Bytes of a device's memory: the total, and what programs can use."""

    capacity: int
    usable: int

    @classmethod
    def from_card(cls, card: Card, fraction: float = MEM_FRACTION, margin_gib: float = MARGIN_GIB) -> "MemoryPool":
        """Raises UserError unless 0 < ``fraction`` ≤ 1 and something is left."""
        if not 0 < fraction <= 1:
            raise UserError(f"--mem-fraction {fraction:g}: should be a share of the device's memory, up to 1")
        if margin_gib < 0:
            raise UserError(f"--margin-gib {margin_gib:g}: should not be negative")
        capacity = card_memory(card.description)
        usable = int(capacity * fraction - margin_gib * 2**30)
        if usable <= 0:
            raise UserError(f"--margin-gib {margin_gib:g}: nothing is left of {capacity / 2**30:.1f} GiB")
        return cls(capacity, usable)


def _own_card(file: Path) -> str:
    """Returns the table in ``file``. If the rates that the card reaches are missing, they are estimated with an H200's
    ratios.
    """
    columns, *rows = csv.reader(TABLE.read_text().splitlines())
    try:
        given = list(csv.DictReader(read_text(file, "the card").removeprefix("\ufeff").splitlines()))
    except csv.Error as error:
        raise UserError(f"--gpu {file}: cannot be read ({error})") from error
    if len(given) != 1:
        raise UserError(f"--gpu {file}: has {len(given)} rows; should have one below its header, as in {TABLE}")
    card = {column: (given[0].get(column) or "").strip() for column in columns}
    measured = next(dict(zip(columns, row, strict=True)) for row in rows if row[0] == MEASURED)
    missing = [column for column in columns if not card[column] and column not in (*REACHED, "reached")]
    if missing:
        raise UserError(f"--gpu {file}: lacks {', '.join(missing)}; start from a row of {TABLE}")
    _check(file, card, measured)
    for reached, promised in REACHED.items():
        share = float(measured[reached]) / float(measured[promised])
        card[reached] = card[reached] or f"{share * float(card[promised]):.3g}"
    card["name"] = card["name"].lower()
    card["reached"] = card["reached"] or "an H200's shares of the data sheet"
    text = io.StringIO()
    csv.writer(text).writerows((columns, [card[column] for column in columns]))
    return text.getvalue()


def _check(file: Path, card: Mapping[str, str], like: Mapping[str, str]) -> None:
    """Raises UserError for a value of another type than that of the card ``like`` (XLA reads counts as integers)."""
    kinds = {
        "a count": r"[1-9]\d*",
        "a positive number": r"(?=[\d.]*[1-9])\d+(\.\d*)?(e\+?\d+)?",
        "yes or no": "yes|no",
        "one line of words": r'[^\x00-\x1f"\\]+',
    }
    for column, value in card.items():
        kind = next(name for name, pattern in kinds.items() if re.fullmatch(pattern, like[column]))
        if column == "compute_capability":
            kind, fits = "such as 9.0", re.fullmatch(r"\d+\.\d+", value)
        else:
            fits = re.fullmatch(kinds[kind], value, re.IGNORECASE)
        if value and not fits:
            raise UserError(f"--gpu {file}: {column}: should be {kind}, is {value!r}")
