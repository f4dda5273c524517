"""A run to share, with labels and a graph by hand that has every kind of node; and the field tables of formats."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from param_decomp_lab.graph import Edge, Graph, Node
from param_decomp_lab.graph.behind import Behind, Contributor
from param_decomp_lab.graph.graph import Shares
from param_decomp_lab.harvest.files import find_harvests
from param_decomp_lab.harvest.files.labels import BY_MODEL, Labels

GOLDEN = Path(__file__).parents[1] / "golden" / "share"
LLAMA, TOY = "p-00000001", "p-00000002"
UP, DOWN = "layers.0.mlp.up_proj", "layers.1.mlp.down_proj"
MARKUP = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&amp;"
LABEL, MODEL = f"vowels {MARKUP}", "gpt-5-mini"
STEP = 80
TOY_STEP = 12
GRAPH = "hello-1a2b3c4d"


def share_copy(harvested: Path, folder: Path) -> Path:
    """Copies of both runs in ``folder``, without checkpoints; the Llama has labels and a graph."""
    shutil.copytree(harvested, folder, ignore=shutil.ignore_patterns("ckpts"))
    labels = Labels(folder / LLAMA, STEP)
    labels.set(UP, 3, LABEL, "Ada")
    labels.set(DOWN, 5, "ends of words", MODEL + BY_MODEL)
    hand_graph().save(folder / LLAMA / "graphs" / f"{GRAPH}.json")
    return folder


def hand_graph(step: int = STEP) -> Graph:
    """Four tokens, two outputs, five components, a rest and the biases, with 0.8 of all influence."""
    nodes = (
        Node("output", "", 3, 110, 5.0, 0.0, 0.75, 0.6),
        Node("output", "", 3, 101, 3.0, 0.0, 0.25, 0.2),
        Node("component", DOWN, 3, 5, -1.5, 0.9, 0.7),
        Node("component", UP, 1, 3, 2.0, 1.0, 0.5),
        Node("component", UP, 3, 3, 0.5, 0.4, 0.3),
        Node("component", UP, 3, 0, 1.0, 1.0, 0.2),
        Node("component", "layers.0.mlp.down_proj", 3, 0, 1.0, 1.0, 0.1),
        Node("rest", DOWN, 3, -1, 0.0, 0.0, 0.06),
        Node("rest", "layers.1.mlp.up_proj", 3, -1, 0.0, 0.0, 0.04),
        Node("embedding", "", 1, 104, 0.0, 0.0, 0.05),
        Node("biases", "", -1, -1, 0.0, 0.0, 0.05),
    )
    ends = (
        (2, 0, 1.25),
        (2, 1, -0.5),
        (3, 2, 0.125),
        (4, 2, 2.0),
        (7, 0, 1e-7),
        (9, 3, 3.0),
        (10, 2, -1.0),
        (5, 2, 1.0),
    )
    edges = tuple(Edge(source, target, weight, 0.5) for source, target, weight in ends)
    return Graph(
        LLAMA, step, "then", ("t", "h", "e", "n"), (116, 104, 101, 110), 0.0, 100, 90,
        Shares(0.8, 0.9, 0.5, 0.3, 0.1, 0.1, 0.1), nodes, edges, {110: "n", 101: "e"},
    )  # fmt: skip


def with_parts(graph: Graph) -> Graph:
    """`hand_graph` with what is behind one of its residual errors: its parts add up to 0.5."""
    parts = (Contributor(DOWN, 3, 2, -1.5, 0.0, 0.25), Contributor(DOWN, 3, 7, 0.5, 0.0, -0.125))
    return replace(graph, rests=(Behind(f"{DOWN}:rest@3", 0.3125, 0.0625, 21, parts),))


def small_graph(
    tokens: str, nodes: tuple[Node, ...], ends: tuple[tuple[int, int, float], ...], run: str = LLAMA
) -> Graph:
    """A graph of these nodes and edges. Without ``tokens`` it is one of the toy."""
    prompt = tokens or "1=0.75 3=1"
    return Graph(
        run, STEP if tokens else TOY_STEP, prompt, tuple(tokens) or (prompt,), tuple(map(ord, tokens)), 0.0, 10, 10,
        Shares(0.8, 0.9, 0.5, 0.3, 0.1, 0.1, 0.1), nodes, tuple(Edge(*end, 0.5) for end in ends),
        {110: "n"} if tokens else {},
    )  # fmt: skip


def one_token() -> Graph:
    """One token, at which two sites have residual errors."""
    nodes = (
        Node("output", "", 0, 110, 5.0, 0.0, 1.0, 0.6),
        Node("component", DOWN, 0, 5, -1.5, 0.9, 0.7),
        Node("rest", DOWN, 0, -1, 0.0, 0.0, 0.06),
        Node("rest", UP, 0, -1, 0.0, 0.0, 0.06),
        Node("embedding", "", 0, 104, 0.0, 0.0, 0.05),
        Node("biases", "", -1, -1, 0.0, 0.0, 0.05),
    )
    return small_graph("h", nodes, ((1, 0, 1.0), (2, 0, 0.5), (3, 1, 0.25), (4, 1, 2.0), (5, 1, -1.0)))


def two_tokens() -> Graph:
    """Two tokens; at the second, both sites of a layer have residual errors, and their components an edge."""
    up = "layers.1.mlp.up_proj"
    nodes = (
        Node("output", "", 1, 110, 5.0, 0.0, 1.0, 0.6),
        Node("component", DOWN, 1, 5, -1.5, 0.9, 0.7),
        Node("component", up, 1, 5, 1.0, 0.9, 0.4),
        Node("rest", DOWN, 1, -1, 0.0, 0.0, 0.06),
        Node("rest", up, 1, -1, 0.0, 0.0, 0.06),
        Node("embedding", "", 0, 104, 0.0, 0.0, 0.05),
    )
    return small_graph("hn", nodes, ((1, 0, 1.0), (2, 1, 0.5), (3, 0, 0.25), (4, 1, 2.0), (5, 2, -1.0)))


def up_alone() -> Graph:
    """Components of the network's first layer alone."""
    nodes = (
        Node("output", "", 2, 110, 5.0, 0.0, 1.0, 0.6),
        Node("component", UP, 2, 3, 2.0, 1.0, 0.5),
        Node("component", UP, 2, 0, 2.0, 1.0, 0.3),
        Node("embedding", "", 2, 104, 0.0, 0.0, 0.05),
    )
    return small_graph("ten", nodes, ((1, 0, 1.0), (2, 0, -0.5), (3, 1, 0.25), (3, 2, 0.125)))


