"""Attribution graphs of runs: what is followed, what is kept, and what a file holds."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph
from param_decomp_lab.graph.build import GraphRequest, Prompt, build_graph, find_outputs
from param_decomp_lab.graph.graph import merge_groups
from param_decomp_lab.graph.incoming import Incoming
from param_decomp_lab.graph.influence import IncomingEdges, influence, prune
from param_decomp_lab.graph.show import graph_file
from param_decomp_lab.opening import Run, load_run
from tests import reference as ref
from tests.core import test_experts as with_experts
from tests.core import tiny
from tests.lab.tiny_run import pd_here

TEXT = "def f(x):"
WHOLE = {"threshold": -1.0, "most_followed": 10**6, "unfollowed": 0.0, "nodes_share": 1.0, "edges_share": 1.0}


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


@pytest.fixture(scope="module")
def whole(run: Run) -> Graph:
    """Every component a node, everything followed, nothing left out."""
    return run.graph(TEXT, target=[104, 7], **WHOLE)


def test_everything_is_in_a_graph_that_is_not_pruned(whole: Graph, run: Run) -> None:
    assert whole.firing == len(TEXT) * sum(site.C for site in run.sites.values())
    shares = whole.shares
    assert shares.influence == pytest.approx(1)
    assert shares.edges == pytest.approx(1)
    assert shares.embeddings + shares.rests + shares.biases == pytest.approx(1, abs=1e-5)
    assert shares.not_followed == pytest.approx(0, abs=1e-6)
    assert whole.tokens == tuple(TEXT)
    assert [whole.output_names[node.number] for node in whole.outputs] == ["h", "\u2407"]
    assert sum(node.influence for node in whole.outputs) == pytest.approx(1)
    for node in whole.components[:5]:
        a = run.activations(TEXT, node.site)[node.site][node.position, node.number]
        lam = run.causal_importances(TEXT, node.site)[node.site][node.position, node.number]
        assert (node.value, node.importance) == (pytest.approx(float(a), abs=1e-5), pytest.approx(float(lam), abs=1e-5))
    logits = np.asarray(run.logits(TEXT))[-1]
    assert whole.outputs[0].value == pytest.approx(logits[104] - logits.mean(), abs=1e-4)


def test_scores_are_those_of_circuit_tracer(run: Run, whole: Graph) -> None:
    """By its formulas on the dense matrix of the whole graph (E9); a graph that is pruned has the same."""
    nodes = whole.nodes
    A = np.zeros((len(nodes), len(nodes)))
    for edge in whole.edges:
        A[edge.target, edge.source] += abs(edge.weight)
    A /= np.maximum(A.sum(axis=1, keepdims=True), 1e-30)
    p = np.asarray([node.influence if node.kind == "output" else 0.0 for node in nodes])
    influence = np.linalg.solve(np.eye(len(nodes)) - A.T, p) - p
    ends = {kind: np.asarray([node.kind == kind for node in nodes]) for kind in ("embedding", "rest")}
    words, errors = influence[ends["embedding"]].sum(), influence[ends["rest"]].sum()
    without = 1 - A[:, ends["rest"]].sum(axis=1)
    completeness = (without * (influence + p)).sum() / (influence + p).sum()
    assert 0.1 < completeness < 0.999
    pruned = run.graph(TEXT, target=[104, 7], **WHOLE | {"nodes_share": 0.5, "edges_share": 0.9})
    for graph in (whole, pruned):
        assert graph.replacement_score == pytest.approx(words / (words + errors), rel=1e-3)
        assert graph.completeness_score == pytest.approx(completeness, rel=1e-3)


def test_edges_into_a_component_are_direct(whole: Graph) -> None:
    """What an `up_proj` of layer 1 reads, components of layer 0 have written; its own layer's have not."""
    node = next(node for node in whole.components if node.site == "layers.1.mlp.up_proj")
    sources = whole.into(node)
    assert {source.site for source, _ in sources} <= {"", "layers.0.mlp.down_proj"}
    assert all(source.position <= node.position for source, _ in sources)
    assert sum(edge.share for _, edge in sources) == pytest.approx(1, abs=1e-5)
    assert [abs(edge.weight) for _, edge in sources] == sorted((abs(edge.weight) for _, edge in sources), reverse=True)


