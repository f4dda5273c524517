"""Describes what determines a harvest. The plan is kept in its folder, and is the same in every process."""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from param_decomp_lab.safe_io.printable import printable

HARVESTS = "harvests"
"""The subfolder of a run with its harvests."""
FORMAT = 3
"""The format of new harvests. Format 1 ranked the top examples by λ, with ties broken at random, and did not count
``firings_at_one``. Format 2 did not keep the tokens at the sampled positions, nor the signs of a there.
"""
READABLE = (1, 2, 3)
LARGEST = 1 << 40
"""Largest number in a plan."""
MOST_INPUTS = 1 << 24
NAMES = ("run", "name")
NAME = re.compile(r"[\w.-]*\w[\w.-]*", re.ASCII)
"""The pattern of names of runs and sites, which become parts of URLs."""


@dataclass(frozen=True)
class PlannedSite:
    """A harvested site. ``number``: its place in the run's canonical order, on which random keys depend."""

    name: str
    number: int
    C: int
    d_in: int
    d_out: int


@dataclass(frozen=True)
class HarvestPlan:
    """What determines a harvest to its last bit, apart from the run and the data themselves.

    ``rows`` of ``length`` positions are read, ``block_rows`` at a time, out of ``available`` rows. ``inputs``:
    ``tokens`` or ``features``, ``n_inputs`` different ones. ``around``: positions kept to each side of an example.
    ``sampled``: positions of each block at which all firings are kept, with ``outputs`` predictions.
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
        """The name of the harvest's folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"step-{self.step}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def n_positions(self) -> int:
        return self.rows * self.length

    @property
    def n_blocks(self) -> int:
        return math.ceil(self.rows / self.block_rows)

    def rows_of_block(self, block: int) -> range:
        """Returns the indices of the block's rows in the harvest; the last block may have fewer rows."""
        return range(block * self.block_rows, min(self.rows, (block + 1) * self.block_rows))

    @classmethod
    def from_json(cls, raw: Any) -> "HarvestPlan":
        """Reads a plan. Raises TypeError, KeyError or ValueError for anything else, since the file is untrusted."""
        if type(raw["format"]) is not int or raw["format"] not in READABLE:
            raise ValueError(f"its format is {raw['format']}, this version reads {', '.join(map(str, READABLE))}")
        sites = tuple(
            PlannedSite(**{field.name: site[field.name] for field in fields(PlannedSite)}) for site in raw["sites"]
        )
        plan = cls(**{**{field.name: raw[field.name] for field in fields(cls)}, "sites": sites})
        every: list[HarvestPlan | PlannedSite] = [plan, *sites]
        for about in every:
            for field in fields(about):
                value = getattr(about, field.name)
                if field.name in NAMES and not NAME.fullmatch(value):
                    raise ValueError(f"{field.name}: {printable(repr(value), 80)} is not a name")
                if field.type is int and not (type(value) is int and 0 <= value <= LARGEST):
                    raise ValueError(f"{field.name}: {printable(repr(value), 80)}")
        if len({site.name for site in sites}) < len(sites) or not sites:
            raise ValueError("sites are missing, or twice there")
        if plan.inputs not in ("tokens", "features") or not 0 <= plan.threshold < 1:
            raise ValueError("its inputs or its threshold")
        if not (
            plan.rows
            and plan.length
            and plan.block_rows
            and plan.n_inputs <= MOST_INPUTS
            and plan.around <= plan.length + 1024
        ):
            raise ValueError("its sizes")
        if not isinstance(plan.data, str):
            raise TypeError("its data")
        return plan
