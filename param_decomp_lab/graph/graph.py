"""An attribution graph as it is kept: nodes, edges, and what was left out."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.graph.behind import Behind, from_columns, to_columns
from param_decomp_lab.harvest.files.groups import Groups
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.cards import card
from param_decomp_lab.ui.numbers import number, percent

VERSION = 1
FOLDER = "graphs"
"""Subfolder of a run's folder."""
LARGEST = 64 << 20
"""Bytes of a file that is read."""

SHOWN = 5
"""Components that the printed form of a graph lists."""

CARD_NODES = 12
ON_CARD = ("component", "group")

GroupOf = Callable[[str, int], int | None]
"""The group of a component, by site and number; None where it has none (`Groups.group_of`)."""

NodeKind = Literal["component", "embedding", "rest", "biases", "output", "group"]


@dataclass(frozen=True)
class Node:
    """A node (E5). ``number``: of a component within its site; of an embedding, the token or feature; of an output, the
    token or feature. ``position``: in the prompt, -1 for all biases together. ``value``: the activation a, or an
    output's value (E3). ``importance``: λ, of components alone. ``influence``: E6; of an output, its probability
    among those chosen. ``probability``: of an output that is a token, the model's own.

    A group stands for several components at one position, ``members`` by their ids (`merge_groups`): its ``number``
    is that of the group, ``site`` that of its member of largest influence, ``importance`` the largest λ."""

    kind: NodeKind
    site: str
    position: int
    number: int
    value: float
    importance: float
    influence: float
    probability: float = 0.0
    members: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """``layers.3.mlp.down_proj:17@4``: component 17 at position 4."""
        match self.kind:
            case "component":
                return f"{self.site}:{self.number}@{self.position}"
            case "rest":
                return f"{self.site}:rest@{self.position}"
            case "biases":
                return "biases"
            case _:
                return f"{self.kind}:{self.number}@{self.position}"

    def __repr__(self) -> str:
        importance = f", λ {self.importance:.2f}" if self.kind in ("component", "group") else ""
        return printable(f"Node({self.id}, value {self.value:.3g}{importance}, influence {self.influence:.3g})")


@dataclass(frozen=True)
class Edge:
    """``weight``: E2. ``share``: its part in all that leads to the target, by absolute weight (A of E6)."""

    source: int
    target: int
    weight: float
    share: float


@dataclass(frozen=True)
class Shares:
    """What a graph covers. ``influence``: of all influence, that of the nodes kept. ``edges``: of the scores between
    kept nodes, those of the edges kept (E7). Where influence ends, adding up to 1: ``embeddings``, ``rests`` (and in
    them ``deltas``), ``biases``, ``not_followed`` (components whose incoming edges were not computed)."""

    influence: float
    edges: float
    embeddings: float
    rests: float
    deltas: float
    biases: float
    not_followed: float


@dataclass(frozen=True)
class ReadingErrors:
    """How far an output is from the clean one (O2), at importances, with the others at random, and under attack."""

    ci: float
    random: float
    attack: float


@dataclass(frozen=True)
class Optimized:
    """Importances that were optimised for the prompt (section 16). ``loss``: kl or logit. ``step``: that of the result;
    0 if nothing smaller than the run's own importances stood the readings. ``before``, ``after``: components that fire,
    with the errors of both."""

    loss: str
    steps: int
    step: int
    before: int
    after: int
    errors_before: ReadingErrors
    errors_after: ReadingErrors


