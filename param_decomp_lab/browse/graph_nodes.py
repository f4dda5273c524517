"""The nodes of a graph in words: names, places, and what a component does, in brief."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import address, brief, clean, shown_tokens
from param_decomp_lab.data.token_names import STORED_CHARACTERS
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Graph, Node
from param_decomp_lab.harvest.files import Example

NAMED_BY = 3
"""Tokens that name a component without a label."""
EXAMPLES = 3
AROUND = 6
"""Tokens before and after the one where it fires."""
CONTRIBUTORS = 10
TOKENS = 5
"""Tokens that a component raises, and that it lowers."""


@dataclass(frozen=True)
class Essentials:
    """What a component does, in brief. ``examples``: before, at and after the place where it fires; ``raises``,
    ``lowers``: tokens, by the logit lens of U, where its site writes to the residual stream."""

    density: float
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    raises: list[str] = field(default_factory=list)
    lowers: list[str] = field(default_factory=list)


def essentials(opened: Opened, site: str, number: int) -> Essentials | None:
    """None for a component that the harvest does not have, or where that is damaged: its own page says what is
    wrong."""
    if not _is_known(opened, site, number):
        return None
    harvest = opened.harvest
    try:
        weights = harvest.weights(site, number)
        return Essentials(
            float(harvest.component(site, number)["density"]),
            [_in_context(e) for e in harvest.examples(site, number, most=EXAMPLES)],
            harvest.names(weights["promoted"][:TOKENS]),
            harvest.names(weights["suppressed"][:TOKENS]),
        )
    except UserError:
        return None


def _in_context(example: Example) -> tuple[str, str, str]:
    if not example.of_text:
        return "", ", ".join(example.names), ""
    here = example.position - example.first
    if not 0 <= here < len(example.names):
        raise UserError(f"an example at position {example.position} has tokens from {example.first}")
    before = "".join(example.names[max(0, here - AROUND) : here])
    return before, example.names[here], "".join(example.names[here + 1 : here + 1 + AROUND])


@dataclass(frozen=True)
class BehindRow:
    """A part of a residual error. ``share``: of all parts. ``node``: the component, or None for the delta and for all
    other components together."""

    name: str
    share: float
    page: str = ""
    node: Node | None = None


def behind(opened: Opened, graph: Graph, node: Node) -> list[BehindRow] | None:
    """The parts of a residual error (E10), the largest first and the other components last; None where the graph does
    not have them."""
    try:
        found = graph.behind(node)
    except UserError:
        return None
    rows = [BehindRow("delta", found.share(found.delta))]
    for c in found.contributors[:CONTRIBUTORS]:
        component = Node("component", node.site, node.position, c.number, c.value, c.importance, 0.0)
        name = node_name(opened, graph, component)
        rows.append(BehindRow(name, found.share(c.part), page_of(opened, component), component))
    rows.sort(key=lambda row: -abs(row.share))
    if found.n_others:
        others = "1 other component" if found.n_others == 1 else f"{found.n_others:,} other components"
        rows.append(BehindRow(others, found.share(found.others)))
    return rows


def _is_known(opened: Opened, site: str, number: int) -> bool:
    return site in opened.harvest.sites and 0 <= number < opened.harvest.site(site).C


def node_names(opened: Opened, graph: Graph, nodes: Sequence[Node]) -> list[str]:
    """The `node_name` of each node. Found site by site, so that each site's components are read once."""
    in_order = sorted(range(len(nodes)), key=lambda k: nodes[k].site)
    found = {k: node_name(opened, graph, nodes[k]) for k in in_order}
    return [found[k] for k in range(len(nodes))]


def node_name(opened: Opened, graph: Graph, node: Node) -> str:
    """A component's label, or else the tokens that tell most about it; the token of an output or embedding."""
    match node.kind:
        case "component":
            label = opened.labels.of_site(node.site).get(node.number, "").strip()
            if label:
                return brief(label)
            tokens = _tokens(opened, node.site, node.number)
            return brief(" ".join(tokens)) if tokens else f"component {node.number}"
        case "rest":
            return "residual error"
        case "biases":
            return "all biases"
        case "group":
            return f"group {node.number}"
        case "output":
            return output_name(graph, node)
        case "embedding":
            return _token(graph, node) if graph.token_ids else f"feature {node.number}"


def _tokens(opened: Opened, site: str, number: int) -> list[str]:
    if not _is_known(opened, site, number):
        return []
    try:
        ids = opened.telling_tokens(site, number)
        return [name.strip() or name for name in shown_tokens(opened, list(ids))[:NAMED_BY]]
    except UserError:
        return []


def where(graph: Graph, node: Node) -> str:
    """The matrix and number, and the token: ``layers.3.mlp.down_proj 17 · ' a' at 4``."""
    what = {
        "component": f"{node.site} {node.number}", "rest": node.site, "output": "output", "embedding": "embedding",
        "group": f"{len(node.members)} components", "biases": "",
    }[node.kind]  # fmt: skip
    at = f"'{_token(graph, node)}' at {node.position}" if 0 <= node.position < len(graph.tokens) else ""
    return " · ".join(part for part in (clean(what, 300), at) if part)


def _token(graph: Graph, node: Node) -> str:
    inside = 0 <= node.position < len(graph.tokens)
    return clean(graph.tokens[node.position], STORED_CHARACTERS) if inside else ""


def output_name(graph: Graph, node: Node) -> str:
    return clean(graph.output_names[node.number], STORED_CHARACTERS)


def page_of(opened: Opened, node: Node) -> str:
    """The address of a component's or a group's own page; "" where there is none."""
    if node.kind == "group":
        return address(opened.run, opened.name, "groups", node.number)
    if node.kind != "component" or node.site not in opened.harvest.sites:
        return ""
    return address(opened.run, opened.name, "sites", node.site, node.number)


def subject(node: Node) -> str:
    """What the explanation of a node is about: nodes of one subject share it."""
    match node.kind:
        case "component":
            return f"{node.site}:{node.number}"
        case "group":
            return node.id
        case _:
            return node.kind


def first_of_subject(nodes: Sequence[Node]) -> list[int]:
    """By node, the first node of the same subject."""
    found: dict[str, int] = {}
    return [found.setdefault(subject(node), k) for k, node in enumerate(nodes)]
