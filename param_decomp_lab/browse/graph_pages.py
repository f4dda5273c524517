"""The pages of attribution graphs: which there are, and one of them, positions from left to right, layers upwards."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.graph_drawing import Shown, draw_graph
from param_decomp_lab.browse.graph_nodes import (
    behind,
    essentials,
    first_of_subject,
    node_names,
    output_name,
    page_of,
    where,
)
from param_decomp_lab.browse.pages import NotThere, Pages, address, as_asked, clean, unit, unseen
from param_decomp_lab.browse.text_page import PATIENCE_S, WAITING, Workers
from param_decomp_lab.browse.text_worker import LONGEST, GraphAnswer, GraphQuestion
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written
from param_decomp_lab.graph.graph import FOLDER, Edge, Graph, Node, merge_groups
from param_decomp_lab.graph.show import graph_file
from param_decomp_lab.harvest.files import Groups
from param_decomp_lab.schema.site_names import short_sites

LISTED = 100
"""Graphs in a list, the newest first."""
SERVED = 2000
"""Nodes of a page, those of largest influence."""
EDGES = 6000
"""Edges that a page has at hand, those of largest score (E7). Without a script, the list of one node has all of its."""
DRAWN = 40
"""Edges that are drawn at first, unless the address says otherwise: more make a tangle of a graph of usual size."""
SHOWN = 60
"""Edges in a list to or from one node."""
BEHIND = 40
"""Residual errors in the list with what is behind them, those of largest influence; a chosen node has it always."""
EXPLAINED = 80
"""Components with examples in the list, those of largest influence; a chosen node has them always."""


@dataclass(frozen=True)
class View:
    """What an address asks of a graph. ``chosen``: the id of a node whose edges are drawn and listed; "" for none.
    ``merged``: with groups of `pd cluster` as nodes. ``edges``: how many are drawn while no node is chosen."""

    chosen: str = ""
    merged: bool = False
    edges: int = DRAWN


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
        return self._pages.render(
            "graphs.html", opened=opened, entries=entries, waiting="", wrong="", prompt="", target="", optimize=False,
            unit=unit(opened), unseen={}, unseen_target={},
        )  # fmt: skip

    def kept(self, opened: Opened, name: str, view: View) -> str:
        """A graph from the run's folder."""
        path = next((path for path in _files(opened) if path.stem == name), None)
        if path is None:
            raise NotThere(f"there is no graph {clean(name, 100)} of this run")
        return self._graph(opened, Graph.load(path), view, None)

    def of_prompt(self, opened: Opened, question: GraphQuestion, view: View) -> str:
        """The graph of a prompt, made now; the address has all that it is made from."""
        answer = self.ask(opened, question)
        if answer is None or answer.graph is None:
            waiting = WAITING if answer is None else ""
            wrong = "" if answer is None else clean(answer.wrong, 2000)
            return self._pages.render(
                "graphs.html", opened=opened, entries=[], waiting=waiting, wrong=wrong,
                prompt=as_asked(question.prompt[:LONGEST]), target=as_asked(question.target[:100]),
                optimize=question.optimize, unit=unit(opened),
                unseen=unseen(question.prompt[:LONGEST]), unseen_target=unseen(question.target[:100]),
            )  # fmt: skip
        asked = {"prompt": question.prompt, "target": question.target, "optimize": "1" if question.optimize else ""}
        return self._graph(opened, answer.graph, view, asked)

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
        return address(opened.run, opened.name, "graphs", file.stem)

    def _graph(self, opened: Opened, graph: Graph, view: View, asked: dict[str, str] | None) -> str:
        """``asked``: what a graph that is not kept was made from."""
        n_groups = 0
        with_groups = _with_groups(opened, graph)
        if with_groups is not None:
            n_groups = sum(node.kind == "group" for node in with_groups.nodes)
            graph = with_groups if view.merged else graph

        def link(**changes: object) -> str:
            """To this page with another choice; relative, so that it is short."""
            kept = {**(asked or {}), "groups": "1" if view.merged else ""} | changes
            return "?" + urlencode({name: value for name, value in kept.items() if value not in ("", None)})

        served = _served(graph)
        numbers = {served_node: k for k, served_node in enumerate(served)}
        at = None
        if view.chosen:
            at = next((n for n, node in enumerate(graph.nodes) if node.id == view.chosen), None)
            if at is None:
                raise NotThere(f"the graph has no node {clean(view.chosen, 200)}")
        edges = [e for e in graph.edges if e.source in numbers and e.target in numbers]
        edges.sort(key=lambda edge: -_edge_score(graph, edge))
        total = sum(_edge_score(graph, edge) for edge in edges)
        own = [(e, math.sqrt(max(0.0, e.share))) for e in edges if at is not None and at in (e.source, e.target)]
        del edges[EDGES:]
        entries = self._entries(opened, graph, served, link, view.chosen)
        scores = [_edge_score(graph, edge) for edge in edges]
        drawn = min(view.edges, len(edges))
        short = short_sites(sorted({graph.nodes[n].site for n in served if graph.nodes[n].kind == "component"}))
        drawing = draw_graph(
            graph, served, {n: _shown(graph.nodes[n], entries[k], short) for k, n in enumerate(served)},
            list(opened.harvest.sites), at, own if at is not None else _strongest(edges, scores, drawn),
        )  # fmt: skip
        data = {
            "nodes": [_entry(graph.nodes[n]) for n in served],
            "edges": [
                [numbers[e.source], numbers[e.target], float(f"{e.weight:.3g}"), float(f"{e.share:.2g}")] for e in edges
            ],
            "drawn": drawn,
        }
        text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
        between = sum(e.source in numbers and e.target in numbers for e in graph.edges)
        return self._pages.render(
            "graph.html", opened=opened, n_groups=n_groups, merged=view.merged,
            other_way=link(groups="" if view.merged else "1"), link=link,
            graph=graph, drawing=drawing, asked=asked, entries=entries, drawn=drawn, n_edges=len(edges),
            drawn_share=sum(scores[:drawn]) / total if total else 0.0,
            lists=None if at is None else self._lists(opened, graph, at, link),
            data=Markup(text.replace("<", "\\u003c")), left_out=len(graph.nodes) - len(served),
            edges_left_out=between - len(edges), prompt=clean(graph.prompt, 2000), unit=unit(opened),
            sent=as_asked(graph.prompt[: LONGEST + 1]),  # one that is too long is refused, not run in part
            unseen=unseen(graph.prompt[:LONGEST]),
            outputs=[
                {"token": output_name(graph, n), "node": n, "sum": sum(e.weight for _, e in graph.into(n))}
                for n in graph.outputs
            ],
        )  # fmt: skip

    def _entries(
        self, opened: Opened, graph: Graph, served: Sequence[int], link: Callable[..., str], chosen: str
    ) -> list[dict[str, Any]]:
        """The list of nodes. What a component does is explained once, at its node of largest influence."""
        nodes = [graph.nodes[n] for n in served]
        first, names = first_of_subject(nodes), node_names(opened, graph, nodes)
        entries: list[dict[str, Any]] = []
        explained = opened_up = 0
        with_parts = {entry.node for entry in graph.rests} if self._pages.only is None else set()
        for k, node in enumerate(nodes):
            is_first = first[k] == k
            entry = self._node(opened, graph, node, names[k], is_first, is_first and explained < EXPLAINED)
            explained += entry["essentials"] is not None
            entry["like"] = first[k] if not is_first and node.kind == "component" else None
            entry["href"] = f"#i{k}" if self._pages.only is not None else f"{link(node=node.id)}#node"
            if node.kind == "rest" and (opened_up < BEHIND or node.id == chosen):
                entry["behind"] = behind(opened, graph, node)
                opened_up += 1
            else:
                entry["parts"] = node.id in with_parts
            entries.append(entry)
        return entries

    def _node(
        self, opened: Opened, graph: Graph, node: Node, name: str, explain: bool, examples: bool
    ) -> dict[str, Any]:
        """``explain``: whether the entry says what the node is; ``examples``: whether it has examples."""
        return {
            "node": node, "name": name, "where": where(graph, node), "explain": explain,
            "page": page_of(opened, node) if explain else "",
            "essentials": essentials(opened, node.site, node.number) if examples and node.kind == "component" else None,
            "behind": None, "parts": False,
        }  # fmt: skip

    def _lists(self, opened: Opened, graph: Graph, at: int, link: Callable[..., str]) -> dict[str, Any]:
        node = graph.nodes[at]

        def rows(pairs: list[tuple[Node, Edge]]) -> list[dict[str, Any]]:
            names = node_names(opened, graph, [other for other, _ in pairs])
            return [
                {
                    "name": name,
                    "where": where(graph, other),
                    "edge": edge,
                    "href": link(node=other.id),
                    "effect": graph.effect(edge),
                    "does": _does(graph, edge),
                }
                for name, (other, edge) in zip(names, pairs, strict=True)
            ]

        into, out = graph.into(node), graph.out_of(node)
        (name,) = node_names(opened, graph, [node])
        of_rest = {"behind": behind(opened, graph, node)} if node.kind == "rest" else {}
        return self._node(opened, graph, node, name, explain=True, examples=True) | {
            "into": rows(into[:SHOWN]), "out": rows(out[:SHOWN]), "n_into": len(into), "n_out": len(out), **of_rest,
        }  # fmt: skip


