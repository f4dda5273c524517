"""Every page of `pd browse` in Chromium, of runs whose labels, tokens and names do harm where they can: by keyboard
alone, without scripts, on a phone, light and dark. Skipped where there is no Chromium.

`docs/measurements/tests.md` says which test holds what.
"""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
import yaml
from playwright.sync_api import Browser, Page
from starlette.routing import Route

from param_decomp_lab import load_run
from param_decomp_lab.baselines.kept import Kept, keep
from param_decomp_lab.browse.listen import _bind
from param_decomp_lab.browse.server import make_app
from param_decomp_lab.browse.text_worker import AnyAnswer, Question, TextWorker, _answer
from param_decomp_lab.cluster.cluster import cluster
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_names import token_names
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.plan import HarvestRequest
from param_decomp_lab.runs.position_attack import comparison_file
from param_decomp_lab.safe_io.printable import UNPRINTABLE
from param_decomp_lab.ui.cards import card, context
from tests.lab.chromium import CHROMIUM, NONE_HERE, chromium, follow, watched
from tests.lab.shared_folders import DOWN, UP, hand_graph, with_parts
from tests.lab.test_browse import LLAMA, LONG_MARKS, MARKS, MARKUP, base, only_harvest
from tests.lab.test_browse_baselines import SAE, comparison
from tests.lab.test_browse_groups import act_together
from tests.lab.test_heads import K, Q, decomposed
from tests.lab.tiny_run import STEPS, Tiny
from tests.lab.worker_here import LONG_S

TWIN, ATTENDS = "p-00000003", "p-00000004"
"""A copy of the Llama's run, to match it with, and a run that decomposes attention."""
HOSTILE = [
    f"{MARKUP}{MARKS}", LONG_MARKS, "W" * 10_000, f"line\nbreak\r\n\u2028{MARKUP}", "\u200b\u200b{}\u00a0\ufeff",
    "ش" * 10_000, "a b " * 2_500, "\u202e\u2067\u200f\"'><b>",
]  # fmt: skip
KINDS = ("label", "author", "token", "run", "data", "baseline", "rows", "prompt", "output", "site")
"""Of texts that come from outside; `hostile` says in each which it is."""
CHOSEN = quote(f"{DOWN}:5@3")
PAGES = {
    "runs": ("/", "/"),
    "a harvest": ("/{run}/{harvest}", ""),
    "all components": ("/{run}/{harvest}/components", "/components?sort=density&order=up"),
    "a search": ("/{run}/{harvest}/components", "/components?search=b"),
    "a site": ("/{run}/{harvest}/sites/{site}", f"/sites/{DOWN}"),
    "a component": ("/{run}/{harvest}/sites/{site}/{component}", f"/sites/{DOWN}/6"),
    "a text": ("/{run}/{harvest}/text", "/text?text=then"),
    "a component on a text": ("/{run}/{harvest}/text", f"/text?of={DOWN}:6&text=then"),
    "without it": ("/{run}/{harvest}/effect", f"/effect?site={DOWN}&component=6"),
    "what if": ("/{run}/{harvest}/intervene", f"/intervene?prompt=then&select={DOWN}:6+{UP}:3&how=scale&scale=2&on=1"),
    "nearest": ("/{run}/{harvest}/nearest", f"/nearest?site={DOWN}&component=6"),
    "nearest in another run": (
        "/{run}/{harvest}/nearest", f"/nearest?site={DOWN}&component=6&other={TWIN}&at=<harvest>",
    ),
    "graphs": ("/{run}/{harvest}/graphs", "/graphs"),
    "a graph": ("/{run}/{harvest}/graphs/{graph}", "/graphs/hand"),
    "a node": ("/{run}/{harvest}/graphs/{graph}", f"/graphs/hand?node={CHOSEN}"),
    "a graph of other sites": ("/{run}/{harvest}/graphs/{graph}", "/graphs/alien"),
    "a graph of a text": ("/{run}/{harvest}/graph", "/graph?prompt=then"),
    "groups": ("/{run}/{harvest}/groups", "/groups"),
    "a group": ("/{run}/{harvest}/groups/{group}", "/groups/3"),
    "baselines": ("/{run}/{harvest}/baselines", "/baselines"),
    "report": ("/{run}/{harvest}/report", "/report"),
    "another run": ("/{run}/{harvest}/matched", f"/matched?site={DOWN}&component=6"),
    "two runs": ("/{run}/{harvest}/matched/{other}/{other_harvest}", f"/matched/{TWIN}/<harvest>"),
    "pairs of a site": ("/{run}/{harvest}/matched/{other}/{other_harvest}/{site}", f"/matched/{TWIN}/<harvest>/{DOWN}"),
    "a pair": (
        "/{run}/{harvest}/matched/{other}/{other_harvest}/{site}/{component}",
        f"/matched/{TWIN}/<harvest>/{DOWN}/<paired>",
    ),
    "heads": ("/{run}/{harvest}/heads", f"<attends>/heads?site={Q}&component=3"),
    "nothing there": ("", f"/sites/{quote(MARKUP, safe='')}"),
}  # fmt: skip
"""By name, the route of each page, and an address: below the Llama's harvest, but for the first."""
NOT_PAGES = {"/static/{version}/{file}", "/{run}/{harvest}/sites/{site}/{component}/label"}
every_page = pytest.mark.parametrize("name", PAGES)
slow = pytest.mark.slow


