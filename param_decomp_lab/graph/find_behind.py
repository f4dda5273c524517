"""Finds what is behind the residual errors of a pruned graph (E10)."""

import numpy as np
from jaxtyping import Float, Int

from param_decomp_lab.graph.behind import Behind, Contributor
from param_decomp_lab.graph.incoming import Incoming
from param_decomp_lab.graph.influence import IncomingEdges, Pruned

LARGEST = 10
"""Contributors that are kept of a residual error."""


def find_behind(
    incoming: Incoming,
    rows: IncomingEdges,
    values: Float[np.ndarray, " N"],
    kept: Pruned,
    position: int,
    outputs: Int[np.ndarray, " O"],
) -> tuple[Behind, ...]:
    """What each residual error that was kept is made of, along the edges that were kept of it.

    ``values``: influence of all nodes. ``position``, ``outputs``: the outputs that the graph follows. Costs a backward
    pass of each target of such an edge.
    """
    layout = incoming.layout
    is_rest = (kept.nodes >= layout.components) & (kept.nodes < layout.components + len(layout.rest_site))
    nodes = kept.nodes[is_rest]
    if not len(nodes):
        return ()
    column = {int(node): k for k, node in enumerate(nodes)}
    edges = [(int(row), int(node)) for row, node in kept.edges if int(node) in column]
    targets = np.unique([row for row, _ in edges])
    of_row = np.concatenate([rows.probability, values[rows.node]])
    sizes = np.abs(rows.weights).sum(axis=1)
    factors = np.zeros((len(targets), len(nodes)))
    for row, node in edges:
        factors[np.searchsorted(targets, row), column[node]] = (
            of_row[row] * np.sign(rows.weights[row, node]) / sizes[row]
        )
    n_outputs = len(outputs)
    first = int(np.searchsorted(targets, n_outputs))
    of_outputs = outputs[targets[:first]], factors[:first]
    of_components = rows.node[targets[first:] - n_outputs], factors[first:]
    rests = nodes - layout.components
    found = incoming.behind(rests, position, of_outputs, of_components)
    return tuple(
        _largest(incoming, int(rest), parts.components, parts.delta) for rest, parts in zip(rests, found, strict=True)
    )


def _largest(incoming: Incoming, rest: int, parts: Float[np.ndarray, " C"], delta: float) -> Behind:
    site = incoming.sites.all[incoming.layout.rest_site[rest]].name
    position = int(incoming.layout.rest_position[rest])
    importance, a = (x[site][position] for x in (incoming.importances, incoming.activations))
    order = np.argsort(-np.abs(parts), kind="stable")[:LARGEST]
    order = order[parts[order] != 0]  # of those that fire it is 0
    contributors = tuple(
        Contributor(site, position, int(n), float(a[n]), float(importance[n]), float(parts[n])) for n in order
    )
    n_silent = int((~(importance > incoming.threshold)).sum())
    others = float(parts.sum(dtype=np.float64) - parts[order].sum(dtype=np.float64))
    return Behind(f"{site}:rest@{position}", delta, others, n_silent - len(order), contributors)
