"""Graphs and interventions in the browser: what the pages show, what is kept, and what they refuse."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from markupsafe import escape
from starlette.testclient import TestClient

from param_decomp_lab import load_run
from param_decomp_lab.graph import Graph, Node
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.averages import AverageOptions, write_averages
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.tables import table_file
from param_decomp_lab.opening import Run
from param_decomp_lab.schema.site_names import short_sites
from tests.lab.shared_folders import DOWN, hand_graph, harvest_step, with_parts
from tests.lab.test_browse import LLAMA, MARKUP, TOY, base, client, only_harvest

TEXT = "then"


@pytest.fixture(scope="module")
def mine(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with its checkpoints, in which graphs may be kept."""
    return Path(shutil.copytree(harvested, tmp_path_factory.mktemp("graphs") / "runs"))


@pytest.fixture(scope="module")
def shown(mine: Path) -> Iterator[TestClient]:
    with client(mine) as found:
        yield found


@pytest.fixture(scope="module")
def run(mine: Path) -> Run:
    return load_run(mine / LLAMA)


def wait(browser: TestClient, page: str, **params: str) -> str:
    for _ in range(600):
        found = browser.get(page, params=params)
        if "http-equiv" not in found.text:
            return found.text
        time.sleep(0.1)
    pytest.fail("no answer")


def data_of(page: str) -> dict[str, list[list[object]]]:
    found = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    return {"nodes": found["nodes"], "edges": found["edges"]}


def drawn_in(page: str) -> list[str]:
    """What is drawn of each edge."""
    return re.findall("<path [^>]*>", page.partition('<g id="lines">')[2].partition("</g>")[0])


def listed(page: str) -> list[str]:
    """The list of nodes, an entry each."""
    return page.partition('id="nodes"')[2].partition("</ol>")[0].split("<li ")[1:]


def test_a_graph_is_made_and_kept(shown: TestClient, mine: Path, run: Run) -> None:
    here = base(mine)
    page = wait(shown, f"{here}/graph", prompt=TEXT, target="h")
    graph = run.graph(TEXT, target="h")
    data = data_of(page)
    # The page's graph and ours are of different numbers of devices: alike but for roundings, and nodes of nearly equal
    # influence may have changed places.
    at = {node.id: node for node in graph.nodes}
    shown_ids = [str(node[3]) for node in data["nodes"]]
    assert sorted(shown_ids) == sorted(at)
    places = [at[name].influence + 10 * (at[name].kind == "output") for name in shown_ids]
    assert places == pytest.approx(sorted(places, reverse=True), rel=1e-4)
    assert page.count("<circle") == len(graph.nodes)
    assert len(data["edges"]) == len(graph.edges)
    best = graph.components[0]
    chosen = shown.get(f"{here}/graph", params={"prompt": TEXT, "target": "h", "node": best.id}).text
    own = [edge for edge in graph.edges if best in (graph.nodes[edge.source], graph.nodes[edge.target])]
    assert len(drawn_in(chosen)) == len(own)
    for other, _ in (*graph.into(best)[:5], *graph.out_of(best)[:5]):
        link = f"?prompt={TEXT}&target=h&node={quote(other.id, safe='')}"
        assert link in unescape(chosen)
    assert f"{here}/sites/{best.site}/{best.number}" in chosen
    assert "Keep this graph" in page
    kept = shown.post(f"{here}/graph", data={"prompt": TEXT, "target": "h"})
    assert kept.status_code == 303
    [file] = (mine / LLAMA / "graphs").iterdir()
    for node in Graph.load(file).nodes:
        mine_of_it = at[node.id]
        for name in ("value", "importance", "influence", "probability"):
            assert getattr(node, name) == pytest.approx(getattr(mine_of_it, name), rel=1e-4, abs=1e-6), name
    assert kept.headers["location"] == f"{here}/graphs/{file.stem}"
    again = shown.get(kept.headers["location"])
    # The file has rounded numbers, which the page rounds once more.
    for part, before in data.items():
        for was, now in zip(before, data_of(again.text)[part], strict=True):
            texts, numbers = ([x for x in was if isinstance(x, kind)] for kind in (str, int | float))
            assert [x for x in now if isinstance(x, str)] == texts
            assert [x for x in now if not isinstance(x, str)] == pytest.approx(numbers, rel=0.02)
    assert "Keep this graph" not in again.text
    assert file.stem in shown.get(f"{here}/graphs").text


