"""From incoming edges to influence (E6), and from influence to the part of a graph that is worth looking at (E7).

Both follow Ameisen et al. (2025) and circuit-tracer: see docs/sources.md.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class IncomingEdges:
    """Incoming edges of the outputs and of some nodes, over all N nodes: A of E6, with the signed weights beside.

    ``node``: of each row after those of the outputs, the node it belongs to; ``order``: of that node, a number that
    grows along every edge. ``probability``: of the outputs, adding up to 1.
    """

    weights: Float[np.ndarray, "R N"]
    node: Int[np.ndarray, " F"]
    order: Int[np.ndarray, " F"]
    probability: Float[np.ndarray, " O"]

    @cached_property
    def shares(self) -> Float[np.ndarray, "R N"]:
        """Absolute weights over their sum; rows without any stay 0."""
        size = np.abs(self.weights)
        total = size.sum(axis=1, keepdims=True)
        return np.divide(size, total, out=np.zeros_like(size), where=total > 0)


def influence(
    shares: Float[np.ndarray, "R N"],
    node: Int[np.ndarray, " F"],
    order: Int[np.ndarray, " F"],
    probability: Float[np.ndarray, " O"],
) -> Float[np.ndarray, " N"]:
    """``p (A + A² + …)`` of every node (E6). Edges only lead from lower to higher ``order``, so one pass over the rows
    from the last to the first gives all powers."""
    n_outputs = len(probability)
    found = probability @ shares[:n_outputs].astype(np.float64)
    for level in np.unique(order)[::-1]:
        rows = np.flatnonzero(order == level)
        found += found[node[rows]] @ shares[n_outputs + rows]
    return found


@dataclass(frozen=True)
class Pruned:
    """What is kept of a graph (E7). ``edges``: [row, node] of each, the largest score first; ``nodes_share``,
    ``edges_share``: how much of influence and of the scores between kept nodes was kept."""

    nodes: Int[np.ndarray, " n"]
    edges: Int[np.ndarray, "e 2"]
    nodes_share: float
    edges_share: float


def largest(values: Float[np.ndarray, " N"], share: float, most: int | None = None) -> Int[np.ndarray, " n"]:
    """The fewest entries that together have ``share`` of the sum, the largest first; at most ``most``."""
    order = np.argsort(-values, kind="stable")
    running = np.cumsum(values[order])
    total = running[-1] if len(running) else 0.0
    if total <= 0:
        return order[:0]
    n = int(np.searchsorted(running, share * total * (1 - 1e-12))) + 1
    return order[: min(n, len(order), len(order) if most is None else most)]


def prune(
    rows: IncomingEdges,
    values: Float[np.ndarray, " N"],
    nodes_share: float,
    edges_share: float,
    most: int | None = None,
) -> Pruned:
    """Keeps the nodes of largest influence and the edges of largest score between them (E7); then drops nodes whose
    edges are all gone, so that every node leads to an output. ``most``: nodes kept at most."""
    shares = rows.shares
    kept = np.zeros(shares.shape[1], bool)
    kept[largest(values, nodes_share, most)] = True
    n_outputs = len(rows.probability)
    of_row = np.concatenate([rows.probability, values[rows.node]])
    of_row[n_outputs:] *= kept[rows.node]
    score = of_row[:, None] * shares * kept
    flat = score.reshape(-1)
    chosen = np.flatnonzero(flat)
    chosen = chosen[largest(flat[chosen], edges_share)]
    edges = np.stack(np.unravel_index(chosen, score.shape), axis=1)
    edges = edges[_leads_to_an_output(edges, rows)]
    reached = np.unique(edges[:, 1])
    total, all_scores = values.sum(), flat.sum()
    return Pruned(
        reached[np.argsort(-values[reached], kind="stable")],
        edges,
        float(values[reached].sum() / total) if total > 0 else 0.0,
        float(score[edges[:, 0], edges[:, 1]].sum() / all_scores) if all_scores > 0 else 0.0,
    )


def _leads_to_an_output(edges: Int[np.ndarray, "e 2"], rows: IncomingEdges) -> Bool[np.ndarray, " e"]:
    """Whether what each edge leads to has a way to an output."""
    n_outputs = len(rows.probability)
    reached = np.zeros(rows.weights.shape[1], bool)
    level = np.concatenate([np.full(n_outputs, np.iinfo(np.int64).max), rows.order])[edges[:, 0]]
    good = np.zeros(len(edges), bool)
    for at in np.unique(level)[::-1]:
        here = np.flatnonzero(level == at)
        row = edges[here, 0]
        node = rows.node[np.maximum(row - n_outputs, 0)] if len(rows.node) else np.zeros(len(row), int)
        good[here] = (row < n_outputs) | reached[node]
        reached[edges[here, 1]] |= good[here]
    return good
