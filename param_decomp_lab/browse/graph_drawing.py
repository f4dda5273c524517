"""A graph as a picture: where nodes, their names and edges lie, positions from left to right, layers upwards."""

import math
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from param_decomp_lab.data.token_names import STORED_CHARACTERS
from param_decomp_lab.graph.graph import Edge, Graph, Node
from param_decomp_lab.ui.cards import clean

LINE = 15
"""Pixels from one line of nodes to the next, and from node to node where they have no names."""
CHARACTER = 6.1
"""Pixels of a character of a name, in a monospace font of 10 pixels."""
NAME_CHARACTERS = 16
SLOT = 16 + round(CHARACTER * NAME_CHARACTERS)
"""Pixels of a node with its name beside it."""
NAMED_LINES = 4
"""Lines of a cell that have names; nodes of smaller influence are packed below, without."""
NAMED_COLUMNS = 24
"""Positions at which nodes are named, those of largest influence; a long prompt would become too wide."""
ACROSS = 4
"""Nodes side by side in a cell without names."""
NARROW = 40
"""Pixels of a position at least."""
TITLE = 15
"""Pixels of the line with a row's name."""
FILLED = 880
"""Pixels that a narrower picture is spread to, about what its frame has beside the list."""
LONG = 1000
"""From this width on, a row's name stands at both ends of its line."""


@dataclass(frozen=True)
class Shown:
    """How a node is drawn, wherever it stands: the name beside it ("" for none), the text under the pointer, and where
    a click leads."""

    name: str
    title: str
    href: str


@dataclass(frozen=True)
class DrawnNode:
    """A node as it is drawn. ``number``: its place in the page's list of nodes."""

    number: int
    x: float
    y: float
    size: float
    kind: str
    name: str
    title: str
    href: str


@dataclass(frozen=True)
class DrawnEdge:
    """An edge as it is drawn: the path, slightly bent, so that edges between nodes in one column lie apart."""

    path: str
    sign: str
    width: float
    opacity: float


@dataclass(frozen=True)
class Drawing:
    """A graph as SVG. ``rows``: name and height of the title's line; ``columns``: token, cut to the column, the whole
    one, position, and left end; ``wide``: whether rows are named at both ends."""

    width: int
    height: int
    marks: list[DrawnNode]
    rows: list[tuple[str, float]]
    columns: list[tuple[str, str, int, float]]
    lines: list[DrawnEdge]
    wide: bool


def fit(text: str, columns: int) -> str:
    """``text``, or its beginning and an ellipsis, so that a monospace font needs at most ``columns``."""
    widths = [_columns(character) for character in text]
    if sum(widths) <= columns:
        return text
    taken, kept = 1, 0
    while taken + widths[kept] <= columns:
        taken += widths[kept]
        kept += 1
    return f"{text[:kept]}…"


def _columns(character: str) -> int:
    # Scripts without a monospace font, and emoji, are taken as wide.
    return 1 if unicodedata.east_asian_width(character) in ("Na", "H") or character in "…·’“”\u00a0" else 2


def draw_graph(
    graph: Graph,
    served: Sequence[int],
    shown: Mapping[int, Shown],
    site_order: Sequence[str],
    chosen: int | None,
    edges: Sequence[tuple[Edge, float]],
) -> Drawing:
    """``served``: numbers of the nodes to draw, those of largest influence first; ``shown``: what is drawn of each.
    ``edges``: those to draw, with their strength from 0 to 1."""
    cells = _cells(graph, served, site_order)
    columns, start, across, width = _columns_of(graph, cells, shown)
    rows = sorted({row for row, _ in cells}, reverse=True)
    numbers = {n: k for k, n in enumerate(served)}
    largest = max((graph.nodes[n].influence for n in served), default=1.0) or 1.0
    y, titles, marks = 6.0, [], []
    for row in rows:
        title = {0: "embeddings", 2: "outputs"}.get(row[0], row[2])
        titles.append((title, y + TITLE / 2))
        y += TITLE
        lines = 0
        for (_, position), members in ((key, m) for key, m in cells.items() if key[0] == row):
            places, used = _places(members, shown, across[position])
            lines = max(lines, used)
            for n, column, line, name in places:
                node = graph.nodes[n]
                marks.append(
                    DrawnNode(
                        numbers[n], round(start[position] + column + 7, 1), round(y + LINE * (line + 0.5), 1),
                        round(2.5 + 4 * math.sqrt(max(node.influence, 0) / largest), 1),
                        node.kind + (" chosen" if n == chosen else ""), name, shown[n].title, shown[n].href,
                    )
                )  # fmt: skip
        y += LINE * lines + 6
    marks.sort(key=lambda mark: mark.number)
    of_node = {n: marks[k] for n, k in numbers.items()}
    drawn = [_line(of_node[e.source], of_node[e.target], graph.effect(e), strength) for e, strength in edges]
    return Drawing(width, round(y) + 38, marks, titles, columns, drawn, width > LONG)