def test_every_route_is_among_the_pages(harvested: Path) -> None:
    routes = {route.path for route in make_app([harvested]).routes if isinstance(route, Route)}
    assert {route for route, _ in PAGES.values() if route} == routes - NOT_PAGES


# ---- runs that do harm, and their server ----


def hostile(kind: str, text: str) -> str:
    assert kind in KINDS
    return f"<s>{kind}</s>{text}"


@pytest.fixture(scope="module")
def runs(harvested: Path, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "runs"
    shutil.copytree(harvested / LLAMA, folder / LLAMA)
    own = decomposed(tiny, tmp_path_factory.mktemp("attends"), {Q: 10, K: 9, UP: 6})
    harvest(own, HarvestRequest(tokens=640, examples=4))
    shutil.copytree(own.folder, folder / ATTENDS)
    act_together(Harvest(only_harvest(folder)))
    cluster(Harvest(only_harvest(folder)), ClusterRequest(alpha=0.5, seeds=2))
    shutil.copytree(folder / LLAMA, folder / TWIN)
    for run in (LLAMA, TWIN, ATTENDS):
        _make_hostile(folder, run)
    own_graph = hostile_graph()
    (folder / LLAMA / "graphs").mkdir(exist_ok=True)
    (folder / LLAMA / "graphs" / "hand.json").write_text(json.dumps(own_graph))
    sites = own_graph["nodes"]["site"]
    own_graph["nodes"]["site"] = [hostile("site", HOSTILE[n % len(HOSTILE)]) for n in range(len(sites))]
    own_graph["rests"] = {name: [] for name in own_graph["rests"]}
    (folder / LLAMA / "graphs" / "alien.json").write_text(json.dumps(own_graph))
    (folder / LLAMA / "graphs" / "damaged.json").write_text(json.dumps(MARKUP))
    file = comparison_file(folder / LLAMA, STEPS)
    file.parent.mkdir(exist_ok=True)
    kept = comparison(replacements=(replace(SAE, name=hostile("baseline", f"{MARKUP}{'x' * 100}")),))
    keep(file, Kept(kept, hostile("rows", f"{MARKUP}{'y' * 10_000}")))
    return folder


def _make_hostile(folder: Path, run: str) -> None:
    made = only_harvest(folder, run)
    names = [hostile("token", HOSTILE[n % len(HOSTILE)]) + str(n) for n in range(256)]
    pq.write_table(pa.table({"text": names}), made / "vocabulary.parquet")
    plan = json.loads((made / "harvest.json").read_text())
    (made / "harvest.json").write_text(json.dumps(plan | {"data": hostile("data", f"{MARKUP}{MARKS}{'y' * 10_000}")}))
    config = folder / run / "config.yaml"
    resolved = yaml.safe_load(config.read_text())
    resolved["wrapper"]["run_name"] = hostile("run", f"{MARKUP}{'x' * 10_000}")
    config.write_text(yaml.safe_dump(resolved))
    labels = Labels(folder / run, plan["step"])
    for site in Harvest(made).plan.sites:
        for n in range(0, site.C, 3):  # the others have their tokens in the label's place
            label = hostile("label", HOSTILE[n // 3 % len(HOSTILE)])
            labels.set(site.name, n, label[:10_000], hostile("author", MARKUP + MARKS)[:100])


def hostile_graph() -> dict[str, Any]:
    raw = with_parts(hand_graph(STEPS)).to_json()
    tokens = [hostile("token", HOSTILE[n]) for n in (0, 2, 3, 4)]
    raw |= {"prompt": hostile("prompt", HOSTILE[0] + "p" * 3_000), "tokens": tokens}
    raw["output_names"] = dict.fromkeys(raw["output_names"], hostile("output", HOSTILE[0]))
    return raw


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """Of a server in this process, whose runs answer here, with tokens that do harm. Nothing waits, so that no page
    asks again by itself."""
    opened = {run: load_run(runs / run, devices=1) for run in (LLAMA, TWIN, ATTENDS)}
    names = token_names({n: hostile("token", HOSTILE[n % len(HOSTILE)]) + str(n) for n in range(256)})
    wait = TextWorker.wait

    def answer(worker: TextWorker, question: Question) -> AnyAnswer:
        return _answer(opened[worker._about[0].name], question, *worker._about[2:])

    bound = _bind("127.0.0.1", [0])
    server = uvicorn.Server(uvicorn.Config(make_app([runs]), log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextWorker, "_question", answer)
        patch.setattr(TextWorker, "wait", lambda worker, question, patience_s: wait(worker, question, LONG_S))
        patch.setattr(TokenText, "tokens", lambda text, ids: [names[n] for n in ids])
        thread.start()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)
        bound.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NONE_HERE)
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def here(address: str, runs: Path) -> str:
    """The address of the Llama's harvest."""
    return address + base(runs)


def at(here: str, runs: Path, name: str) -> str:
    """The address of a page."""
    path = PAGES[name][1]
    if name == "runs":
        return here.removesuffix(base(runs)) + path
    if path.startswith("<attends>"):
        here = here.removesuffix(base(runs)) + base(runs, ATTENDS)
    paired = Harvest(only_harvest(runs)).summary(DOWN).firings.argmax()
    path = path.replace("<attends>", "").replace("<harvest>", only_harvest(runs, TWIN).name)
    return here + path.replace("<paired>", str(paired))


# ---- what is asked of a page, in its own words ----

CONTRASTS = """() => {
  const rgba = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [R, G, B]) => [a * r + (1 - a) * R, a * g + (1 - a) * G, a * b + (1 - a) * B];
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (color) => color.reduce((sum, x, k) => sum + linear(x / 255) * [0.2126, 0.7152, 0.0722][k], 0);
  const ratio = (one, other) => {
    const [dark, bright] = [light(one), light(other)].sort((x, y) => x - y);
    return (bright + 0.05) / (dark + 0.05);
  };
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const style = getComputedStyle(e);
      // A gradient here has one colour, which is written at both of its ends.
      const gradients = style.backgroundImage.split("gradient(").map((one) => one.match(/rgba?\\([^)]*\\)/)?.[0]);
      layers.push(...gradients.filter(Boolean).map(rgba), rgba(style.backgroundColor));
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const found = [];
  const look = (element, color, text) => {
    let alpha = 1;
    for (let e = element; e; e = e.parentElement) alpha *= Number(getComputedStyle(e).opacity);
    const below = ground(element);
    const [r, g, b, a] = rgba(color);
    const value = ratio(over([r, g, b, a * alpha], below), below);
    const said = `${element.localName}.${element.getAttribute("class") ?? ""} ${text.slice(0, 40)}`;
    if (value < 4.5) found.push(`${value.toFixed(2)} ${said}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.data;
    if (!text.trim() || !element.checkVisibility() || element.closest("script, style, title, option")) continue;
    // A chosen node's edges are drawn with the rest of the picture faint.
    if (element.closest("svg.one a:not(.near):not(.chosen)")) continue;
    count += 1;
    const style = getComputedStyle(element);
    look(element, element.closest("svg") ? style.fill : style.color, text);
  }
  for (const box of document.querySelectorAll("input, textarea, select")) {
    if (["hidden", "radio", "checkbox"].includes(box.type)) continue;
    look(box, getComputedStyle(box).color, "a box");
    if (box.placeholder) look(box, getComputedStyle(box, "::placeholder").color, box.placeholder);
  }
  return [count, [...new Set(found)].slice(0, 12)];
}"""

WATCH_FOCUS = """() => {
  const boxes = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]";
  const first = (one) => one.type !== "radio" || one.checked;
  const shown = (one) => one.checkVisibility({ visibilityProperty: true });
  window.stops = [...document.querySelectorAll(boxes)].filter((one) => one.tabIndex >= 0 && shown(one) && first(one));
  window.reached = [];
  window.unseen = [];
  const name = (one) => `${one.localName} ${one.textContent.trim().slice(0, 30)}`;
  document.addEventListener("focusin", ({ target }) => {
    window.reached.push(window.stops.indexOf(target));
    const style = getComputedStyle(target);
    const box = target.getBoundingClientRect();
    const inside = box.bottom > 0 && box.right > 0 && box.top < innerHeight && box.left < innerWidth;
    const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
    if (!outlined || !inside) window.unseen.push(name(target));
  });
  return window.stops.map(name);
}"""

NOTHING_MADE = "document.querySelectorAll(`img:not([src^='data:image/png']), iframe, object, embed, b > b, s`).length"
SCRIPTS = "[...document.scripts].filter((one) => !one.src && one.type !== 'application/json').length"


def unnamed(page: Page) -> list[str]:
    """Roles of links and boxes that have no name for those who hear a page."""
    session = page.context.new_cdp_session(page)
    tree = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"link", "button", "textbox", "searchbox", "combobox", "checkbox", "radio", "DisclosureTriangle"}
    return [
        node["role"]["value"]
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles and not node.get("name", {}).get("value", "").strip()
    ]


def clicked_without_keys(page: Page) -> list[str]:
    """What listens for clicks and is neither a link nor a button nor a box."""
    session = page.context.new_cdp_session(page)
    document = session.send("Runtime.evaluate", {"expression": "document"})["result"]["objectId"]
    listening = session.send("DOMDebugger.getEventListeners", {"objectId": document, "depth": -1})["listeners"]
    found = []
    for node in {one["backendNodeId"] for one in listening if one["type"] in ("click", "pointerdown", "mousedown")}:
        element = session.send("DOM.resolveNode", {"backendNodeId": node})["object"]
        asked = 'function () { return this.matches("a[href], button, summary, input") ? "" : this.outerHTML; }'
        call = {"objectId": element["objectId"], "functionDeclaration": asked}
        found.append(session.send("Runtime.callFunctionOn", call)["result"]["value"])
    return [one[:100] for one in found if one]


# ---- the columns of the table ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
@slow
@every_page
def test_without_scripts_on_a_phone(here: str, runs: Path, browser: Browser, name: str, scheme: str) -> None:
    """No page is wider than 400 pixels, all text has a contrast of 4.5, and nothing is shown that needs a script."""
    said: list[str] = []
    page = watched(
        browser, said, java_script_enabled=False, viewport={"width": 400, "height": 800}, color_scheme=scheme
    )
    page.goto(at(here, runs, name))
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    dark = sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) < 384
    assert dark == (scheme == "dark")
    count, faint = page.evaluate(CONTRASTS)
    assert count > (4 if name == "nothing there" else 15)
    assert faint == []
    if page.locator("#by-activation").count():  # a label or a radio button does it without scripts
        page.locator("#by-activation").check()
        shaded, faint = page.evaluate(CONTRASTS)
        assert (shaded, faint) == (count, [])
    for button in page.locator("button:visible").all():
        assert button.evaluate("x => x.form !== null && x.type === 'submit'"), button.inner_text()
    assert [line for line in said if "404" not in line] == []
    page.context.close()


