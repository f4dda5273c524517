"""Chooses which components are labelled or scored, and in which order."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest

Order = Literal["density", "importance"]
Component = tuple[str, int]
"""Name of its site, and its number."""


@dataclass(frozen=True)
class Selection:
    """The chosen components. ``sites``: patterns; empty for all. ``limit``: the most components, over all sites.
    ``by``: the quantity by which they are ordered, largest first.
    """

    sites: tuple[str, ...] = ()
    min_density: float = 0.0
    max_density: float = 1.0
    limit: int | None = None
    by: Order = "density"


def choose_components(harvest: Harvest, selection: Selection) -> list[Component]:
    """Returns the chosen components that fire at all, in order. Labelled ones count towards the limit, so that the same
    command chooses the same components again. Raises UserError for a pattern that matches no site, and for an invalid
    density.
    """
    least, most = selection.min_density, selection.max_density
    for option, density in (("--min-density", least), ("--max-density", most)):
        if not 0 <= density <= 1:
            raise UserError(f"{option} should be a share from 0 to 1, not {density:g}")
    sites = chosen_sites(harvest.sites, selection.sites or None, "--sites ")
    numbers, values, of_site = [], [], []
    for k, site in enumerate(sites):
        summary = harvest.summary(site)
        kept = np.flatnonzero((summary.firings > 0) & (summary.density >= least) & (summary.density <= most))
        numbers.append(kept)
        values.append((summary.density if selection.by == "density" else summary.importance_mean)[kept])
        of_site.append(np.full(len(kept), k))
    number, value, site_number = map(np.concatenate, (numbers, values, of_site))
    order = np.argsort(-value, kind="stable")[: selection.limit]
    return [(sites[site_number[i]], int(number[i])) for i in order]
