"""The components of a run whose directions are nearest to one's own, in the weights alone."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from param_decomp_jax.decomposition.sites import Site
from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.opened import OpenedRun

Side = Literal["U", "V"]
AT_ONCE = 1 << 14
"""Components whose cosines are computed together: some 100 MB of float64 where they have 1,000 dimensions."""


class Nearest(NamedTuple):
    """``cosine``: of its U, or V, with that of the component that was asked about. Its sign depends on which of
    ``(V, U)`` and ``(-V, -U)``, the same matrix, each of the two components is."""

    site: str
    number: int
    cosine: float


def nearest_components(
    run: OpenedRun, site: str, number: int, side: Side, most: int = 12, sites: str | Sequence[str] | None = None
) -> list[Nearest]:
    """The components with the largest absolute cosine between their directions and that of component ``number``.

    ``side``: ``U``, the output direction, among the sites that write the same space (`written_space`), or ``V``, the
    input direction, among those that read the same (`read_space`). ``sites``: names or patterns of those that are
    searched; None for all. The result is shorter than ``most`` where there are no more. Raises UserError for an unknown
    site, component or side.
    """
    if side not in ("U", "V"):
        raise UserError(f"side: '{side}' should be U or V")
    mine = run.component(site, number)
    spaces = {name: written_space(run, of) if side == "U" else read_space(run, of) for name, of in run.sites.items()}
    vector = (mine.U if side == "U" else mine.V).astype(np.float64)
    best: list[Nearest] = []
    for name in chosen_sites(run.sites, sites):
        if spaces[name] != spaces[mine.site]:
            continue
        cosines = _cosines(run.directions(name, side), vector)
        if name == mine.site:
            cosines[number] = 0
        chosen = np.argpartition(-np.abs(cosines), min(most, len(cosines) - 1))[:most]
        best += [Nearest(name, int(n), float(cosines[n])) for n in chosen if cosines[n] != 0]
        best = sorted(best, key=lambda found: -abs(found.cosine))[:most]
    return best


def _cosines(directions: Float[np.ndarray, "C d"], vector: Float[np.ndarray, " d"]) -> Float[np.ndarray, " C"]:
    """0 where one of the two is 0."""
    found = np.zeros(len(directions))
    for first in range(0, len(directions), AT_ONCE):
        rows = directions[first : first + AT_ONCE].astype(np.float64)
        sizes = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
        np.divide(rows @ vector, sizes, out=found[first : first + AT_ONCE], where=sizes > 0)
    return found


def written_space(run: OpenedRun, site: Site) -> tuple[Any, ...]:
    """What the coordinates of a site's outputs are: equal for sites whose U can be compared. The residual stream is the
    same for all layers; neurons are those of a layer, or of an expert in it; anything else is a site's own."""
    if site.kind in getattr(run.target, "writes_residual", ()):
        return ("residual", site.d_out)
    if site.faces is not None and site.faces.side == "output" and site.faces.kind == "neuron":
        return ("neurons", site.layer, site.expert, site.d_out)
    return (site.name,)


def read_space(run: OpenedRun, site: Site) -> tuple[Any, ...]:
    """What the coordinates of a site's inputs are: equal for sites whose V can be compared. The residual stream is the
    same for all layers (each after its own norm); of anything else a layer's sites that read the same activation."""
    matrices = run.architecture.matrices()
    inner = {m.reads for m in matrices if m.faces is not None and m.faces.side == "input"}
    if inner and site.reads not in inner and not site.lookup:
        return ("residual", site.d_in)
    return (site.layer, site.reads, site.expert if site.reads in inner else None)
