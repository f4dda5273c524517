"""The browser in a real browser: Chromium, driven by Playwright. Skipped where there is none."""

import http.client
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.lab.chromium import CHROMIUM, NONE_HERE, chromium, follow, watched
from tests.lab.test_browse import LLAMA, MARKUP, SITE, only_harvest
from tests.lab.tiny_run import PD, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a `pd browse` of its own."""
    process = subprocess.Popen([*PD, "browse", folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+)/", line)
        assert found is not None, line
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def mine(harvested: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(harvested, tmp_path / "runs", ignore=shutil.ignore_patterns("ckpts")))


def component_of(page: Page) -> int:
    return int(page.url.partition("?")[0].rpartition("/")[2])


def test_from_the_runs_to_a_label(mine: Path, browser: Browser) -> None:
    said: list[str] = []
    with served(mine) as address:
        page = watched(browser, said)
        page.goto(address)
        follow(page.get_by_role("link", name=only_harvest(mine).name))
        follow(page.get_by_role("link", name="Report"))
        page.get_by_role("button", name=SITE).click()  # by its script
        follow(page.locator("#components .id a").locator("visible=true").first)
        assert f"/sites/{SITE}/" in page.url
        follow(page.get_by_role("link", name=SITE).first)
        # Sort, filter, search.
        follow(page.get_by_role("link", name="density"))
        assert "sort=density" in page.url
        page.locator("select[name=sort]").select_option("largest")
        follow(page.get_by_role("button", name="Show"))
        assert "sort=largest" in page.url
        page.get_by_label("search").fill("e")
        with page.expect_navigation():
            page.get_by_label("search").press("Enter")
        assert "search=e" in page.url
        follow(page.get_by_role("link", name="all", exact=True))
        # A component by its number, then the next.
        page.get_by_label("to component").fill("4")
        follow(page.get_by_role("button", name="Go"))
        assert component_of(page) == 4
        follow(page.get_by_role("link", name="5 →"))
        assert component_of(page) == 5
        # Examples are shaded by λ, and then by a, and that is kept.
        shaded = page.locator(".context .at").first

        def background() -> str:
            return str(shaded.evaluate("x => getComputedStyle(x).background"))

        by_importance = background()
        assert "rgba(213, 94, 0" in by_importance
        page.get_by_label("a", exact=True).check()
        assert "linear-gradient" in background()
        page.reload()
        assert page.get_by_label("a", exact=True).is_checked()
        page.get_by_label("λ", exact=True).check()
        assert background() == by_importance
        # From the map to a component.
        follow(page.get_by_role("link", name=SITE).first)
        follow(page.locator(".plane a").first, force=True)
        assert "/sites/" in page.url
        # A label, with all that it may contain.
        page.goto(f"{address}/{LLAMA}/{only_harvest(mine).name}/sites/{SITE}/5")
        page.get_by_label("label", exact=True).fill(f"vowels {MARKUP}")
        page.get_by_label("author", exact=True).fill("Ada")
        follow(page.get_by_role("button", name="Keep"))
        assert page.locator("h1").inner_text().startswith(f"{SITE} 5 vowels </title>")
    with served(mine) as address:  # a restart
        page.goto(f"{address}/{LLAMA}/{only_harvest(mine).name}/sites/{SITE}/5")
        assert page.get_by_label("label", exact=True).input_value() == f"vowels {MARKUP}"
        page.goto(f"{address}/{LLAMA}/{only_harvest(mine).name}/sites/{SITE}?labelled=yes")
        follow(page.get_by_role("rowheader").get_by_role("link", name="5", exact=True))
        assert component_of(page) == 5
    assert said == []


def test_with_the_keyboard_alone(mine: Path, browser: Browser) -> None:
    said: list[str] = []
    with served(mine) as address:
        page = watched(browser, said)
        page.goto(address)

        def tab_to(name: str) -> None:
            for _ in range(40):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.textContent").strip() == name:
                    return
            pytest.fail(f"no {name} within 40 tabs")

        def press(key: str) -> None:
            with page.expect_navigation():
                page.keyboard.press(key)

        tab_to(only_harvest(mine).name)
        press("Enter")
        tab_to(SITE)
        press("Enter")
        page.keyboard.press("/")
        page.keyboard.type("e")
        press("Enter")
        assert "search=e" in page.url
        page.keyboard.press("g")
        page.keyboard.type("7")
        press("Enter")
        assert component_of(page) == 7
        press("n")
        press("ArrowRight")
        assert component_of(page) == 9
        press("p")
        assert component_of(page) == 8
        page.keyboard.press("a")
        assert page.locator("#by-activation").is_checked()
        page.keyboard.press("e")
        page.keyboard.type("by keys, n and p are letters here")
        page.keyboard.press("Escape")
        page.keyboard.press("a")
        assert page.locator("#by-importance").is_checked()
        page.keyboard.press("e")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        press("Enter")
        assert "by keys" not in page.url
        press("u")
        assert page.url.endswith(SITE)
    assert said == []


def test_without_script_and_on_a_phone(mine: Path, harvested: Path, browser: Browser) -> None:
    said: list[str] = []
    with served(mine) as address:
        here = f"{address}/{LLAMA}/{only_harvest(mine).name}"
        label = "unbreakable" * 300
        for scheme in ("light", "dark"):
            page = watched(
                browser, said, java_script_enabled=False, viewport={"width": 400, "height": 800}, color_scheme=scheme
            )
            page.goto(f"{here}/sites/{SITE}/5")
            page.get_by_label("label", exact=True).fill(label)
            follow(page.get_by_role("button", name="Keep"))
            page.get_by_label("a", exact=True).check()
            assert "linear-gradient" in page.locator(".context .at").first.evaluate(
                "x => getComputedStyle(x).background"
            )
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 22, 25)"
            assert dark == (scheme == "dark")
            for path in ("/", "", f"/sites/{SITE}", f"/sites/{SITE}/5", "/text", "?search=unbreak", "/sites/nowhere"):
                page.goto(address if path == "/" else here + path)
                assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
        # A text, whose page reloads by itself.
    with served(harvested) as address:
        page.goto(f"{address}/{LLAMA}/{only_harvest(harvested).name}/text")
        page.get_by_label("text").fill("then")
        follow(page.get_by_role("button", name="Show"))
        page.locator("table.fires").wait_for()
        follow(page.get_by_role("link", name="h", exact=True))
        assert "at=1" in page.url
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert [line for line in said if "404" not in line] == []


def test_what_changes_without_a_component(harvested: Path, browser: Browser) -> None:
    """In its place on the component's page; without scripts on a page of its own."""
    said: list[str] = []
    with served(harvested) as address:
        here = f"{address}/{LLAMA}/{only_harvest(harvested).name}/sites/{SITE}/5"
        for scripts in (True, False):
            page = watched(browser, said, java_script_enabled=scripts, viewport={"width": 400, "height": 800})
            page.goto(here)
            page.get_by_role("link", name="What changes where it fires").click()
            page.get_by_text("at 64 of its firings").wait_for(timeout=120_000)
            assert (page.url == here) == scripts
            assert page.locator("[data-loaded] h3").count() == 2  # it fires with both signs
            assert page.locator("[data-loaded] tbody tr").count() == 40
            assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert said == []


def test_paths_that_no_browser_sends(harvested: Path) -> None:
    with served(harvested) as address:
        host = address.removeprefix("http://")
        for path in ("/../../etc/passwd", f"/{LLAMA}/../../../etc/passwd", "//etc/passwd", "/static/../harvest.json",
                     "/%2e%2e/%2e%2e/etc/passwd", f"/{LLAMA}/..", "http://evil.example/"):  # fmt: skip
            connection = http.client.HTTPConnection(host)
            connection.putrequest("GET", path, skip_host=False)
            connection.endheaders()
            answer = connection.getresponse()
            assert answer.status in (400, 403, 404) or path == "http://evil.example/"
            assert b"root:" not in answer.read()
        connection = http.client.HTTPConnection(host)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
