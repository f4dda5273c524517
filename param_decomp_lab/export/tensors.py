"""Names the exported tensors, which split the stacked arrays by site (or by block or tap of the CI function)."""

from collections.abc import Mapping
from dataclasses import dataclass

from param_decomp_jax.ci.taps import TAPS
from param_decomp_jax.decomposition.sites import Sites

BLOCKS = "blocks"
"""Part of the name of arrays with a leading axis for the blocks of a CI transformer."""


@dataclass(frozen=True)
class TensorPiece:
    """A tensor that is a part of a checkpoint array: its ``row`` on the first axis (on the first two for experts), or
    all of it (None).
    """

    name: str
    shape: tuple[int, ...]
    row: int | tuple[int, int] | None = None
    transposed: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        return () if self.row is None else (self.row,) if isinstance(self.row, int) else self.row


def pieces(sites: Sites, arrays: Mapping[str, tuple[int, ...]]) -> dict[str, list[TensorPiece]]:
    """Returns, for the name of each array of the item ``learned``, the tensors it is split into. ``arrays``: shapes by
    name.

    A site that is tied to another (T4) gets its own tensors: the other site's, transposed and swapped.
    """
    stacks = {stack.name: [sites.all[n].name for n in stack.sites] for stack in sites.stacks}
    rows = {stack.name: (stack.rows(), len(stack.lead)) for stack in sites.stacks}
    tied = {first: second for second, first in sites.views.items()}
    found: dict[str, list[TensorPiece]] = {}
    for name, shape in arrays.items():
        kind, *path = _without_readout(name.split("/"))
        stack = next((part for part in path if part in stacks), None)
        if stack is not None:
            places, n_lead = rows[stack]
            named = [(row, _named(kind, path, stack, site)) for row, site in zip(places, stacks[stack], strict=True)]
            found[name] = [TensorPiece(tensor, shape[n_lead:], row) for row, tensor in named]
            if kind == "components" and stack in tied:
                other = "U" if path[-1] == "V" else "V"
                (site,) = stacks[tied[stack]]
                found[name].append(TensorPiece(f"components.{site}.{other}", shape[:0:-1], 0, transposed=True))
        elif path[1:] == ["rows", TAPS]:
            found[name] = [TensorPiece(f"{kind}.{path[0]}.{TAPS}.{n}.W", shape[1:], n) for n in range(shape[0])]
        elif path[0] == BLOCKS:
            rest = ".".join(path[1:])
            found[name] = [TensorPiece(f"{kind}.{BLOCKS}.{n}.{rest}", shape[1:], n) for n in range(shape[0])]
        else:
            found[name] = [TensorPiece(".".join((kind, *path)), shape)]
    return found


def _without_readout(path: list[str]) -> list[str]:
    """Returns the path as it is without a component readout, whose vectors are under `readout` instead of `heads`."""
    if path[:2] == ["ci", "function"]:
        return ["ci", *path[2:]]
    if path[:2] == ["ci", "heads"] and path[3] in ("head", "readout"):
        return ["ci", "heads" if path[3] == "head" else "readout", path[2], *path[4:]]
    return path


def _named(kind: str, path: list[str], stack: str, site: str) -> str:
    """`components/<stack>/V` is `components.<site>.V`; the rows of a joint affine map are `ci.project.<site>.W`."""
    parts = [site if part == stack else part for part in path if part != "rows"]
    return ".".join((kind, *parts, *(("W",) if "rows" in path else ())))
