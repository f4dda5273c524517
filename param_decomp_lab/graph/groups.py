"""A graph in which components that act together are one node."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from param_decomp_lab.graph.graph import Edge, Graph, Node

GroupOf = Callable[[str, int], int | None]
"""The group of a component, by site and number; None where it has none (`harvest_files/groups.py:Groups.group_of`)."""


def merge_groups(graph: Graph, group_of: GroupOf) -> Graph:
    """Members of a group at the same position become one node, whose influence is the sum of theirs; a member that is
    alone there stays as it is.

    Edges that run together are added up, and those within a group are gone. Of a group's incoming edge, the share is
    the mean over its members, weighted by their influence. Weights are added as they are: those into a group are of
    several activations, each in units of its own.
    """
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n, node in enumerate(graph.nodes):
        if node.kind == "component":
            group = group_of(node.site, node.number)
            if group is not None:
                together[group, node.position].append(n)
    place: dict[int, int] = {}
    merged: list[tuple[Node, list[int]]] = []
    for (group, position), members in together.items():
        if len(members) > 1:
            nodes = [graph.nodes[n] for n in members]
            best = max(nodes, key=lambda node: node.influence)
            importance = max(node.importance for node in nodes)
            total = sum(node.influence for node in nodes)
            ids = tuple(node.id for node in nodes)
            merged.append((Node("group", best.site, position, group, 0.0, importance, total, members=ids), members))
    inside = {n for _, members in merged for n in members}
    kept = [([n], graph.nodes[n]) for n in range(len(graph.nodes)) if n not in inside]
    entries = kept + [(members, node) for node, members in merged]
    entries.sort(key=lambda entry: (entry[1].kind != "output", -entry[1].influence))
    for k, (members, _) in enumerate(entries):
        place.update(dict.fromkeys(members, k))
    return replace(graph, nodes=tuple(node for _, node in entries), edges=_added_up(graph, place, entries))


def _added_up(graph: Graph, place: dict[int, int], entries: list[tuple[list[int], Node]]) -> tuple[Edge, ...]:
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for edge in graph.edges:
        source, target = place[edge.source], place[edge.target]
        if source == target:
            continue
        members, node = entries[target]
        part = 1.0
        if len(members) > 1:
            part = graph.nodes[edge.target].influence / node.influence if node.influence > 0 else 1 / len(members)
        weight, share = sums.get((source, target), (0.0, 0.0))
        sums[source, target] = weight + edge.weight, share + part * edge.share
    return tuple(Edge(source, target, *values) for (source, target), values in sums.items())
