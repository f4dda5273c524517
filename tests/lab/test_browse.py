"""The browser's pages, asked as a browser asks them: what they show, whom they answer, and what no input can do."""

import json
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from httpx import Response
from starlette.testclient import TestClient

from param_decomp_lab import load_run
from param_decomp_lab.browse.catalog import Catalog, Opened
from param_decomp_lab.browse.component_list import Query, find_components
from param_decomp_lab.browse.listen import _bind, listen
from param_decomp_lab.browse.pages import by_sign, by_third
from param_decomp_lab.browse.server import make_app
from param_decomp_lab.browse.text_worker import TextAnswer, TextWorker
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Example, Harvest, find_harvests
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.numbers import number, percent, signed
from tests.lab.tiny_run import ROOT, pd_here
from tests.lab.worker_here import answer_here

LLAMA, TOY = "p-00000001", "p-00000002"
SITE = "layers.1.mlp.down_proj"
MARKUP = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&amp;"
LONG_MARKS = ("\u202e<b>'\"&" * 2000)[:10_000]
MARKS = "\u202egnp\u202c\u200f\x1b[2J\x00"


def client(*folders: Path) -> TestClient:
    return TestClient(make_app(folders), base_url="http://localhost:8720", follow_redirects=False)


def only_harvest(folder: Path, run: str = LLAMA) -> Path:
    [found] = find_harvests(folder / run)
    return found


def base(folder: Path, run: str = LLAMA) -> str:
    return f"/{run}/{only_harvest(folder, run).name}"


@pytest.fixture
def mine(harvested: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(harvested, tmp_path / "runs", ignore=shutil.ignore_patterns("ckpts")))


@pytest.fixture(scope="module")
def shown(harvested: Path) -> Iterator[TestClient]:
    with client(harvested) as found:
        yield found


def links(page: Response) -> set[str]:
    return {unescape(link) for link in re.findall(r'(?:href|action|src)="([^"]*)"', page.text)}


def numbers_of(page: Response) -> list[int]:
    return [int(n) for n in re.findall(r'<th scope="row" class="num"><a href="[^"]*">(\d+)</a>', page.text)]


def listed_of(page: Response) -> list[tuple[str, int]]:
    """Site and number of the components in a list of all sites."""
    found = re.findall(r'<th scope="row"><a href="[^"]*/sites/([^/"]*)/(\d+)">', page.text)
    return [(unescape(site), int(n)) for site, n in found]


def all_listed(browser: TestClient, address: str, **params: str) -> list[tuple[str, int]]:
    """Through all pages."""
    found: list[tuple[str, int]] = []
    for at in range(1, 100):
        page = browser.get(address, params=params | {"page": str(at)})
        assert page.status_code == 200, page.text
        found += listed_of(page)
        if 'rel="next"' not in page.text:
            return found
    pytest.fail("more pages than components")


# ---- what they show ----


