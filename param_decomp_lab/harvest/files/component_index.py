"""Numbers of a harvest's components through all its sites."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.plan import PlannedSite
from param_decomp_lab.schema.spelling import nearest


class ComponentIndex:
    """Components by site and number, and by their number through all ``sites`` of the harvest in ``folder``."""

    def __init__(self, folder: Path, sites: Sequence[PlannedSite]) -> None:
        self._folder, self._sites = folder, sites
        self.site_number = {site.name: number for number, site in enumerate(sites)}

    def __len__(self) -> int:
        """How many components there are."""
        return sum(site.C for site in self._sites)

    def site(self, name: str) -> PlannedSite:
        """Raises UserError if the harvest has no such site."""
        if name not in self.site_number:
            raise UserError(f"unknown site '{name}' in {self._folder}; {nearest(name, self.site_number)}")
        return self._sites[self.site_number[name]]

    def number_of(self, site: str, component: int) -> int:
        """Number of a component through all sites. Raises UserError if there is no such component."""
        C = self.site(site).C
        if not 0 <= component < C:
            raise UserError(f"{site} has components 0 to {C - 1}, and no component {component}")
        return int(self._offsets[self.site_number[site]]) + component

    def site_numbers(self, numbers: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The number of each component's site, of components numbered through all sites."""
        return np.searchsorted(self._offsets, numbers, side="right") - 1

    def named(self, numbers: Int[np.ndarray, " n"]) -> list[tuple[str, int]]:
        """Site and number of components numbered through all sites."""
        sites = self.site_numbers(numbers)
        own = numbers - self._offsets[sites]
        return [(self._sites[s].name, c) for s, c in zip(sites.tolist(), own.tolist(), strict=True)]

    @cached_property
    def _offsets(self) -> Int64[np.ndarray, " sites"]:
        return np.concatenate([[0], np.cumsum([site.C for site in self._sites])])[:-1].astype(np.int64)
