"""The components of two runs matched one to one, site by site."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.overlap import pair_overlaps, same_rows
from param_decomp_lab.matching.pairs import Fired, pairs_of, random_like
from param_decomp_lab.matching.result import MatchedRuns, MatchedSite
from param_decomp_lab.runs.checkpoints.damage import Damaged
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.opened import OpenedRun
from param_decomp_lab.safe_io.printable import few_names


def match_runs(
    run: OpenedRun, harvest: Harvest, other: OpenedRun, other_harvest: Harvest, sites: str | Sequence[str] | None = None
) -> MatchedRuns:
    """P5 at the sites that both harvests have. ``sites``: names or patterns of the run's; None for all.

    Raises UserError for an unknown site, where no site is in both, and as `refuse_other_target`.
    """
    refuse_other_target(run, other)
    chosen = [name for name in chosen_sites(run.sites, sites) if name in harvest.sites]
    common = [name for name in chosen if name in other_harvest.sites]
    if not common:
        theirs = few_names(list(other_harvest.sites))
        raise UserError(f"no site is in both harvests: {run.id} has {few_names(chosen)}, {other.id} has {theirs}")
    alike = same_rows(harvest, other_harvest)
    found = {name: match_site(run, harvest, other, other_harvest, name, alike) for name in common}
    missing = (
        tuple(name for name in chosen if name not in other_harvest.sites),
        tuple(name for name in other_harvest.sites if sites is None and name not in harvest.sites),
    )
    return MatchedRuns(f"{run.id} at {run.step:,}", f"{other.id} at {other.step:,}", found, missing, alike)


def match_site(
    run: OpenedRun, harvest: Harvest, other: OpenedRun, other_harvest: Harvest, site: str, alike: bool
) -> MatchedSite:
    """P5 at one site, of whose matrix alone the vectors are read. ``alike``: whether the harvests are of the same rows.
    Of runs of the same target."""
    one_numbers, one = _firing(run, harvest, site)
    other_numbers, two = _firing(other, other_harvest, site)
    pairs = pairs_of(one, two)
    random = pairs_of(*random_like(one, two), pairs.assigned)
    jaccard = None
    if alike:
        numbers = one_numbers[pairs.one], other_numbers[pairs.other]
        jaccard = pair_overlaps(harvest, other_harvest, site, *numbers)
    return MatchedSite.of(site, (one_numbers, other_numbers), pairs, random, jaccard)


@dataclass(frozen=True)
class DecomposedTarget:
    """The target of the run ``run``, as far as it is known. ``weights``: their fingerprint as the checkpoint has it;
    empty where it has none, as of imported runs. ``dtype``: in which they were read."""

    run: str
    architecture: Architecture
    weights: str
    dtype: str | None

    def difference(self, other: "DecomposedTarget") -> str:
        """How two targets differ, empty if they are the same as far as is known: weights are compared where both have a
        fingerprint in one dtype."""
        if self.architecture != other.architecture:
            names = f"{self.architecture.name}, {other.architecture.name}"
            return f"{self.run} and {other.run} decompose different targets ({names})"
        if self.weights and other.weights and self.dtype == other.dtype and self.weights != other.weights:
            return f"the targets of {self.run} and {other.run} have the same sizes but different weights"
        return ""


def decomposed_target(run: OpenedRun) -> DecomposedTarget:
    """The target of a run, as far as it is known."""
    try:
        weights = Checkpoints(run.folder).inputs(run.step).get("target", "")
    except Damaged:
        weights = ""
    return DecomposedTarget(run.id, run.architecture, weights, run.resolved.weights_dtype)


def refuse_other_target(run: OpenedRun, other: OpenedRun) -> None:
    """Raises UserError unless both runs decompose the same target."""
    if difference := decomposed_target(run).difference(decomposed_target(other)):
        raise UserError(f"{difference}; components are compared within one target")


def _firing(run: OpenedRun, harvest: Harvest, site: str) -> tuple[np.ndarray, Fired]:
    """The components of a site that fire in a harvest: their numbers, ascending, and their vectors."""
    firings = np.asarray(harvest.components(site, ["firings"])["firings"])
    numbers = np.flatnonzero(firings > 0)
    V, U = run.factors(site)
    if len(firings) != V.shape[1]:
        raise UserError(f"{harvest.folder} has {len(firings):,} components at {site}, but the run has {V.shape[1]:,}")
    return numbers, Fired(V[:, numbers], U[numbers])
