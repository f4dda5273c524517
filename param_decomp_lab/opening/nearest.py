"""The components of a run, or of another of the same target, whose directions are nearest to one's own, in the
weights alone."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from param_decomp_jax.decomposition.sites import Site
from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening.matched import refuse_other_target
from param_decomp_lab.runs.opened import Component, OpenedRun

Side = Literal["U", "V", "both"]
AT_ONCE = 1 << 14
"""Components whose cosines are computed together: some 100 MB of float64 where they have 1,000 dimensions."""


class Nearest(NamedTuple):
    """``cosine``: of its U, or V, with that of the component that was asked about; of ``both`` the product of the two,
    which is the cosine of the matrices V ⊗ U. The sign of one side depends on which of ``(V, U)`` and ``(-V, -U)``, the
    same matrix, each of the two components is; that of both does not."""

    site: str
    number: int
    cosine: float


def nearest_components(
    run: OpenedRun,
    site: str,
    number: int,
    side: Side,
    most: int = 12,
    sites: str | Sequence[str] | None = None,
    other: OpenedRun | None = None,
) -> list[Nearest]:
    """The components with the largest absolute cosine between their directions and that of component ``number``.

    ``side``: ``U``, the output direction, among the sites that write the same space (`written_space`), or ``V``, the
    input direction, among those that read the same (`read_space`); ``both``: their product, among those that do both.
    ``other``: a run of the same target in which they are looked for; None for the component's own. ``sites``: names or
    patterns of those that are searched; None for all. The result is shorter than ``most`` where there are no more.
    Raises UserError for an unknown site, component or side, and for a run of another target.
    """
    if side not in ("U", "V", "both"):
        raise UserError(f"side: '{side}' should be U, V or both")
    if other is not None:
        refuse_other_target(run, other)
    mine, among = run.component(site, number), run if other is None else other
    best: list[Nearest] = []
    for name in chosen_sites(among.sites, sites):
        found = [
            _cosines(among.directions(name, one), vector)
            for one, vector in _comparable(run, mine, among, name)
            if side in (one, "both")
        ]
        if len(found) < (2 if side == "both" else 1):
            continue
        cosines = np.prod(found, axis=0)
        if other is None and name == mine.site:
            cosines[number] = 0
        chosen = np.argpartition(-np.abs(cosines), min(most, len(cosines) - 1))[:most]
        best += [Nearest(name, int(n), float(cosines[n])) for n in chosen if cosines[n] != 0]
        best = sorted(best, key=lambda found: -abs(found.cosine))[:most]
    return best


def cosines_between(
    run: OpenedRun, site: str, number: int, other: OpenedRun, other_site: str, other_number: int
) -> dict[str, float]:
    """Cosines of the directions of two components, of runs of the same target, by side: ``U`` and ``V``, each where the
    two sites write, or read, the same space."""
    mine, theirs = run.component(site, number), other.component(other_site, other_number)
    return {
        side: float(_cosines((theirs.U if side == "U" else theirs.V)[None], vector)[0])
        for side, vector in _comparable(run, mine, other, theirs.site)
    }


def _comparable(
    run: OpenedRun, mine: Component, among: OpenedRun, name: str
) -> list[tuple[Literal["U", "V"], Float[np.ndarray, " d"]]]:
    """The sides on which components of a site can be compared with one, each with the vector of that one."""
    here, there = run.sites[mine.site], among.sites[name]
    found: list[tuple[Literal["U", "V"], Float[np.ndarray, " d"]]] = []
    if written_space(run, here) == written_space(among, there):
        found.append(("U", mine.U.astype(np.float64)))
    if read_space(run, here) == read_space(among, there):
        found.append(("V", mine.V.astype(np.float64)))
    return found


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