def test_what_an_activation_usually_is(shown: TestClient, mine: Path, tmp_path: Path) -> None:
    """A note for one component; a damaged harvest says nothing, and the page can still be used."""
    component, note = "layers.1.mlp.up_proj:3", "Where this component fires"
    here = f"{base(mine)}/intervene"
    assert note in shown.get(here, params={"select": component, "prompt": ""}).text
    assert note not in shown.get(here, params={"select": f"group:3 {component}", "prompt": ""}).text
    runs = Path(shutil.copytree(mine, tmp_path / "runs", ignore=shutil.ignore_patterns("ckpts")))
    harvest = Harvest(only_harvest(runs))
    table_file(harvest.folder, "components", harvest.sites["layers.1.mlp.up_proj"]).write_bytes(b"damaged")
    with client(runs) as browser:
        page = browser.get(here, params={"select": component, "prompt": ""})
    assert page.status_code == 200
    assert note not in page.text
    assert component in page.text


@pytest.mark.slow
def test_an_intervention(shown: TestClient, mine: Path, run: Run) -> None:
    component = "layers.1.mlp.up_proj:3"
    page = wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select=f"{component}@1", how="off")
    assert page.count("<h2>others ") == 3
    assert "How the text continues" not in page
    found = run.intervene(TEXT, f"{component}@1", readings=("ci",))
    before, after = found.readings["ci"].probabilities()
    first = page.partition("others at λ")[2].partition("</section>")[0]
    shares = [float(x) for x in re.findall(r'num">([\d.]+)\u00a0%', first)]
    best = int(before.argmax())
    assert shares[0] == pytest.approx(100 * before[best], rel=0.05)
    assert shares[1] == pytest.approx(100 * after[best], rel=0.05)
    page = wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select=f"{component}@-1", how="set", scale="-75")
    assert '<option value="set" selected>' in page
    _, after = run.intervene(TEXT, f"{component}@-1", set_to=-75, readings=("ci",)).readings["ci"].probabilities()
    assert abs(after[best] - before[best]) > 0.2 * before[best]
    first = page.partition("others at λ")[2].partition("</section>")[0]
    shares = [float(x) for x in re.findall(r'num">([\d.]+)\u00a0%', first)]
    assert shares[1] == pytest.approx(100 * after[best], rel=0.05)
    for how in ("scale", "set"):
        refused = wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select=component, how=how, scale="lots")
        assert "should be a number" in refused
        beyond = wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select=component, how=how, scale="1e300")
        assert "should be a number from -1e+30 to 1e+30" in beyond
        assert "others at λ" not in beyond
    unknown = wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select="layers.7.up:1", how="off")
    assert "unknown site" in unknown
    assert MARKUP not in wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select=MARKUP, how=MARKUP)


@pytest.mark.slow
def test_a_toy(shown: TestClient, mine: Path) -> None:
    here = base(mine, TOY)
    assert "output" in wait(shown, f"{here}/graph", prompt="1=0.75", target="1")
    assert "features go from 0" in wait(shown, f"{here}/graph", prompt="1=0.75", target="99")
    site = next(iter(load_run(mine / TOY).sites))
    assert "mean squared change" in wait(shown, f"{here}/intervene", prompt="1=0.75", select=f"{site}:0", how="alone")


