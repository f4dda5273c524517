"""The graph page in Chromium: what is chosen is marked, said and kept in the address. Skipped where there is none."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser, Page

from param_decomp_lab.graph import Node
from tests.lab.chromium import CHROMIUM, NONE_HERE, chromium, follow, watched
from tests.lab.shared_folders import DOWN, UP, hand_graph, harvest_step, with_parts
from tests.lab.test_browse import LLAMA, only_harvest
from tests.lab.test_browse_in_chromium import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def graph_page(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of `hand_graph`; beside it lies ``long``, the same at the end of 40 tokens."""
    folder = tmp_path_factory.mktemp("served") / "runs"
    shutil.copytree(harvested, folder, ignore=shutil.ignore_patterns("ckpts"))
    graph = hand_graph(harvest_step(folder, LLAMA))
    graph.save(folder / LLAMA / "graphs" / "hand.json")
    with_parts(graph).save(folder / LLAMA / "graphs" / "parts.json")
    again = replace(graph.nodes[2], position=2, value=1.0, influence=0.01)  # the same component, with a > 0
    replace(graph, nodes=(*graph.nodes, again)).save(folder / LLAMA / "graphs" / "turned.json")
    later = tuple(replace(node, position=node.position + 36) for node in graph.nodes)
    longer = replace(graph, nodes=later, tokens=("t",) * 36 + graph.tokens, token_ids=(116,) * 36 + graph.token_ids)
    longer.save(folder / LLAMA / "graphs" / "long.json")
    rests = tuple(Node("rest", UP, position, -1, 0.0, 0.0, 0.08) for position in range(40))
    last = Node("rest", UP.replace("up", "down"), 0, -1, 0.0, 0.0, 0.001)
    [parts] = with_parts(graph).rests
    many = replace(longer, nodes=(*longer.nodes, *rests, last), rests=(replace(parts, node=f"{DOWN}:rest@39"),))
    many.save(folder / LLAMA / "graphs" / "many.json")
    with served(folder) as address:
        yield f"{address}/{LLAMA}/{only_harvest(folder).name}/graphs/hand"


def mark(page: Page, number: int) -> str:
    """The classes of a node in the picture and of its entry in the list; where the mouse is does not matter."""
    classes = (page.locator(f"#{kind}{number}").get_attribute("class") or "" for kind in "ni")
    return " | ".join(" ".join(sorted({*found.split()} - {"pointed"})) for found in classes)


def edges(page: Page) -> int:
    return page.locator("#lines path").count()


def test_the_parts_of_a_residual_error_are_shown_where_it_is_chosen(graph_page: str, browser: Browser) -> None:
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(graph_page.replace("/hand", "/parts"))
    page.locator("#n7 circle").click()
    assert page.locator("#node h3").all_inner_texts() == ["made of", "leads to"]
    assert page.locator("#node .columns div").first.locator("tbody tr").count() == 4
    page.locator("#n8 circle").click()  # another, whose parts the file does not have
    assert page.locator("#node h3").all_inner_texts() == ["comes from", "leads to"]
    assert not said


def test_the_parts_of_a_small_residual_error_are_a_link_away(graph_page: str, browser: Browser) -> None:
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(graph_page.replace("/hand", "/many"))
    small = page.locator("#nodes li[data-parts]")
    assert small.count() == 1
    hidden = page.locator("#nodes li").nth(2).locator("a").first
    hidden.click()
    page.keyboard.press("h")
    small.locator("a").first.click()
    assert page.locator("#node h3").all_inner_texts() == ["made of", "leads to"]
    follow(page.locator("#node .columns a", has_text="list its parts"))
    assert page.locator("#node h3").all_inner_texts() == ["made of", "leads to"]
    assert page.locator("#node .columns div").first.locator("tbody tr").count() == 4
    assert "away" in mark(page, 2)  # what was hidden stays hidden
    page.locator("#nodes li").last.locator("a").first.click()  # another, whose parts the file does not have
    assert page.locator("#node h2").inner_text().startswith("residual error")
    assert page.locator("#node h3").all_inner_texts() == ["comes from", "leads to"]
    assert not said


def test_what_a_component_does_goes_by_the_sign_of_its_activation(graph_page: str, browser: Browser) -> None:
    """The list explains it once, where a < 0; where it is chosen with a > 0, it raises what it lowers there."""
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(graph_page.replace("/hand", "/turned"))

    def lens(where: str) -> list[str]:
        return page.locator(f"{where} .lens > span").all_text_contents()

    page.locator("#n2 circle").click()
    here, raises, lowers = lens("#node")
    assert here == "a < 0"
    assert raises != lowers
    words = [row.split("\t")[1] for row in page.locator("#node .columns tbody tr").all_inner_texts()]
    assert words == ["weakens", "strengthens", "weakens", "weakens", "raises", "lowers"]
    drawn = [path.get_attribute("class") for path in page.locator("#lines path").all()]
    assert drawn.count("up") == 2
    page.locator("#n11 circle").click()
    assert lens("#node") == ["a > 0", lowers, raises]
    assert lens("#i2") == ["a < 0", raises, lowers]
    assert not said


