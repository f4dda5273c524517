"""Numbers a harvest's components across all its sites."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.plan import PlannedSite
from param_decomp_lab.schema.spelling import nearest


class ComponentIndex:
    """Converts between a component's site and number within it, and its number across all ``sites`` of the harvest in
    ``folder``.
    """

    def __init__(self, folder: Path, sites: Sequence[PlannedSite]) -> None:
        self._folder, self._sites = folder, sites
        self.site_number = {site.name: number for number, site in enumerate(sites)}

    def __len__(self) -> int:
        """The number of components."""
        return sum(site.C for site in self._sites)

    def site(self, name: str) -> PlannedSite:
        """Returns the site of this name. Raises UserError if the harvest has no such site."""
        if name not in self.site_number:
            raise UserError(f"unknown site '{name}' in {self._folder}; {nearest(name, self.site_number)}")
        return self._sites[self.site_number[name]]

    def number_of(self, site: str, component: int) -> int:
        """Returns the number of a component across all sites. Raises UserError if there is no such component."""
        C = self.site(site).C
        if not 0 <= component < C:
            raise UserError(f"{site} has components 0 to {C - 1}, and no component {component}")
        return int(self._offsets[self.site_number[site]]) + component

    def site_numbers(self, numbers: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the site number of each component, from its number across all sites."""
        return np.searchsorted(self._offsets, numbers, side="right") - 1

    def named(self, numbers: Int[np.ndarray, " n"]) -> list[tuple[str, int]]:
        """Returns the site and number within it of components, from their numbers across all sites."""
        sites = self.site_numbers(numbers)
        own = numbers - self._offsets[sites]
        return [(self._sites[s].name, c) for s, c in zip(sites.tolist(), own.tolist(), strict=True)]

    @cached_property
    def _offsets(self) -> Int64[np.ndarray, " sites"]:
        return np.concatenate([[0], np.cumsum([site.C for site in self._sites])])[:-1].astype(np.int64)