def test_groups_as_nodes(shown: TestClient, mine: Path, run: Run) -> None:
    """Members of a group are one node, which leads to the group's page, and can be taken out as a whole."""
    graph = run.graph(TEXT, nodes_share=1.0)
    groups = run.groups
    merged = graph.grouped(groups)
    name = next(node.id for node in merged.nodes if node.kind == "group")
    graph.save(mine / LLAMA / "graphs" / "groups.json")
    here = f"{base(mine)}/graphs/groups"
    one_by_one = shown.get(here)
    assert 'href="?groups=1"' in one_by_one.text
    page = shown.get(here, params={"groups": "1", "node": name})
    ids = [node[3] for node in data_of(page.text)["nodes"]]
    assert set(ids) == {node.id for node in merged.nodes}
    number = merged.node(name).number
    assert f"{base(mine)}/groups/{number}" in page.text
    assert all(member in page.text for member in merged.node(name).members)
    found = wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select=f"group:{number}")
    assert "others under attack" in found
    assert "has no group 999" in wait(shown, f"{base(mine)}/intervene", prompt=TEXT, select="group:999")


def test_an_optimised_graph_says_so(shown: TestClient, mine: Path, run: Run) -> None:
    raw = run.graph(TEXT).to_json()
    errors = {"ci": 0.25, "random": 0.125, "attack": 2.0}
    raw["optimized"] = {"loss": "kl", "steps": 400, "step": 380, "before": 300, "after": 12, "errors_before": errors,
                        "errors_after": errors}  # fmt: skip
    (mine / LLAMA / "graphs" / "optimised.json").write_text(json.dumps(raw))
    assert "12 components fire, in place of 300" in shown.get(f"{base(mine)}/graphs/optimised").text


def test_averages_on_a_component_page(shown: TestClient, mine: Path, run: Run) -> None:
    site = "layers.0.mlp.down_proj"
    page = f"{base(mine)}/sites/{site}/5"
    assert "On average" not in shown.get(page).text
    numbers = [run.harvest.index.number_of(*at) for at in ((site, 5), ("layers.1.mlp.up_proj", 7))]
    options = AverageOptions(8, 20, 1)
    edges = [np.asarray([numbers[1]], np.int32), np.asarray([numbers[0]], np.int32), np.asarray([-0.5], np.float32)]
    write_averages(run.harvest.folder / "averages" / options.name, options, 1, edges)
    text = shown.get(page).text
    assert "leads to" in text
    assert f"{base(mine)}/sites/layers.1.mlp.up_proj/7" in text
    assert "It has no kept edges" in shown.get(f"{base(mine)}/sites/{site}/6").text


def test_what_is_wrong_with_a_kept_graph(shown: TestClient, mine: Path) -> None:
    folder = mine / LLAMA / "graphs"
    folder.mkdir(exist_ok=True)
    (folder / "broken.json").write_text("{")
    here = base(mine)
    listed = shown.get(f"{here}/graphs")
    assert listed.status_code == 200
    assert "not valid JSON" in listed.text
    assert shown.get(f"{here}/graphs/broken").status_code == 400
    for path in ("nothing", "..%2f..%2fconfig", quote(MARKUP, safe="")):
        answer = shown.get(f"{here}/graphs/{path}")
        assert answer.status_code == 404
        assert MARKUP not in answer.text


def test_hostile_graphs(shown: TestClient, mine: Path, run: Run) -> None:
    """A graph's texts are shown as they are, and end neither the page's tags nor its data."""
    raw = run.graph(TEXT).to_json()
    raw |= {"prompt": MARKUP, "tokens": [MARKUP] * 4}
    raw["output_names"] = dict.fromkeys(raw["output_names"], MARKUP)
    raw["nodes"]["site"] = [MARKUP] * len(raw["nodes"]["site"])
    place = raw["rests"]["node"][0].rpartition(":")[2]
    raw["rests"] = {name: column[:1] for name, column in raw["rests"].items()} | {"node": [f"{MARKUP}:{place}"]}
    (mine / LLAMA / "graphs").mkdir(exist_ok=True)
    (mine / LLAMA / "graphs" / "hostile.json").write_text(json.dumps(raw))
    for address in (f"{base(mine)}/graphs/hostile", f"{base(mine)}/graphs"):
        page = shown.get(address)
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text
        assert page.text.count("</script>") == (3 if address.endswith("hostile") else 1)