@slow
@every_page
def test_with_the_keyboard_alone(here: str, runs: Path, browser: Browser, name: str) -> None:
    """Tab reaches everything once, in order, and shows where it is; everything that can be clicked is reached, and has
    a name."""
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900}, reduced_motion="reduce")
    page.goto(at(here, runs, name))
    stops = page.evaluate(WATCH_FOCUS)
    reached: list[int] = []
    for pressed in range(1, len(stops) + 60):  # frames that scroll are stops, too
        page.keyboard.press("Tab")
        if pressed >= len(stops):
            reached = [n for n in page.evaluate("window.reached") if n >= 0]
        if len(reached) >= len(stops):
            break
    assert reached == list(range(len(stops))), [stops[n] for n in range(len(stops)) if n not in reached]
    assert page.evaluate("window.unseen") == []
    assert unnamed(page) == []
    assert clicked_without_keys(page) == []
    assert [line for line in said if "404" not in line] == []
    page.context.close()


SHOWN = {
    "runs": "run data", "a harvest": "run data", "all components": "label token", "a search": "label token",
    "a site": "label token", "a component": "label author token", "a text": "label token",
    "a component on a text": "label token", "without it": "token", "what if": "token", "nearest": "label token",
    "nearest in another run": "label token", "graphs": "prompt output", "a graph": "prompt label token output",
    "a node": "prompt label token output", "a graph of other sites": "prompt site token output",
    "a graph of a text": "label token", "groups": "label", "a group": "label token", "baselines": "baseline rows",
    "report": "run", "another run": "", "two runs": "", "pairs of a site": "label token", "a pair": "label token",
    "heads": "label token", "nothing there": "",
}  # fmt: skip
"""By page, the `KINDS` of texts that it shows."""


