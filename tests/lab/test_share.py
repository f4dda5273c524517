"""`pd share graph`, and the copies of `pd share site`, whose links all lead somewhere."""

import re
import shutil
import zipfile
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.evidence import gallery
from experiments.evidence.gallery import write_gallery
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph
from param_decomp_lab.graph.graph import Edge
from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.share.graphs import share_graphs
from param_decomp_lab.share.links import relative_page
from param_decomp_lab.share.numbering import Numbering, pair, run_numbering, unpair
from param_decomp_lab.share.shared_run import open_shared
from tests.lab.shared_folders import (
    DOWN,
    GOLDEN,
    GRAPH,
    LABEL,
    LLAMA,
    MARKUP,
    STEP,
    TOY,
    UP,
    hand_graph,
    hrefs,
    mistakes,
    read,
    share_copy,
)  # fmt: skip
from tests.lab.tiny_run import SITES, pd_here


@pytest.fixture(scope="module")
def runs(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return share_copy(harvested, tmp_path_factory.mktemp("share") / "runs")


@pytest.fixture(scope="module")
def run(runs: Path) -> Path:
    return runs / LLAMA


@pytest.fixture(scope="module")
def harvest(run: Path) -> Harvest:
    return Harvest(find_harvests(run)[0])


# ---- the field tables ----


def test_the_tables_take_what_was_published() -> None:
    assert mistakes(read(GOLDEN / "graph.json"), "Graph") == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metadata", "slug"), None),
        (("metadata", "schema_version"), "1"),
        (("nodes", 1, "layer"), 4),
        (("nodes", 1, "ctx_idx"), 1.0),
        (("nodes", 1, "is_target_logit"), 0),
        (("nodes", 1, "label"), "x"),
        (("qParams", "supernodes"), ["a"]),
        (("links", 0, "weight"), True),
    ],
)
def test_the_tables_refuse_other_types_and_fields(path: tuple[Any, ...], value: object) -> None:
    whole = read(GOLDEN / "graph.json")
    place = whole
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert len(mistakes(whole, "Graph")) == 1


# ---- numbers ----


@given(st.integers(0, 200), st.integers(0, 1 << 25))
def test_the_pairing_can_be_taken_back(layer: int, feature: int) -> None:
    assert unpair(pair(layer, feature)) == (layer, feature)
    assert pair(layer, feature) < 1 << 53  # a number in JavaScript


def test_numbers_of_components() -> None:
    sites = [("embed", 7), ("layers.0.q", 3), ("layers.0.k", 5), ("layers.2.q", 4)]
    numbering = Numbering(sites)
    found = [(name, n) for name, C in sites for n in range(C)]
    numbers = [numbering.feature(*component) for component in found]
    assert len(set(numbers)) == len(found)
    assert [numbering.component(*number) for number in numbers] == found
    assert numbering.feature("embed", 6) == (1, 6)
    assert numbering.feature("layers.0.k", 4) == (3, 4)
    assert numbering.n_layers == 5
    assert {site["name"]: site["layer"] for site in numbering.to_json()["sites"]}["layers.2.q"] == 4
    for layer, feature in ((1, 7), (0, 0), (9, 0), (1, -1)):
        with pytest.raises(KeyError):
            numbering.component(layer, feature)
    with pytest.raises(UserError, match="components 0 to 2"):
        numbering.feature("layers.0.q", 3)
    with pytest.raises(UserError, match="not a site of this run"):
        numbering.feature("layers.9.q", 3)


# ---- graphs ----