def test_a_page_of_two_thousand_nodes(shown: TestClient, mine: Path, run: Run) -> None:
    """At most 200 KB travel, and the largest nodes are drawn."""
    raw = run.graph(TEXT).to_json()
    raw.pop("rests", None)
    names = list(raw["nodes"])
    n = 3000
    node = {name: raw["nodes"][name][-1] for name in names}
    nodes = [{**node, "kind": "component", "site": f"layers.{k % 30}.mlp.down_proj", "number": k,
              "position": k % 4, "influence": 1 / (k + 2)} for k in range(n)]  # fmt: skip
    raw["nodes"] = {name: [row[name] for row in nodes] for name in names}
    ends = [(k, (k * 7 + j) % n) for k in range(n) for j in range(1, 6)]
    raw["edges"] = {
        "source": [a for a, _ in ends], "target": [b for _, b in ends],
        "weight": [0.123456 * (1 + k % 97) for k in range(len(ends))],
        "share": [1 / (1 + k % 89) for k in range(len(ends))],
    }  # fmt: skip
    (mine / LLAMA / "graphs").mkdir(exist_ok=True)
    (mine / LLAMA / "graphs" / "large.json").write_text(json.dumps(raw))
    page = shown.get(f"{base(mine)}/graphs/large")
    assert page.status_code == 200
    assert page.text.count("<circle") == 2000
    assert int(page.headers["content-length"]) <= 200_000
    assert "draws the largest 2000 nodes" in page.text
    between = sum(source < 2000 and target < 2000 for source, target in ends)
    assert f"The {between - 6000:,} edges of smallest share are not on this page" in page.text


def test_the_strongest_edges_are_drawn_at_first(shown: TestClient, mine: Path, run: Run) -> None:
    graph = run.graph(TEXT, nodes_share=0.95)
    replace(graph, edges=graph.edges[::-1]).save(mine / LLAMA / "graphs" / "strongest.json")
    here = f"{base(mine)}/graphs/strongest"
    scores = sorted((graph.nodes[e.target].influence * e.share for e in graph.edges), reverse=True)
    assert len(scores) > 100
    for address, n in (("", 40), ("?edges=7", 7), ("?edges=80", 80), ("?edges=0", 1), ("?edges=99999", len(scores))):
        page = shown.get(here + address).text
        assert len(drawn_in(page)) == n
        assert f"The <b>{n}</b> strongest of {len(scores):,} edges" in page
        part = re.search(r"with <b>([\d.]+)", page)
        assert part is not None
        assert float(part[1]) == pytest.approx(100 * sum(scores[:n]) / sum(scores), abs=0.06)
    first = shown.get(f"{here}?edges=1").text
    best = max(graph.edges, key=lambda e: graph.nodes[e.target].influence * e.share)
    ids = [str(node[3]) for node in data_of(first)["nodes"]]
    ends = [
        re.search(rf'id="n{ids.index(graph.nodes[n].id)}".*?cx="([\d.]+)" cy="([\d.]+)"', first)
        for n in (best.source, best.target)
    ]  # fmt: skip
    [line] = drawn_in(first)
    (x1, y1), (x2, y2) = ([f"{float(x):g}" for x in end.groups()] for end in ends if end is not None)
    assert re.search(rf'd="M{x1} {y1}Q\S+ \S+ {x2} {y2}"', line)
    assert 'href="?edges=80#edges=80">more' in shown.get(here).text
    assert 'href="?edges=2#edges=2">more' in shown.get(f"{here}?edges=0").text
    assert shown.get(f"{here}?edges=many").status_code == 404