@slow
@every_page
def test_labels_tokens_and_names_are_text(here: str, runs: Path, browser: Browser, name: str) -> None:
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(at(here, runs, name))
    assert page.evaluate(NOTHING_MADE) == 0
    assert page.evaluate(SCRIPTS) == (name == "report")  # whose own one the policy knows
    text = page.evaluate("document.body.textContent + [...document.querySelectorAll('[title], [aria-label]')]"
                         ".map(x => x.title + x.ariaLabel).join()")  # fmt: skip
    assert re.findall(f"[{UNPRINTABLE}]", text.replace("\t", "")) == []
    assert {kind for kind in KINDS if f"<s>{kind}</s>" in text} == set(SHOWN[name].split())
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300
    assert [line for line in said if "404" not in line] == []
    page.context.close()


@slow
def test_links_and_forms_lead_to_every_page(here: str, runs: Path, browser: Browser, address: str) -> None:
    """Without scripts, from the first page on."""
    page = watched(browser, [], java_script_enabled=False)
    app = make_app([runs])
    routes = {route.path: route.path_regex for route in app.routes if isinstance(route, Route)}
    found: set[str] = {"/"}
    targets = """() => [...document.querySelectorAll("a[href]"), ...document.forms].filter((x) => x.checkVisibility())
      .map((x) => new URL(x.getAttribute(x.localName === "form" ? "action" : "href") ?? "", location.href).href)"""
    todo, seen = [address + "/"], set[str]()
    while todo:
        where = todo.pop()
        page.goto(where)
        for link in page.evaluate(targets):
            path = urlsplit(link).path
            kind = next((name for name, pattern in routes.items() if pattern.match(path)), "")
            found.add(kind)
            # One of each kind and run, and of those of a site, one of each site.
            one = f"{kind} {re.sub(r'/[0-9]+$', '', path) if '{site}' in kind else path.split('/')[1]}"
            if kind and one not in seen and kind not in NOT_PAGES:
                seen.add(one)
                todo.append(link)
    assert found >= set(routes) - {"/static/{version}/{file}"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@slow
def test_contrasts_of_what_a_page_is_not_at_first(here: str, runs: Path, browser: Browser, scheme: str) -> None:
    """Hidden nodes of a graph, which stay in its list; and all shades of a card, on the ground that is its own."""
    page = watched(browser, [], viewport={"width": 1300, "height": 900}, color_scheme=scheme)
    page.goto(at(here, runs, "a graph"))
    page.locator("#n2").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("h")
    assert page.locator(".nodes li.away > a").count() > 0
    assert page.evaluate(CONTRASTS)[1] == []
    values = np.arange(11) / 10
    marked = context([f"token {n}" for n in range(11)], values, values, 10)
    page.goto("about:blank")  # where no policy forbids the style of a card
    page.set_content(card("example", context=marked, importance=1.0, activation=1.0, position=10, row=0, uniform=False))
    assert page.locator(".context span[class]").count() == 10
    count, faint = page.evaluate(CONTRASTS)
    assert count > 10
    assert faint == []
    page.context.close()


# ---- keys that do more than to follow a link ----


def press(page: Page, key: str, name: str) -> None:
    """Presses a key on the first link or button of this name."""
    page.locator("a, button", has_text=name).first.focus()
    page.keyboard.press(key)


@slow
def test_a_graph_by_keys(here: str, runs: Path, browser: Browser) -> None:
    """What has the focus never vanishes: where it does, what took its place has it."""
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 1300, "height": 900})
    page.goto(at(here, runs, "a graph"))

    def focused() -> str:
        return str(page.evaluate("document.activeElement.textContent")).strip()

    page.locator("#n2").focus()
    assert page.locator("#lines path").count() == 6  # as under the pointer
    page.keyboard.press("Enter")
    assert page.locator("#n2.chosen").count() == 1
    assert page.evaluate("document.activeElement.id") == "n2"
    press(page, "Space", "Select")
    assert focused() == "Let go"
    page.keyboard.press("Enter")
    assert focused() == "Select"
    page.keyboard.press("Space")
    page.get_by_label("group").focus()
    page.keyboard.type("mine")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert "mine (1)" in page.locator("#selection").inner_text()
    assert focused() == page.locator("#node h2").inner_text()
    press(page, "Enter", "Undo")
    assert focused() == page.locator("#node h2").inner_text()
    page.locator("#node table a").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#n2.chosen").count() == 0
    assert focused() == page.locator("#node h2").inner_text()
    page.keyboard.press("h")
    assert focused() == page.locator("#node p").inner_text()
    press(page, "Enter", "Show again")
    assert focused() == page.locator("#node p").inner_text()
    page.locator("#nodes small a").first.focus()  # to the examples of another node of the component
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('li').querySelector('details') !== null")
    assert said == []
    page.context.close()