def test_pruned(run: Run, whole: Graph) -> None:
    graph = run.graph(TEXT, target=[104, 7], threshold=-1.0, nodes_share=0.5, edges_share=0.9, unfollowed=0.0)
    assert len(graph.nodes) < len(whole.nodes) / 2
    assert 0.4 < graph.shares.influence <= 0.51 + max(node.influence for node in graph.components)
    kept = {node.id: node for node in graph.nodes}
    for node in whole.nodes:
        if node.id in kept:
            assert kept[node.id].influence == pytest.approx(node.influence, rel=1e-4)
    least = min(node.influence for node in graph.nodes if node.kind != "output")
    dropped = [node for node in whole.nodes if node.id not in kept and node.influence > least * 1.001]
    assert all(not graph_has_way_out(whole, node, kept) for node in dropped)
    followed = run.graph(TEXT, threshold=-1.0, most_followed=70)
    assert followed.followed == 70
    assert followed.shares.not_followed > 0


def graph_has_way_out(whole: Graph, node: Any, kept: dict[str, Any]) -> bool:
    """Whether a dropped node of large influence leads to anything that was kept by more than the share left out."""
    total = sum(edge.share for target, edge in whole.out_of(node) if target.id in kept)
    return total > 0.5


@pytest.mark.slow
def test_on_eight_devices(run: Run, finished: Path, whole: Graph) -> None:
    parts = load_run(finished, devices=8).graph(TEXT, target=[104, 7], **WHOLE)
    assert {node.id for node in parts.nodes} == {node.id for node in whole.nodes}
    place = {node.id: k for k, node in enumerate(parts.nodes)}
    weights = {(edge.source, edge.target): edge.weight for edge in parts.edges}
    scale = max(abs(edge.weight) for edge in whole.edges)
    for edge in whole.edges:
        ends = tuple(place[whole.nodes[end].id] for end in (edge.source, edge.target))
        assert weights.get(ends, 0.0) == pytest.approx(edge.weight, abs=1e-5 * scale)


@pytest.mark.slow
def test_experts(run: Run) -> None:
    """Slots and positions, stacks and sites: edges into an output, one by one, against the reference."""
    target, weights = with_experts.target(), with_experts.weights()
    problem = tiny.problem((), target)
    state = tiny.ruffled_state(problem)
    opened = SimpleNamespace(problem=problem, learned=state.learned, mesh=run.mesh, weights=jax.device_put(weights))
    tokens = tiny.TOKENS[:1, :3]
    incoming = Incoming(opened, jnp.asarray(tokens), 0.0)
    plain = tiny.ref_target(target, weights, tokens)
    want = ref.attributions(plain, tiny.ref_components(state.components, target.sites), ref.Node(ref.LOGIT, (0, 2), 5))
    found = incoming.of_outputs(2, np.asarray([5])).weights[0]
    names, firing = [site.name for site in target.sites.all], incoming.firing
    assert 0 < len(firing) < sum(site.C for site in target.sites.all) * 3
    assert any("experts" in names[site] for site in firing.site)
    places = zip(firing.site, firing.position, firing.number, strict=True)
    theirs = [want.components[names[site]][0, position, number] for site, position, number in places]
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(found[: len(firing)], theirs, atol=1e-5 * scale)
    fires = {name: np.zeros(x.shape, bool) for name, x in want.components.items()}
    for site, position, number in zip(firing.site, firing.position, firing.number, strict=True):
        fires[names[site]][0, position, number] = True
        assert incoming.importances[names[site]][position, number] > 0
    _, rests = ref.with_rests(want, fires)
    layout = incoming.layout
    for site, position, weight in zip(
        layout.rest_site, layout.rest_position, found[len(firing) : len(firing) + len(layout.rest_site)], strict=True
    ):
        assert weight == pytest.approx(rests[names[site]][0, position], abs=1e-4 * scale)
    every = np.arange(len(layout.rest_site))
    signs = np.sign(found[None, len(firing) : len(firing) + len(every)])
    no_components = np.zeros(0, int), np.zeros((0, len(every)))
    parts = incoming.behind(every, 2, (np.asarray([5]), signs), no_components)
    size = np.abs(found).sum()
    for n, own in enumerate(parts):
        site, at = names[layout.rest_site[n]], (0, int(layout.rest_position[n]))
        wanted = ref.rest_parts([(want, 1.0)], fires, site, at)
        np.testing.assert_allclose(own.components, size * wanted.components, atol=1e-4 * scale)
        assert own.delta == pytest.approx(size * wanted.delta, abs=1e-4 * scale)


def where_few_fire(run: Run, **options: Any) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph of importances at random, and these: the run's own are nearly all 1."""
    rng = np.random.default_rng(2)
    ids = np.asarray(list(TEXT.encode()))
    importances = {name: rng.uniform(size=(len(ids), site.C)).astype(np.float32) for name, site in run.sites.items()}
    request = GraphRequest((104, 7), **WHOLE | {"threshold": 0.7} | options)
    incoming = Incoming(run, run.as_batch(ids)[0], request.threshold, importances)
    about = Prompt(run.id, run.step, TEXT, tuple(TEXT), tuple(ids.tolist()), chr)
    return build_graph(incoming, about, request, find_outputs(incoming, request, True)), importances


