"""The merges of a group as a tree, as numbers that a template draws as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.ui.numbers import percent

MOST_LEAVES = 200
LEAF, WIDTH = 18, 100
"""Height of a leaf, and width of the whole tree."""


@dataclass(frozen=True)
class Leaf:
    """``node``: of a component, or of the ``members`` that a branch which is not drawn has."""

    y: float
    node: int
    members: int


@dataclass(frozen=True)
class Branch:
    """A merge: a bracket at ``x`` from ``top`` to ``bottom``, and from where its two lines come."""

    x: float
    top: float
    bottom: float
    top_from: float
    bottom_from: float
    title: str


@dataclass(frozen=True)
class Dendrogram:
    """``ticks``: x and label. ``merged``: merges that are not drawn."""

    leaves: list[Leaf]
    branches: list[Branch]
    height: float
    ticks: list[tuple[float, str]]
    merged: int


def dendrogram(leaves: Sequence[int], merges: Sequence[dict[str, Any]], n_sampled: int) -> Dendrogram:
    """The tree of ``merges`` (`harvest/files/groups.py:Groups.merges_of`), the last of which is its root.

    A merge stands at the share of the positions at which either part is active that only one of them is: 0 where they
    always are together. It never stands to the left of one that it contains. Of a tree with more than `MOST_LEAVES` the
    last merges are drawn.
    """
    if not merges:
        return Dendrogram([Leaf(LEAF / 2, leaf, 1) for leaf in leaves], [], LEAF * len(leaves), [], 0)
    drawn = list(merges[-(MOST_LEAVES - 1) :])
    members = dict.fromkeys(leaves, 1)
    x: dict[int, float] = dict.fromkeys(leaves, 0.0)
    for merge in merges:
        node, parts = merge["node"], (merge["first"], merge["second"])
        members[node] = sum(members[part] for part in parts)
        apart = 1 - merge["together"] / max(1, merge["active"])
        x[node] = max(apart, *(x[part] for part in parts))
    children = {merge["node"]: merge for merge in drawn}
    y: dict[int, float] = {}
    found: list[Leaf] = []
    todo = [drawn[-1]["node"]]
    while todo:  # from top to bottom, the larger part first
        node = todo.pop()
        if node not in children:
            y[node] = LEAF * (len(found) + 0.5)
            found.append(Leaf(y[node], node, members[node]))
            continue
        todo += sorted((children[node]["first"], children[node]["second"]), key=lambda part: (members[part], -part))
    branches = []
    for merge in drawn:
        upper, lower = sorted((merge["first"], merge["second"]), key=lambda part: y[part])
        y[merge["node"]] = (y[upper] + y[lower]) / 2
        share = merge["together"] / max(1, merge["active"])
        title = (
            f"{members[merge['node']]} members, active at {percent(merge['active'] / max(1, n_sampled))}; "
            f"its two parts together at {percent(share)} of that"
        )
        at, above, below = (round(WIDTH * x[node], 2) for node in (merge["node"], upper, lower))
        branches.append(Branch(at, y[upper], y[lower], above, below, title))
    ticks = [(WIDTH * share / 4, f"{25 * share} %") for share in range(5)]
    return Dendrogram(found, branches, LEAF * len(found), ticks, len(merges) - len(drawn))
