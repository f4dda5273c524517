"""What is behind a graph's residual errors, as it is kept: their largest parts (E10)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.numbers import percent

SHOWN = 5
"""Contributors that the printed form lists."""


@dataclass(frozen=True)
class Contributor:
    """A component that does not fire, as a part of a residual error. ``value``: the activation a. ``importance``: λ, at
    most the graph's threshold. ``part``: E10, with its sign."""

    site: str
    position: int
    number: int
    value: float
    importance: float
    part: float

    @property
    def id(self) -> str:
        """``layers.3.mlp.down_proj:17@4``: component 17 at position 4."""
        return f"{self.site}:{self.number}@{self.position}"


@dataclass(frozen=True)
class Behind:
    """The parts of a residual error (E10), which add up to ``total``: the influence that goes through its edges in the
    graph. A negative part cancels others.

    ``node``: its id. ``delta``: the delta's part. ``contributors``: components of largest absolute part, at most ten.
    ``others``: the part of the ``n_others`` other components that do not fire there."""

    node: str
    delta: float
    others: float
    n_others: int
    contributors: tuple[Contributor, ...]

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.delta + self.others + sum(c.part for c in self.contributors)

    def share(self, part: float) -> float:
        """A part, divided by the total."""
        return part / self.total if self.total > 0 else 0.0

    def __repr__(self) -> str:
        lines = [
            f"Behind {self.node}: delta {percent(self.share(self.delta))}, the {len(self.contributors)} largest "
            f"components {percent(self.share(sum(c.part for c in self.contributors)))}, {self.n_others:,} others "
            f"{percent(self.share(self.others))}"
        ]
        for c in self.contributors[:SHOWN]:
            lines.append(f"  {c.id}  {percent(self.share(c.part))}, λ {c.importance:.2g}, a {c.value:.3g}")
        return printable("\n".join(lines))


def to_columns(entries: Iterable[Behind]) -> dict[str, list[Any]]:
    """As a graph's file has them: numbers with six digits, and no sites and positions, which are the node's."""
    found: dict[str, list[Any]] = {
        name: [] for name in ("node", "delta", "others", "n_others", "number", "value", "importance", "part")
    }
    for entry in entries:
        own = {"node": entry.node, "n_others": entry.n_others}
        own |= {"delta": _short(entry.delta), "others": _short(entry.others)}
        own["number"] = [c.number for c in entry.contributors]
        for name in ("value", "importance", "part"):
            own[name] = [_short(getattr(c, name)) for c in entry.contributors]
        for name, column in found.items():
            column.append(own[name])
    return found


def from_columns(columns: Mapping[str, list[Any]], places: Mapping[str, tuple[str, int]]) -> list[dict[str, Any]]:
    """Fields of `Behind`, not yet checked. ``places``: site and position of the residual errors, by id.

    Raises KeyError, TypeError or ValueError for what `to_columns` does not make.
    """
    found = []
    names = ("number", "value", "importance", "part")
    heads = ("node", "delta", "others", "n_others")
    for entry in zip(*(columns[name] for name in (*heads, *names)), strict=True):
        site, position = places[entry[0]]
        contributors = [
            {"site": site, "position": position, **dict(zip(names, values, strict=True))}
            for values in zip(*entry[len(heads) :], strict=True)
        ]
        found.append(dict(zip(heads, entry, strict=False)) | {"contributors": contributors})
    if len({entry["node"] for entry in found}) < len(found):
        raise ValueError("two entries about one residual error")
    return found


def _short(x: float) -> float:
    return float(f"{x:.6g}")