def test_a_choice_is_marked_everywhere_and_stays_in_the_address(graph_page: str, browser: Browser) -> None:
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(graph_page)
    assert edges(page) == 8
    page.locator("#n2 circle").click()
    assert mark(page, 2) == "chosen component near | chosen"
    assert page.locator("#node h2").inner_text().endswith(f"{DOWN} 5 · 'n' at 3")
    assert edges(page) == 6
    assert page.locator("#node q").count() >= 1
    page.locator("#nodes li", has_text=f"{UP} 3 · 'h' at 1").get_by_role("link").first.click()
    assert mark(page, 3) == "chosen component near | chosen"
    assert "chosen" not in mark(page, 2)
    assert page.locator("#i3 details").get_attribute("open") is not None
    page.keyboard.press("s")
    page.keyboard.press("Escape")
    page.go_back()
    assert mark(page, 3) == "chosen component near selected | chosen"
    page.go_back()
    page.go_back()
    assert mark(page, 2) == "chosen component near | chosen"
    page.go_forward()
    page.go_forward()
    other = watched(browser, said)
    other.goto(page.url)  # a link opens the same view
    assert mark(other, 3) == mark(page, 3) == "chosen component near selected | chosen"
    assert other.locator("#selection li").all_inner_texts() == [f"{UP}:3@1"]
    other.keyboard.press("h")
    assert mark(other, 3).startswith("away component")
    assert edges(other) == 6
    other.get_by_role("button", name="Show again").click()
    assert edges(other) == 8
    # Ids of another graph, and markup, are left alone.
    other.goto(f"{graph_page}#node=x&select=y&group=<img src=x>&of=z&edges=no")
    other.reload()
    assert edges(other) == 8
    assert other.locator("#selection").is_hidden()
    # A component's page, and back.
    follow(page.locator("#node").get_by_role("link", name="the whole page"))
    page.go_back()
    assert mark(page, 3) == "chosen component near selected | chosen"
    assert said == []


def test_nodes_are_joined_by_dragging(graph_page: str, browser: Browser) -> None:
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(graph_page)

    def drag(source: int, target: int) -> None:
        for number, button in ((source, page.mouse.down), (target, page.mouse.up)):
            box = page.locator(f"#n{number} circle").bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
            button()

    drag(4, 5)  # both lead to node 2
    assert mark(page, 4).startswith("away")
    assert mark(page, 5) == "chosen component grouped near | chosen"
    assert page.locator("#lines path").count() == 1
    row = page.locator("#node .columns > div").nth(1).locator("tbody tr").inner_text()
    assert re.split(r"\s+", row)[-3:] == ["3.00", "100", "%"]  # 2 and 1, a half of what leads there each
    before = page.url
    drag(2, 9)  # an embedding takes none
    assert page.url == before
    drag(3, 5)
    assert "(3)" in page.locator("#selection h3").inner_text()
    page.go_back()
    assert "(2)" in page.locator("#selection h3").inner_text()
    page.get_by_label("another name for").fill("<b>mine</b>")
    page.get_by_role("button", name="Rename").click()
    page.reload()
    assert page.locator("#node h2").inner_text().startswith("<b>mine</b>")
    page.get_by_role("button", name="Undo").click()
    page.keyboard.press("Escape")
    assert edges(page) == 8
    page.locator("#n4 circle").click(modifiers=["Shift"])  # and without dragging
    page.locator("#n5 circle").click(modifiers=["Shift"])
    page.get_by_label("group").fill("by keys")
    page.get_by_role("button", name="Make a group").click()
    assert "by keys (2)" in page.locator("#selection").inner_text()
    assert "away" in mark(page, 5)
    assert said == []


def test_the_picture_as_a_file(graph_page: str, browser: Browser) -> None:
    said: list[str] = []
    page = watched(browser, said)
    page.goto(f"{graph_page}#hide={DOWN}:5@3")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download SVG").click()
    text = download.value.path().read_text()
    root = ElementTree.fromstring(text)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(hand_graph().nodes) - 1
    fills = {circle.get("fill") for circle in root.iter("{http://www.w3.org/2000/svg}circle")}
    assert len(fills) >= 4
    assert "none" not in fills
    assert "class=" not in text.replace('class="one"', "")
    assert "href" not in text
    assert graph_page.partition("/graphs")[0] not in text
    assert said == []


def test_without_script_and_on_a_phone(graph_page: str, browser: Browser) -> None:
    """The list, and the picture with names and edges; its frame shows the outputs and what leads to them."""
    said: list[str] = []
    for scheme in ("light", "dark"):
        page = watched(
            browser, said, java_script_enabled=False, viewport={"width": 400, "height": 800}, color_scheme=scheme
        )
        page.goto(graph_page.replace("/hand", "/long"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert edges(page) == 8
        assert page.locator("#nodes li").count() == len(hand_graph().nodes)
        frame = page.locator(".graph").bounding_box()
        assert frame is not None
        for number in (0, 1, 2, 4, 5, 6, 7, 8):  # those at the last token
            box = page.locator(f"#n{number} circle").bounding_box()
            assert box is not None
            assert frame["x"] <= box["x"] <= frame["x"] + frame["width"] - 20
        assert page.get_by_role("button", name="Download SVG").is_hidden()
        follow(page.locator("#nodes li").nth(2).get_by_role("link").first)
        assert page.locator("#node h2").inner_text().endswith("'n' at 39")
        assert edges(page) == 6
        assert page.locator("#n2.chosen, #i2.chosen").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert said == []