@pytest.fixture(scope="module")
def few(run: Run) -> Graph:
    return where_few_fire(run)[0]


def test_what_is_behind_residual_errors(few: Graph, whole: Graph, run: Run) -> None:
    """E10, by the edges of a graph in which every component is a node of its own."""
    of_parts = {node.id: dict[str, float]() for node in few.nodes if node.kind != "rest"}
    for edge in whole.edges:
        source, target = whole.nodes[edge.source], whole.nodes[edge.target]
        if target.id in of_parts:
            of_parts[target.id][source.id] = edge.weight
    a, importance = run.activations(TEXT), where_few_fire(run)[1]
    rests = [node for node in few.nodes if node.kind == "rest"]
    assert len(rests) > len(TEXT)
    assert {entry.node for entry in few.rests} == {node.id for node in rests}
    fire = {node.id for node in few.components}
    cancelled = others = 0
    for node in rests:
        found, C = few.behind(node), run.sites[node.site].C
        assert found.total == pytest.approx(node.influence, rel=1e-4, abs=1e-8)
        leads = [(target, edge) for target, edge in few.out_of(node) if edge.weight]

        def part(of: str, leads: Any = leads) -> float:
            factors = ((t.id, t.influence * edge.share / edge.weight) for t, edge in leads)
            return sum(factor * of_parts[target].get(of, 0.0) for target, factor in factors)

        silent = [f"{node.site}:{n}@{node.position}" for n in range(C)]
        want = {name: part(name) for name in silent if name not in fire}
        largest = sorted(map(abs, want.values()), reverse=True)
        close = {"rel": 1e-3, "abs": 1e-5 * max(largest, default=0.0) + 1e-9}
        n = len(found.contributors)
        assert [abs(c.part) for c in found.contributors] == pytest.approx(largest[:n], **close)
        assert n == 10 or max(largest[n:], default=0.0) <= close["abs"]
        for c in found.contributors:
            assert c.part == pytest.approx(want[c.id], **close)
            assert c.value == pytest.approx(float(a[c.site][c.position, c.number]), abs=1e-5)
            assert c.importance == pytest.approx(float(importance[c.site][c.position, c.number]))
            assert c.importance <= few.threshold
            cancelled += c.part < 0
        assert found.n_others == len(want) - n
        others += found.n_others
        assert found.others == pytest.approx(sum(want.values()) - sum(want[c.id] for c in found.contributors), **close)
        assert found.delta == pytest.approx(part(node.id), **close)
    assert cancelled > 0
    assert others > 0


def test_what_is_behind_follows_the_edges_that_are_kept(few: Graph, run: Run) -> None:
    """A graph with groups has it too; other nodes have no parts."""
    pruned, _ = where_few_fire(run, nodes_share=0.9, edges_share=0.7)
    assert pruned.rests
    assert len(pruned.edges) < len(few.edges)
    for entry in pruned.rests:
        through = sum(target.influence * edge.share for target, edge in pruned.out_of(entry.node))
        assert entry.total == pytest.approx(through, rel=1e-4)
        assert merge_groups(pruned, lambda site, number: number % 3).behind(entry.node) == entry
    assert pruned.rests[0].contributors[0].id in repr(pruned.rests[0])
    with pytest.raises(UserError, match="is not a residual error"):
        pruned.behind(pruned.components[0])


def test_files_of_residual_errors(few: Graph, tmp_path: Path) -> None:
    few.save(tmp_path / "a.json")
    read = Graph.load(tmp_path / "a.json")
    assert read.to_json() == few.to_json()
    entry, before = read.rests[0], few.rests[0]
    assert [c.id for c in entry.contributors] == [c.id for c in before.contributors]
    assert [c.part for c in entry.contributors] == pytest.approx([c.part for c in before.contributors], rel=1e-5)
    earlier = few.to_json()
    del earlier["rests"]
    opened = Graph.from_json(earlier, "a file")
    assert opened.nodes == read.nodes
    assert graph_file(tmp_path, opened) == graph_file(tmp_path, read)
    with pytest.raises(UserError, match="make it again"):
        opened.behind(entry.node)