@slow
def test_keys_of_frames_and_of_what_is_loaded(here: str, runs: Path, browser: Browser) -> None:
    """Arrows in a frame that scrolls move it, and elsewhere the page; what is loaded in place is where Tab goes on."""
    said: list[str] = []
    page = watched(browser, said, viewport={"width": 250, "height": 800})
    page.goto(at(here, runs, "a component"))
    frame = page.locator(".scroll").first
    assert frame.evaluate("x => x.scrollWidth > x.clientWidth")
    frame.locator("a").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("x => x.scrollLeft > 0", arg=frame.element_handle())
    assert page.url == at(here, runs, "a component")
    press(page, "Enter", "What changes")
    page.get_by_text("of its firings", exact=False).locator("visible=true").first.wait_for()
    page.locator("[data-loaded] h3").first.wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('[data-loaded]') !== null")
    page.locator("body").evaluate("x => document.activeElement.blur()")
    with page.expect_navigation():
        page.keyboard.press("ArrowRight")
    assert page.url.endswith("/7")
    assert said == []
    page.context.close()


@slow
def test_a_pasted_text_is_run_as_it_is(here: str, browser: Browser) -> None:
    """With what nobody sees in it; the page tells, and a link on it runs the same text."""
    text, said = "t\u200bh\u00a0\u202een", list[str]()
    page = watched(browser, said, viewport={"width": 400, "height": 800})
    page.goto(f"{here}/text")
    page.get_by_label("text").fill(text)
    follow(page.get_by_role("button", name="Show"))
    count = page.locator("table.fires thead a").count()
    for _ in range(2):
        assert page.get_by_label("text").input_value() == text
        told = page.locator(".unseen").inner_text()
        assert "U+00A0 NO-BREAK SPACE, U+200B ZERO WIDTH SPACE, U+202E RIGHT-TO-LEFT OVERRIDE" in told
        assert told.endswith("t\\u200bh\\u00a0\\u202een")
        assert page.locator("table.fires thead a").count() == count == len(text.encode())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        follow(page.locator("table.fires thead a").first)
    page.get_by_label("text").fill("then")
    follow(page.get_by_role("button", name="Show"))
    assert page.locator(".unseen").count() == 0
    assert said == []
    page.context.close()
