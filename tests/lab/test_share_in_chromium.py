"""A copy of `pd share site`, opened in Chromium from `file://`. Skipped where there is no Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from param_decomp_lab.share.shared_run import open_shared
from param_decomp_lab.share.site import share_site
from tests.lab.chromium import CHROMIUM, NONE_HERE, chromium, follow, watched
from tests.lab.shared_folders import DOWN, LLAMA, UP, hand_graph, share_copy

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def run(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return share_copy(harvested, tmp_path_factory.mktemp("share") / "runs") / LLAMA


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
    assert page.locator("#lines path").count() > 0
    page.reload()  # the address has it
    assert "mine (1)" in page.locator("#selection").inner_text()
    page.get_by_role("button", name="Undo").click()
    page.locator("svg a.component").first.click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download SVG").click()
    assert download.value.path().read_text().startswith("<svg ")
    follow(page.locator("#node").get_by_role("link", name="the whole page"))
    assert page.url.endswith(f"/sites/{DOWN}/5.html")
    page.go_back()
    assert page.locator("#n2.chosen, #i2.chosen").count() == 2
    assert said == []
