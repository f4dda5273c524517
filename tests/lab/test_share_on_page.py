"""Graphs of `pd share graph`, opened by circuit-tracer's own page in Chromium. Skipped where there is no Chromium, or
no npm with its registry, from which the page's libraries come."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from param_decomp_lab.graph import Graph
from param_decomp_lab.opening import load_run
from param_decomp_lab.share.graphs import share_graphs
from tests.lab.chromium import CHROMIUM, NONE_HERE, chromium, watched
from tests.lab.circuit_tracer_page import drawn, fetch_packages, missing, open_graph, serving
from tests.lab.shared_folders import (
    GRAPH,
    LLAMA,
    TOY,
    hand_graph,
    one_token,
    share_copy,
    toy_graph,
    two_tokens,
    up_alone,
)

LLAMA_GRAPHS = {GRAPH: hand_graph(), "one-token": one_token(), "two-tokens": two_tokens(), "up-alone": up_alone()}
GRAPHS = {LLAMA: LLAMA_GRAPHS, TOY: {"toy": toy_graph()}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        missing(NONE_HERE)
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    fetch_packages(folder)
    return folder


@pytest.fixture(scope="module")
def shared(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data folder of each run."""
    folder = tmp_path_factory.mktemp("share")
    share_copy(harvested, folder / "runs")
    for run, graphs in GRAPHS.items():
        for name, graph in graphs.items():
            graph.save(folder / "runs" / run / "graphs" / f"{name}.json")
        share_graphs(folder / "runs" / run, (), folder / run)
    return {run: folder / run for run in GRAPHS}


@pytest.mark.parametrize(("run", "name"), [(run, name) for run, graphs in GRAPHS.items() for name in graphs])
def test_the_page_draws_what_is_in_the_file(
    shared: dict[str, Path], packages: Path, browser: Browser, run: str, name: str
) -> None:
    assert_drawn(shared[run], name, GRAPHS[run][name], packages, browser)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["th", "1=0.75 3"])
def test_the_page_draws_graphs_of_runs(
    finished: Path, toy: Path, packages: Path, browser: Browser, tmp_path: Path, prompt: str
) -> None:
    """As `pd graph` makes them. At the second of two tokens, all sites have residual errors."""
    run = finished if prompt == "th" else toy / "p-00000001"
    graph = load_run(run).graph(prompt, nodes_share=1.0)
    graph.save(tmp_path / "own.json")
    share_graphs(run, [str(tmp_path / "own.json")], tmp_path / "out")
    assert sum(node.kind == "rest" for node in graph.nodes) > 2
    assert_drawn(tmp_path / "out", "own", graph, packages, browser)


def assert_drawn(folder: Path, name: str, graph: Graph, packages: Path, browser: Browser) -> None:
    """The page draws the nodes and links of ``graph``, from its file in ``folder``, and has nothing to complain of."""
    file = json.loads((folder / f"{name}.json").read_text())
    said: list[str] = []
    page = watched(browser, said)
    with serving(folder) as address:
        missed = open_graph(page, address, name, packages)
        nodes, links = drawn(page)
        assert len(nodes) == len(graph.nodes)
        assert set(nodes) == {node["node_id"] for node in file["nodes"]}
        assert links == {(link["source"], link["target"], link["weight"]) for link in file["links"]}
        assert len(links) == len(graph.edges)
        # The page has its own names for inputs, from the tokens.
        for node in file["nodes"]:
            token = file["metadata"]["prompt_tokens"][node["ctx_idx"]]
            expected = f'Emb: “{token}"' if node["feature_type"] == "embedding" else node["clerp"]
            assert nodes[node["node_id"]] == expected
        rows = row_of_nodes(page)
        layers = {node["node_id"]: node["layer"] for node in file["nodes"]}
        assert len(set(rows.values())) == len(set(layers.values()))
        for link in file["links"]:  # no link lies within a row, under its nodes
            assert rows[link["source"]] > rows[link["target"]], link
        assert missed == []
    assert not any("rror" in text for text in said), said


def test_a_click_shows_a_component(shared: dict[str, Path], packages: Path, browser: Browser) -> None:
    page = watched(browser, [])
    with serving(shared[LLAMA]) as address:
        missed = open_graph(page, address, GRAPH, packages)
        file = json.loads((shared[LLAMA] / f"{GRAPH}.json").read_text())
        node = next(node for node in file["nodes"] if node["clerp"] == "ends of words")
        feature = json.loads((shared[LLAMA] / "features" / f"{LLAMA}-step-80" / f"{node['feature']}.json").read_text())
        page.evaluate(
            """id => d3.selectAll('.supernode-container').filter(d => d.nodeId === id).node()
                .dispatchEvent(new MouseEvent('click', {bubbles: true}))""",
            node["node_id"],
        )
        detail = page.locator(".feature-detail")
        detail.locator(".example-quantile").first.wait_for()
        assert detail.locator(".quantile-title").all_inner_texts() == [
            "Where it matters most (largest λ · |a|)",
            "Uniform sample of its firings",
        ]
        examples = [example for quantile in feature["examples_quantiles"] for example in quantile["examples"]]
        shown = detail.locator(".feature-example-list .ctx-container")
        assert shown.count() == len(examples) == 8
        assert "".join(examples[0]["tokens"]).split() == shown.first.inner_text().split()
        title = detail.locator(".feature-title span").first
        title.filter(has_text="Freq").wait_for()
        rank = sum(value < node["activation"] for value in feature["quantile_values"]) + 1
        frequency = feature["activation_frequency"] * 100
        assert title.inner_text() == f"Act: {node['activation']:.2f} {rank}pct, Freq: {frequency:.3f}%"
        assert detail.locator(".histogram-placeholder rect.bar").count() == len(feature["histogram"])
        assert missed == []


def row_of_nodes(page: Page) -> dict[str, float]:
    """Distance from the top, in pixels, of the row in which a node lies."""
    found: Any = page.evaluate(
        "() => Object.fromEntries(d3.selectAll('.link-graph text.node').data().map(d => [d.nodeId, d.pos[1]]))"
    )
    return dict(found)
