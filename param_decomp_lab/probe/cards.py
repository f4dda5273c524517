"""The GPUs that can be probed, and how much of their memory a run can use."""

from dataclasses import dataclass
from pathlib import Path

import param_decomp_aot
from param_decomp_aot.topology import card_memory, target_configs
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION
from param_decomp_lab.schema.spelling import nearest

TABLE = Path(param_decomp_aot.__file__).parent / "gpus" / "cards.csv"
LATENCIES = TABLE.with_name("collectives.csv")


def card(name: str) -> str:
    """XLA's description of a card. UserError for one that is not in the table."""
    known = target_configs(TABLE.read_text())
    if name.lower() not in known:
        raise UserError(f"--gpu {name}: unknown; {nearest(name.lower(), known)}")
    return known[name.lower()]


@dataclass(frozen=True)
class Pool:
    """Bytes of a device's memory: all of it, and what programs can use."""

    capacity: int
    usable: int

    @classmethod
    def from_card(cls, description: str, fraction: float = MEM_FRACTION, margin_gib: float = MARGIN_GIB) -> "Pool":
        """Raises UserError unless 0 < ``fraction`` ≤ 1 and something is left."""
        if not 0 < fraction <= 1:
            raise UserError(f"--mem-fraction {fraction:g}: should be a share of the device's memory, up to 1")
        if margin_gib < 0:
            raise UserError(f"--margin-gib {margin_gib:g}: should not be negative")
        capacity = card_memory(description)
        usable = int(capacity * fraction - margin_gib * 2**30)
        if usable <= 0:
            raise UserError(f"--margin-gib {margin_gib:g}: nothing is left of {capacity / 2**30:.1f} GiB")
        return cls(capacity, usable)