@dataclass(frozen=True)
class Graph:
    """The attribution graph of a prompt, pruned.

    ``tokens``: of the prompt, as text, and ``token_ids``; a toy has one position, named by its active features, and no
    ids. ``output_names``: of the outputs, by number. ``firing``: components that fire in all; ``followed``: those whose
    incoming edges were computed. ``optimized``: where importances are not the run's own. ``rests``: what is behind the
    residual errors among the nodes (E10); empty in graphs of earlier versions.
    """

    run: str
    step: int
    prompt: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    threshold: float
    firing: int
    followed: int
    shares: Shares
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    output_names: dict[int, str]
    optimized: Optimized | None = None
    rests: tuple[Behind, ...] = ()

    @property
    def title(self) -> str:
        """The prompt and the outputs that it follows back: ``a text → ' word' 45 %``."""
        outputs = ", ".join(
            f"{self.output_names.get(node.number, str(node.number))!r}"
            + (f" {node.probability:.1%}" if node.probability else "")
            for node in self.outputs[:3]
        )
        more = f" and {len(self.outputs) - 3} more" if len(self.outputs) > 3 else ""
        return f"{self.prompt!r} → {outputs}{more}"

    def __repr__(self) -> str:
        lines = [
            f"Graph of {self.title}",
            f"  {len(self.components)} of {self.firing} components that fire, {len(self.nodes)} nodes, "
            f"{len(self.edges)} edges; {self.shares.influence:.0%} of the influence",
        ]
        for node in self.components[:SHOWN]:
            lines.append(f"  {node.id} {self._at(node)!r}  influence {node.influence:.3f}, λ {node.importance:.2f}")
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        shown = [node for node in sorted(self.nodes, key=lambda node: -node.influence) if node.kind in ON_CARD]
        by_position = [0.0] * len(self.tokens)
        for node in shown:
            if 0 <= node.position < len(by_position):
                by_position[node.position] += node.influence
        most = max([*by_position, 1e-30])
        tokens = [
            {"name": name, "influence": influence, "share": influence / most}
            for name, influence in zip(self.tokens, by_position, strict=True)
        ]
        outputs = [
            {
                "name": self.output_names.get(node.number, str(node.number)),
                "value": percent(node.probability) if self.token_ids else number(node.value),
            }
            for node in self.outputs
        ]
        nodes = [
            {
                "name": node.id.rpartition("@")[0], "at": self._at(node), "position": node.position,
                "influence": node.influence, "importance": node.importance, **self._strongest(node),
            }
            for node in shown[:CARD_NODES]
        ]  # fmt: skip
        return card(
            "graph", n_components=len(self.components), firing=self.firing, n_edges=len(self.edges), shares=self.shares,
            tokens=tokens, outputs=outputs, nodes=nodes, more=max(0, len(shown) - CARD_NODES),
        )  # fmt: skip

    def _at(self, node: Node) -> str:
        """The token where a node is; empty if it is nowhere, or the graph is damaged."""
        return self.tokens[node.position] if 0 <= node.position < len(self.tokens) else ""

    def _strongest(self, node: Node) -> dict[str, Any]:
        """What a node leads to most, and whether that is an output."""
        found = self.out_of(node)
        target = found[0][0] if found else None
        if target is None or target.kind != "output":
            return {"to": "" if target is None else target.id, "output": False}
        return {"to": self.output_names.get(target.number, str(target.number)), "output": True}

    @property
    def outputs(self) -> tuple[Node, ...]:
        """The nodes that the graph follows back."""
        return tuple(node for node in self.nodes if node.kind == "output")

    @property
    def components(self) -> tuple[Node, ...]:
        """The components, of largest influence first."""
        found = (node for node in self.nodes if node.kind == "component")
        return tuple(sorted(found, key=lambda node: -node.influence))

    @property
    def replacement_score(self) -> float:
        """The part of the influence ending in embeddings or residual errors that ends in embeddings (E9)."""
        ends = self.shares.embeddings + self.shares.rests
        return self.shares.embeddings / ends if ends > 0 else 0.0

    @property
    def completeness_score(self) -> float:
        """Share of what leads to a node that is not a residual error, on average over nodes, weighted by influence
        (E9)."""
        kept = sum(node.influence for node in self.nodes if node.kind != "output")
        total = kept / self.shares.influence if self.shares.influence > 0 else 0.0
        return max(0.0, 1 - self.shares.rests / (1 + total))

    def node(self, id: str) -> Node:
        """The node of this id. Raises UserError if the graph has none."""
        for node in self.nodes:
            if node.id == id:
                return node
        raise UserError(f"the graph has no node {id}; it has those such as {self.nodes[0].id}")

    def into(self, node: Node | str) -> list[tuple[Node, Edge]]:
        """What leads to a node, the largest weight first."""
        number = self._number(node)
        found = [(self.nodes[edge.source], edge) for edge in self.edges if edge.target == number]
        return sorted(found, key=lambda pair: -abs(pair[1].weight))

    def out_of(self, node: Node | str) -> list[tuple[Node, Edge]]:
        """What a node leads to, the largest weight first."""
        number = self._number(node)
        found = [(self.nodes[edge.target], edge) for edge in self.edges if edge.source == number]
        return sorted(found, key=lambda pair: -abs(pair[1].weight))

    def effect(self, edge: Edge) -> float:
        """The weight with the sign of what the edge does here: positive where it strengthens a component, whose
        activation may be negative, or raises an output."""
        target = self.nodes[edge.target]
        return -edge.weight if target.kind == "component" and target.value < 0 else edge.weight

    def behind(self, node: Node | str) -> Behind:
        """What a residual error is made of: its delta, and the components of largest part that do not fire there
        (E10). Raises UserError for another node, and for a graph of an earlier version, which does not have it."""
        own = self.node(node) if isinstance(node, str) else node
        if own.kind != "rest":
            raise UserError(f"{own.id} is not a residual error; `graph.into` has what leads to it")
        found = next((entry for entry in self.rests if entry.node == own.id), None)
        if found is None:
            raise UserError(f"the graph was made without what is behind {own.id}; make it again with `pd graph`")
        return found

    def grouped(self, groups: Groups) -> "Graph":
        """The same graph with the members of a group at one position as one node (`merge_groups`)."""
        return merge_groups(self, groups.group_of)

    def _number(self, node: Node | str) -> int:
        return self.nodes.index(self.node(node) if isinstance(node, str) else node)

    def save(self, path: str | Path) -> None:
        """Writes the graph as JSON; a reader finds the old file or the new one, never a part."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":")) + "\n")

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it. Nodes and edges are columns: names once, then rows."""
        tables = ("nodes", "edges", "shares", "optimized", "rests")
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tables}
        nodes = _columns(Node, self.nodes)
        if not any(nodes["members"]):
            del nodes["members"]
        return {
            "version": VERSION,
            **head,
            "shares": asdict(self.shares),
            "optimized": None if self.optimized is None else asdict(self.optimized),
            "nodes": nodes,
            "edges": _columns(Edge, self.edges),
            **({"rests": to_columns(self.rests)} if self.rests else {}),
        }

    @classmethod
    def load(cls, path: str | Path) -> "Graph":
        """Reads what `save` wrote. Raises UserError for anything else."""
        path = Path(path)
        return cls.from_json(read_json(path, "a graph", dict, LARGEST), str(path))

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> "Graph":
        """From `to_json`'s result. Raises UserError, which names ``where``."""
        version = raw.get("version")
        if version != VERSION:
            raise UserError(f"{where} is not a graph of version {VERSION}, which this code reads")
        try:
            tables = {name: list(_rows(raw[name])) for name in ("nodes", "edges")}
            if "rests" in raw:
                tables["rests"] = from_columns(raw["rests"], _places_of_rests(tables["nodes"]))
            graph = TypeAdapter(cls).validate_python({**raw, **tables})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{where} is not a graph that `pd graph` wrote: {error}") from error
        n = len(graph.nodes)
        if not all(0 <= end < n for edge in graph.edges for end in (edge.source, edge.target)):
            raise UserError(f"{where} is not a graph that `pd graph` wrote: an edge leads to no node")
        if not all(-1 <= node.position < max(1, len(graph.tokens)) for node in graph.nodes):
            raise UserError(f"{where} is not a graph that `pd graph` wrote: a node stands at no token")
        return graph


def _columns(kind: Any, entries: tuple[Any, ...]) -> dict[str, list[Any]]:
    def plain(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {f.name: [plain(getattr(entry, f.name)) for entry in entries] for f in fields(kind)}


def _rows(columns: Any) -> Iterator[dict[str, Any]]:
    names = list(columns)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _places_of_rests(nodes: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Site and position of the residual errors, by id."""
    places = [(node["site"], node["position"]) for node in nodes if node["kind"] == "rest"]
    return {f"{site}:rest@{position}": (site, position) for site, position in places}


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