@pytest.fixture(scope="module")
def graphs(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("graphs") / "out"
    outcome = pd_here("share", "graph", run, "--out", out, "--creator", "Ada")
    assert outcome.status == 0, outcome
    assert "1 graph with 11 nodes and 8 links, 4 feature files" in outcome.out
    return out


def test_a_graph_loses_nothing(run: Path, graphs: Path) -> None:
    found, graph = read(graphs / f"{GRAPH}.json"), hand_graph()
    assert mistakes(found, "Graph") == []
    assert mistakes(read(graphs / "graph-metadata.json"), "GraphList") == []
    assert read(graphs / "graph-metadata.json") == {"graphs": [found["metadata"]]}
    assert found["metadata"]["info"]["creator_name"] == "Ada"
    numbering = run_numbering(run)
    assert [site["C"] for site in found["metadata"]["param_decomp"]["numbering"]["sites"]] == list(SITES.values())
    of_id = {}
    for made, node in zip(found["nodes"], graph.nodes, strict=True):
        of_id[made["node_id"]] = node
        assert made["ctx_idx"] == max(node.position, 0)
        assert made["feature_type"] == {
            "component": "cross layer transcoder", "embedding": "embedding", "output": "logit",
            "rest": "mlp reconstruction error", "biases": "mlp reconstruction error",
        }[node.kind]  # fmt: skip
        if node.kind == "component":
            layer, feature = unpair(made["feature"])
            assert numbering.component(layer, feature) == (node.site, node.number)
            assert made["node_id"] == f"{layer}_{feature}_{node.position}"
            assert made["layer"] == str(layer)
            assert made["activation"] == node.importance
            assert made["param_decomp"] == {"site": node.site, "component": node.number, "a": node.value}
    assert len(of_id) == len(graph.nodes)
    assert len({made["jsNodeId"] for made in found["nodes"]}) == len(graph.nodes)
    links = [(of_id[link["source"]], of_id[link["target"]], link["weight"]) for link in found["links"]]
    assert links == [(graph.nodes[e.source], graph.nodes[e.target], e.weight) for e in graph.edges]
    assert [made["is_target_logit"] for made in found["nodes"]] == [True] + [False] * 10
    assert [made["token_prob"] for made in found["nodes"][:3]] == [0.6, 0.2, 0.0]
    names = [made["clerp"] for made in found["nodes"]]
    assert names[0] == 'Output "n" (p=0.600)'
    assert names[2] == "ends of words"
    assert names[3] == names[4] == LABEL.replace("</", "‹/").replace("<script", "‹script").replace("<img", "‹img")
    assert names[6:] == [
        "layers.0.mlp.down_proj 0", f"{DOWN}, the rest", "layers.1.mlp.up_proj, the rest", 'Emb: "h"', "all biases"
    ]  # fmt: skip


def test_influence_is_a_threshold(graphs: Path) -> None:
    """As circuit-tracer's page has it: nodes up to a threshold have that share of all influence."""
    nodes = read(graphs / f"{GRAPH}.json")["nodes"]
    assert [node["influence"] for node in nodes[:2]] == [None, None]
    assert [node["influence"] for node in nodes[2:6]] == pytest.approx([0.28, 0.48, 0.6, 0.68])
    assert max(node["influence"] for node in nodes[2:]) == pytest.approx(0.8)


def test_groups_are_supernodes(run: Path, graphs: Path, harvest: Harvest, tmp_path: Path) -> None:
    """Only where they are asked for: one with nearly all components is no help."""
    components = [node for node in hand_graph().nodes if node.kind == "component"]
    ids = dict(zip(components, ["4_5_3", "1_3_1", "1_3_3", "1_0_3", "2_0_3"], strict=True))
    params = read(graphs / f"{GRAPH}.json")["qParams"]
    assert params["supernodes"] == []
    assert params["pinnedIds"] == ["5_110_3", "5_101_3", *ids.values()]

    def supernodes(*flags: object) -> Any:
        outcome = pd_here("share", "graph", run, GRAPH, "--out", tmp_path / "out", "--overwrite", *flags)
        assert outcome.status == 0, outcome
        return read(tmp_path / "out" / f"{GRAPH}.json")["qParams"]["supernodes"]

    own = {harvest.groups.group_of(node.site, node.number) for node in components}
    expected = [
        [f"group {group}", *(i for n, i in ids.items() if harvest.groups.group_of(n.site, n.number) == group)]
        for group in sorted(group for group in own if group is not None)
    ]
    assert supernodes("--clusters") == [group for group in expected if len(group) > 2] != []
    assert supernodes("--group", f"mine={UP}:3@1, {DOWN}:5@3") == [["mine", "1_3_1", "4_5_3"]]


def test_graphs_that_are_not_of_this_run(run: Path, tmp_path: Path) -> None:
    """Nothing is made where one of them is wrong."""
    out, file = tmp_path / "out", tmp_path / "other.json"

    def refused(message: str, **changes: Any) -> None:
        Graph(**{**vars(hand_graph()), **changes}).save(file)
        with pytest.raises(UserError, match=message):
            share_graphs(run, [GRAPH, str(file)], out)
        assert not out.exists()

    nodes = hand_graph().nodes
    refused(
        "'elsewhere' is not a site", nodes=(type(nodes[2])("component", "elsewhere", 1, 3, 1.0, 1.0, 1.0),), edges=()
    )
    refused("no component 99", nodes=(type(nodes[2])("component", UP, 1, 99, 1.0, 1.0, 1.0),), edges=())
    refused(
        "position -1, where it has no token", nodes=(type(nodes[2])("component", UP, -1, 3, 1.0, 1.0, 1.0),), edges=()
    )
    refused("two nodes 1_3_1", nodes=(nodes[3], nodes[3]), edges=())
    refused("has no outputs", nodes=nodes[2:], edges=())
    refused("not finite", nodes=nodes[:4], edges=(Edge(3, 2, float("inf"), 0.1),))
    file.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        share_graphs(run, [str(file)], out)


def test_a_graph_of_a_step_without_harvest(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "early.json"
    hand_graph(step=20).save(file)
    outcome = pd_here("share", "graph", run, file, "--out", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert "no harvest of step 20" in outcome.out
    assert "0 feature files" in outcome.out
    found = read(tmp_path / "out" / "early.json")
    assert mistakes(found, "Graph") == []
    told = pd_here("share", "graph", run, file, "--out", tmp_path / "clusters", "--clusters")
    assert told.status == 2
    assert "which has no harvest to take them from" in told.err


# ---- a copy of the pages ----


@pytest.fixture(scope="module")
def site(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "out"
    outcome = pd_here("share", "site", run, "--out", out, "--most", 9)
    assert outcome.status == 0, outcome
    assert "with 9 components, 1 graph and" in outcome.out
    return out


def test_every_link_of_every_page_leads_to_a_file(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    reached = {site / "index.html"}
    for page in pages:
        text = page.read_text()
        assert "<form" not in text
        assert 'http-equiv="content-security-policy"' in text
        for link in map(unescape, hrefs(text)):
            path, _, anchor = link.partition("#")
            assert not path.startswith("/"), link
            assert ":" not in path, link
            target = (page.parent / unquote(path)).resolve() if path else page
            assert target.is_file(), (page, link)
            assert target.is_relative_to(site.resolve())
            reached.add(target)
            if anchor:
                assert f'id="{anchor}"' in target.read_text(), (page, link)
    assert {page.resolve() for page in pages} <= {page.resolve() for page in reached}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<p title="a &gt; b">&amp;&#39; &lt;b&gt; λ</p>', None),
        (
            '<a class="x" href="/r/h/sites/s/1?sort=density#node">1 <b>&lt;</b></a>',
            '<a class="x" href="1.html#node">1 <b>&lt;</b></a>',
        ),
        ('<a href="/r/h/sites/s/2">2</a> <a href="/r/h">r</a>', '<span>2</span> <a href="../../index.html">r</a>'),
        (
            '<a href="/r/h?page=1">r</a><a href="/r/h?page=2&amp;search=">2</a>',
            '<a href="../../index.html">r</a><a href="../../page-2.html">2</a>',
        ),
        ('<a href="/r/h?search=x">r</a>', "<span>r</span>"),
        (
            '<svg viewBox="0 0 1 1"><a href="/r/h/x"><rect x="1"/></a></svg><a href="/x">y</a>',
            '<svg viewBox="0 0 1 1"><g><rect x="1"/></g></svg><span>y</span>',
        ),
        ('<a href="//example.org/r/h">x</a><a href="javascript:alert(1)">y</a>', "<span>x</span><span>y</span>"),
        ('<link rel="stylesheet" href="/static/browse.css">', '<link rel="stylesheet" href="../../static/browse.css">'),
    ],
)
def test_links_and_nothing_else_are_changed(before: str, after: str | None) -> None:
    files = {
        "/r/h": "index.html", "/r/h?page=2": "page-2.html", "/r/h/sites/s/1": "sites/s/1.html",
        "/static/browse.css": "static/browse.css",
    }  # fmt: skip
    assert relative_page(before, "sites/s/4.html", files) == (before if after is None else after)


def test_a_style_sheet_that_is_not_there_is_no_copy() -> None:
    with pytest.raises(ValueError, match=r"other\.css"):
        relative_page('<link href="/static/other.css">', "index.html", {})


def test_what_is_copied(site: Path, run: Path, harvest: Harvest) -> None:
    """Components of the graph, then those that matter most; the others are named without a link."""
    made = {(page.parent.name, int(page.stem)) for page in site.glob("sites/*/*.html") if page.stem.isdecimal()}
    assert len(made) == 9
    assert {(node.site, node.number) for node in hand_graph().components} <= made
    for name in SITES:
        text = (site / "sites" / name / "index.html").read_text()
        own = sorted(n for s, n in made if s == name)
        assert [n for n in range(harvest.site(name).C) if f'href="{n}.html"' in text] == own
        assert ("This copy has none of its components" in text) == (not own)
    group = (site / "groups" / "0" / "index.html").read_text()
    for site_name, n in harvest.groups.members(0):
        linked = f'href="../../sites/{site_name}/{n}.html"' in group
        assert linked == ((site_name, n) in made)
    page = (site / "graphs" / GRAPH / "index.html").read_text()
    addresses = {link for link in hrefs(page) if "/sites/" in link}
    assert addresses == {f"../../sites/{n.site}/{n.number}.html" for n in hand_graph().components}


def test_a_copy_is_escaped_and_tells_nothing_of_the_machine(site: Path, run: Path) -> None:
    labelled = (site / "sites" / UP / "3.html").read_text()
    assert "vowels &lt;/title&gt;" in labelled
    assert "Ada" in labelled
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert MARKUP not in text
        assert "<script>alert" not in text
        assert str(run.parent) not in text
    for page in site.glob("sites/*/*.html"):
        assert page.read_text().count("<script") == 1


def test_chosen_components_and_graphs(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = ["--components", f"{UP}:4,0", "--components", f"model.{DOWN}.weight:2"]
    few = ["--examples", "1", "--context", "3"]
    outcome = pd_here("share", "site", run, "--out", out, *chosen, "--graphs", GRAPH, *few)
    assert outcome.status == 0, outcome
    made = {f"{page.parent.name}:{page.stem}" for page in out.glob("sites/*/*.html") if page.stem.isdecimal()}
    assert made == {f"{UP}:0", f"{UP}:4", f"{DOWN}:2"}
    between = (out / "sites" / UP / "4.html").read_text()
    assert 'rel="prev"' in between
    assert 'rel="next"' not in between
    lists = re.findall(r"<h3>a [<&>].*?</ol>|<h3>\w+ third.*?</ol>", between, re.DOTALL)
    assert len(lists) > 1
    assert {found.count("<li>") for found in lists} == {1}
    contexts = [context.count("<span") for context in re.findall(r'<p class="context">(.*?)</p>', between)]
    assert len(contexts) == len(lists)
    assert set(contexts) == {3}


def test_the_gallery_has_what_is_labelled(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file that is the same each time, with every link leading to a page of it; too large is refused."""
    out, runs = tmp_path / "gallery.zip", {"demo": run, "smollm2": run}
    pages, size = write_gallery(runs, out, 40)
    with zipfile.ZipFile(out) as archive:
        names = set(archive.namelist())
        index = archive.read("index.html").decode()
        made = {name: archive.read(name).decode() for name in names if name.endswith(".html")}
    assert len(names) == pages
    assert {name.split("/")[0] for name in names} == {"index.html", *runs}
    assert set(hrefs(index)) - names == set()
    labels = open_shared(run, None).labels
    assert f"Here are {sum(labels.count().values())} of them" in index
    shown = {name.removeprefix("demo/sites/") for name in made if re.fullmatch(r"demo/sites/.*/\d+\.html", name)}
    assert shown == {f"{site}/{n}.html" for site in SITES for n in labels.of_site(site)}
    again = tmp_path / "again.zip"
    write_gallery(runs, again, 40)
    assert again.read_bytes() == out.read_bytes()
    monkeypatch.setattr(gallery, "LARGEST", size - 1)
    with pytest.raises(UserError, match="take fewer"):
        write_gallery(runs, out, 40)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("graph", "RUN", "nothing"), "has kept: hello-1a2b3c4d"),
        (("graph", "TOY"), "has no graphs; make one with"),
        (("graph", "RUN/harvests"), "is not the folder of a run"),
        (("graph", "RUN", "--group", "mine"), "should be NAME=NODE"),
        (("graph", "RUN", "--group", f"mine={UP}:3@2"), "no graph has a node"),
        (("graph", "RUN", "--group", f"mine={UP}:3@1", "--clusters"), "give one of the two"),
        (("graph", "RUN", "--for", "neuronpedia"), "give its id, --model ID"),
        (("graph", "RUN", "--features-url", "https://example.org/f"), "give its id, --model ID"),
        (("graph", "RUN", "--for", "circuit-tracer", "--model", "m"), "--model is for Neuronpedia's page"),
        (("graph", "RUN", "--model", "gemma-2-2b", "--features-url", "https://example.org/f"), "give --source-set"),
        (("graph", "RUN", "--model", "gpt2-small"), "give --source-set or --features-url"),
        (("graph", "RUN", "--model", "m", "--source-set", "a_b"), "takes letters and digits, and hyphens"),
        (
            ("graph", "RUN", "--model", "m", "--source-set", "a", "--features-url", "https://e.org"),
            "give one of the two",
        ),
        (("components", "RUN/graphs"), "has no harvest; make one with `pd harvest"),
        (("components", "RUN", "--sites", "*.q_proj"), "matches no site"),
        (("components", "RUN", "--model", "a/b"), "--model a/b: use letters"),
        (("components", "RUN", "--source-set", "mlp_down-pd"), "takes letters and digits, and hyphens"),
        (("components", "RUN", "--for", "neuronpedia"), "give its id, --model ID"),
        (("components", "RUN", "--for", "neuronpedia", "--model", "m", "--batch", "129"), "at most 128 features"),
        (("components", "RUN", "--for", "neuronpedia", "--model", "m", "--gzip"), "--gzip is for --for sae-dashboard"),
        (("components", "RUN", "--for", "circuit-tracer"), "shows the components of graphs alone; use pd share graph"),
        (("components", "RUN", "--harvest", "none"), "has no harvest 'none'"),
        (("site", "nowhere"), "is not a folder"),
        (("site", "RUN", "--components", "layers.0.mlp.up:1"), "unknown site 'layers.0.mlp.up'"),
        (("site", "RUN", "--components", f"{UP}:20"), "no component 20"),
        (("site", "RUN", "--components", UP), "should be SITE:NUMBERS"),
        (("site", "RUN", "--graphs", "nothing"), "no such graph; it has kept: hello-1a2b3c4d"),
    ],
    ids=lambda value: " ".join(value[:1] + value[2:]) if isinstance(value, tuple) else "",
)
def test_mistakes(runs: Path, tmp_path: Path, command: tuple[str, ...], message: str) -> None:
    words = [w.replace("RUN", str(runs / LLAMA)).replace("TOY", str(runs / TOY)) for w in command]
    outcome = pd_here("share", *words, "--out", tmp_path / "out")
    assert outcome.status == 2
    assert message in outcome.err.replace("\n", " ")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["graph", "components", "site"])
def test_what_is_there_stays(run: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    for flags in ([], ["--overwrite"]):
        outcome = pd_here("share", kind, run, "--out", out, *flags)
        assert outcome.status == 2
        assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").unlink()
    few = ["--most", 2] if kind == "site" else []
    for flags, status in (([], 0), ([], 2), (["--overwrite"], 0)):
        assert pd_here("share", kind, run, "--out", out, *few, *flags).status == status
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_harvest_without_its_run(run: Path, tmp_path: Path) -> None:
    [folder] = find_harvests(run)
    alone = shutil.copytree(folder, tmp_path / "alone")
    with pytest.raises(UserError, match="a harvest without its run"):
        open_shared(alone, None)
    shutil.copytree(folder, tmp_path / "harvests" / folder.name)
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        open_shared(tmp_path, None)
    assert open_shared(folder, None).folder == run.resolve()
    assert open_shared(run, folder.name).harvest.plan.step == STEP
