"""A selection of components, at some or all positions: what an intervention is done to."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool

from param_decomp_jax.decomposition.sites import Site
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Node
from param_decomp_lab.harvest.files import Groups
from param_decomp_lab.harvest.files.groups import GROUP
from param_decomp_lab.schema.spelling import nearest

Selection = Any
"""Components as text (``layers.3.mlp.down_proj:17``, at one position ``layers.3.mlp.down_proj:17@4``), groups of
`pd cluster` (``group:12``, ``group:12@4``), nodes of a graph, or numbers by site: one or many."""


def selected(
    selection: Selection,
    sites: Mapping[str, Site],
    n_positions: int,
    positions: Iterable[int] | None = None,
    *,
    may_have_positions: bool = True,
    groups: Callable[[], Groups] | None = None,
) -> dict[str, Bool[np.ndarray, "T C"]]:
    """By site, which components are selected at which positions; sites without any are left out.

    ``positions``: of the components that are selected without a position of their own; None for all.
    ``may_have_positions``: whether a component may be selected at one position. ``groups``: where a group's members are
    read. Raises UserError for an unknown component, group or position.
    """
    everywhere = range(n_positions) if positions is None else [_position(p, n_positions) for p in positions]
    found: dict[str, np.ndarray] = {}

    def add(name: str, number: int, own: int | None) -> None:
        site = name.removeprefix("model.").removesuffix(".weight")
        if site not in sites:
            raise UserError(f"unknown site '{name}'; {nearest(site, sites)}")
        C = sites[site].C
        if not 0 <= number < C:
            raise UserError(f"{site} has components 0 to {C - 1}, and no component {number}")
        if own is not None and not may_have_positions:
            raise UserError(f"{site}:{number}@{own}: here a component is selected at all positions; leave out @{own}")
        mask = found.setdefault(site, np.zeros((n_positions, C), bool))
        mask[everywhere if own is None else _position(own, n_positions), number] = True

    def add_group(number: int, own: int | None) -> None:
        if groups is None:
            raise UserError(f"group:{number}: here components are selected one by one")
        of_run = groups()
        if not 0 <= number < len(of_run):
            raise UserError(f"group:{number}: the run's groups go from 0 to {len(of_run) - 1}")
        for name, member in of_run.members(number):
            add(name, member, own)

    for entry in _entries(selection):
        match entry:
            case Node(kind="group", members=members):
                for name, number, position in map(_parts, members):
                    add(name, number, position)
            case Node(kind="component", site=site, number=number, position=position):
                add(site, number, position)
            case Node():
                raise UserError(f"{entry.id} is not a component; interventions act on components")
            case str():
                name, number, position = _parts(entry)
                if name == GROUP:
                    add_group(number, position)
                else:
                    add(name, number, position)
            case (str(site), number):
                for one in np.atleast_1d(np.asarray(number)).tolist():
                    add(site, int(one), None)
            case _:
                raise UserError(f"a selection has components such as layers.3.mlp.down_proj:17, not {entry!r}")
    if not found:
        raise UserError("nothing is selected")
    return found


def _parts(text: str) -> tuple[str, int, int | None]:
    """Site, number, and position of ``SITE:NUMBER`` or ``SITE:NUMBER@POSITION``."""
    parts = re.fullmatch(r"(.+):(\d{1,12})(?:@(-?\d{1,12}))?", text.strip(), re.ASCII)
    if parts is None:
        raise UserError(f"'{text[:80]}' should be SITE:NUMBER or SITE:NUMBER@POSITION")
    return parts[1], int(parts[2]), None if parts[3] is None else int(parts[3])


def _entries(selection: Selection) -> list[Any]:
    if isinstance(selection, str | Node):
        return [selection]
    return list(selection.items()) if isinstance(selection, Mapping) else list(selection)


def _position(position: int, n: int) -> int:
    if not -n <= position < n:
        raise UserError(f"position {position}: the inputs have {n} positions, 0 to {n - 1}")
    return position % n
