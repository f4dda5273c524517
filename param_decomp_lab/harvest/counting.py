"""Counts the firings of a block into the state of a harvest."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64

from param_decomp_lab.harvest import keys
from param_decomp_lab.harvest.device import SiteSums
from param_decomp_lab.harvest.files.plan import HarvestPlan
from param_decomp_lab.harvest.firings import Firings, Tables
from param_decomp_lab.harvest.inputs import Inputs
from param_decomp_lab.harvest.positions import BlockPositions, choose_positions
from param_decomp_lab.harvest.state import HarvestState


class SiteBlock(NamedTuple):
    """One site in one block: what fires, and NumPy's sums over all positions."""

    found: Firings
    sums: SiteSums


class BlockCounter:
    """Adds blocks to ``state``."""

    def __init__(self, plan: HarvestPlan, state: HarvestState) -> None:
        self.plan, self.state = plan, state
        self._streams = [keys.stream(plan.seed, purpose) for purpose in (keys.POSITIONS, keys.FIRINGS)]
        self._component_keys = [
            keys.keys(keys.stream(plan.seed, keys.FIRINGS, site.number), np.arange(site.C)) for site in plan.sites
        ]

    def sampled(self, block: int) -> Int64[np.ndarray, " s"]:
        """Indices within the block of the positions at which all firings are kept."""
        first, n, n_valid = self._span(block)
        return choose_positions(self._streams[0], first, n, n_valid, self.plan.sampled)

    def add(
        self,
        block: int,
        inputs: Inputs,
        outputs: Int[np.ndarray, "s k"],
        values: Float[np.ndarray, "s k"],
        sites: Sequence[Callable[[], SiteBlock]],
        pool: Executor,
    ) -> None:
        """Counts one block. ``outputs``, ``values``: the largest predictions at the sampled positions. ``sites``:
        functions that return what is counted, each of which runs in its own thread.
        """
        plan, state = self.plan, self.state
        first, n, n_valid = self._span(block)
        first_row = first // plan.length
        sampled = self.sampled(block)
        kept = sampled < n_valid
        at = sampled[kept]
        tokens = np.zeros(len(at), np.int32) if inputs.tokens is None else inputs.tokens[at]
        chosen = BlockPositions(first + at, tokens, outputs[kept].astype(np.int32), values[kept].astype(np.float16))
        position_keys = keys.keys(self._streams[1], first + np.arange(n))

        def count_site(number: int) -> None:
            found, sums = sites[number]()
            site, C = state.sites[number], plan.sites[number].C
            n_firings, totals = len(found), site.totals
            pairs, activation_sum = inputs.table(C, n_firings), np.zeros(C)
            counts = totals.firings, totals.firings_at_one, totals.importance_max
            histograms = totals.importance_histogram, totals.activation_histogram
            keys_of_firings = position_keys, self._component_keys[number]
            worst = site.top.worst, site.uniform.worst
            tables = Tables(*counts, *histograms, activation_sum, pairs, inputs.places, *keys_of_firings, *worst)
            top, uniform = found.count(tables, n_firings)
            totals.add(sums, activation_sum)
            site.top.add(found, top, first_row, plan.length)
            site.uniform.add(found, uniform, first_row, plan.length)
            state.tokens.add(number, inputs.counted(found, pairs))
            chosen.add(number, found, at)

        list(pool.map(count_site, range(len(sites))))
        state.tokens.spill(f"tokens-block-{block}")
        state.positions[block] = chosen
        state.done.add(block)

    def _span(self, block: int) -> tuple[int, int, int]:
        """Returns the index of the block's first position, the positions in a block, and how many of them are valid in
        this one.
        """
        plan = self.plan
        rows = plan.rows_of_block(block)
        return rows.start * plan.length, plan.block_rows * plan.length, len(rows) * plan.length
