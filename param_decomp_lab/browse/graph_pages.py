"""The pages of attribution graphs: which there are, and one of them, positions from left to right, layers upwards."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import NotThere, Pages, address, clean, unit
from param_decomp_lab.browse.text_page import PATIENCE_S, WAITING, Workers
from param_decomp_lab.browse.text_worker import LONGEST, GraphAnswer, GraphQuestion
from param_decomp_lab.data.token_names import STORED_CHARACTERS
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written
from param_decomp_lab.graph.graph import FOLDER, Edge, Graph, Node, merge_groups
from param_decomp_lab.graph.show import graph_file
from param_decomp_lab.harvest.files import Groups

LISTED = 100
"""Graphs in a list, the newest first."""
SERVED = 2000
"""Nodes of a page, those of largest influence."""
EDGES = 6000
"""Edges that a page has at hand, those of largest share; the list of one node has all of its."""
STEP = 15
"""Pixels from node to node within a cell."""
ACROSS = 4
"""Nodes side by side in a cell."""
LABEL = 190
"""Pixels at the left for the names of the rows."""
COLUMN_CHARACTERS = 12
"""Longest name of a token at the foot of its column."""
SHOWN = 60
"""Edges in a list to or from one node."""


@dataclass(frozen=True)
class Mark:
    """A node as it is drawn. ``number``: its place in the page's list of nodes."""

    number: int
    x: float
    y: float
    size: float
    kind: str
    href: str
    title: str


@dataclass(frozen=True)
class Drawing:
    """A graph as SVG. ``rows``: name and height of the middle; ``columns``: token, position and middle."""

    width: int
    height: int
    marks: list[Mark]
    rows: list[tuple[str, float]]
    columns: list[tuple[str, int, float]]
    lines: list[dict[str, Any]]


class GraphPages:
    """Renders the graphs of a run's folder, and of prompts that are typed."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def listing(self, opened: Opened) -> str:
        entries: list[dict[str, Any]] = []
        only = self._pages.only
        files = [path for path in _files(opened) if only is None or path.stem in only.graphs]
        for path in files[: LISTED if only is None else None]:
            try:
                entries.append({"name": path.stem, "wrong": "", **asdict(_brief(path, path.stat().st_mtime_ns))})
            except (UserError, OSError) as error:
                entries.append({"name": path.stem, "wrong": clean(error, 300)})
        return self._pages.render("graphs.html", opened=opened, entries=entries, waiting="", wrong="", prompt="",
                                  target="", optimize=False, unit=unit(opened))  # fmt: skip

    def kept(self, opened: Opened, name: str, chosen: str, merged: bool) -> str:
        """A graph from the run's folder. ``chosen``: the id of a node whose edges are drawn and listed; "" for none.
        ``merged``: with groups of `pd cluster` as nodes."""
        path = next((path for path in _files(opened) if path.stem == name), None)
        if path is None:
            raise NotThere(f"there is no graph {clean(name, 100)} of this run")

        def to(node: str, groups: bool) -> str:
            return _address(opened, name, node, groups)

        return self._graph(opened, Graph.load(path), chosen, merged, to, None)

    def of_prompt(self, opened: Opened, question: GraphQuestion, chosen: str, merged: bool) -> str:
        """The graph of a prompt, made now; the address has all that it is made from."""
        asked = {"prompt": question.prompt, "target": question.target, "optimize": "1" if question.optimize else ""}

        def to(node: str, groups: bool) -> str:
            return address(opened.run, opened.name, "graph", **asked, node=node, **_merging(groups))

        answer = self.ask(opened, question)
        if answer is None or answer.graph is None:
            waiting = WAITING if answer is None else ""
            wrong = "" if answer is None else clean(answer.wrong, 2000)
            return self._pages.render(
                "graphs.html", opened=opened, entries=[], waiting=waiting, wrong=wrong, prompt=clean(question.prompt),
                target=clean(question.target, 100), optimize=question.optimize, unit=unit(opened),
            )  # fmt: skip
        return self._graph(opened, answer.graph, chosen, merged, to, asked)

    def ask(self, opened: Opened, question: GraphQuestion) -> GraphAnswer | None:
        """The graph of a prompt; None while it is being made."""
        if len(question.prompt) > LONGEST:
            return GraphAnswer(wrong=f"a prompt may have {LONGEST:,} characters; this has {len(question.prompt):,}")
        return self._workers.of(opened).graph(question, PATIENCE_S)

    def keep(self, opened: Opened, question: GraphQuestion) -> str:
        """Writes the graph of a prompt into the run's folder; its address."""
        answer = self.ask(opened, question)
        if answer is None or answer.graph is None:
            raise UserError("there is no such graph to keep" if answer is None else answer.wrong)
        file = graph_file(opened.run_folder, answer.graph)
        try:
            answer.graph.save(file)
        except OSError as error:
            raise not_written(file, error, "look at the folder's permissions") from error
        return _address(opened, file.stem, "", groups=False)

    def _graph(
        self, opened: Opened, graph: Graph, chosen: str, merged: bool, address_of: Callable[[str, bool], str],
        asked: dict[str, str] | None,
    ) -> str:  # fmt: skip
        """``asked``: what a graph that is not kept was made from."""
        n_groups = 0
        with_groups = _with_groups(opened, graph)
        if with_groups is not None:
            n_groups = sum(node.kind == "group" for node in with_groups.nodes)
            graph = with_groups if merged else graph

        def to(node: str) -> str:
            return address_of(node, merged)

        served = _served(graph)
        numbers = {served_node: k for k, served_node in enumerate(served)}
        at = None
        if chosen:
            at = next((n for n, node in enumerate(graph.nodes) if node.id == chosen), None)
            if at is None:
                raise NotThere(f"the graph has no node {clean(chosen, 200)}")
        edges = [e for e in graph.edges if e.source in numbers and e.target in numbers]
        drawing = _draw(opened, graph, served, to, at, edges)
        edges.sort(key=lambda edge: -edge.share * _weight(graph, edge))
        data = {
            "nodes": [self._entry(opened, graph, graph.nodes[n]) for n in served],
            "edges": [
                [numbers[e.source], numbers[e.target], float(f"{e.weight:.3g}"), float(f"{e.share:.2g}")]
                for e in edges[:EDGES]
            ],
        }
        text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
        return self._pages.render(
            "graph.html", opened=opened, n_groups=n_groups, merged=merged, other_way=address_of("", not merged),
            graph=graph, drawing=drawing, asked=asked,
            lists=None if at is None else self._lists(opened, graph, at, to),
            data=Markup(text.replace("<", "\\u003c")), left_out=len(graph.nodes) - len(served),
            edges_left_out=max(0, len(edges) - EDGES), prompt=clean(graph.prompt, 2000), unit=unit(opened),
            outputs=[{"token": _output_name(graph, n), "node": n} for n in graph.outputs],
        )  # fmt: skip

    def _entry(self, opened: Opened, graph: Graph, node: Node) -> list[Any]:
        """What the script is told of a node: its name, its place, its own page, λ and a, influence, and its id."""
        values = [float(f"{x:.3g}") for x in (node.importance, node.value, node.influence)]
        return [_name(graph, node, _label(opened, node)), _place(graph, node), _page(opened, node), *values, node.id]

    def _lists(self, opened: Opened, graph: Graph, at: int, to: Callable[[str], str]) -> dict[str, Any]:
        node = graph.nodes[at]

        def row(other: Node, edge: Edge) -> dict[str, Any]:
            return {
                "name": _name(graph, other, _label(opened, other)), "place": _place(graph, other), "edge": edge,
                "href": to(other.id),
            }  # fmt: skip

        into, out = graph.into(node), graph.out_of(node)
        return {
            "node": node, "name": _name(graph, node, _label(opened, node)), "place": _place(graph, node),
            "page": _page(opened, node), "into": [row(*pair) for pair in into[:SHOWN]],
            "out": [row(*pair) for pair in out[:SHOWN]], "n_into": len(into), "n_out": len(out),
        }  # fmt: skip


