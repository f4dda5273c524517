"""An attribution graph as circuit-tracer and Neuronpedia read one: metadata, qParams, nodes and links.

Field names and identifiers are those of `circuit_tracer/frontend/graph_models.py`; docs/sharing.md has the table.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from param_decomp_lab.graph import Graph
from param_decomp_lab.harvest.files import Groups
from param_decomp_lab.share.nodes import Columns, Labels, node_ids, node_json, probability
from param_decomp_lab.share.numbering import Numbering
from param_decomp_lab.share.readers import Reader, reader_metadata, refuse_unshown
from param_decomp_lab.share.shared_run import rounded

PINNED = 30
"""Components that are pinned, those of largest influence: a page draws only pinned nodes in its smaller graph."""

HandGroups = Mapping[str, Sequence[str]]
"""Groups by hand: ids of nodes (`Node.id`) by name."""


@dataclass(frozen=True)
class About:
    """What a graph's metadata say of it. ``slug``, ``features``: names of the graph and of the folder of its feature
    files. ``creator``: a name; may be empty. ``made_ms``: when the graph was made, in ms since 1970."""

    slug: str
    features: str
    creator: str
    made_ms: int
    reader: Reader


def attribution_graph(
    graph: Graph,
    numbering: Numbering,
    about: About,
    labels: Labels,
    clusters: Groups | None = None,
    by_hand: HandGroups | None = None,
) -> dict[str, Any]:
    """The whole file, as JSON values. Supernodes: those ``by_hand``, otherwise what is together in ``clusters``. Raises
    UserError for a graph that the page cannot draw, that is not of this run, or that has two equal nodes."""
    ids = node_ids(graph, about.slug, numbering)
    refuse_unshown(graph, about.slug, about.reader)
    columns = Columns(graph)
    influences = _cumulative(graph)
    likeliest = max(graph.outputs, key=lambda node: probability(graph, node), default=None)
    supernodes = _by_hand(graph, ids, by_hand) if by_hand else _together(graph, ids, clusters)
    pinned = [id for id, node in zip(ids, graph.nodes, strict=True) if node.kind == "output"]
    pinned += [ids[n] for n in _largest(graph)] + [id for _, *members in supernodes for id in members]
    return {
        "metadata": _metadata(graph, columns, numbering, about),
        "qParams": {
            "pinnedIds": list(dict.fromkeys(pinned)), "supernodes": supernodes, "linkType": "both", "clickedId": "",
            "sg_pos": "",
        },
        "nodes": [
            {
                "node_id": id, "jsNodeId": id, "is_target_logit": node is likeliest,
                **node_json(graph, node, columns, numbering, labels, influence),
            }
            for id, node, influence in zip(ids, graph.nodes, influences, strict=True)
        ],
        "links": [
            {"source": ids[edge.source], "target": ids[edge.target], "weight": rounded(edge.weight)}
            for edge in graph.edges
        ],
    }  # fmt: skip


def _metadata(graph: Graph, columns: Columns, numbering: Numbering, about: About) -> dict[str, Any]:
    return {
        "slug": about.slug, **reader_metadata(about.reader, about.features), "prompt_tokens": columns.tokens,
        "prompt": graph.prompt, "title_prefix": "", "node_threshold": rounded(graph.shares.influence),
        "info": {
            "creator_name": about.creator, "creator_url": "", "source_urls": [], "transcoder_set": about.features,
            "generator": {"name": "param-decomp", "version": version("param-decomp"), "url": ""},
            "create_time_ms": about.made_ms,
        },
        "pruning_settings": {
            "node_threshold": rounded(graph.shares.influence), "edge_threshold": rounded(graph.shares.edges)
        },
        "param_decomp": {
            "run": graph.run, "step": graph.step, "threshold": graph.threshold, "firing": graph.firing,
            "followed": graph.followed, "numbering": numbering.to_json(),
        },
    }  # fmt: skip


def _cumulative(graph: Graph) -> list[float | None]:
    """circuit-tracer's ``influence``: the share of all influence that a node has together with those of larger one, so
    that a page can leave out what is above a threshold. None for outputs."""
    order = sorted(range(len(graph.nodes)), key=lambda n: -graph.nodes[n].influence)
    inner = [n for n in order if graph.nodes[n].kind != "output"]
    kept = sum(graph.nodes[n].influence for n in inner)
    found: list[float | None] = [None] * len(graph.nodes)
    running = 0.0
    for n in inner:
        running += graph.nodes[n].influence
        found[n] = rounded(min(1.0, running / kept) * graph.shares.influence) if kept > 0 else 0.0
    return found


def _largest(graph: Graph) -> list[int]:
    """Numbers of the components of largest influence."""
    components = [n for n, node in enumerate(graph.nodes) if node.kind == "component"]
    return sorted(components, key=lambda n: -graph.nodes[n].influence)[:PINNED]


def _together(graph: Graph, ids: Sequence[str], clusters: Groups | None) -> list[list[str]]:
    """Those components of largest influence that are in one cluster: its name, then their ids."""
    if clusters is None:
        return []
    found: dict[int, list[str]] = defaultdict(list)
    for n in _largest(graph):
        node = graph.nodes[n]
        group = clusters.group_of(node.site, node.number) if node.site in clusters.index.site_number else None
        if group is not None:
            found[group].append(ids[n])
    return [[f"group {group}", *members] for group, members in sorted(found.items()) if len(members) > 1]


def _by_hand(graph: Graph, ids: Sequence[str], groups: HandGroups) -> list[list[str]]:
    of_node = {node.id: id for node, id in zip(graph.nodes, ids, strict=True)}
    found = []
    for name, members in groups.items():
        here = [of_node[member] for member in members if member in of_node]
        if here:
            found.append([name, *here])
    return found