def _does(graph: Graph, edge: Edge) -> str:
    """In a word; "" into a group, whose members' activations may have either sign."""
    target = graph.nodes[edge.target].kind
    words = {"component": ("strengthens", "weakens"), "output": ("raises", "lowers")}.get(target, ("", ""))
    return words[graph.effect(edge) <= 0]


def _shown(node: Node, entry: dict[str, Any], short: Mapping[str, str]) -> Shown:
    # The token of an embedding stands at the foot of its column.
    name = {"embedding": "", "rest": "error", "biases": "biases"}.get(node.kind, entry["name"])
    if node.kind == "component":
        name = f"{clean(short[node.site], 40)}:{node.number} {name}"
    return Shown(name, f"{entry['name']} · {entry['where']}", entry["href"])


def _entry(node: Node) -> list[Any]:
    """What the script is told of a node: λ and a, influence, and its id."""
    return [*(float(f"{x:.3g}") for x in (node.importance, node.value, node.influence)), node.id]


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
    outputs = [output_name(graph, node) for node in graph.outputs]
    sizes = len(graph.nodes), len(graph.edges)
    return Brief(clean(graph.prompt, 200), outputs, *sizes, graph.shares.influence, graph.step)


def _with_groups(opened: Opened, graph: Graph) -> Graph | None:
    """The graph with groups as nodes; None where there are no groups that can be read, or none in the graph."""
    try:
        groups = opened.groups
        found = None if groups is None else merge_groups(graph, _group_of(opened, groups))
    except UserError:  # a graph is shown without damaged groups
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


def _edge_score(graph: Graph, edge: Edge) -> float:
    """E7."""
    return graph.nodes[edge.target].influence * edge.share


def _strongest(edges: Sequence[Edge], scores: Sequence[float], most: int) -> list[tuple[Edge, float]]:
    """The first ``most``, with their strengths, relative to the largest. ``edges``: the largest score first."""
    largest = max(scores[:1], default=0.0) or 1.0
    return [(edge, math.sqrt(score / largest)) for edge, score in zip(edges[:most], scores, strict=False)]
