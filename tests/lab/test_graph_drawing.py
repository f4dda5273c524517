"""Where the nodes of a graph, their names and its edges lie in the picture."""

import random
import re
from itertools import pairwise

import pytest

from param_decomp_lab.browse.graph_drawing import (
    CHARACTER,
    FILLED,
    LONG,
    NAME_CHARACTERS,
    NAMED_COLUMNS,
    Drawing,
    Shown,
    draw_graph,
    fit,
)  # fmt: skip
from param_decomp_lab.graph.graph import Edge, Graph, Node, Shares

SITES = ("layers.0.up", "layers.0.down", "layers.1.up")


def drawn(n: int, tokens: int, seed: int, edges: int = 0) -> Drawing:
    """A graph of ``n`` nodes of all kinds at random places, with names of random length."""
    rng = random.Random(seed)
    kinds = ("component", "component", "component", "rest", "output", "embedding")
    nodes = []
    for k in range(n):
        kind, site = rng.choice(kinds), rng.choice(SITES)
        site = site if kind in ("component", "rest") else ""
        nodes.append(Node(kind, site, rng.randrange(tokens), k, 1.0, 0.5, rng.random() ** 3))
    nodes.sort(key=lambda node: -node.influence)
    graph = Graph(
        "p-1", 3, "x", tuple("t" * rng.randint(1, 20) for _ in range(tokens)), (1,) * tokens, 0.0, n, n,
        Shares(1, 1, 0.5, 0.1, 0.0, 0.1, 0.0), tuple(nodes), (), {},
    )  # fmt: skip
    names = ["".join(rng.choice("aW漢 ") for _ in range(rng.randint(0, 30))) for _ in nodes]
    shown = {k: Shown(name, f"title {k}", f"#i{k}") for k, name in enumerate(names)}
    ends = [(rng.randrange(n), rng.randrange(n)) for _ in range(edges)]
    lines = [(Edge(*end, rng.choice([-1.0, 1.0]), 0.5), rng.random()) for end in ends]
    return draw_graph(graph, range(n), shown, SITES, None, lines)


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("ended", 5, "ended"),
        ("ended.", 5, "ende…"),
        ("漢字", 4, "漢字"),
        ("漢字漢", 5, "漢字…"),
        ("漢字漢", 4, "漢…"),
        ("", 3, ""),
    ],
)
def test_names_are_cut(text: str, columns: int, said: str) -> None:
    assert fit(text, columns) == said


@pytest.mark.parametrize(("n", "tokens"), [(1, 1), (12, 3), (150, 4), (400, 60)])
def test_nothing_overlaps(n: int, tokens: int) -> None:
    """Neither names, nor nodes, nor a node with another's name; and all lies within the picture."""
    drawing = drawn(n, tokens, seed=n)
    assert [mark.number for mark in drawing.marks] == list(range(n))
    boxes = []
    for mark in drawing.marks:
        boxes.append((mark.y, mark.x - mark.size, mark.x + mark.size))
        if mark.name:
            wide = sum(2 if letter == "漢" else 1 for letter in mark.name)
            assert wide <= NAME_CHARACTERS
            boxes.append((mark.y, mark.x + 8, mark.x + 8 + CHARACTER * wide))
        assert mark.size <= 7.5  # lines are 15 pixels apart
    boxes.sort()
    for (y, _, end), (below, start, _) in pairwise(boxes):
        assert below >= y + 15 or (below == y and start >= end)
    assert min(start for _, start, _ in boxes) >= 0
    assert max(end for _, _, end in boxes) <= drawing.width
    assert max(y for y, _, _ in boxes) + 7.5 <= drawing.height - 30  # the tokens are below


@pytest.mark.parametrize(("n", "tokens"), [(1, 1), (40, 1), (12, 3), (30, 10)])
def test_a_small_graph_fills_its_frame(n: int, tokens: int) -> None:
    """Nodes stand side by side where there is room, and columns lie apart."""
    drawing = drawn(n, tokens, seed=n)
    assert abs(drawing.width - FILLED) <= 1 or drawing.width > FILLED
    ends = [mark.x for mark in drawing.marks] + [mark.x + 8 + CHARACTER * len(mark.name) for mark in drawing.marks]
    if n > 1:
        assert max(ends) - min(ends) > 0.7 * drawing.width
    if (n, tokens) == (40, 1):
        lines: dict[float, int] = {}
        for mark in drawing.marks:
            lines[mark.y] = lines.get(mark.y, 0) + (mark.name != "")
        assert max(lines.values()) >= 5


def test_a_long_prompt_names_the_nodes_of_some_positions() -> None:
    drawing = drawn(400, 60, seed=2)
    columns = sorted(x for _, _, _, x in drawing.columns)
    wide = [b - a for a, b in pairwise(columns) if b - a > 90]
    assert NAMED_COLUMNS - 1 <= len(wide) <= NAMED_COLUMNS
    assert len(drawing.columns) == 60


def test_edges_lead_from_node_to_node() -> None:
    drawing = drawn(12, 3, seed=1, edges=20)
    places = {(f"{mark.x:g}", f"{mark.y:g}") for mark in drawing.marks}
    assert len(drawing.lines) == 20
    for line in drawing.lines:
        x1, y1, x2, y2 = re.fullmatch(r"M(\S+) (\S+)Q\S+ \S+ (\S+) (\S+)", line.path).groups()  # type: ignore[union-attr]
        assert {(x1, y1), (x2, y2)} <= places
        assert line.sign in ("up", "down")
        assert 0.25 <= line.opacity <= 0.85
    strong, weak = max(drawing.lines, key=lambda x: x.width), min(drawing.lines, key=lambda x: x.width)
    assert strong.opacity > weak.opacity


def test_layers_go_upwards_and_tokens_to_the_right() -> None:
    drawing = drawn(150, 4, seed=5)
    assert [name for name, _ in drawing.rows] == ["outputs", *reversed(SITES), "embeddings"]
    heights = [y for _, y in drawing.rows]
    assert heights == sorted(heights)
    assert [position for _, _, position, _ in drawing.columns] == [0, 1, 2, 3]
    assert drawing.wide == (drawing.width > LONG)


def test_tokens_are_shown_without_what_hides_or_reverses_text() -> None:
    node = Node("output", "", 0, 0, 1.0, 0.0, 1.0, 0.5)
    shares = Shares(1, 1, 0.5, 0.1, 0.0, 0.1, 0.0)
    graph = Graph("p-1", 3, "x", ("a\u202eb\x1b" + "c" * 10_000,), (1,), 0.0, 1, 1, shares, (node,), (), {})
    ((cut, whole, _, _),) = draw_graph(graph, [0], {0: Shown("n", "t", "#i")}, SITES, None, []).columns
    assert not {"\u202e", "\x1b"} & {*cut, *whole}
    assert len(whole) < 300