def toy_graph() -> Graph:
    """Two inputs and two outputs, which have no probability."""
    nodes = (
        Node("output", "", 0, 3, 0.5, 0.0, 0.75),
        Node("output", "", 0, 1, 0.25, 0.0, 0.25),
        Node("component", "linear2", 0, 1, 2.0, 1.0, 0.5),
        Node("component", "linear1", 0, 2, 2.0, 1.0, 0.5),
        Node("rest", "linear2", 0, -1, 0.0, 0.0, 0.06),
        Node("rest", "linear1", 0, -1, 0.0, 0.0, 0.05),
        Node("embedding", "", 0, 1, 0.0, 0.0, 0.05),
        Node("embedding", "", 0, 3, 0.0, 0.0, 0.05),
    )
    ends = ((2, 0, 1.0), (2, 1, 0.5), (3, 2, 0.25), (4, 0, 0.1), (5, 2, 0.2), (6, 3, 1.5), (7, 3, -1.5))
    return small_graph("", nodes, ends, TOY)


def harvest_step(folder: Path, run: str) -> int:
    [found] = find_harvests(folder / run)
    return int(json.loads((found / "harvest.json").read_text())["step"])


def read(file: Path) -> Any:
    """A JSON file, compressed or not."""
    return json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())


def mistakes(value: Any, kind: str, where: str = "it") -> list[str]:
    """What is wrong with a JSON value, by the field tables of `tests/golden/share`."""
    tables = json.loads((GOLDEN / "fields.json").read_text())
    return list(_mistakes(value, kind, tables, where))


def _mistakes(value: Any, kind: str, tables: dict[str, dict[str, str]], where: str) -> list[str]:
    if "|" in kind:
        found = [_mistakes(value, one, tables, where) for one in kind.split("|")]
        return [] if any(not wrong for wrong in found) else [f"{where} is no {kind}"]
    if kind.startswith("["):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [m for n, entry in enumerate(value) for m in _mistakes(entry, kind[1:-1], tables, f"{where}[{n}]")]
    if kind not in tables:
        good = {
            "string": isinstance(value, str), "integer": type(value) is int, "number": type(value) in (int, float),
            "boolean": isinstance(value, bool), "null": value is None, "object": isinstance(value, dict),
        }[kind]  # fmt: skip
        return [] if good else [f"{where} is no {kind}: {value!r}"]
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    wrong = [f"{where}.{name} is unknown" for name in value if not {name, f"{name}?"} & tables[kind].keys()]
    for key, inner in tables[kind].items():
        name = key.removesuffix("?")
        if name in value:
            wrong += _mistakes(value[name], inner, tables, f"{where}.{name}")
        elif name == key:
            wrong.append(f"{where}.{name} is missing")
    return wrong


def hrefs(page: str) -> list[str]:
    return re.findall(r'(?:href|src)="([^"]*)"', page)
