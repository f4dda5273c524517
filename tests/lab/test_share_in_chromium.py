"""What `pd share` makes, opened in Chromium: graphs by a page that is strict about their format, copies from `file://`.
Skipped where there is no Chromium."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route

from param_decomp_lab.share.graphs import share_graphs
from param_decomp_lab.share.shared_run import open_shared
from param_decomp_lab.share.site import share_site
from tests.lab.chromium import CHROMIUM, NONE_HERE, chromium, follow, watched
from tests.lab.shared_folders import DOWN, GOLDEN, GRAPH, LABEL, LLAMA, UP, hand_graph, share_copy

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)
READER = Path(__file__).with_name("graph_reader")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def run(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return share_copy(harvested, tmp_path_factory.mktemp("share") / "runs") / LLAMA


@pytest.fixture(scope="module")
def graphs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("graphs") / "out"
    share_graphs(run, (), out)
    return out


def read_graph(page: Page, folder: Path, slug: str) -> dict[str, Any]:
    """What the reader reports of a graph in ``folder``."""

    def answer(route: Route) -> None:
        path = urlsplit(route.request.url).path.lstrip("/")
        places = {"data": folder, "fields.json": GOLDEN}
        first, _, rest = path.partition("/")
        file = places[first] / (rest or first) if first in places else READER / path
        if file.is_file():
            route.fulfill(path=file)
        else:
            route.fulfill(status=404)

    page.route("http://reader.test/**", answer)
    page.goto(f"http://reader.test/index.html?slug={slug}")
    page.locator("#report:not(:empty)").wait_for(state="attached")
    found: dict[str, Any] = json.loads(page.locator("#report").inner_text())
    return found


def test_a_page_reads_a_graph(graphs: Path, browser: Browser) -> None:
    said: list[str] = []
    page = watched(browser, said)
    report = read_graph(page, graphs, GRAPH)
    graph = hand_graph()
    assert report == {"nodes": 11, "links": 8, "features": 4, "errors": []}
    assert page.locator("circle").count() == len(graph.nodes)
    assert page.locator("line.raises").count() == sum(edge.weight > 0 for edge in graph.edges)
    assert page.locator('[id="0_3_1"] title').text_content() == LABEL
    page.locator('[id="0_3_1"]').click()
    assert "Uniform sample" in page.locator("#feature").inner_text()
    assert page.locator("#feature p").count() == 8
    assert page.locator("#feature .at").count() == 8
    assert said == []


def test_a_page_reads_what_was_published(tmp_path: Path, browser: Browser) -> None:
    """The reader itself: a graph that is not ours passes, apart from identifiers that only ours make unique."""
    graph = json.loads((GOLDEN / "graph.json").read_text())
    feature = json.loads((GOLDEN / "feature.json").read_text())
    folder = tmp_path / "features" / "gemma-2-2b"
    folder.mkdir(parents=True)
    for index in (148, 121843834):
        (folder / f"{index}.json").write_text(json.dumps({**feature, "index": index}))
    (tmp_path / "graph-metadata.json").write_text(json.dumps({"graphs": [graph["metadata"]]}))
    (tmp_path / "good.json").write_text(json.dumps(graph))
    graph["nodes"][1]["feature"] = 149
    graph["links"][0]["target"] = "4_12_2"
    graph["nodes"][0]["influence"] = "0.31"
    (tmp_path / "bad.json").write_text(json.dumps(graph))
    page = watched(browser, [])
    assert read_graph(page, tmp_path, "good") == {"nodes": 5, "links": 4, "features": 2, "errors": []}
    errors = read_graph(page, tmp_path, "bad")["errors"]
    assert errors[:3] == [
        "graph.nodes[0].influence is no number|null", "a link E_2_1 to 4_12_2", "4_12_1: feature 149"
    ]  # fmt: skip
    assert "149.json: 404" in errors[3]


@pytest.mark.slow
def test_a_copy_needs_no_server(run: Path, tmp_path: Path, browser: Browser) -> None:
    share_site(open_shared(run, None), tmp_path / "out", most=9)
    said: list[str] = []
    page = watched(browser, said)
    page.goto((tmp_path / "out" / "index.html").as_uri())
    follow(page.get_by_role("link", name=UP))
    follow(page.get_by_role("rowheader").get_by_role("link", name="3", exact=True))
    assert page.locator("h1").inner_text().startswith(f"{UP} 3 vowels </title>")
    # Style and script are there.
    shaded = page.locator(".context .at").first
    assert "rgba(213, 94, 0" in str(shaded.evaluate("x => getComputedStyle(x).background"))
    page.get_by_label("a", exact=True).check()
    assert page.get_by_role("link", name="→").count() == 1
    with page.expect_navigation():
        page.keyboard.press("n")
    assert page.url.endswith(".html")
    assert not page.url.endswith("/3.html")
    with page.expect_navigation():
        page.keyboard.press("u")
    assert page.url.endswith(f"/{UP}/index.html")
    follow(page.get_by_role("link", name=LLAMA))
    follow(page.get_by_role("link", name="Groups"))
    follow(page.locator("tbody a").first)
    page.get_by_role("heading", name="Members").wait_for()
    follow(page.get_by_role("link", name=LLAMA))
    follow(page.get_by_role("link", name="Graphs"))
    follow(page.get_by_role("link", name="then"))
    # A node, its edges, its group by hand, and from there to its component.
    assert page.locator("circle").count() == len(hand_graph().nodes)
    page.locator("svg a.component").first.click()
    page.keyboard.press("s")
    page.get_by_label("group").fill("mine")
    page.get_by_role("button", name="Make a group").click()
    assert "mine (1)" in page.locator("#selection").inner_text()
    assert page.locator("#lines line").count() > 0
    page.locator("svg a.component").first.click()
    follow(page.get_by_role("link", name="what this component does"))
    assert page.url.endswith(f"/sites/{DOWN}/5.html")
    assert said == []