@pytest.mark.parametrize(
    "changes",
    [
        {"node": ["layers.7.up:rest@0"]}, {"node": [[]]}, {"part": 4}, {"number": []}, {"delta": [None]},
        {"n_others": ["many"]}, {"value": [["x"]]}, {"number": [[0]], "part": [[0.5, 0.5]]},
    ],
)  # fmt: skip
def test_damaged_residual_errors(few: Graph, changes: dict[str, Any]) -> None:
    raw = replace(few, rests=few.rests[:1]).to_json()
    assert Graph.from_json(raw, "a file").rests
    with pytest.raises(UserError, match="not a graph that `pd graph` wrote"):
        Graph.from_json(raw | {"rests": raw["rests"] | changes}, "a file")
    with pytest.raises(UserError, match="two entries"):
        Graph.from_json(replace(few, rests=few.rests[:1] * 2).to_json(), "a file")


def test_files(whole: Graph, tmp_path: Path) -> None:
    whole.save(tmp_path / "graphs" / "a.json")
    read = Graph.load(tmp_path / "graphs" / "a.json")
    assert read.nodes[0] == whole.nodes[0] or read.nodes[0].id == whole.nodes[0].id
    assert [(e.source, e.target) for e in read.edges] == [(e.source, e.target) for e in whole.edges]
    assert read.to_json() == whole.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "not a graph of version 1"),
        ({"nodes": {"kind": ["component"]}}, "is not a graph"),
        ({"nodes": 3}, "is not a graph"),
        ({"edges": {"source": [0], "target": [10**6], "weight": [1.0], "share": [1.0]}}, "an edge leads to no node"),
        ({"edges": {"source": [0], "target": [], "weight": [1.0], "share": [1.0]}}, "is not a graph"),
        ({"tokens": 4}, "is not a graph"),
        ({"tokens": ["a"]}, "a node stands at no token"),
    ],
)
def test_damaged_files(whole: Graph, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(whole.to_json() | change))
    with pytest.raises(UserError, match=message):
        Graph.load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"target": "the"}, "should be one token of the vocabulary, not 3"),
        ({"target": 300}, "output 300: they go from 0 to 255"),
        ({"target": [4, 4]}, "one is given twice"),
        ({"position": 9}, "position 9: the inputs have 9 positions"),
        ({"nodes_share": 0.0}, "nodes_share: 0.0 should be above 0"),
        ({"most_nodes": 0}, "most_nodes: 0 should be at least 1"),
    ],
)
def test_wrong_requests(run: Run, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run.graph(asked.pop("prompt", TEXT), **asked)


@settings(max_examples=60)
@given(st.data())
def test_influence_and_pruning_are_the_reference_s(data: st.DataObject) -> None:
    """On random graphs; the reference takes powers of whole matrices, outputs among the nodes."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n_outputs, levels, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    level = rng.integers(0, levels, n)
    followed = rng.permutation(n)[: data.draw(st.integers(0, n))]
    weights = rng.normal(size=(n_outputs + len(followed), n)) * (rng.uniform(size=(n_outputs + len(followed), n)) < 0.6)
    weights[n_outputs:] *= level[None] < level[followed][:, None]
    p = rng.uniform(0.1, 1, n_outputs)
    rows = IncomingEdges(weights, followed, level[followed], p / p.sum())
    values = influence(rows.shares, followed, level[followed], rows.probability)
    assume(values.sum() > 0)
    dense = np.zeros((n + n_outputs, n + n_outputs))
    dense[n:, :n] = weights[:n_outputs]
    dense[followed, :n] = weights[n_outputs:]
    A = ref.influence_rows(dense, np.zeros(n + n_outputs))
    want_p = np.concatenate([np.zeros(n), p])
    np.testing.assert_allclose(values, ref.influence(A, want_p)[:n], atol=1e-12)
    want = ref.prune(A, want_p, 0.6, 0.9)
    kept = prune(rows, values, 0.6, 0.9)
    assert set(kept.nodes.tolist()) == set(np.flatnonzero(want.nodes[:n]))
    mine = {(n + r if r < n_outputs else followed[r - n_outputs], source) for r, source in kept.edges.tolist()}
    assert mine == {tuple(pair) for pair in np.argwhere(want.edges)}


def test_the_command(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "graph.json"
    told = pd_here("graph", finished, TEXT, "--target", "h", "--out", out)
    assert told.status == 0, told
    assert "components fire" in told.out
    assert Graph.load(out).prompt == TEXT


@pytest.mark.slow
def test_a_toy(toy: Path) -> None:
    graph = load_run(toy / "p-00000001").graph("1=0.75 3", target="3")
    assert graph.tokens == ("1=0.75 3=1",)
    assert [node.id for node in graph.outputs] == ["output:3@0"]
    embeddings = {node.number for node in graph.nodes if node.kind == "embedding"}
    assert embeddings <= {1, 3}
