"""Nodes of a graph as circuit-tracer writes them: identifiers, layers, names, and the columns they are drawn in."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph, Node
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.share.numbering import Numbering, pair
from param_decomp_lab.share.shared_run import rounded

LABEL_CHARACTERS = 300
COMPONENT, EMBEDDING, OUTPUT, REST = "cross layer transcoder", "embedding", "logit", "mlp reconstruction error"

Labels = Mapping[tuple[str, int], str]
"""Labels of components, by site and number."""


class Columns:
    """The prompt as a page draws it, a column for each token.

    A page calls an input by the token of its column. A toy has one position and several inputs: each of them gets a
    column, and all other nodes stand in one without a name behind them. circuit-tracer's page draws no graph whose
    nodes are all in the first column, so a prompt of one token gets a column without a name before it.
    """

    def __init__(self, graph: Graph) -> None:
        self._is_text = bool(graph.token_ids)
        numbers = [] if self._is_text else [node.number for node in graph.nodes if node.kind == "embedding"]
        self._inputs = {number: column for column, number in enumerate(numbers)}
        self._before = 1 if len(graph.tokens) == 1 else 0
        if self._is_text:
            self.tokens = [*[""] * self._before, *graph.tokens]
        else:
            self.tokens = [*(f"feature {number}" for number in numbers), *[""] * max(1, 2 - len(numbers))]

    def of(self, node: Node) -> int:
        if self._is_text:
            return max(node.position, 0) + self._before
        return self._inputs[node.number] if node.kind == "embedding" else len(self.tokens) - 1


def node_ids(graph: Graph, slug: str, numbering: Numbering) -> list[str]:
    """The id of each node. Raises UserError for a graph that is not of this run, or has two nodes that are the same."""
    columns = Columns(graph)
    for node in graph.nodes:
        if node.kind == "group":
            raise UserError(f"graph {slug} has groups for nodes; share the graph that they were made from")
        if node.kind != "biases" and not 0 <= node.position < len(graph.tokens):
            raise UserError(f"graph {slug} has a node at position {node.position}, where it has no token")
    ids = [node_id(node, columns, numbering) for node in graph.nodes]
    twice = [id for id, n in Counter(ids).items() if n > 1]
    if twice:
        raise UserError(f"graph {slug} has two nodes {twice[0]}; make it again with `pd graph`")
    return ids


def node_id(node: Node, columns: Columns, numbering: Numbering) -> str:
    column = columns.of(node)
    match node.kind:
        case "component":
            layer, feature = numbering.feature(node.site, node.number)
            return f"{layer}_{feature}_{column}"
        case "rest":
            return f"0_{numbering.site(node.site).layer}_{column}"
        case "biases":
            return f"0_0_{column}"
        case "embedding":
            return f"E_{node.number}_{column}"
        case "output":
            return f"{numbering.n_layers}_{node.number}_{column}"
        case "group":
            raise AssertionError("refused before")


def node_json(
    graph: Graph, node: Node, columns: Columns, numbering: Numbering, labels: Labels, influence: float | None
) -> dict[str, Any]:
    """A node without its ids and `is_target_logit`. Its activation is λ, as the values of its feature file are, so that
    the page finds its place in their histogram; a is kept in `param_decomp`."""
    layer, feature, kind = _place(node, columns, numbering)
    column = columns.of(node)
    component = node.kind == "component"
    found = {
        "feature": feature, "layer": layer, "ctx_idx": column, "feature_type": kind,
        "token_prob": rounded(probability(graph, node)), "run_idx": 0,
        "reverse_ctx_idx": len(columns.tokens) - 1 - column, "clerp": name(graph, node, labels),
        "influence": influence, "activation": rounded(node.importance) if component else None,
    }  # fmt: skip
    if component:
        found["param_decomp"] = {"site": node.site, "component": node.number, "a": rounded(node.value)}
    return found


def _place(node: Node, columns: Columns, numbering: Numbering) -> tuple[str, int, str]:
    """Layer, feature and type. Residual errors have negative numbers, one for each site: a page takes nodes of one
    number for the same thing."""
    match node.kind:
        case "component":
            layer, feature = numbering.feature(node.site, node.number)
            return str(layer), pair(layer, feature), COMPONENT
        case "rest":
            layer = numbering.site(node.site).layer
            return str(layer), -(layer + 1), REST
        case "biases":
            return "0", -1, REST
        case "embedding":
            return "E", columns.of(node), EMBEDDING
        case "output":
            return str(numbering.n_layers), node.number, OUTPUT
        case "group":
            raise AssertionError("refused before")


def probability(graph: Graph, node: Node) -> float:
    """The model's probability of an output; of a toy's, which has none, the weight with which it is followed."""
    return node.influence if node.kind == "output" and not graph.token_ids else node.probability


def name(graph: Graph, node: Node, labels: Labels) -> str:
    """What a page calls a node. Pages read the probability of an output from its name, and put names into tooltips as
    HTML, so nothing here can be read as a tag."""
    match node.kind:
        case "component":
            text = labels.get((node.site, node.number), "") or f"{node.site} {node.number}"
        case "rest":
            text = f"{node.site}, the rest"
        case "biases":
            text = "all biases"
        case "embedding":
            text = f'Emb: "{graph.tokens[node.position]}"' if graph.token_ids else f"feature {node.number}"
        case "output":
            output = _plain(str(graph.output_names.get(node.number, node.number))).replace("(p=", "( p=")
            return f'Output "{output}" (p={probability(graph, node):.3f})'
        case "group":
            raise AssertionError("refused before")
    return _plain(text)


def _plain(text: str) -> str:
    return re.sub("<(?=[A-Za-z/!?])", "‹", printable(text, LABEL_CHARACTERS))