@dataclass(frozen=True)
class Brief:
    """What the list says of a graph."""

    prompt: str
    outputs: list[str]
    nodes: int
    edges: int
    influence: float
    step: int


@lru_cache(maxsize=4 * LISTED)
def _brief(path: Path, changed: int) -> Brief:
    """Kept until the file is ``changed``: a graph takes a second to read, and its list is looked at often."""
    del changed
    graph = Graph.load(path)
    outputs = [_output_name(graph, node) for node in graph.outputs]
    sizes = len(graph.nodes), len(graph.edges)
    return Brief(clean(graph.prompt, 200), outputs, *sizes, graph.shares.influence, graph.step)


def _address(opened: Opened, name: str, node: str, groups: bool) -> str:
    return address(opened.run, opened.name, "graphs", name, node=node, **_merging(groups))


def _merging(groups: bool) -> dict[str, str]:
    """In an address: whether groups are nodes."""
    return {"groups": "1"} if groups else {}


def _with_groups(opened: Opened, graph: Graph) -> Graph | None:
    """The graph with groups as nodes; None where there are no groups that can be read, or none in the graph."""
    try:
        groups = opened.groups
        found = None if groups is None else merge_groups(graph, _group_of(opened, groups))
    except UserError:  # damaged groups are no reason not to show the graph
        return None
    return found if found is not None and any(node.kind == "group" for node in found.nodes) else None


def _group_of(opened: Opened, groups: Groups) -> Callable[[str, int], int | None]:
    """The harvest may lack sites that the graph has."""
    sites = opened.harvest.sites
    return lambda site, number: groups.group_of(site, number) if site in sites else None


def _files(opened: Opened) -> list[Path]:
    """Graphs of the harvest's run, the newest first."""
    try:
        found = [(path.stat().st_mtime, path) for path in (opened.run_folder / FOLDER).glob("*.json")]
    except OSError:
        return []
    return [path for _, path in sorted(found, key=lambda pair: (-pair[0], pair[1].name))]