def test_nodes_are_named_and_listed(shown: TestClient, mine: Path, run: Run) -> None:
    """In the picture by label or tokens, in the list with examples, once for each component; so is one that is
    chosen."""
    graph = run.graph(TEXT, nodes_share=0.95)
    graph.save(mine / LLAMA / "graphs" / "named.json")
    here, best = f"{base(mine)}/graphs/named", graph.components[0]
    everywhere = [node for node in graph.components[1:] if run.harvest.summary(node.site).tokens[node.number, 0] < 0]
    named = [node for node in graph.components if node not in everywhere]
    other = next(node for node in named if (node.site, node.number) != (best.site, best.number))
    Labels(mine / LLAMA, run.harvest.plan.step).set(best.site, best.number, f"ends of clauses {MARKUP}", "Ada")
    page = shown.get(here).text
    assert MARKUP not in page
    entries = listed(page)
    order = sorted(graph.nodes, key=lambda node: (node.kind != "output", -node.influence))
    assert len(entries) == len(order)
    by_id = {str(node[3]): entry for node, entry in zip(data_of(page)["nodes"], entries, strict=True)}
    assert ">ends of clauses &lt;/title&gt;" in by_id[best.id]
    layer, kind = best.site.split(".")[1], best.site.split(".")[-1][0]
    assert f">{f'{kind}{layer}:{best.number} ends of clauses'[:15]}…</text>" in page
    known = [token for token in run.harvest.summary(other.site).tokens[other.number].tolist() if token >= 0]
    tokens = [name.strip() or name for name in run.harvest.names(known)]
    assert f">{escape(' '.join(tokens[:3]))}</a>" in by_id[other.id]
    for node in everywhere[:1]:  # no token tells anything
        assert f">component {node.number}</a>" in by_id[node.id]
    for node in (best, other):
        assert f"{node.site} {node.number} · &#39;{TEXT[node.position]}&#39; at {node.position}" in by_id[node.id]
    components = {(node.site, node.number) for node in graph.components}
    assert len(components) < len(graph.components)
    assert page.count(">the whole page</a>") == len(components)
    for site, number in components:
        assert page.count(f'href="{base(mine)}/sites/{site}/{number}"') == 1
    [first] = run.harvest.examples(best.site, best.number, most=1)
    at = first.position - first.first
    here_and_after = f"<mark>{escape(first.names[at])}</mark>{escape(''.join(first.names[at + 1 : at + 7]))}</q>"
    assert here_and_after in by_id[best.id]
    chosen = shown.get(here, params={"node": best.id}).text.partition('id="node"')[2].partition("</section>")[0]
    assert here_and_after in chosen
    assert f'href="{base(mine)}/sites/{best.site}/{best.number}"' in chosen
    graph = replace(graph, nodes=(*graph.nodes, Node("component", "layers.1.mlp.down_proj", 3, 3, 1.0, 1.0, 0.0)))
    graph.save(mine / LLAMA / "graphs" / "down.json")
    own = [node for node in graph.components if (node.site, node.number) == ("layers.1.mlp.down_proj", 3)]
    negative = max(own, key=lambda node: node.influence).value < 0  # where it is explained
    raised = run.harvest.weights("layers.1.mlp.down_proj", 3)["suppressed" if negative else "promoted"][:5]
    of_down = [e for e in listed(shown.get(f"{base(mine)}/graphs/down").text) if "layers.1.mlp.down_proj 3 ·" in e]
    [entry] = (e for e in of_down if "<details" in e)
    codes = "".join(f" <code>{escape(name)}</code>" for name in run.harvest.names(raised))
    here = f"here (<span>a {'&lt;' if negative else '&gt;'} 0</span>) raises"
    assert f"{here}<span>{codes}</span>; lowers<span> <code>" in entry


def test_what_is_said_of_residual_errors_and_scores(shown: TestClient, mine: Path) -> None:
    graph = hand_graph(harvest_step(mine, LLAMA))
    graph.save(mine / LLAMA / "graphs" / "hand.json")
    here = f"{base(mine)}/graphs/hand"
    page = shown.get(here).text
    assert page.count("Circuit-tracer calls it an error node") == 1  # of two
    # Embeddings have 0.5 of what ends, rests 0.3. Nodes but outputs have 2 of influence, and that is 0.8 of all.
    assert ">Replacement score</abbr> 62.5\u00a0%, " in page
    assert ">completeness score</abbr> 91.4\u00a0%." in page
    chosen = shown.get(here, params={"node": f"{DOWN}:rest@3"}).text
    said = chosen.partition('id="node"')[2].partition("</section>")[0]
    assert "residual error <small>layers.1.mlp.down_proj · " in said
    assert "Circuit-tracer calls it an error node" in said
    assert re.search(r'<h3>comes from</h3>\s*<p class="note">nothing</p>', said)
    assert "make it again to see the parts" in said