def _line(source: DrawnNode, target: DrawnNode, effect: float, strength: float) -> DrawnEdge:
    x, y = target.x - source.x, target.y - source.y
    bend = f"{round(source.x + x / 2 - y / 8)} {round(source.y + y / 2 + x / 8)}"
    return DrawnEdge(
        f"M{source.x:g} {source.y:g}Q{bend} {target.x:g} {target.y:g}", "up" if effect > 0 else "down",
        round(0.6 + 4 * strength, 1), round(0.25 + 0.6 * strength, 2),
    )  # fmt: skip


Row = tuple[int, int, str]
Cells = Mapping[tuple[Row, int], list[int]]


def _cells(graph: Graph, served: Sequence[int], site_order: Sequence[str]) -> Cells:
    order = {"embedding": 0, "biases": 0, "rest": 1, "component": 1, "group": 1, "output": 2}
    sites = {site: n for n, site in enumerate(site_order)}

    def row_of(node: Node) -> Row:
        return order[node.kind], sites.get(node.site, -1), node.site

    cells: dict[tuple[Row, int], list[int]] = defaultdict(list)
    for n in served:
        node = graph.nodes[n]
        cells[row_of(node), max(node.position, 0)].append(n)
    return cells


def _columns_of(
    graph: Graph, cells: Cells, shown: Mapping[int, Shown]
) -> tuple[list[tuple[str, str, int, float]], dict[int, float], dict[int, int], int]:
    """The columns, where each begins, how many named nodes stand side by side in it (0 where none is named), and the
    width of all. Tokens behind the last node have no column. Where there is room, more nodes stand side by side, and
    the columns are spread."""
    last = max((position for _, position in cells), default=-1)
    influence: dict[int, float] = defaultdict(float)
    named: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for (_, position), members in cells.items():
        most[position] = max(most[position], len(members))
        with_name = [n for n in members if shown[n].name]
        named[position] = max(named[position], len(with_name))
        influence[position] += sum(graph.nodes[n].influence for n in with_name)
    chosen = sorted((p for p in named if named[p]), key=lambda p: (-influence[p], p))[:NAMED_COLUMNS]
    across = {p: (1 if named[p] <= 3 else 2) if p in chosen else 0 for p in range(last + 1)}

    def wide(p: int) -> int:
        return SLOT * across[p] if across[p] else max(NARROW, LINE * min(most[p], ACROSS) + 8)

    room = FILLED - 20 - sum(map(wide, across))
    while room >= SLOT and (stacked := [p for p in chosen if named[p] > across[p]]):
        across[max(stacked, key=lambda p: (named[p] / across[p], -p))] += 1
        room -= SLOT
    gap = max(0, room) / max(len(across), 1)
    columns, start, x = [], {}, 8.0
    for position in across:
        start[position] = x + gap / 2
        token = clean(graph.tokens[position], STORED_CHARACTERS) if position < len(graph.tokens) else ""
        space = int((wide(position) + gap / 2) / CHARACTER) - 1
        columns.append((fit(token, space), token, position, round(start[position] + 2, 1)))
        x += wide(position) + gap
    return columns, start, across, round(x) + 12


def _places(
    members: Sequence[int], shown: Mapping[int, Shown], across: int
) -> tuple[list[tuple[int, float, int, str]], int]:
    """Node, pixels from the column's beginning, line, and name as drawn, of each node of a cell; and the lines in
    all."""
    named = [n for n in members if shown[n].name][: NAMED_LINES * across]
    places: list[tuple[int, float, int, str]] = []
    for k, n in enumerate(named):
        places.append((n, SLOT * (k % across), k // across, fit(shown[n].name, NAME_CHARACTERS)))
    lines = math.ceil(len(named) / across) if across else 0
    side_by_side = SLOT * across // LINE if across else ACROSS
    dots = [n for n in members if n not in set(named)]
    for k, n in enumerate(dots):
        places.append((n, LINE * (k % side_by_side), lines + k // side_by_side, ""))
    return places, lines + math.ceil(len(dots) / side_by_side)