def _served(graph: Graph) -> list[int]:
    order = sorted(range(len(graph.nodes)), key=lambda n: (graph.nodes[n].kind != "output", -graph.nodes[n].influence))
    return order[:SERVED]


def _weight(graph: Graph, edge: Edge) -> float:
    return graph.nodes[edge.target].influence


def _label(opened: Opened, node: Node) -> str:
    if node.kind != "component":
        return ""
    return clean(opened.labels.of_site(node.site).get(node.number, ""), 80)


def _name(graph: Graph, node: Node, label: str) -> str:
    match node.kind:
        case "component":
            return f"{node.site} {node.number}" + (f": {label}" if label else "")
        case "rest":
            return f"{node.site}, the rest"
        case "biases":
            return "all biases"
        case "group":
            return f"group {node.number}, {len(node.members)} components"
        case "output":
            return f"output '{_output_name(graph, node)}'"
        case "embedding":
            return "embedding" if graph.token_ids else f"feature {node.number}"


def _place(graph: Graph, node: Node) -> str:
    if not 0 <= node.position < len(graph.tokens):
        return ""
    return f"'{clean(graph.tokens[node.position], STORED_CHARACTERS)}' at {node.position}"


def _output_name(graph: Graph, node: Node) -> str:
    return clean(graph.output_names[node.number], STORED_CHARACTERS)


def _brief_name(token: str) -> str:
    name = clean(token, STORED_CHARACTERS)
    return name if len(name) <= COLUMN_CHARACTERS else f"{name[: COLUMN_CHARACTERS - 1]}…"


def _page(opened: Opened, node: Node) -> str:
    if node.kind == "group":
        return address(opened.run, opened.name, "groups", node.number)
    if node.kind != "component" or node.site not in opened.harvest.sites:
        return ""
    return address(opened.run, opened.name, "sites", node.site, node.number)


def _draw(
    opened: Opened, graph: Graph, served: list[int], to: Callable[[str], str], chosen: int | None, edges: list[Edge]
) -> Drawing:
    """Cells by row and position; a cell has as many lines of nodes as it needs."""
    order = {"embedding": 0, "biases": 0, "rest": 1, "component": 1, "group": 1, "output": 2}
    sites = {site: n for n, site in enumerate(opened.harvest.sites)}

    def row_of(node: Node) -> tuple[int, int, str]:
        return order[node.kind], sites.get(node.site, -1), node.site

    cells: dict[tuple[Any, int], list[int]] = defaultdict(list)
    for n in served:
        node = graph.nodes[n]
        cells[row_of(node), max(node.position, 0)].append(n)
    rows = sorted({row for row, _ in cells})
    used = range(len(graph.tokens))
    most = {position: max((len(c) for (_, p), c in cells.items() if p == position), default=0) for position in used}
    lines = {row: max(math.ceil(len(c) / ACROSS) for (r, _), c in cells.items() if r == row) for row in rows}
    columns, x = [], float(LABEL)
    start = {}
    for position in used:
        width = max(34, STEP * min(most[position], ACROSS) + 12)
        start[position] = x + 6
        columns.append((_brief_name(graph.tokens[position]), position, x + width / 2))
        x += width
    y, tops, names = 8.0, {}, []
    for row in reversed(rows):
        height = STEP * lines[row] + 10
        tops[row] = y + 5
        title = {0: "embeddings", 2: "outputs"}.get(row[0], row[2])
        names.append((title, y + height / 2))
        y += height
    largest = max((graph.nodes[n].influence for n in served), default=1.0) or 1.0
    marks, centre = [], {}
    numbers = {n: k for k, n in enumerate(served)}
    for (row, position), members in cells.items():
        for k, n in enumerate(members):
            node = graph.nodes[n]
            centre[n] = (
                round(start[position] + STEP * (k % ACROSS) + STEP / 2, 1),
                round(tops[row] + STEP * (k // ACROSS) + STEP / 2, 1),
            )
            size = round(2.5 + 4 * math.sqrt(node.influence / largest), 1)
            title = f"{_name(graph, node, _label(opened, node))} {_place(graph, node)}"
            href = to(node.id) + "#node"
            kind = node.kind + (" chosen" if n == chosen else "")
            marks.append(Mark(numbers[n], *centre[n], size, kind, href, title))
    own = [e for e in edges if chosen is not None and chosen in (e.source, e.target)]
    drawn = [
        {
            "x1": centre[e.source][0], "y1": centre[e.source][1], "x2": centre[e.target][0], "y2": centre[e.target][1],
            "sign": "up" if e.weight > 0 else "down", "width": round(0.6 + 5 * math.sqrt(e.share), 1),
        }
        for e in own
    ]  # fmt: skip
    return Drawing(int(x) + 10, int(y) + 44, sorted(marks, key=lambda m: m.number), names, columns, drawn)