def test_run_without_these_sends_the_prompt_as_it_is(shown: TestClient, mine: Path) -> None:
    graph = hand_graph(harvest_step(mine, LLAMA))
    for name, prompt, sent in (("lines", "a\n\tb\r\n", "a\n\tb\n"), ("long", "x" * 6000, "x" * 5001)):  # refused
        replace(graph, prompt=prompt).save(mine / LLAMA / "graphs" / f"{name}.json")
        page = shown.get(f"{base(mine)}/graphs/{name}").text
        assert f'<input type="hidden" name="prompt" value="{sent}">' in page


def test_signs_are_those_of_the_activation_here(shown: TestClient, mine: Path) -> None:
    """Component 5 has a = −1.5: a positive edge into it weakens it, and it raises what its U lowers. Its edges into
    outputs raise and lower logits as they are."""
    graph = hand_graph(harvest_step(mine, LLAMA))
    graph.save(mine / LLAMA / "graphs" / "signs.json")
    here = f"{base(mine)}/graphs/signs"
    page = shown.get(here).text
    strength = [graph.effect(edge) for edge in graph.edges]
    assert strength == [1.25, -0.5, -0.125, -2.0, 1e-7, 3.0, 1.0, -1.0]
    # Edges are drawn by their score.
    order = sorted(graph.edges, key=lambda e: -graph.nodes[e.target].influence * e.share)
    drawn = [re.search('class="(up|down)"', line) for line in drawn_in(page)]
    assert [found and found[1] for found in drawn] == ["up" if graph.effect(e) > 0 else "down" for e in order]
    harvest = Harvest(only_harvest(mine))
    weights = harvest.weights(DOWN, 5)
    suppressed, promoted = (
        "".join(f" <code>{escape(name)}</code>" for name in harvest.names(weights[kind][:5]))
        for kind in ("suppressed", "promoted")
    )
    said = f"here (<span>a &lt; 0</span>) raises<span>{suppressed}</span>; lowers<span>{promoted}</span>"
    [entry] = [entry for entry in listed(page) if f"{DOWN} 5 ·" in entry]
    assert said in entry
    assert "<span> · a&nbsp;−1.50</span>" in entry
    chosen = (
        shown.get(here, params={"node": graph.nodes[2].id}).text.partition('id="node"')[2].partition("</section>")[0]
    )
    assert said in chosen
    rows = re.findall('<td class="(up|down)">([a-z]*)</td><td class="num (up|down)">([^<]*)</td>', chosen)
    assert rows == [
        ("down", "weakens", "down", "2"), ("up", "strengthens", "up", "−1"), ("down", "weakens", "down", "1"),
        ("down", "weakens", "down", "0.125"), ("up", "raises", "up", "1.25"), ("down", "lowers", "down", "−0.500"),
    ]  # fmt: skip


def test_edges_into_an_output_are_held_against_its_logit(shown: TestClient, mine: Path) -> None:
    hand_graph(harvest_step(mine, LLAMA)).save(mine / LLAMA / "graphs" / "sums.json")
    page = shown.get(f"{base(mine)}/graphs/sums").text
    said = " ".join(re.sub("<[^>]*>", " ", page.partition("Kept edges")[2].partition("</p>")[0]).split())
    beside = "beside a logit (less the mean) of"
    assert said.startswith(f"into n add up to 1.25, {beside} 5, into e add up to −0.500, {beside} 3. Behind")


@pytest.mark.parametrize(
    ("sites", "short"),
    [
        (("layers.2.mlp.down_proj", "layers.10.mlp.down_proj", "layers.2.mlp.up_proj"), ("d2", "d10", "u2")),
        (("h.0.attn.c_proj", "h.0.mlp.c_proj", "h.0.mlp.c_fc"), ("a0", "m0", "c0")),
        (("layers.0.mlp.experts.3.up_proj", "embed_tokens"), ("u0.3", "e")),
        (("up", "upper"), ("up", "upp")),
        (("a.0", "a0"), ("a.0", "a0")),  # would be the same
        (("",), ("",)),
    ],
)
def test_short_names_of_sites(sites: tuple[str, ...], short: tuple[str, ...]) -> None:
    assert short_sites(sites) == dict(zip(sites, short, strict=True))


