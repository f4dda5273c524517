"""What determines a harvest: kept in its folder, and the same in every process."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

HARVESTS = "harvests"
"""Folder of a run's harvests, in its own."""
FORMAT = 1


@dataclass(frozen=True)
class PlannedSite:
    """``number``: in the run's canonical order, which random keys depend on."""

    name: str
    number: int
    C: int
    d_in: int
    d_out: int


@dataclass(frozen=True)
class Plan:
    """What determines a harvest to its last bit, apart from the run and the data themselves.

    ``rows`` of ``length`` positions are read, ``block_rows`` at a time; ``available`` rows are there. ``inputs``:
    ``tokens`` or ``features``, ``n_inputs`` different ones. ``around``: positions kept to each side of an example.
    ``sampled``: positions of each block at which all that fires is kept, with ``outputs`` predictions.
    """

    run: str
    step: int
    data: str
    available: int
    rows: int
    length: int
    inputs: str
    n_inputs: int
    sites: tuple[PlannedSite, ...]
    threshold: float
    seed: int
    block_rows: int
    examples: int
    around: int
    sampled: int
    outputs: int
    format: int = FORMAT

    @property
    def name(self) -> str:
        """Of the harvest's folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"step-{self.step}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def n_positions(self) -> int:
        return self.rows * self.length

    @property
    def n_blocks(self) -> int:
        return math.ceil(self.rows / self.block_rows)

    def rows_of_block(self, block: int) -> range:
        """Numbers of the block's rows in the harvest; the last block may have fewer."""
        return range(block * self.block_rows, min(self.rows, (block + 1) * self.block_rows))

    @classmethod
    def from_json(cls, raw: Any) -> "Plan":
        """TypeError, KeyError or ValueError for what is none."""
        sites = tuple(PlannedSite(**site) for site in raw["sites"])
        plan = cls(**{**{field.name: raw[field.name] for field in fields(cls)}, "sites": sites})
        if plan.format != FORMAT:
            raise ValueError(f"its format is {plan.format}, this version reads {FORMAT}")
        return plan
