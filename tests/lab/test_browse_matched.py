"""The browser's pages of two runs side by side: what they show, where they lead, and what cannot be compared."""

import re
import shutil
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from param_decomp_lab import load_run
from param_decomp_lab.browse import text_worker
from param_decomp_lab.browse.matched_page import PairQuery
from param_decomp_lab.browse.text_worker import MatchAnswer, NearestAnswer, TextWorker
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.overlap import nearest_by_firing, overlap
from param_decomp_lab.matching import pairs as matching
from param_decomp_lab.matching.result import MatchedRuns
from param_decomp_lab.opening import Run
from param_decomp_lab.opening.nearest import cosines_between
from param_decomp_lab.ui.numbers import number, percent, signed
from tests.lab.test_browse import LLAMA, MARKS, MARKUP, TOY, base, client, links, only_harvest
from tests.lab.tiny_run import SITES
from tests.lab.turned_run import Turned, turned
from tests.lab.worker_here import answer_here

SITE = "layers.1.mlp.down_proj"
TWIN = "p-00000003"
"""A copy of the Llama's run, whose components are turned where it is opened here."""


@pytest.fixture(scope="module")
def runs(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs and the twin; nobody may change them."""
    folder = tmp_path_factory.mktemp("twins") / "runs"
    without = shutil.ignore_patterns("ckpts")
    shutil.copytree(harvested, folder, ignore=without)
    shutil.copytree(harvested / LLAMA, folder / TWIN, ignore=without)
    return folder


@pytest.fixture
def opened(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Turned]:
    """The run, which answers what is asked of a process, and the other."""
    run = load_run(harvested / LLAMA, devices=1)
    other = turned(load_run(harvested / LLAMA, devices=1), monkeypatch)
    answer_here(run, monkeypatch)
    monkeypatch.setattr(text_worker, "_other_run", lambda folder, step: other.run)
    return run, other


@pytest.fixture
def browser(runs: Path, opened: tuple[Run, Turned]) -> Iterator[TestClient]:
    """Its own, which has kept no answer of another test."""
    with client(runs) as found:
        yield found


@pytest.fixture
def matched(opened: tuple[Run, Turned]) -> MatchedRuns:
    run, other = opened
    return run.matched(other.run)


def beside(folder: Path, run: str = LLAMA, other: str = TWIN) -> str:
    return f"{base(folder, run)}/matched{base(folder, other)}"


def cells(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables, without marks."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    plain = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [[unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in row] for row in plain]


def test_the_sites(browser: TestClient, runs: Path, matched: MatchedRuns) -> None:
    page = browser.get(beside(runs)).text
    rows = {row[0]: row[1:] for row in cells(page)}
    for site, found in matched.sites.items():
        assert found.jaccard is not None
        assert rows[site] == [
            f"{found.firing[0]} · {found.firing[1]}", percent(found.share(0.9)), percent(found.random_share(0.9)),
            percent(found.share(0.5)), percent(found.random_share(0.5)), number(found.mean), number(found.random_mean),
            number(float(found.jaccard.mean())),
        ]  # fmt: skip
    near = sum((found.similarity > 0.9).sum() for found in matched.sites.values())
    assert f"{near} of the {near} that can be matched (100\u00a0%)" in page
    assert "Only in" not in page
    assert 'http-equiv="refresh"' not in page


def test_the_pairs_of_a_site(browser: TestClient, runs: Path, matched: MatchedRuns) -> None:
    found, here = matched.sites[SITE], f"{beside(runs)}/{SITE}"
    assert found.jaccard is not None
    page = browser.get(here).text
    expected = [
        [str(one), str(other), *map(signed, (similarity, V, U)), percent(jaccard)]
        for one, other, similarity, V, U, jaccard in zip(
            found.one, found.other, found.similarity, found.cos_V, found.cos_U, found.jaccard, strict=True
        )
    ]  # fmt: skip
    rows = cells(page)[1:]
    assert [[*(cell.split()[0] for cell in row[:2]), *row[2:]] for row in rows] == expected
    assert f"<span>{found.flipped.sum()} with flipped sign" in page
    values = np.sort(found.similarity)
    middle = float(values[3] + values[4]) / 2
    for query, wanted in (
        ({"min": f"{middle:.9f}"}, expected[: len(values) - 4]), ({"max": f"{middle:.9f}"}, expected[-4:]),
        ({"order": "up"}, expected[::-1]), ({"min": "-1", "max": "-0.5"}, []),
    ):  # fmt: skip
        listed = [row[2:] for row in cells(browser.get(here, params=query).text)[1:]]
        assert listed == [row[2:] for row in wanted], query
    for query in ({"min": "x"}, {"max": "1.5"}, {"min": "nan"}, {"page": "x"}):
        assert browser.get(here, params=query).status_code in (400, 404), query
    asked = PairQuery(0.25, None, True)
    assert PairQuery.parse(asked.address) == asked
    assert PairQuery.parse({}).turned.address == {"order": "up"}


def test_a_pair(browser: TestClient, runs: Path, matched: MatchedRuns, harvested: Path) -> None:
    """Examples at which the two do the same stand beside each other: of the other sign where the sign is flipped."""
    found, harvest = matched.sites[SITE], Harvest(only_harvest(harvested))
    seen = set()
    for place, (one, other) in enumerate(zip(found.one.tolist(), found.other.tolist(), strict=True)):
        page = browser.get(f"{beside(runs)}/{SITE}/{one}").text
        flipped = bool(found.flipped[place])
        assert ("Matched with flipped sign" in page) == flipped
        assert f"<dd>{signed(found.similarity[place])} " in page
        assert f"{place + 1} of {len(found.one)}" in page
        assert f"{base(runs)}/sites/{SITE}/{one}" in page
        assert f"{base(runs, TWIN)}/sites/{SITE}/{other}" in page
        top = [[e for e in harvest.examples(SITE, n) if e.kind == "top"] for n in (one, other)]
        heading = r"<h3>a ([<>]|&[gl]t;) 0 <small>of (\d+) \((\S+)\),[^<]*</small></h3>"
        lists = re.findall(rf"{heading}\s*(.*?)</section>", page, re.DOTALL)
        for k, (sign, n, run, shown) in enumerate(lists):
            positive, of_one = unescape(sign) == ">", k % 2 == 0
            assert (int(n), run) == ((one, LLAMA) if of_one else (other, TWIN))
            if not of_one:
                assert positive == ((unescape(lists[k - 1][0]) == ">") != flipped)
            wanted = [e for e in top[k % 2] if e.activation and (e.activation > 0) == positive]
            assert shown.count("<li>") == min(6, len(wanted))
            seen.add((flipped, positive, bool(wanted)))
    assert {flipped for flipped, _, wanted in seen if wanted} == {True, False}


def kind_of(link: str) -> str:
    """An address without the number at its end, and with any site."""
    return re.sub(r"layers\.\d\.mlp\.\w+", "site", re.sub(r"\d+(?=$|[?&#])", "0", link))


def test_links(browser: TestClient, runs: Path, matched: MatchedRuns) -> None:
    """From a component, a harvest and the list of runs to the pages, and from these on."""
    one = int(matched.sites[SITE].one[0])
    pair, component = f"{beside(runs)}/{SITE}/{one}", f"{base(runs)}/sites/{SITE}/{one}"
    assert pair in links(browser.get(component))
    assert beside(runs) in links(browser.get(base(runs)))
    choice = f"{base(runs)}/matched"
    assert choice in links(browser.get("/"))
    assert f"{base(runs, TOY)}/matched" not in links(browser.get("/"))
    assert beside(runs) in links(browser.get(choice))
    assert not any("/matched" in link for link in links(browser.get(base(runs, TOY))))
    assert "No other run of the same target" in browser.get(f"{base(runs, TOY)}/matched").text
    assert pair in links(browser.get(choice, params={"site": SITE, "component": str(one)}))
    near = f"{base(runs)}/nearest?site={SITE}&component={one}"
    todo, done = [beside(runs), choice, near], set[str]()
    while todo:
        link = todo.pop()
        kind = kind_of(link)
        if kind in done or not ("/matched" in link or "/nearest" in link):
            continue
        done.add(kind)
        page = browser.get(link)
        assert page.status_code == 200, (link, page.text)
        assert int(page.headers["content-length"]) <= 50_000
        assert page.text.count("<h1>") == 1
        assert " style=" not in page.text
        todo += links(page)
    assert {urlsplit(link).path.count("/") for link in done} >= {3, 5, 6, 7}
    assert kind_of(beside(runs, TWIN, LLAMA)) in done


def test_a_harvest_of_several_others(runs: Path, opened: tuple[Run, Turned], tmp_path: Path) -> None:
    """With more than one, the links lead to a choice."""
    folder = Path(shutil.copytree(runs, tmp_path / "runs"))
    shutil.copytree(folder / TWIN, folder / "p-00000004")
    with client(folder) as browser:
        choice = f"{base(folder)}/matched?site={SITE}&component=3"
        assert choice in links(browser.get(f"{base(folder)}/sites/{SITE}/3"))
        found = links(browser.get(choice))
        assert {f"{beside(folder, other=name)}/{SITE}/3" for name in (TWIN, "p-00000004")} <= found


def test_nearest_in_the_other_run(browser: TestClient, runs: Path, opened: tuple[Run, Turned]) -> None:
    run, other = opened
    c = int(np.asarray(run.harvest.components(SITE)["firings"]).argmax())
    asked = {"site": SITE, "component": str(c), "other": TWIN, "at": only_harvest(runs, TWIN).name}
    page = browser.get(f"{base(runs)}/nearest", params=asked).text
    together = [(f.site, f.number) for f in nearest_by_firing(run.harvest, SITE, c, run.harvest, 12)]
    for title, wanted in (
        *((f"By {side}", [n[:2] for n in run.nearest(SITE, c, side, other=other.run)]) for side in ("both", "U", "V")),
        ("By firing", together),
    ):
        [section] = re.findall(rf"<h2>{title}:.*?</section>", page, re.DOTALL)
        rows = cells(section)[1:]
        assert len(rows) == len(wanted) > 5
        for row, (site, n) in zip(rows, wanted, strict=True):
            cosines = cosines_between(run, SITE, c, other.run, site, n)
            values = [cosines["U"] * cosines["V"] if len(cosines) == 2 else None, cosines.get("U"), cosines.get("V")]
            assert row[0].startswith(f"{site} {n}")
            assert row[1:4] == ["–" if x is None else signed(x) for x in values]
            assert row[4] == percent(overlap(run.harvest, SITE, c, run.harvest, site, n))
            assert row[5] == percent(run.harvest.summary(site).density[n])
    for wrong in ({"other": "x"}, {"at": "x"}, {"at": ""}):
        assert browser.get(f"{base(runs)}/nearest", params=asked | wrong).status_code == 404


def test_what_cannot_be_compared(browser: TestClient, runs: Path, tmp_path: Path) -> None:
    page = browser.get(beside(runs, other=TOY)).text
    assert f"{LLAMA} and {TOY} decompose different targets" in page
    assert f"{LLAMA} and {TOY} decompose different targets" in browser.get(f"{beside(runs, other=TOY)}/{SITE}").text
    for path, status in (
        (f"{beside(runs)}/nowhere", 404), (f"{beside(runs)}/{SITE}/99", 404), (f"{beside(runs)}/{SITE}/x", 404),
        (f"{base(runs)}/matched/nothing/{only_harvest(runs).name}", 404), (f"{base(runs)}/matched/{TWIN}/x", 404),
        (f"{base(runs)}/matched?site=x", 404), (f"{base(runs)}/matched?site={SITE}&component=x", 404),
    ):  # fmt: skip
        assert browser.get(path).status_code == status, path


def test_a_site_that_one_lacks(runs: Path, opened: tuple[Run, Turned], tmp_path: Path) -> None:
    """The harvest of the other says that it has one site alone, or, under other names, none of them."""
    folder = Path(shutil.copytree(runs, tmp_path / "runs"))
    plan = only_harvest(folder, TWIN) / "harvest.json"
    whole = plan.read_text()
    plan.write_text(whole.replace('"layers.0.mlp.up_proj"', '"layers.0.mlp.wide_proj"'))
    with client(folder) as browser:
        page = browser.get(beside(folder)).text
        plain = re.sub("<[^>]*>", "", page)
        assert f"Only in {LLAMA}: layers.0.mlp.up_proj." in plain
        assert f"Only in {TWIN}: layers.0.mlp.wide_proj." in plain
        assert f"/matched{base(folder, TWIN)}/{SITE}" in page
        assert f"{TWIN} has no layers.0.mlp.up_proj" in browser.get(f"{beside(folder)}/layers.0.mlp.up_proj").text
    plan.write_text(re.sub(r'"layers\.(\d)', r'"other.\1', whole))
    with client(folder) as browser:
        assert "No site is in both harvests" in browser.get(beside(folder)).text


def test_hostile_labels(runs: Path, opened: tuple[Run, Turned], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs, tmp_path / "runs"))
    for name in (LLAMA, TWIN):
        harvest = Harvest(only_harvest(folder, name))
        for n in range(harvest.site(SITE).C):
            harvest.labels.set(SITE, n, MARKUP + MARKS, MARKUP)
    one = int(opened[0].matched(opened[1].run).sites[SITE].one[0])
    here, at = f"{beside(folder)}/{SITE}", f"component={one}&other={TWIN}&at={only_harvest(folder, TWIN).name}"
    with client(folder) as browser:
        for path in (here, f"{here}/{one}", f"{base(folder)}/nearest?site={SITE}&{at}"):
            page = browser.get(path).text
            assert "&lt;script&gt;" in page
            assert "<script>alert" not in page
            assert "<img" not in page
            assert not set("\u202e\u200f\x1b\x00") & set(page)


def test_too_many_for_an_assignment(browser: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "ASSIGNED", 4)
    assert "100\u00a0% *</td>" in browser.get(beside(runs)).text
    assert "mutual nearest neighbours are paired" in browser.get(f"{beside(runs)}/{SITE}").text


def test_other_rows(browser: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harvest, "rows_digest", property(id))
    one = Harvest(only_harvest(runs)).plan.sites
    assert [row[-1] for row in cells(browser.get(beside(runs)).text)[1:]] == ["–"] * len(one)
    page = browser.get(f"{beside(runs)}/{SITE}").text
    assert "The harvests read different rows" in page
    assert "Jaccard" not in page
    asked = {"site": SITE, "component": "3", "other": TWIN, "at": only_harvest(runs, TWIN).name}
    assert "By firing" not in browser.get(f"{base(runs)}/nearest", params=asked).text


def test_waiting_and_failing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites are asked for one after the other, what is there is shown, and the page asks again; what fails is said."""
    asked = []

    def slow(worker: TextWorker, question: text_worker.Question, patience_s: float) -> text_worker.AnyAnswer | None:
        asked.append(question)
        return None

    monkeypatch.setattr(TextWorker, "wait", slow)
    with client(runs) as browser:
        for path in ("", f"/{SITE}", f"/{SITE}/3"):
            page = browser.get(beside(runs) + path).text
            assert 'http-equiv="refresh"' in page
            assert 'role="status"' in page
        assert len(asked) == 3
        assert f"0 of {len(SITES)} sites are done" in browser.get(beside(runs)).text
        wrong = f"no checkpoint {MARKUP}"
        monkeypatch.setattr(TextWorker, "match", lambda *_: MatchAnswer(wrong=wrong))
        monkeypatch.setattr(TextWorker, "nearest", lambda *_: NearestAnswer(wrong=wrong))
        at = f"site={SITE}&component=3&other={TWIN}&at={only_harvest(runs, TWIN).name}"
        for path in (beside(runs), f"{beside(runs)}/{SITE}", f"{beside(runs)}/{SITE}/3", f"{base(runs)}/nearest?{at}"):
            page = browser.get(path).text
            assert "no checkpoint &lt;/title&gt;" in page
            assert 'http-equiv="refresh"' not in page


def test_what_was_found_is_kept(browser: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = browser.get(beside(runs)).text
    monkeypatch.setattr(TextWorker, "wait", lambda *_: None)
    assert browser.get(beside(runs)).text == first
    turned_page = browser.get(f"{beside(runs, TWIN, LLAMA)}/{SITE}").text
    back = {(row[1].split()[0], row[0].split()[0]) for row in cells(turned_page)[1:]}
    there = {(row[0].split()[0], row[1].split()[0]) for row in cells(browser.get(f"{beside(runs)}/{SITE}").text)[1:]}
    assert back == there
    assert len(there) > 5


def test_a_component_without_a_partner(
    browser: TestClient, runs: Path, opened: tuple[Run, Turned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partner does not fire in the other harvest."""
    run, other = opened
    monkeypatch.setattr(text_worker, "_harvest", lambda folder, _: without(int(other.partner[SITE][3]))(folder))
    page = browser.get(f"{beside(runs)}/{SITE}/3").text
    n = run.sites[SITE].C
    assert f"It has no match. {n} components of {LLAMA} fire at this site, and {n - 1} of {TWIN}" in page
    assert f"{n - 1} pairs" in browser.get(f"{beside(runs)}/{SITE}").text


def without(number: int) -> Callable[[Path], Harvest]:
    """Opens the twin's harvest as one in which this component of `SITE` never fires, and any other as it is."""

    def opened_without(folder: Path) -> Harvest:
        harvest = Harvest(folder)
        if TWIN not in folder.parts:
            return harvest
        components = harvest.components

        def changed(site: str, columns: list[str]) -> pa.Table:
            values = components(site, columns)["firings"].to_numpy().copy()
            values[number] *= site != SITE
            return pa.table({"firings": values})

        harvest.components = changed  # type: ignore[method-assign,assignment]
        return harvest

    return opened_without
