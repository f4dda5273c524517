"""Layer and feature numbers for components, which other tools identify by these two alone.

A layer has several sites, and components are numbered per site. The sites of a layer are put behind one another in
canonical order: the feature number of a component is its own number plus the C of the sites before its own.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from param_decomp_lab.config.strict import nearest
from param_decomp_lab.errors import UserError

RULE = (
    "feature = first + component, where first is that of the site; the embedding, if it is decomposed, is layer 0 and "
    "all others move up by one; a node's `feature` and a feature file's `index` are the Cantor pairing "
    "(layer + feature) (layer + feature + 1) / 2 + feature"
)


@dataclass(frozen=True)
class NumberedSite:
    """A site of ``C`` components. ``first``: the feature number of component 0, in ``layer``. ``place``: the site's
    among those of its layer."""

    name: str
    layer: int
    place: int
    first: int
    C: int


class Numbering:
    """Of all sites of a run. ``sites``: name, layer number and C of each, in canonical order."""

    def __init__(self, sites: Sequence[tuple[str, int, int]]) -> None:
        lowest = min(0, *(layer for _, layer, _ in sites))
        used: dict[int, tuple[int, int]] = {}
        self.sites: dict[str, NumberedSite] = {}
        for name, number, C in sites:
            layer = number - lowest
            place, first = used.get(layer, (0, 0))
            self.sites[name] = NumberedSite(name, layer, place, first, C)
            used[layer] = place + 1, first + C
        self._of_layer = {layer: [s for s in self.sites.values() if s.layer == layer] for layer in used}

    @property
    def n_layers(self) -> int:
        """Up to the last that has a site."""
        return max(self._of_layer) + 1

    def site(self, name: str) -> NumberedSite:
        """Raises UserError for a site that the run does not have."""
        if name not in self.sites:
            raise UserError(f"'{name}' is no site of this run; {nearest(name, self.sites)}")
        return self.sites[name]

    def feature(self, site: str, component: int) -> tuple[int, int]:
        """Layer and feature number of a component. Raises UserError if there is no such component."""
        found = self.site(site)
        if not 0 <= component < found.C:
            raise UserError(f"{site} has components 0 to {found.C - 1}, and no component {component}")
        return found.layer, found.first + component

    def component(self, layer: int, feature: int) -> tuple[str, int]:
        """The inverse of `feature`. Raises KeyError if there is none."""
        for site in self._of_layer.get(layer, ()):
            if site.first <= feature < site.first + site.C:
                return site.name, feature - site.first
        raise KeyError((layer, feature))

    def to_json(self) -> dict[str, Any]:
        """The rule in words, and the sites that it is applied to."""
        return {"rule": RULE, "sites": [asdict(site) for site in self.sites.values()]}


def pair(layer: int, feature: int) -> int:
    """One number for both (Cantor): that of a feature file."""
    return (layer + feature) * (layer + feature + 1) // 2 + feature


def unpair(index: int) -> tuple[int, int]:
    """Layer and feature, from `pair`'s result."""
    diagonal = (math.isqrt(8 * index + 1) - 1) // 2
    feature = index - diagonal * (diagonal + 1) // 2
    return diagonal - feature, feature


def run_numbering(folder: Path) -> Numbering:
    """Of the run in ``folder``. Reads its configuration, and no array. Raises UserError if there is no run."""
    from param_decomp_lab.opening.target import find_architecture
    from param_decomp_lab.run_folder.folder import saved_config
    from param_decomp_lab.setup.problem import make_problem

    config = saved_config(folder)
    sites = make_problem(config, find_architecture(folder, config), folder).target.sites.all
    return Numbering([(site.name, site.layer, site.C) for site in sites])
