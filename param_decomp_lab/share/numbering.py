"""Layer and feature numbers for components, which other tools identify by these two alone.

Other tools draw a layer as one row, and have one set of features for it. So every site has a layer number of its own:
the sites are numbered from 1 in canonical order, in which activations pass through them, and a feature number is that
of the component within its site. Layer 0 has no site: all biases stand there. Neuronpedia's page opens no graph whose
nodes are all in layer 0.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.schema.spelling import nearest

RULE = (
    "every site has a layer number of its own, from 1 in the order in which activations pass through the sites; a "
    "feature number is that of the component within its site; a node's `feature` and a feature file's `index` are the "
    "Cantor pairing (layer + feature) (layer + feature + 1) / 2 + feature; residual errors have feature -(layer + 1)"
)


@dataclass(frozen=True)
class NumberedSite:
    """A site of ``C`` components. ``layer``: its number for other tools, not that of the network's layer."""

    name: str
    layer: int
    C: int


class Numbering:
    """Layer numbers of a run's sites. ``sites``: name and C of each, in canonical order."""

    def __init__(self, sites: Sequence[tuple[str, int]]) -> None:
        self.sites = {name: NumberedSite(name, layer, C) for layer, (name, C) in enumerate(sites, start=1)}

    @property
    def n_layers(self) -> int:
        """Layers of a model in which all sites have a place: one more than there are sites."""
        return len(self.sites) + 1

    def site(self, name: str) -> NumberedSite:
        """Raises UserError for a site that the run does not have."""
        if name not in self.sites:
            raise UserError(f"'{name}' is not a site of this run; {nearest(name, self.sites)}")
        return self.sites[name]

    def feature(self, site: str, component: int) -> tuple[int, int]:
        """Layer and feature number of a component. Raises UserError if there is no such component."""
        found = self.site(site)
        if not 0 <= component < found.C:
            raise UserError(f"{site} has components 0 to {found.C - 1}, and no component {component}")
        return found.layer, component

    def component(self, layer: int, feature: int) -> tuple[str, int]:
        """The inverse of `feature`. Raises KeyError if there is none."""
        for site in self.sites.values():
            if site.layer == layer and 0 <= feature < site.C:
                return site.name, feature
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
    """Layer numbers of the run in ``folder``. Reads its configuration only. Raises UserError where no run is."""
    from param_decomp_lab.runs.folder import saved_config
    from param_decomp_lab.runs.target import find_architecture
    from param_decomp_lab.setup.problem import make_problem
    from param_decomp_lab.setup.resolved import ResolvedConfig

    resolved = ResolvedConfig(saved_config(folder))
    sites = make_problem(resolved, find_architecture(folder, resolved), folder).target.sites.all
    return Numbering([(site.name, site.C) for site in sites])
