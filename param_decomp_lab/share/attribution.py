"""An attribution graph as circuit-tracer and Neuronpedia write one: metadata, qParams, nodes and links, version 1.

Field names and identifiers are those of `circuit_tracer/frontend/graph_models.py`; docs/sharing.md has the table.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph, Node
from param_decomp_lab.harvest_files import Groups
from param_decomp_lab.share.numbering import Numbering, pair
from param_decomp_lab.share.shared_run import rounded
from param_decomp_lab.untrusted.printable import printable

SCHEMA_VERSION = 1
PINNED = 30
"""Components that are pinned, those of largest influence: a page draws only pinned nodes in its smaller graph."""
LABEL_CHARACTERS = 300
COMPONENT, EMBEDDING, OUTPUT, REST = "cross layer transcoder", "embedding", "logit", "mlp reconstruction error"

Labels = Mapping[tuple[str, int], str]
"""Of components, by site and number."""
HandGroups = Mapping[str, Sequence[str]]
"""Groups by hand: ids of nodes (`Node.id`) by name."""


@dataclass(frozen=True)
class About:
    """What a graph's metadata say of it. ``slug``, ``scan``: names of the graph and of the set of feature files.
    ``creator``: a name; may be empty. ``made_ms``: when the graph was made, in ms since 1970. ``features_url``: where
    the feature files are, for Neuronpedia."""

    slug: str
    scan: str
    creator: str
    made_ms: int
    features_url: str


def attribution_graph(
    graph: Graph,
    numbering: Numbering,
    about: About,
    labels: Labels,
    groups: Groups | None = None,
    by_hand: HandGroups | None = None,
) -> dict[str, Any]:
    """The whole file, as JSON values. ``groups``: supernodes, unless there are some ``by_hand``. Raises UserError for a
    graph that is not of this run, or has two nodes that are the same."""
    for node in graph.nodes:
        if node.kind == "group":
            raise UserError(f"graph {about.slug} has groups for nodes; share the graph that they were made from")
        if node.kind != "biases" and not 0 <= node.position < len(graph.tokens):
            raise UserError(f"graph {about.slug} has a node at position {node.position}, where it has no token")
    ids = [_node_id(graph, node, numbering) for node in graph.nodes]
    twice = [id for id, n in Counter(ids).items() if n > 1]
    if twice:
        raise UserError(f"graph {about.slug} has two nodes {twice[0]}; make it again with `pd graph`")
    influences = _cumulative(graph)
    likeliest = max(graph.outputs, key=lambda node: node.probability, default=None)
    supernodes = _by_hand(graph, ids, by_hand) if by_hand else _together(graph, ids, groups)
    pinned = [id for id, node in zip(ids, graph.nodes, strict=True) if node.kind == "output"]
    pinned += [ids[n] for n in _largest(graph)] + [id for _, *members in supernodes for id in members]
    return {
        "metadata": _metadata(graph, numbering, about),
        "qParams": {
            "pinnedIds": list(dict.fromkeys(pinned)), "supernodes": supernodes, "linkType": "both", "clickedId": "",
            "sg_pos": "",
        },
        "nodes": [
            {
                "node_id": id, **_place(graph, node, numbering), "ctx_idx": max(node.position, 0),
                "token_prob": rounded(node.probability), "is_target_logit": node is likeliest, "run_idx": 0,
                "reverse_ctx_idx": _from_end(graph, node), "clerp": _clerp(graph, node, labels),
                "influence": influence, "activation": rounded(node.value) if node.kind == "component" else None,
            }
            for id, node, influence in zip(ids, graph.nodes, influences, strict=True)
        ],
        "links": [
            {"source": ids[edge.source], "target": ids[edge.target], "weight": rounded(edge.weight)}
            for edge in graph.edges
        ],
    }  # fmt: skip


def _metadata(graph: Graph, numbering: Numbering, about: About) -> dict[str, Any]:
    return {
        "slug": about.slug, "scan": about.scan, "transcoder_list": [], "prompt_tokens": list(graph.tokens),
        "prompt": graph.prompt, "title_prefix": "", "node_threshold": rounded(graph.shares.influence),
        "schema_version": SCHEMA_VERSION,
        "info": {
            "creator_name": about.creator, "creator_url": "", "source_urls": [], "transcoder_set": about.scan,
            "generator": {"name": "param-decomp", "version": version("param-decomp"), "url": ""},
            "create_time_ms": about.made_ms,
        },
        "feature_details": {"feature_json_base_url": about.features_url, "neuronpedia_source_set": ""},
        "pruning_settings": {
            "node_threshold": rounded(graph.shares.influence), "edge_threshold": rounded(graph.shares.edges)
        },
        "param_decomp": {
            "run": graph.run, "step": graph.step, "threshold": graph.threshold, "firing": graph.firing,
            "followed": graph.followed, "numbering": numbering.to_json(),
        },
    }  # fmt: skip


def _node_id(graph: Graph, node: Node, numbering: Numbering) -> str:
    match node.kind:
        case "component":
            layer, feature = numbering.feature(node.site, node.number)
            return f"{layer}_{feature}_{node.position}"
        case "rest":
            site = numbering.site(node.site)
            return f"R{site.place}_{site.layer}_{node.position}"
        case "biases":
            return "B_0_0"
        case "embedding":
            return f"E_{node.number}_{node.position}"
        case "output":
            return f"{numbering.n_layers + 1}_{node.number}_{node.position}"
        case "group":
            raise AssertionError("refused before")


def _place(graph: Graph, node: Node, numbering: Numbering) -> dict[str, Any]:
    """Layer, feature and type, and the id that does not depend on how many tokens come before."""
    end = _from_end(graph, node)
    match node.kind:
        case "component":
            layer, feature = numbering.feature(node.site, node.number)
            found = str(layer), pair(layer, feature), COMPONENT, f"{layer}_{feature}-{end}"
        case "rest":
            site = numbering.site(node.site)
            found = str(site.layer), -1, REST, f"R{site.place}_{site.layer}-{end}"
        case "biases":
            found = "0", -1, REST, "B_0-0"
        case "embedding":
            found = "E", node.position if graph.token_ids else node.number, EMBEDDING, f"E_{node.number}-{end}"
        case "output":
            found = str(numbering.n_layers + 1), node.number, OUTPUT, f"L_{node.number}-{end}"
        case "group":
            raise AssertionError("refused before")
    return dict(zip(("layer", "feature", "feature_type", "jsNodeId"), found, strict=True))


def _from_end(graph: Graph, node: Node) -> int:
    return 0 if node.kind == "biases" else len(graph.tokens) - 1 - node.position


def _clerp(graph: Graph, node: Node, labels: Labels) -> str:
    match node.kind:
        case "component":
            label = labels.get((node.site, node.number), "")
            text = label or f"{node.site} {node.number}"
        case "rest":
            text = f"{node.site}, the rest"
        case "biases":
            text = "all biases"
        case "embedding":
            text = f'Emb: "{graph.tokens[node.position]}"' if graph.token_ids else f"feature {node.number}"
        case "output":
            likely = f" (p={node.probability:.3f})" if graph.token_ids else ""
            text = f'Output "{graph.output_names.get(node.number, node.number)}"{likely}'
        case "group":
            raise AssertionError("refused before")
    return printable(text, LABEL_CHARACTERS)


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
        found[n] = rounded(running / kept * graph.shares.influence) if kept > 0 else 0.0
    return found


def _largest(graph: Graph) -> list[int]:
    """Numbers of the components of largest influence."""
    components = [n for n, node in enumerate(graph.nodes) if node.kind == "component"]
    return sorted(components, key=lambda n: -graph.nodes[n].influence)[:PINNED]


def _together(graph: Graph, ids: Sequence[str], groups: Groups | None) -> list[list[str]]:
    """Of the components of largest influence, those that are in one group: its name, then their ids."""
    if groups is None:
        return []
    found: dict[int, list[str]] = defaultdict(list)
    for n in _largest(graph):
        node = graph.nodes[n]
        group = groups.group_of(node.site, node.number) if node.site in groups.harvest.sites else None
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