def test_parts_of_a_residual_error(shown: TestClient, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the list, and where the node is chosen: the largest first, by label or tokens, the others together last."""
    step = harvest_step(mine, LLAMA)
    with_parts(hand_graph(step)).save(mine / LLAMA / "graphs" / "parts.json")
    Labels(mine / LLAMA, step).set(DOWN, 2, f"silent {MARKUP}", "Ada")
    here, name = f"{base(mine)}/graphs/parts", f"{DOWN}:rest@3"

    def rows(part: str) -> list[list[str]]:
        found = re.findall(r"<tr>(<td>.*?)</tr>", part.partition("<th>part</th>")[2].partition("</table>")[0])
        return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row.split("</td>")[:-1]] for row in found]

    page = shown.get(here).text
    assert MARKUP not in page
    assert page.count("<th>part</th>") == 1
    [entry] = [entry for entry in listed(page) if "<th>part</th>" in entry]
    assert f"{DOWN} · " in entry
    found = rows(entry)
    assert [row[1:] for row in found] == [
        ["62.5\u00a0%", "", ""], ["50.0\u00a0%", "0", "−1.50"], ["−25.0\u00a0%", "0", "0.500"], ["12.5\u00a0%", "", ""],
    ]  # fmt: skip
    assert found[0][0] == "delta"
    assert found[1][0].startswith("silent </title>")
    assert found[1][0].endswith(" 2")
    assert found[2][0].endswith(" 7")
    assert found[3][0] == "21 other components"
    for number in (2, 7):
        assert f'href="{base(mine)}/sites/{DOWN}/{number}"' in entry
    chosen = shown.get(here, params={"node": name}).text.partition('id="node"')[2].partition("</section>")[0]
    assert rows(chosen) == found
    assert "<h3>made of</h3>" in chosen
    assert "comes from" not in chosen
    assert "made again" not in page
    assert " data-parts>" not in page
    monkeypatch.setattr("param_decomp_lab.browse.graph_pages.BEHIND", 0)
    page = shown.get(here).text
    assert "<th>part</th>" not in page
    [entry] = [entry for entry in listed(page) if " data-parts>" in entry]  # the script links to them
    assert f"{DOWN} · " in entry
    chosen = shown.get(here, params={"node": name}).text
    assert chosen.count("<th>part</th>") == 2
    assert " data-parts>" not in chosen
    assert rows(chosen) == found


def test_a_component_that_the_harvest_does_not_have(shown: TestClient, mine: Path) -> None:
    """The graph is of another run's size, or of sites that were not harvested."""
    graph = hand_graph(harvest_step(mine, LLAMA))
    strange = (Node("component", DOWN, 3, 10**6, 1.0, 1.0, 0.9), Node("component", "layers.9.up", 3, 0, 1.0, 1.0, 0.8))
    replace(graph, nodes=(*graph.nodes, *strange)).save(mine / LLAMA / "graphs" / "strange.json")
    page = shown.get(f"{base(mine)}/graphs/strange")
    assert page.status_code == 200
    assert ">component 1000000</a>" in page.text
    for node in strange:
        assert shown.get(f"{base(mine)}/graphs/strange", params={"node": node.id}).status_code == 200


def test_the_best_examples_alone(run: Run) -> None:
    site = "layers.0.mlp.up_proj"
    for number in range(4):
        top = [e for e in run.harvest.examples(site, number) if e.kind == "top"]
        best = sorted(top, key=lambda e: -e.importance * abs(e.activation))[:3]
        found = run.harvest.examples(site, number, most=3)
        assert [(e.row, e.position, e.tokens) for e in found] == [(e.row, e.position, e.tokens) for e in best]