def test_every_link_leads_somewhere(shown: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first page, each address once, with one of each kind of query; no process of a run is started."""
    asked = "param_decomp_lab.browse.text_worker.TextWorker._question"
    monkeypatch.setattr(asked, lambda worker, question: TextAnswer(wrong="not asked"))
    todo, done, kinds = ["/"], set[str](), set[str]()
    while todo:
        link = todo.pop()
        path, query = urlsplit(link).path, urlsplit(link).query
        kind = re.sub(r"\d+", "0", query) + re.sub(r"\d+$", "0", path) if query else path
        if kind in kinds or path.endswith("/label"):
            continue
        kinds.add(kind)
        page = shown.get(link)
        assert page.status_code == 200, (link, page.text)
        assert int(page.headers["content-length"]) <= 50_000 or path.endswith("/report")
        assert "content-security-policy" in page.headers
        if path.endswith("/report"):
            assert "'unsafe-inline'" not in page.headers["content-security-policy"].partition("script-src")[2]
            linked = f'<span class="id"><a href="{path.removesuffix("/report")}/sites/' in page.text
            assert linked == (LLAMA in path)  # a toy's report has no examples
        elif page.headers["content-type"].startswith("text/html"):
            assert page.text.count("<h1>") == 1
            assert " style=" not in page.text  # which the policy forbids
            assert "<script>" not in page.text
            done.add(path)
            todo += links(page)
    assert len(done) > 64


def test_pages_of_an_expert_say_how_many_positions_take_it(mine: Path) -> None:
    with (mine / LLAMA / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps({"step": 99, "eval/routed/layers.1.mlp": 0.25}) + "\n")
    with client(mine) as found:
        for address in ("", f"/sites/{SITE}", f"/sites/{SITE}/0"):
            text = found.get(base(mine) + address).text
            assert "25.0\u00a0%" in text
            assert "the expert" in text
        assert "the expert" not in found.get(f"{base(mine)}/sites/layers.0.mlp.down_proj").text


def test_a_component(shown: TestClient, harvested: Path) -> None:
    harvest = Harvest(only_harvest(harvested))
    c = int(harvest.components(SITE)["firings"].to_numpy().argmax())
    page = shown.get(f"{base(harvested)}/sites/{SITE}/{c}").text
    row = harvest.component(SITE, c)
    assert f"{row['firings']:,} of {harvest.plan.n_positions:,}" in page
    assert page.count('<p class="context">') == 8
    assert page.count(' at"') == 8  # where it fires
    assert f"λ is 0.999 or more at {row['firings_at_one']:,} of its {row['firings']:,} firings" in page
    for other in harvest.co_firing(SITE, c, 3).to_pylist():
        assert f"{base(harvested)}/sites/{other['site']}/{other['component']}" in page
    last = harvest.plan.sites[-1].C - 1
    for n, kinds in ((0, ["next"]), (5, ["prev", "next"]), (last, ["prev"])):
        found = re.findall(r'rel="(\w+)"', shown.get(f"{base(harvested)}/sites/{SITE}/{n}").text)
        assert [kind for kind in found if kind in ("prev", "next")] == kinds


def examples_of(page: str, title: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The lists under a heading: their titles, and λ and a of each example as they are written."""
    section = page.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
    parts = re.findall(r"<h3>(.*?)</h3>(.*?)</ol>", section, re.DOTALL)
    values = r"<span>λ ([^<]*)</span><br><span>a ([^<]*)</span>"
    return [(unescape(re.sub("<[^>]*>", "", head)), re.findall(values, body)) for head, body in parts]


def listed(title: str, lam: np.ndarray, a: np.ndarray) -> tuple[str, list[tuple[str, str]]]:
    """As a list of examples is written."""
    size = lam * np.abs(a)
    to = f" to {number(size[-1])}" if len(size) > 1 else ""
    rows = [(f"{x:.2f}", number(y)) for x, y in zip(lam, a, strict=True)]
    return f"{title} λ · |a| {number(size[0])}{to}", rows


def test_the_top_examples_of_each_sign(shown: TestClient, harvested: Path) -> None:
    harvest = Harvest(only_harvest(harvested))
    for c in np.flatnonzero(harvest.summary(SITE).firings).tolist():
        top = [e for e in harvest.examples(SITE, c) if e.kind == "top"]
        lam, a = (np.asarray([getattr(e, name) for e in top]) for name in ("importance", "activation"))
        expected = []
        for title, mine in (("a > 0", a > 0), ("a < 0", a < 0)):
            order = np.flatnonzero(mine)[np.argsort(-(lam * np.abs(a))[mine], kind="stable")]
            if len(order):
                expected.append(listed(title, lam[order], a[order]))
        page = shown.get(f"{base(harvested)}/sites/{SITE}/{c}").text
        assert examples_of(page, "Where it matters most") == expected
    assert [title for title, _ in by_sign([e for e in top if e.activation < 0])] == ["a < 0"]


def test_the_sample_in_thirds(shown: TestClient, harvested: Path) -> None:
    harvest = Harvest(only_harvest(harvested))
    summary = harvest.summary(SITE)
    for c in np.flatnonzero(summary.firings).tolist():
        sample = [e for e in harvest.examples(SITE, c) if e.kind == "uniform"]
        lam, a = (np.asarray([getattr(e, name) for e in sample]) for name in ("importance", "activation"))
        order = np.argsort(-lam * np.abs(a), kind="stable")
        sizes = {1: (0, 0, 1), 2: (1, 0, 1), 3: (1, 1, 1), 4: (1, 2, 1)}[len(sample)]
        expected = []
        for title, first, size in zip(("upper", "middle", "lower"), np.cumsum((0, *sizes)), sizes, strict=False):
            if size:
                of_third = order[first : first + size]
                expected.append(listed(f"{title} third", lam[of_third], a[of_third]))
        page = shown.get(f"{base(harvested)}/sites/{SITE}/{c}").text
        assert examples_of(page, "A random sample of its firings") == expected
    assert summary.firings.max() >= 4
    sample = [Example("uniform", k, 0, 1.0, float(k), 0, (), np.zeros(0), np.zeros(0)) for k in range(12)]
    assert [[e.row for e in found] for _, found in by_third(sample)] == [[11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]


def test_tokens_and_what_comes_next_by_sign(
    shown: TestClient, harvested: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tables of each where both signs occur; else one, as before format 3."""
    harvest = Harvest(only_harvest(harvested))
    numbers = range(harvest.site(SITE).C)
    signs = {c: harvest.by_sign(SITE, c, 8) for c in numbers}
    both = next(c for c in numbers if signs[c])
    here = f"{base(harvested)}/sites/{SITE}"
    page = shown.get(f"{here}/{both}").text
    for of in signs[both]:
        for title, rows, key in (
            (f"most frequent where {of.sign}", of.tokens, "precision"),
            (f"prediction where {of.sign}", of.outputs, "mean"),
        ):
            table = page.partition(f"<th>{escape(title)}</th>")[2].partition("</table>")[0]
            shares = re.findall(r'<td class="num"[^>]*>([^<]*)</td>', table)[::2]
            assert shares == [percent(row[key]) for row in rows.to_pylist()]
            assert shares
    assert f"a ≥ 0 at {signs[both][0].n} and a &lt; 0 at {signs[both][1].n}" in page
    card = harvest.read(SITE, both)._repr_html_()
    for of in signs[both]:
        for what in ("Tokens", "What comes next"):
            assert f'{what} where {escape(of.sign)} <span class="quiet">at {of.n}<' in card
    nothing = [of._replace(outputs=of.outputs.slice(0, 0)) if of.sign == "a < 0" else of for of in signs[both]]
    monkeypatch.setattr(Harvest, "by_sign", lambda *_, **__: nothing)
    page = shown.get(f"{here}/{both}").text
    assert "<th>prediction where a &lt; 0</th>" not in page
    assert "Nothing is predicted more often than elsewhere where a &lt; 0." in page
    monkeypatch.undo()
    plan = json.loads((only_harvest(mine) / "harvest.json").read_text())
    (only_harvest(mine) / "harvest.json").write_text(json.dumps(plan | {"format": 2}))
    (only_harvest(mine) / "components_negative.npy").unlink()
    with client(mine) as browser:
        old = browser.get(f"{here}/{both}").text
    assert " where a &" not in old
    assert "<th>prediction</th>" in old


def test_a_harvest_of_format_1(shown: TestClient, mine: Path) -> None:
    """Without the count of λ near 1, and with the examples of largest λ."""
    harvest = only_harvest(mine)
    plan = json.loads((harvest / "harvest.json").read_text())
    (harvest / "harvest.json").write_text(json.dumps(plan | {"format": 1}))
    for path in (harvest / "components").iterdir():
        table = pq.read_table(path)
        pq.write_table(table.drop_columns("firings_at_one"), path)
    here = f"{base(mine)}/sites/{SITE}"
    with client(mine) as browser:
        assert browser.get(here).text == shown.get(here).text
        page = browser.get(f"{here}/3")
        assert "This old harvest kept" in page.text
        assert "0.999" not in page.text
        assert examples_of(page.text, "Where it matters most")


def test_a_toy(shown: TestClient, harvested: Path) -> None:
    site = next(iter(Harvest(only_harvest(harvested, TOY)).sites))
    page = shown.get(f"{base(harvested, TOY)}/sites/{site}/0").text
    assert re.search(r"feature \d", page)


def test_order_and_selection(shown: TestClient, harvested: Path) -> None:
    harvest = Harvest(only_harvest(harvested))
    site = f"{base(harvested)}/sites/{SITE}"
    table = harvest.summary(SITE)
    for sort, values in {
        "": table.importance_mean,
        "density": table.density,
        "largest": table.importance_max,
        "activation": table.activation_mean,
        "largest_activation": table.activation_max,
    }.items():
        found = numbers_of(shown.get(site, params={"sort": sort}))
        assert sorted(found) == list(range(len(values)))
        assert np.all(np.diff(values[found]) <= 0)
        rising = numbers_of(shown.get(site, params={"sort": sort, "order": "up"}))
        assert np.all(np.diff(values[rising]) >= 0)
    middle = float(np.median(table.density))
    found = numbers_of(shown.get(site, params={"min_density": f"{middle:.8f}", "max_density": "1"}))
    assert set(found) == set(np.flatnonzero(table.density >= round(middle, 8)).tolist())
    # The order of the list is that of next and previous.
    by_density = numbers_of(shown.get(site, params={"sort": "density"}))
    page = shown.get(f"{site}/{by_density[1]}", params={"sort": "density"})
    assert f"2 of {len(by_density)}" in page.text
    assert re.findall(r'href="([^"]*)" rel="(\w+)"', page.text) == [
        (f"{site}/{by_density[0]}?sort=density", "prev"),
        (f"{site}/{by_density[2]}?sort=density", "next"),
    ]
    assert shown.get(site, params={"go": "7"}).headers["location"] == f"{site}/7"


def test_search_finds_what_fires_on_a_token(shown: TestClient, harvested: Path) -> None:
    harvest = Harvest(only_harvest(harvested))
    assert harvest.vocabulary is not None
    opened = Catalog([harvested]).harvest(LLAMA, harvest.folder.name)
    for letter in ("e", "t"):
        token = harvest.vocabulary.to_pylist().index(letter)
        expected = set()
        for c in range(harvest.site(SITE).C):
            for row in harvest.tokens(SITE, c).to_pylist():
                # A search is for the letter in any case.
                same = harvest.vocabulary[row["token"]].as_py().lower() == letter
                if same and row["precision"] >= 0.02 and row["lift"] > 1 and row["total"] >= 10:
                    expected.add(c)
        assert token >= 0
        assert set(find_components(opened, SITE, Query(search=letter)).tolist()) == expected
        assert set(numbers_of(shown.get(f"{base(harvested)}/sites/{SITE}", params={"search": letter}))) == expected
    assert "No component matches" in shown.get(f"{base(harvested)}/sites/{SITE}", params={"search": "☃"}).text


VALUES = {
    "": "importance_mean",
    "density": "density",
    "largest": "importance_max",
    "activation": "activation_mean",
    "largest_activation": "activation_max",
}


def test_all_components_in_order(shown: TestClient, harvested: Path) -> None:
    harvest, address = Harvest(only_harvest(harvested)), f"{base(harvested)}/components"
    summaries = {site: harvest.summary(site) for site in harvest.sites}
    every = [(site.name, n) for site in harvest.plan.sites for n in range(site.C)]
    assert len(every) > 50  # so that there are two pages
    for sort, name in VALUES.items():
        for order, sign in (("", -1), ("up", 1)):
            found = all_listed(shown, address, sort=sort, order=order)
            assert sorted(found) == sorted(every)
            values = np.asarray([getattr(summaries[site], name)[n] for site, n in found]) * sign
            assert np.all(np.diff(values) >= -1e-6 * np.abs(values[1:]))
            numbers = np.asarray([every.index(one) for one in found])
            equal = np.diff(values.astype(np.float32)) == 0
            assert np.all(np.diff(numbers)[equal] > 0)  # equal ones by number, both ways
    assert all_listed(shown, address, sort="number", order="up") == every
    assert all_listed(shown, address, sort="number") == every[::-1]
    middle = float(np.median(np.concatenate([x.density for x in summaries.values()])))
    dense = {(site, n) for site, n in every if summaries[site].density[n] >= round(middle, 8)}
    assert set(all_listed(shown, address, min_density=f"{middle:.8f}", max_density="1")) == dense
    assert 0 < len(dense) < len(every)
    page = shown.get(address, params={"sort": "density"}).text
    assert f"{len(every)} components of {len(summaries)} sites" in page
    alive = sum(int((x.firings > 0).sum()) for x in summaries.values())
    assert f"<span>{alive} that fire</span>" in page
    assert f"<h2>{len(every)} components" in page
    row = page.partition("<tbody>")[2].partition("</tr>")[0]
    [(site, n)] = listed_of(Response(200, text=row))
    assert f'<td class="num">{percent(summaries[site].density[n])}</td>' in row
    tokens = harvest.names([t for t in summaries[site].tokens[n].tolist() if t >= 0])
    assert re.findall(r'<span class="token">(.*?)</span>', row) == [str(escape(token)) for token in tokens]


def test_all_components_by_token(shown: TestClient, harvested: Path) -> None:
    """What the first page's search finds is what the searches of the sites find, in one order."""
    harvest, address = Harvest(only_harvest(harvested)), f"{base(harvested)}/components"
    form = shown.get(base(harvested)).text.partition('<form role="search"')[2].partition("</form>")[0]
    assert f'action="{address}"' in form
    assert 'name="search"' in form
    assert address in links(shown.get(base(harvested)))
    old = shown.get(base(harvested), params={"search": "e t"})
    assert (old.status_code, old.headers["location"]) == (303, f"{address}?search=e+t")
    opened = Catalog([harvested]).harvest(LLAMA, harvest.folder.name)
    for sort in ("", "density", "number"):
        expected = {
            (site, n) for site in harvest.sites for n in find_components(opened, site, Query(search="e")).tolist()
        }
        found = all_listed(shown, address, search="e", sort=sort)
        assert sorted(found) == sorted(expected)
        assert 0 < len(found) < len(harvest.index)
        for site in harvest.sites:  # the order within a site is that of its own list
            own = find_components(opened, site, Query(sort, False, "e")).tolist()
            assert [n for name, n in found if name == site] == own
    rows = harvest.find(token="e", most=1000).to_pylist()
    match = {(row["site"], row["component"]): row["match"] for row in rows}
    listed_by_match = all_listed(shown, address, search="e")
    assert set(match) == set(listed_by_match)
    # Components with equal matches may be in either order.
    assert [match[one] for one in listed_by_match] == pytest.approx(sorted(match.values(), reverse=True))
    assert "No component matches" in shown.get(address, params={"search": "☃"}).text
    toy = shown.get(f"{base(harvested, TOY)}/components", params={"search": "1"})
    assert "Features searched for" in toy.text


def test_a_site_shows_the_same_after_all_components(harvested: Path) -> None:
    """Its numbers are then a part of those of all."""
    address = f"{base(harvested)}/sites/{SITE}"
    with client(harvested) as browser:
        before = [browser.get(address, params=params).text for params in ({}, {"search": "e", "sort": "density"})]
        assert browser.get(f"{base(harvested)}/components").status_code == 200
        after = [browser.get(address, params=params).text for params in ({}, {"search": "e", "sort": "density"})]
    assert before == after
    opened = Catalog([harvested]).harvest(LLAMA, only_harvest(harvested).name)
    before_all = {site: opened.summary(site) for site in opened.harvest.sites}
    assert len(opened.all_components.summary.firings) == len(opened.harvest.index)
    for site, summary in before_all.items():
        for one, other in zip(summary, opened.summary(site), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


def test_the_map_has_every_component_that_fires(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fires = np.flatnonzero(Harvest(only_harvest(harvested)).summary(SITE).firings)
    site = f"{base(harvested)}/sites/{SITE}"
    with client(harvested) as one_by_one:
        found = re.findall(r'<a href="([^"]*)" tabindex="-1">', one_by_one.get(site).text)
        assert sorted(found) == sorted(f"{site}/{c}" for c in fires)
    monkeypatch.setattr("param_decomp_lab.browse.plots.ROOM", 1)
    monkeypatch.setattr("param_decomp_lab.browse.plots.ACROSS", 3)
    monkeypatch.setattr("param_decomp_lab.browse.plots.DOWN", 2)
    with client(harvested) as together:
        reached: list[int] = []
        for link in re.findall(r'<a href="([^"]*)" tabindex="-1">', together.get(site).text):
            address = unescape(link)
            reached += numbers_of(together.get(address)) if "?" in address else [int(address.rpartition("/")[2])]
        assert set(reached) == set(fires.tolist())


def test_what_to_do_with_a_component(shown: TestClient, harvested: Path) -> None:
    here, step = base(harvested), Harvest(only_harvest(harvested)).plan.step
    page = shown.get(f"{here}/sites/{SITE}/3")
    for how in ("how=off", "how=scale&scale=2"):
        address = f"{here}/intervene?select={quote(SITE)}%3A3&{how}"
        assert address in links(page)
        form = shown.get(address).text
        assert f">\n{SITE}:3</textarea>" in form
        assert f'<option value="{how[4:].partition("&")[0]}" selected>' in form
    copies = [unescape(text) for text in re.findall(r'data-copy="([^"]*)"', page.text)]
    assert copies[0] == f"{SITE}:3"
    found: dict[str, Any] = {}
    exec(copies[1], found)
    assert (found["run"].folder.resolve(), found["run"].step) == ((harvested / LLAMA).resolve(), step)
    assert (found["component"].site, found["component"].number) == (SITE, 3)
    assert page.text.count("<abbr title=") > 8
    assert '<abbr title="">' not in page.text


def test_what_if_begins_with_an_example(shown: TestClient, harvested: Path) -> None:
    for run, site in ((LLAMA, SITE), (TOY, next(iter(Harvest(only_harvest(harvested, TOY)).sites)))):
        harvest, here = Harvest(only_harvest(harvested, run)), base(harvested, run)
        c = int(harvest.summary(site).firings.argmax())
        [example] = harvest.examples(site, c, 1)
        if run == LLAMA:
            expected = "".join(example.names[: example.position - example.first + 1]).replace("↵", "\n")
        else:
            row = harvest.row(example.row)
            expected = " ".join(f"{k}={row[k]:.6g}" for k in example.tokens)
        address = f"{here}/intervene?select={quote(site)}%3A{c}&how=off"
        assert address in links(shown.get(f"{here}/sites/{site}/{c}"))
        page = shown.get(address)
        assert "http-equiv" not in page.text  # nothing is run yet
        text = re.search(r'<textarea name="prompt"[^>]*>\n(.*?)</textarea>', page.text, re.DOTALL)
        assert text is not None
        assert unescape(text[1]) == expected
        assert expected.strip()
        assert "first example" in page.text
        assert f'<a href="{here}/sites/{site}/{c}" data-key="u">' in page.text
        assert '<h1>What if</h1>\n<p class="note">Changes components' in page.text
        assert page.text.count('<label class="factor">') == 1  # which the style sheet shows beside "multiplied by"
        usual = number(harvest.component(site, c)["firing_activation_mean"])
        assert f"Where this component fires, |a| is {usual} on average" in page.text
    for nothing in ("", "select=x:1", f"select={site}:999", "select=group:1", f"select={site}:{'9' * 30}", "prompt="):
        page = shown.get(f"{here}/intervene?{nothing}").text
        assert 'data-key="/">\n</textarea>' in page
        assert "first example" not in page
        assert "←" not in page
    several = shown.get(f"{here}/intervene", params={"select": f"{site}:0 {site}:1@-1 {site}:0"}).text
    assert re.findall(r"/sites/[^/]*/(\d+)", several) == ["0", "1"]
    assert "first example" not in several


def record_questions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What pages ask the process of a run from now on; it answers that nothing was run."""
    asked: list[Any] = []

    def ask(worker: TextWorker, question: Any) -> TextAnswer:
        asked.append(question)
        return TextAnswer(wrong="not run")

    monkeypatch.setattr(TextWorker, "_question", ask)
    return asked


def test_a_text_of_several_lines_stays_the_same(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers send its line breaks as CR LF; of a text area's content, they leave out the first line break."""
    asked = record_questions(monkeypatch)
    monkeypatch.setattr(Opened, "sites_with_heads", frozenset({SITE}))
    text, sent, here = "\na\n\tb", "\r\na\r\n\tb", base(mine)
    forms: list[tuple[str, str, dict[str, str]]] = [
        ("text", "text", {}), ("text", "text", {"of": f"{SITE}:0"}), ("graph", "prompt", {}),
        ("heads", "text", {"site": SITE, "component": "0"}), ("intervene", "prompt", {"select": f"{SITE}:0"}),
    ]  # fmt: skip
    with client(mine) as browser:
        for path, name, more in forms:
            page = browser.get(f"{here}/{path}", params={name: sent, **more}).text
            question = asked.pop()
            assert (question if isinstance(question, str) else getattr(question, name)) == text
            box = re.search(rf'<textarea name="{name}"[^>]*>\n(.*?)</textarea>', page, re.DOTALL)
            assert box is not None
            assert unescape(box[1]) == text
        browser.post(f"{here}/graph", data={"prompt": f"{sent}c"})
        assert asked.pop().prompt == f"{text}c"
        browser.post(f"{here}/sites/{SITE}/3/label", data={"text": "a\r\n\tb"})
        page = browser.get(f"{here}/sites/{SITE}/3").text
        assert ">\na\n\tb</textarea>" in page
        assert "\\r" not in page


def test_what_does_not_show_in_a_text_is_told(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run, and sent again, as it was typed; so is a text that is blank."""
    asked = record_questions(monkeypatch)
    monkeypatch.setattr(Opened, "sites_with_heads", frozenset({SITE}))
    here, told = base(mine), "U+200B ZERO WIDTH SPACE"
    forms: list[tuple[str, str, dict[str, str]]] = [
        ("text", "text", {}), ("text", "text", {"of": f"{SITE}:0"}), ("graph", "prompt", {}),
        ("graph", "target", {"prompt": "a"}),
        ("heads", "text", {"site": SITE, "component": "0"}), ("intervene", "prompt", {"select": f"{SITE}:0"}),
    ]  # fmt: skip
    with client(mine) as browser:
        for path, name, more in forms:
            for text in ("a\u200b<b>\u202e\u00a0\x1b", "plain\n\tüß", " ", "\u00a0"):
                page = browser.get(f"{here}/{path}", params={name: text, **more}).text
                question = asked.pop()
                assert (question if isinstance(question, str) else getattr(question, name)) == text
                boxes = rf'<textarea name="{name}"[^>]*>\n(.*?)</textarea>|<input name="{name}" value="(.*?)"'
                box = re.search(boxes, page, re.DOTALL)
                assert box is not None
                assert unescape(box[1] or box[2]) == text
                assert (told in page) == ("\u200b" in text)
                assert ("U+00A0 NO-BREAK SPACE" in page) == ("\u00a0" in text)
                assert ("invisible" in page) == ("\u00a0" in text)
            assert '<span class="token">\\u00a0</span>' in page
        page = browser.get(f"{here}/text", params={"text": f"{'a' * 500}\u200b{'b' * 500}\x00"}).text
        assert f'<span class="token">…{"a" * 20}\\u200b{"b" * 59}…</span>' in page
        assert f"{'b' * 500}\\x00</textarea>" in page  # which no page can hold
        assert "characters that are invisible or look like a space: U+0000, U+200B ZERO WIDTH SPACE." in page
        asked.clear()
        for more in ({"how": "scale", "scale": "x"}, {"how": "off", "select": "group:99"}):
            page = browser.get(f"{here}/intervene", params={"prompt": "a\x00", "select": f"{SITE}:0", **more}).text
            assert "It has characters that are invisible or look like a space: U+0000." in page
            assert '<span class="token">a␀</span>' in page
        assert asked == []


def test_a_search_for_what_does_not_show(mine: Path) -> None:
    harvest = Harvest(only_harvest(mine))
    token = int(harvest.tokens(SITE, int(harvest.summary(SITE).firings.argmax()))["token"][0].as_py())
    names = [f"[{n}]" for n in range(256)]
    names[token] = "a\\u00a0b"
    pq.write_table(pa.table({"text": names}), harvest.folder / "vocabulary.parquet")
    with client(mine) as browser:
        for search in ("a\u00a0b", "a\\u00a0b"):
            page = browser.get(f"{base(mine)}/sites/{SITE}", params={"search": search}).text
            assert 'searched for: <span class="token">a\\u00a0b</span>' in page
        assert "No token contains this" in browser.get(f"{base(mine)}/components", params={"search": "a b"}).text


def test_a_search_for_one_that_does_not_show(mine: Path) -> None:
    """The character alone is not trimmed away, on any page that searches, nor in Python."""
    harvest = Harvest(only_harvest(mine))
    token = int(harvest.tokens(SITE, int(harvest.summary(SITE).firings.argmax()))["token"][0].as_py())
    names = [f"[{n}]" for n in range(256)]
    for character, name in (("\u00a0", "\\u00a0"), ("\u3000", "\\u3000"), ("\U000e0001", "\\U000e0001")):
        names[token] = name
        pq.write_table(pa.table({"text": names}), harvest.folder / "vocabulary.parquet")
        with client(mine) as browser:
            for search in (character, f" {character}", name):
                for path in (f"sites/{SITE}", "components"):
                    page = browser.get(f"{base(mine)}/{path}", params={"search": search}).text
                    assert f'searched for: <span class="token">{name}</span>' in page
                first = browser.get(base(mine), params={"search": search})
                assert first.status_code == 303
                assert parse_qs(urlsplit(first.headers["location"]).query)["search"] == [search]
            everything = browser.get(f"{base(mine)}/components", params={"search": " \t"}).text
            assert "searched for" not in everything
        found = Harvest(harvest.folder).find(token=token).to_pylist()
        assert len(found) > 0
        for search in (character, f" {character}\n", name):
            assert Harvest(harvest.folder).find(token=search).to_pylist() == found


def test_an_example_with_what_does_not_show(mine: Path) -> None:
    """What the names of tokens escape is the character again, and what is an escape in the text itself is not."""
    harvest = Harvest(only_harvest(mine))
    names = [f"\\u200b\\u0041[{n}]" for n in range(256)]
    pq.write_table(pa.table({"text": names}), harvest.folder / "vocabulary.parquet")
    c = int(harvest.summary(SITE).firings.argmax())
    with client(mine) as browser:
        page = browser.get(f"{base(mine)}/intervene", params={"select": f"{SITE}:{c}"}).text
    box = re.search(r'<textarea name="prompt"[^>]*>\n(.*?)</textarea>', page, re.DOTALL)
    assert box is not None
    assert box[1].startswith("\u200b\\u0041[")
    assert "U+200B ZERO WIDTH SPACE" in page
    assert "is run" not in page


def test_an_example_of_source_code_with_an_escape(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that make an escape only together are that source code, before and after a marker alike."""
    names = ("<|endoftext|>", "a", "\\", "u", "200", "b", "\\u00", "a0", "\\u00a0", "↵", "b")
    zeros = np.zeros(len(names), np.float32)
    example = Example("top", 0, len(names) - 1, 1.0, 1.0, 0, tuple(range(len(names))), zeros, zeros, names)
    monkeypatch.setattr(Harvest, "examples", lambda *_: [example])
    with client(mine) as browser:
        page = browser.get(f"{base(mine)}/intervene", params={"select": f"{SITE}:0"}).text
    box = re.search(r'<textarea name="prompt"[^>]*>\n(.*?)</textarea>', page, re.DOTALL)
    assert box is not None
    assert box[1] == "a\\u200b\\u00a0\u00a0\nb"


def test_the_factor_shows_where_it_matters(shown: TestClient, harvested: Path) -> None:
    page = shown.get(base(harvested)).text
    [style] = re.findall(r'href="(/static/[^"]*browse.css)"', page)
    hidden = 'form.text:not(:has(option:is([value="scale"], [value="set"]):checked)) .factor { display: none; }'
    assert hidden in shown.get(style).text


def answered_here(harvested: Path, monkeypatch: pytest.MonkeyPatch, run_name: str = LLAMA) -> Run:
    """The run, opened here, which answers what is asked of the process of a run."""
    run = load_run(harvested / run_name, devices=1)
    answer_here(run, monkeypatch)
    return run


def test_a_group_with_a_number_that_is_too_long(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What selects says what is wrong with it."""
    monkeypatch.setattr(TextWorker, "_question", lambda worker, question: TextAnswer(wrong=question.selection[0][:40]))
    with client(harvested) as browser:
        page = browser.get(f"{base(harvested)}/intervene", params={"prompt": "then", "select": f"group:{'9' * 5000}"})
    assert f'<p class="message">group:{"9" * 34}</p>' in page.text


def test_nearest_components(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those by U and V as the run says, here in this process; those by firing by their Jaccard index."""
    run, harvest = answered_here(harvested, monkeypatch), Harvest(only_harvest(harvested))
    c = int(harvest.components(SITE)["firings"].to_numpy().argmin())
    address = f"{base(harvested)}/nearest?site={SITE}&component={c}"
    with client(harvested) as browser:  # its own, which has kept no answer of another test
        assert address in links(browser.get(f"{base(harvested)}/sites/{SITE}/{c}"))
        page = browser.get(address)
        for wrong in (
            f"site=x&component={c}",
            f"site={SITE}&component=99",
            f"site={SITE}",
            "",
            f"site={SITE}&component=-1",
        ):
            assert browser.get(f"{base(harvested)}/nearest?{wrong}").status_code == 404
    found = []
    for section in page.text.split("<h2>")[1:]:
        value = r'<td class="num">([^<]*)</td>'
        row = rf'<tr><td><a href="[^"]*/sites/([^/"]*)/(\d+)">.*?{value}{value}'
        found.append(re.findall(row, section))
    together = sorted(harvest.co_firing(SITE, c, 10**6).to_pylist(), key=lambda row: -row["jaccard"])[:12]
    expected = [[(n.site, n.number, signed(n.cosine)) for n in run.nearest(SITE, c, side)] for side in ("U", "V")]
    expected.append([(row["site"], row["component"], percent(min(row["jaccard"], 1))) for row in together])
    for listed, wanted in zip(found, expected, strict=True):
        assert len(wanted) >= 8
        dense = [percent(harvest.summary(site).density[n]) for site, n, _ in wanted]
        assert listed == [(site, str(n), value, d) for (site, n, value), d in zip(wanted, dense, strict=True)]


@pytest.mark.parametrize("run_name", [LLAMA, TOY])
def test_what_changes_without_a_component(harvested: Path, monkeypatch: pytest.MonkeyPatch, run_name: str) -> None:
    """The page has the numbers of `run.effect`, which are tested against single forwards."""
    run, harvest = answered_here(harvested, monkeypatch, run_name), Harvest(only_harvest(harvested, run_name))
    site = next(iter(harvest.sites))
    firings = harvest.components(site)["firings"].to_numpy()
    c, here = int(firings.argmax()), base(harvested, run_name)
    with client(harvested) as browser:
        address = f"{here}/effect?site={site}&component={c}"
        assert address in links(browser.get(f"{here}/sites/{site}/{c}"))
        page, other = browser.get(address).text, browser.get(f"{address}&by=probability").text
        assert (f"{address}&by=probability" in links(browser.get(address))) == (run_name == LLAMA)
        for wrong in (f"site=x&component={c}", f"site={site}&component=99", f"site={site}", ""):
            assert browser.get(f"{here}/effect?{wrong}").status_code == 404
    found, of_text = run.effect(site, c, places=64, harvest=harvest), run_name == LLAMA
    assert found.n == 64
    show = percent if of_text else number
    assert f"{number(found.error)} ± {number(found.standard_error)}" in page
    assert "at 64 of its firings" in page
    parts = found.by_sign().values()
    for text, listed in (
        (page, [output for part in parts for output in (*part.down, *part.up)]),
        (other, [output for part in parts for output in (*part.down_by_probability, *part.up_by_probability)]),
    ):
        cells = r'<tr><td><span class="token">(.*?)</span></td>' + 3 * r'<td class="num[^"]*">([^<]*)</td>'
        change = signed if of_text else number
        in_points = of_text and text is other
        moved = [100 * (o.after - o.before) if in_points else o.change for o in listed]
        expected = [(o.name, change(x), show(o.before), show(o.after)) for o, x in zip(listed, moved, strict=True)]
        assert [tuple(map(unescape, row)) for row in re.findall(cells, text)] == expected
        assert len(expected) >= 4
    for sign, part in found.by_sign().items():
        assert f"{escape(sign)} <small>at {part.n}</small>" in page


def test_the_effect_of_a_component_that_never_fires(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("param_decomp_lab.harvest.files.Harvest.component", lambda *about: {"firings": 0})
    with client(mine) as browser:
        assert "It fires nowhere" in browser.get(f"{base(mine)}/effect?site={SITE}&component=1").text


def test_one_component_on_a_text(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """λ and a at every token, as the run has them, in the text and in the list of the strongest."""
    run, harvest = answered_here(harvested, monkeypatch), Harvest(only_harvest(harvested))
    site, text = "layers.1.mlp.up_proj", "if <b>x</b>:"
    both = [np.asarray(x[site]) for x in (run.causal_importances(text, site), run.activations(text, site))]
    c = int(both[0].std(axis=0).argmax())  # λ differs most from token to token
    lam, a = (x[:, c] for x in both)
    with client(harvested) as browser:
        component = browser.get(f"{base(harvested)}/sites/{site}/{c}").text
        form = component.partition('<form class="own"')[2].partition("</form>")[0]
        assert f'action="{base(harvested)}/text"' in form
        assert f'name="of" value="{site}:{c}"' in form
        page = browser.get(f"{base(harvested)}/text", params={"of": f"{site}:{c}", "text": text}).text
        assert "5,000 characters" in browser.get(f"{base(harvested)}/text?of={site}:{c}&text={'x' * 5001}").text
        for wrong in ("x:1", f"{site}:99", site, f"{site}:x"):
            assert browser.get(f"{base(harvested)}/text", params={"of": wrong, "text": text}).status_code == 404
    shown = re.findall(r'<span[^>]* title="(?:λ ([\d.]+), )?a ([^"]*)">(.*?)</span>', page)
    assert [unescape(token) for *_, token in shown] == list(text)
    assert [(x, y) for x, y, _ in shown] == [
        (f"{x:.2f}" if x > 0 else "", f"{y:.3g}") for x, y in zip(lam, a, strict=True)
    ]
    assert f"at {(lam > harvest.plan.threshold).sum()} of {len(text)} tokens" in page
    listed = re.findall(
        r'</span></td><td class="num">(\d+)</td><td class="num">([^<]*)</td><td class="num">([^<]*)</td>', page
    )
    order = sorted(range(len(text)), key=lambda k: (-lam[k] * abs(a[k]), -abs(a[k])))[:12]
    assert listed == [(str(k), f"{lam[k]:.2f}", number(a[k])) for k in order]


def test_one_component_on_features(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = answered_here(harvested, monkeypatch, TOY)
    site = next(iter(run.sites))
    lam, a = (
        np.asarray(x[site])[2]
        for x in (run.causal_importances([0, 1, 0, 0.5, 0], site), run.activations([0, 1, 0, 0.5, 0], site))
    )
    with client(harvested) as browser:
        page = browser.get(f"{base(harvested, TOY)}/text", params={"of": f"{site}:2", "text": "1 3=0.5"}).text
    assert "feature 1" in page
    assert f'<td class="num">{lam:.2f}</td><td class="num">{number(a)}</td>' in page


# ---- labels ----


def test_labels_are_kept(mine: Path) -> None:
    here = f"{base(mine)}/sites/{SITE}"
    with client(mine) as browser:
        said = {"text": " vowels before n ", "author": "Ada"}
        answer = browser.post(f"{here}/3/label?sort=density", data=said, headers={"origin": "http://localhost:8720"})
        assert (answer.status_code, answer.headers["location"]) == (303, f"{here}/3?sort=density")
        browser.post(f"{here}/3/label", data={"text": MARKUP, "author": MARKS})
        browser.post(f"{here}/4/label", data={"text": LONG_MARKS, "author": ""})
        assert browser.post(f"{here}/4/label", data={"text": "x" * 10_001}).status_code == 400
        assert browser.post(f"{here}/99/label", data={"text": "x"}).status_code == 404
        assert browser.post(f"{here}/3/label", content=b"text=%ff").status_code == 400
        assert browser.post(f"{here}/3/label", content=b"x" * 100_000).status_code == 400
        assert browser.get(f"{here}/3/label").status_code == 405
    with client(mine) as browser:  # after a restart
        page = browser.get(f"{here}/3").text
        assert "vowels before n" in page
        assert "Ada" in page
        assert "<script>alert" not in page
        assert "<img" not in page
        assert not set(MARKS) & set("\u202e\u200f\x1b") & set(page)
        for path in (
            f"{here}/4",
            f"{here}?labelled=yes",
            f"{base(mine)}/components?search=b",
        ):  # whole, in short, found
            long = browser.get(path).text
            assert "&lt;b&gt;" in long
            assert "<b>&#39;" not in long
            assert "\u202e" not in long
        assert numbers_of(browser.get(here, params={"labelled": "yes", "sort": "number", "order": "up"})) == [3, 4]
        assert set(numbers_of(browser.get(here, params={"sort": "unlabelled"}))[-2:]) == {3, 4}
        assert numbers_of(browser.get(here, params={"search": "ALERT("})) == [3]
        everywhere = f"{base(mine)}/components"
        assert listed_of(browser.get(everywhere, params={"search": "alert(1)"})) == [(SITE, 3)]
        assert f"{here}/3" not in links(browser.get(everywhere, params={"search": "%"}))
        assert set(listed_of(browser.get(everywhere, params={"labelled": "yes"}))) == {(SITE, 3), (SITE, 4)}
        last = browser.get(everywhere, params={"sort": "unlabelled", "page": "999"})
        assert set(listed_of(last)[-2:]) == {(SITE, 3), (SITE, 4)}
        browser.post(f"{here}/3/label", data={"text": "", "author": "Ada"})
        assert "removed" in browser.get(f"{here}/3").text
        assert numbers_of(browser.get(here, params={"labelled": "yes"})) == [4]


def test_labels_that_cannot_be_kept(mine: Path) -> None:
    here = f"{base(mine)}/sites/{SITE}"
    file = only_harvest(mine).parent / "labels.sqlite"
    with client(mine) as browser:
        file.mkdir()
        answer = browser.post(f"{here}/3/label", data={"text": "x"})
        assert answer.status_code == 409
        assert "not kept" in answer.text
        file.rmdir()
        file.write_bytes(b"no database" * 1000)
        assert "cannot be read" in browser.get(f"{here}/3").text
        file.unlink()
        with closing(sqlite3.connect(file)) as other:
            other.execute("CREATE TABLE labels (id)")
            other.commit()
        assert "cannot be read" in browser.get(here).text
        file.unlink()
        assert browser.get(here).status_code == 200


# ---- whom they answer ----


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost:8720", True), ("LOCALHOST", True), ("127.0.0.1:1", True), ("[::1]:8720", True),
        ("10.1.2.3:8720", True), ("evil.example", False), ("localhost.evil.example", False), ("", False),
        ("127.0.0.1.evil.example", False), ("localhost@evil.example", False), ("[::1", False),
    ],
)  # fmt: skip
def test_hosts(shown: TestClient, host: str, answered: bool) -> None:
    assert shown.get("/", headers={"host": host}).status_code == (200 if answered else 403)


def test_edits_from_elsewhere(mine: Path) -> None:
    label = f"{base(mine)}/sites/{SITE}/3/label"
    with client(mine) as browser:
        for headers in (
            {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:99"},
            {"sec-fetch-site": "cross-site"}, {"host": "evil.example", "origin": "http://evil.example"},
        ):  # fmt: skip
            assert browser.post(label, data={"text": "x"}, headers=headers).status_code == 403
    assert not (only_harvest(mine).parent / "labels.sqlite").exists()


# ---- what no input can do ----

OUTSIDE = [
    "/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "a\0b",
    "-1",
    "1e3",
    "x" * 10_000,
    "💥",
    "\\",
]


def test_addresses_that_lead_nowhere(shown: TestClient, harvested: Path) -> None:
    here = base(harvested)
    run, name = here.strip("/").split("/")
    for word in OUTSIDE:
        bad = quote(word, safe="%")
        for path in (
            f"/{bad}/{name}", f"/{run}/{bad}", f"{here}/sites/{bad}", f"{here}/sites/{SITE}/{bad}",
            f"{here}/{bad}/{bad}", f"/static/{bad}/browse.css", f"/static/{bad}/{bad}",
            f"{here}/sites/{SITE}?page={bad}", f"{here}/sites/{SITE}?sort={bad}",
            f"{here}/sites/{SITE}?min_density={bad}&go={bad}",
            f"{here}/sites/{SITE}?labelled={bad}", f"{here}/text?text=x&at={bad}",
            f"{here}/components?page={bad}", f"{here}/components?sort={bad}",
            f"{here}/components?min_density={bad}&sort=x",
        ):  # fmt: skip
            page = shown.get(path)
            assert page.status_code in (400, 404) or (word == "1e3" and page.status_code == 200), (path, page.text)
            assert "<h1>Not" in page.text or page.status_code == 200
            assert "root:" not in page.text
            assert "Traceback" not in page.text
    assert shown.get(f"{here}/sites/{SITE}", params={"search": "x" * 201}).status_code == 400
    assert shown.get(f"{here}/sites/{SITE}", params={"search": MARKUP}).status_code == 200
    assert "<script>alert" not in shown.get(f"{here}/sites/{SITE}", params={"search": MARKUP}).text
    assert shown.get(f"{here}/components", params={"search": "x" * 201}).status_code == 400
    assert "<script>alert" not in shown.get(f"{here}/components", params={"search": MARKUP}).text
    assert "<script>alert" not in shown.get(f"{here}/intervene", params={"select": MARKUP + ":3"}).text


def test_hostile_tokens_and_names(mine: Path) -> None:
    harvest = only_harvest(mine)
    texts = [MARKUP, MARKS, "x" * 10_000, "ش" * 50, "\ud7ff", LONG_MARKS, "ش" * 10_000]
    vocabulary = [texts[i % len(texts)] for i in range(256)]
    pq.write_table(pa.table({"text": vocabulary}), harvest / "vocabulary.parquet")
    config = mine / LLAMA / "config.yaml"
    config.write_text(re.sub(r"run_name:.*", f"run_name: {json.dumps(MARKUP + 'x' * 10_000)}", config.read_text()))
    plan = json.loads((harvest / "harvest.json").read_text())
    (harvest / "harvest.json").write_text(json.dumps(plan | {"data": MARKUP + MARKS + "y" * 10_000}))
    with client(mine) as browser:
        for path in (
            "/", base(mine), f"{base(mine)}/sites/{SITE}", f"{base(mine)}/components",
            f"{base(mine)}/intervene?select={SITE}:3", f"{base(mine)}/sites/{SITE}/3",
        ):  # fmt: skip
            page = browser.get(path)
            assert page.status_code == 200
            assert "<script>alert" not in page.text
            assert "<img" not in page.text
            # A box has its text as it would be run, and the page tells what of it does not show.
            outside = re.sub("<textarea.*?</textarea>", "", page.text, flags=re.DOTALL)
            assert not set("\u202e\u200f\x1b\x00") & set(outside)
            assert int(page.headers["content-length"]) <= 50_000
        assert "&lt;script&gt;" in page.text


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: b"garbage!" * 64,
    "zeros": lambda data: bytes(len(data)),
    "shifted": lambda data: data[1:],
    "footer": lambda data: data[:-40] + bytes(40),
    "header": lambda data: data[:11] + b"(" + data[12:60] + b"(" + data[61:],  # brackets that nothing closes
}


@pytest.mark.slow
def test_damaged_harvests(mine: Path) -> None:
    """Each file in turn is damaged or missing: one clear page, and the next page is as before."""
    harvest = only_harvest(mine)
    number = Harvest(harvest).sites[SITE]
    tables = [f"{table}/{number}.parquet" for table in ("components", "examples", "tokens", "weights")]
    files = [*tables, *(f"{name}.parquet" for name in ("rows", "inputs", "positions", "vocabulary")), "harvest.json"]
    files += ["firings.npy", "components_negative.npy"] + [
        f"{kind}_{part}.npy" for kind in ("positions", "components") for part in ("ends", "members")
    ]
    here = f"{base(mine)}/sites/{SITE}"
    for file in files:
        whole = (harvest / file).read_bytes()
        for kind, damage in DAMAGE.items():
            (harvest / file).write_bytes(damage(whole))
            with client(mine) as browser:
                for path in (
                    "/",
                    base(mine),
                    here,
                    f"{here}?search=e",
                    f"{base(mine)}/components?search=e",
                    f"{here}/3",
                ):
                    page = browser.get(path)
                    assert page.status_code in (200, 400, 404), (file, kind, path, page.text)
                    assert page.status_code == 200 or "harvest" in page.text
        other = harvest / tables[file == tables[0]]
        (harvest / file).write_bytes(other.read_bytes())  # another table's
        with client(mine) as browser:
            assert browser.get(f"{here}/3").status_code in (400, 404), file
        (harvest / file).unlink()
        with client(mine) as browser:
            missing = browser.get(f"{here}/3")
            assert missing.status_code in ((200,) if file == "vocabulary.parquet" else (400, 404)), file
        (harvest / file).write_bytes(whole)
    with client(mine) as browser:
        assert browser.get(f"{here}/3").status_code == 200


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        (f"components/{SITE}", "importance_sum", np.inf), (f"components/{SITE}", "activation_max", np.nan),
        (f"components/{SITE}", "component", 1000), (f"weights/{SITE}", "component", 1000),
        (f"examples/{SITE}", "scale", np.nan), ("positions", "outputs", 10**6), (f"tokens/{SITE}", "token", 10**6),
    ],
)  # fmt: skip
def test_numbers_that_no_harvest_has(mine: Path, file: str, column: str, value: float) -> None:
    """Such as a bit that turned over makes them."""
    harvest = only_harvest(mine)
    file = file.replace(SITE, str(Harvest(harvest).sites[SITE]))
    path = harvest / f"{file}.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index(column)
    values = table[column].combine_chunks()
    if pa.types.is_list(values.type):
        ids = pa.array(np.full(len(values.values), value), values.type.value_type)
        made = pa.ListArray.from_arrays(values.offsets, ids)
    else:
        made = pa.array(np.full(len(values), value), values.type)
    pq.write_table(table.set_column(at, table.schema.field(at), made), path)
    with client(mine) as browser:
        page = browser.get(f"{base(mine)}/sites/{SITE}/3")
        assert page.status_code == 400, page.text
        assert "the harvest is damaged" in page.text
        assert browser.get(f"{base(mine)}/sites/{SITE}").status_code in (200, 400)
        assert browser.get(f"{base(mine)}/components").status_code in (200, 400)


def test_rows_of_another_kind(mine: Path) -> None:
    """Found by the fuzzer: seed 1, harvest, case 247."""
    harvest = only_harvest(mine)
    (harvest / "rows.parquet").write_bytes((harvest / "positions.parquet").read_bytes())
    with client(mine) as browser:
        page = browser.get(f"{base(mine)}/sites/{SITE}/3")
        assert page.status_code == 400
        assert "the harvest is damaged" in page.text


@pytest.mark.parametrize("value", [-1000, 1000])
def test_a_search_where_tokens_are_of_a_component_that_is_not_there(mine: Path, value: int) -> None:
    """Found by the fuzzer: seed 353, harvest, case 171."""
    path = only_harvest(mine) / f"tokens/{Harvest(only_harvest(mine)).sites[SITE]}.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("component")
    wrong = pa.array(np.full(len(table), value), table.schema.field(at).type, safe=False)
    pq.write_table(table.set_column(at, table.schema.field(at), wrong), path)
    with client(mine) as browser:
        page = browser.get(f"{base(mine)}/sites/{SITE}", params={"search": "e"})
        assert page.status_code == 400
        assert f"is damaged: it has component {value}" in page.text


@pytest.mark.parametrize(
    "change",
    [
        {"format": 4}, {"format": "2"}, {"sites": []}, {"sites": [{}]}, {"rows": -1}, {"length": 0}, {"rows": 1e300},
        {"n_inputs": 10**12}, {"inputs": "images"},
        {"run": "../x"}, {"threshold": "a"}, {"data": None}, {"around": 10**9},
        {"block_rows": 0}, {"rows": 0},
    ],
    ids=str,
)  # fmt: skip
def test_foreign_harvests(mine: Path, change: dict[str, object]) -> None:
    file = only_harvest(mine) / "harvest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with client(mine) as browser:
        assert "damaged or of another version" in browser.get("/").text
        assert "damaged or of another version" in browser.get(base(mine)).text
        assert browser.get(base(mine, TOY)).status_code == 200


def test_half_written_and_new_harvests(mine: Path) -> None:
    harvest = only_harvest(mine)
    with client(mine) as browser:
        shutil.copytree(harvest, harvest.with_name(f".{harvest.name}.partial"))
        (harvest.parent / "half").mkdir()
        page = browser.get("/").text
        assert page.count(f"/{LLAMA}/") == 1
        again = harvest.rename(harvest.with_name("another"))
        assert browser.get(base(mine)).status_code == 200
        shutil.rmtree(again)
        assert "Not harvested yet" in browser.get("/").text
        assert browser.get(f"/{LLAMA}/another").status_code == 404


# ---- the text box ----


def test_the_strongest_in_a_text(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sites, each component once, at the place where it is strongest in the chosen order; a BOS is no place. The
    page opens at the last token."""
    run, text = answered_here(harvested, monkeypatch), "if x: return y"
    sites = list(Harvest(only_harvest(harvested)).sites)
    lams, activations = run.causal_importances(text, sites), run.activations(text, sites)
    row = r"""/sites/([^"/]*)/(\d+)">.*?</a></td><td class="num">([\d.]+)</td>"""
    row += r"""<td class="num">[^<]*</td><td class="num">(\d+)</td>"""

    def shown(browser: TestClient, **order: str) -> list[tuple[str, str, str, str]]:
        page = browser.get(f"{base(harvested)}/text", params={"text": text, **order}).text
        return re.findall(row, page.partition('id="strongest"')[2].partition("</section>")[0])

    with client(harvested) as browser:
        lists = {order: shown(browser, by=order) for order in ("both", "importance", "activation")}
        assert shown(browser) == shown(browser, by="nonsense") == lists["both"]
        page, first = (browser.get(f"{base(harvested)}/text?text=a%20b{at}").text for at in ("", "&at=0"))
        assert [re.sub(r".*<h2>At.*?>(.)</span>.*", r"\1", found, flags=re.DOTALL) for found in (page, first)] == [
            "b",
            "a",
        ]
        assert "left out" not in page
    assert run.text is not None
    monkeypatch.setattr(run.text, "bos", ord("i"))
    with client(harvested) as browser:  # its own, which has kept no answer
        lists["of the others"] = shown(browser)
        assert (
            "The first token, which every text begins with, is left out"
            in browser.get(f"{base(harvested)}/text", params={"text": text}).text
        )
    for order, rows in lists.items():
        first_place = int(order == "of the others")
        best: dict[tuple[str, str], tuple[float, str, str]] = {}
        for site in sites:
            lam, a = np.asarray(lams[site])[first_place:], np.asarray(activations[site])[first_place:]
            value = {"importance": lam, "activation": abs(a)}.get(order, lam * abs(a))
            for c in np.flatnonzero((lam > 0).any(0)).tolist():
                at = max(np.flatnonzero(lam[:, c] > 0), key=lambda k: (value[k, c], lam[k, c] * abs(a[k, c])))
                best[site, str(c)] = value[at, c], f"{lam[at, c]:.2f}", str((lam[:, c] > 0).sum())
        if first_place:
            assert rows != lists["both"]
        found = [best[site, number] for site, number, *_ in rows]
        assert len({found[:2] for found in rows}) == len(rows) == 24
        assert [rest for _, *rest in found] == [list(rest) for _, _, *rest in rows]
        values = [value for value, *_ in found]
        assert values == sorted(values, reverse=True)
        assert values[-1] >= sorted((value for value, *_ in best.values()), reverse=True)[23]


@pytest.mark.slow
def test_a_text(harvested: Path) -> None:
    def wait(browser: TestClient, page: str, **params: str) -> str:
        for _ in range(600):
            found = browser.get(page, params=params).text
            if "http-equiv" not in found:
                return found
            time.sleep(0.1)
        pytest.fail("no answer")

    with client(harvested) as browser:
        text = f"{base(harvested)}/text"
        assert "http-equiv" in browser.get(text, params={"text": "then"}).text
        found = wait(browser, text, text="then", at="2")
        sites = list(Harvest(only_harvest(harvested)).sites)
        importances = load_run(harvested / LLAMA).causal_importances("then", sites)
        fires = {site: np.asarray(x) > 0 for site, x in importances.items()}
        for site, counts in fires.items():
            row = re.search(rf'<th scope="row"><a href="[^"]*">{re.escape(site)}</a></th>(.*?)</tr>', found, re.DOTALL)
            assert row is not None
            assert [int(n) for n in re.findall(r">(\d+)</td>", row[1])] == counts.sum(1).tolist()
            here = found.partition("<h2>At")[2]
            listed = re.findall(rf'<a href="[^"]*/sites/{re.escape(site)}/(\d+)">', here)
            assert len(listed) == min(12, counts[2].sum())
            assert {int(n) for n in listed} <= set(np.flatnonzero(counts[2]).tolist())
        assert "5,000 characters" in browser.get(text, params={"text": "x" * 5001}).text
        toy = f"{base(harvested, TOY)}/text"
        assert "feature 1" in wait(browser, toy, text="1 3=0.5")
        assert "should be the number of a feature" in wait(browser, toy, text="one")
        assert "features go from 0" in wait(browser, toy, text="99")


# ---- the command ----


def test_pages_import_neither_jax_nor_scipy(harvested: Path) -> None:
    """The first page comes at once, and 1.3 million components fit into the memory that is asked for."""
    code = """
import sys
from pathlib import Path
from param_decomp_lab.browse.listen import make_app
from starlette.testclient import TestClient
with TestClient(make_app([Path(sys.argv[1])]), base_url="http://localhost:8720") as browser:
    for address in sys.argv[2:]:
        assert browser.get(address).status_code == 200, address
heavy = {"jax", "scipy", "orbax", "equinox", "transformers", "duckdb", "matplotlib"}
sys.exit(str(heavy & sys.modules.keys() or "") or 0)
"""
    site = f"{base(harvested)}/sites/{SITE}"
    pages = ["/", site, f"{site}?search=a", f"{site}/0", f"{base(harvested)}/components"]
    given = [sys.executable, "-c", code, str(harvested), *pages]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_target_of_which_one_run_says_more(mine: Path) -> None:
    """A run's `target.json` lacks the fields that were added after it; damaged, it says nothing."""
    other = Path(shutil.copytree(mine / LLAMA, mine / "p-00000003"))
    file = other / "target.json"
    fields = json.loads(file.read_text())

    def others() -> set[str]:
        catalog = Catalog([mine])
        opened = catalog.harvest(LLAMA, only_harvest(mine).name)
        theirs = catalog.harvest(other.name, only_harvest(mine, other.name).name)
        assert catalog.may_be_alike(opened, theirs) == (not differs)
        return {name for name, _ in catalog.others(opened)}

    cases = ((False, "rope_theta", {}), (True, "", {"rope_theta": 1.5}), (False, "", None), (False, "architecture", {}))
    for differs, without, changed in cases:
        kept = None if changed is None else {k: v for k, v in (fields | changed).items() if k != without}
        new = file.with_suffix(".new")
        new.write_text("{" if kept is None else json.dumps(kept))
        new.replace(file)
        says = kept is not None and "architecture" in kept
        assert others() == ({other.name} if says and not differs else set())


def test_a_port_in_use(harvested: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = pd_here("browse", harvested, "--port", str(port))
        assert outcome.status == 2
        said = f"--port: cannot listen on port {port} of 127.0.0.1: Address already in use; choose another"
        assert said in " ".join(outcome.err.split())
        with closing(_bind("127.0.0.1", [port, 0])) as next_one:
            assert next_one.getsockname()[1] != port


def test_it_is_opened_in_a_browser(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: opened.append("served"))
    for wanted in (False, True):
        listen([harvested], "127.0.0.1", None, wanted)
    assert re.fullmatch(r"served http://127\.0\.0\.1:\d+/ served", " ".join(opened))


def test_nothing_to_show(tmp_path: Path, harvested: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        outcome = pd_here("browse", folder)
        assert outcome.status == 2
        assert "pd browse FOLDER" in outcome.err
    with pytest.raises(UserError, match="--host"):
        listen([harvested], "no.such.host.invalid", None, False)
    # A run that is not harvested says how; a harvest can be shown by itself.
    with client(harvested / TOY / "harvests" / only_harvest(harvested, TOY).name) as browser:
        assert TOY in browser.get("/").text
