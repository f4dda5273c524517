"""The options of a clustering."""

import math
from dataclasses import dataclass

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.groups import Options

MOST_SEEDS = 100


@dataclass(frozen=True)
class ClusterRequest:
    """``alpha``: bits that a member of a group costs where the group is active. ``seeds``: how many groupings are made;
    the first always merges the best pair, the others draw the pair of rank n with a probability proportional to exp(−n
    / ``draw``). ``min_density``: components that fire at a smaller share of the positions stay ungrouped. Raises
    UserError for invalid values.
    """

    alpha: float = 1.0
    seeds: int = 3
    min_density: float = 1e-4
    draw: float = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and 0 <= self.alpha <= 1e6):
            raise UserError(f"--alpha: should be a number from 0 to 1e6, not {self.alpha:g}")
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise UserError(f"--seeds: should be from 1 to {MOST_SEEDS}, not {self.seeds}")
        if not 0 <= self.min_density < 1:
            raise UserError(f"--min-density: should be from 0 up and below 1, not {self.min_density:g}")
        if not (math.isfinite(self.draw) and 0 <= self.draw <= 1e6):
            raise UserError(f"--draw: should be a number from 0 to 1e6, not {self.draw:g}")

    @property
    def options(self) -> Options:
        return Options(float(self.alpha), self.seeds, float(self.min_density), float(self.draw))
