"""Decides, from the run and the request, what a harvest reads and keeps."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float32, Int64

from param_decomp_jax.targets.architecture import FeatureInputs, TokenInputs
from param_decomp_lab.config.method_schema import ToyFile
from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.data.batches import epoch_order
from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.examples import AROUND
from param_decomp_lab.harvest.files.plan import HarvestPlan, PlannedSite
from param_decomp_lab.harvest.inputs import Inputs
from param_decomp_lab.runs.opened import OpenedRun
from param_decomp_lab.setup.toys import HARVEST, feature_source

VALUES_OF_A_BLOCK = 1 << 24
"""The most causal importances of all sites in a block, unless a single row has more."""
MOST_ROWS = 64
OUTPUTS = 16
"""The number of largest predictions that are kept at each sampled position."""


@dataclass(frozen=True)
class HarvestRequest:
    """The options of a harvest. ``tokens``: the least number of positions to read; for a toy, of inputs. ``data``: a
    folder of token data; None for that of training. ``sites``: names or patterns, None for all. ``threshold``: a
    component fires where λ is above it. ``examples``: of each kind, for each component; None for `examples_kept`.
    Raises UserError for invalid values.
    """

    tokens: float = 1e6
    data: Path | None = None
    sites: tuple[str, ...] | None = None
    threshold: float = 0.0
    examples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("--tokens", self.tokens), ("--examples", 1 if self.examples is None else self.examples)):
            if not 1 <= value < 1e15:
                raise UserError(f"{name}: should be at least 1, not {value:g}")
        if not 0 <= self.threshold < 1:
            raise UserError(f"--threshold: should be from 0 up and below 1, not {self.threshold:g}")


class Source:
    """The inputs of a harvest, by block: rows of token data, or a toy's features drawn for it."""

    def __init__(self, run: OpenedRun, request: HarvestRequest) -> None:
        self._run, self._request = run, request
        reads = run.architecture.inputs
        if isinstance(reads, FeatureInputs):
            if request.data is not None:
                raise UserError("--data: a toy draws its inputs itself")
            self.length, self.n_inputs, self.kind, self.name = 1, reads.n_features, "features", "drawn features"
            self.available = self.rows = max(1, math.ceil(request.tokens))
        else:
            assert isinstance(reads, TokenInputs)
            self._data: TokenRows = TokenData(request.data) if request.data is not None else run.resolved.train_rows
            longest = run.longest_row
            self._data.check(reads.vocab_size, longest)
            self.length, self.n_inputs, self.kind = self._data.seq_len, reads.vocab_size, "tokens"
            self.name, self.available = self._data.source, len(self._data)
            self.rows = min(self.available, max(1, math.ceil(request.tokens / self.length)))

    @cached_property
    def _chosen(self) -> Int64[np.ndarray, " rows"]:
        """The rows that are read, a uniform sample of the data in ascending order."""
        return np.sort(epoch_order(self._request.seed, 0, self.available)[: self.rows])

    def block(self, plan: HarvestPlan, number: int) -> np.ndarray:
        """Returns the inputs of a block as the target reads them: ``block_rows`` rows, padded by repeating the first
        ones.
        """
        rows = np.asarray(plan.rows_of_block(number))
        if self.kind == "features":
            return self._features(plan, number)
        filled = np.concatenate([rows, np.full(plan.block_rows - len(rows), rows[0])])
        return self._data.rows(self._chosen[filled])

    def _features(self, plan: HarvestPlan, number: int) -> Float32[np.ndarray, "rows n"]:
        method, reads = self._run.config.method, self._run.architecture.inputs
        assert isinstance(method, ToyFile)
        assert isinstance(reads, FeatureInputs)
        source = feature_source(method, reads, plan.block_rows, HARVEST, self._run.mesh)
        with jax.set_mesh(self._run.mesh):
            return np.asarray(replace(source, seed=self._request.seed)(number))


def as_inputs(plan: HarvestPlan, block: np.ndarray) -> Inputs:
    """Returns a block of the source for counting, without padding rows."""
    return Inputs(tokens=block.ravel()) if plan.inputs == "tokens" else Inputs(features=block)


def make_plan(run: OpenedRun, request: HarvestRequest, source: Source) -> HarvestPlan:
    """Makes the plan of a harvest. Raises UserError for what cannot be harvested."""
    names = chosen_sites(run.sites, request.sites)
    sites = tuple(
        PlannedSite(site.name, number, site.C, site.d_in, site.d_out)
        for number, site in enumerate(run.sites.values())
        if site.name in names
    )
    C = sum(site.C for site in sites)
    block_rows = max(1, min(MOST_ROWS if source.length > 1 else 4096, VALUES_OF_A_BLOCK // (source.length * C)))
    block_rows = min(block_rows, source.rows)
    n_blocks = math.ceil(source.rows / block_rows)
    return HarvestPlan(
        run=run.id,
        step=run.step,
        data=source.name,
        available=source.available,
        rows=source.rows,
        length=source.length,
        inputs=source.kind,
        n_inputs=source.n_inputs,
        sites=sites,
        threshold=request.threshold,
        seed=request.seed,
        block_rows=block_rows,
        examples=examples_kept(C) if request.examples is None else request.examples,
        around=AROUND if source.kind == "tokens" else 0,
        sampled=min(block_rows * source.length, math.ceil(positions_sampled(C) / n_blocks)),
        outputs=min(OUTPUTS, run.n_outputs),
    )


def positions_sampled(C: int) -> int:
    """Returns the approximate number of sampled positions in a harvest of ``C`` components: fewer for many components,
    since the firings at a position take space.
    """
    return 1 << 16 if C <= 1 << 17 else 1 << 14


def examples_kept(C: int) -> int:
    """Returns the number of examples of each kind for each of ``C`` components: fewer for many components, so that a
    process takes less than 4 GiB for a million.
    """
    return 12 if C <= 1 << 18 else 6
