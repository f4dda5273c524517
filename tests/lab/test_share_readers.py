"""What `pd share graph` and `pd share components` write, read by the classes of the tools that it is for."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph, Node
from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.harvest.files.tables import IMPORTANCE_BINS
from param_decomp_lab.share.features import filled, percentiles
from param_decomp_lab.share.graphs import share_graphs
from param_decomp_lab.share.numbering import run_numbering, unpair
from param_decomp_lab.share.readers import CircuitTracer, Neuronpedia, Reader
from param_decomp_lab.share.shared_run import open_shared
from param_decomp_lab.share.site import share_site
from tests.lab.readers import (
    dropped_by_circuit_tracer,
    features_in_neuronpedia,
    has_layer_in_neuronpedia,
    read_batch,
    read_feature,
    read_graph,
)
from tests.lab.shared_folders import (
    DOWN,
    GRAPH,
    LABEL,
    LLAMA,
    MODEL,
    TOY,
    UP,
    hand_graph,
    mistakes,
    one_token,
    read,
    share_copy,
    small_graph,
    toy_graph,
    two_tokens,
    up_alone,
)
from tests.lab.tiny_run import SITES, pd_here

GRAPHS = {
    LLAMA: {GRAPH: hand_graph(), "one-token": one_token(), "two-tokens": two_tokens(), "up-alone": up_alone()},
    TOY: {"toy": toy_graph()},
}
CASES = [(run, name) for run, graphs in GRAPHS.items() for name in graphs]
PAGES: dict[str, Reader] = {
    "circuit-tracer": CircuitTracer(),
    "address": Neuronpedia("tiny", features_url="https://example.org/features/"),
    "source-set": Neuronpedia("tiny", source_set="pd"),
}


@pytest.fixture(scope="module")
def runs(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return share_copy(harvested, tmp_path_factory.mktemp("share") / "runs")


@pytest.fixture(scope="module")
def run(runs: Path) -> Path:
    return runs / LLAMA


@pytest.fixture(scope="module")
def harvest(run: Path) -> Harvest:
    return Harvest(find_harvests(run)[0])


@pytest.fixture(scope="module")
def shared(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Folders of `pd share graph`, by run and page."""
    made = {}
    folder = tmp_path_factory.mktemp("shared")
    for run, graphs in GRAPHS.items():
        for name, graph in graphs.items():
            graph.save(folder / run / f"{name}.json")
        files = [str(folder / run / f"{name}.json") for name in graphs]
        for page, reader in PAGES.items():
            made[run, page] = folder / f"{run}-{page}"
            share_graphs(runs / run, files, made[run, page], reader=reader)
    return made


# ---- graphs ----


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("run", "name"), CASES)
def test_every_graph_is_one_of_the_reader(shared: dict[tuple[str, str], Path], run: str, name: str, page: str) -> None:
    value, graph = read(shared[run, page] / f"{name}.json"), GRAPHS[run][name]
    found = read_graph(value)
    assert mistakes(value, "Graph") == []
    assert len(found.nodes) == len({node.node_id for node in found.nodes}) == len(graph.nodes)
    assert dropped_by_circuit_tracer(value) == set()
    assert max(node.ctx_idx for node in found.nodes) > 0  # in one column its page draws nothing
    assert has_layer_in_neuronpedia(value)
    for node in found.nodes:
        if node.feature_type == "logit":
            # As the pages take it from the name; without it they stop.
            assert float(node.clerp.split("(p=")[1].split(")")[0]) == pytest.approx(node.token_prob, abs=1e-3)
        if node.feature_type == "mlp reconstruction error":
            assert node.feature < 0
    rests = [node for node in found.nodes if node.feature_type == "mlp reconstruction error"]
    assert len({node.feature for node in rests}) == len({node.clerp for node in rests})


@pytest.mark.parametrize(("run", "name"), CASES)
def test_no_link_lies_within_a_layer(shared: dict[tuple[str, str], Path], run: str, name: str) -> None:
    """An MLP's `down_proj` comes after the `up_proj` that it reads."""
    found = read_graph(read(shared[run, "circuit-tracer"] / f"{name}.json"))
    layers = {node.node_id: -1 if node.layer == "E" else int(node.layer) for node in found.nodes}
    for link in found.links:
        assert layers[link["source"]] < layers[link["target"]]


def test_where_each_page_finds_feature_files(shared: dict[tuple[str, str], Path]) -> None:
    values = {page: read(shared[LLAMA, page] / f"{GRAPH}.json") for page in PAGES}
    name = f"{LLAMA}-step-80"
    # circuit-tracer's page asks its own server, which has our folder under /data/, for plain JSON.
    scan = values["circuit-tracer"]["metadata"]["scan"]
    assert scan == f"./data/features/{name}"
    folder = shared[LLAMA, "circuit-tracer"] / Path(scan.removeprefix("./data/"))
    for node in values["circuit-tracer"]["nodes"]:
        if node["feature_type"] == "cross layer transcoder":
            assert (folder / f"{node['feature']}.json").is_file()
    # Neuronpedia files a graph under a model, and asks an address only where nothing else is named.
    assert values["address"]["metadata"]["scan"] == values["source-set"]["metadata"]["scan"] == "tiny"
    assert features_in_neuronpedia(values["address"]) == f"https://example.org/features/{name}"
    assert "schema_version" not in values["address"]["metadata"]
    assert features_in_neuronpedia(values["source-set"]) == "source set pd"
    assert (shared[LLAMA, "address"] / "features" / name).is_dir()


def test_options_of_neuronpedia_choose_its_page(run: Path, tmp_path: Path) -> None:
    """As before `--for` was there."""
    url = "https://example.org/features"
    outcome = pd_here("share", "graph", run, GRAPH, "--out", tmp_path / "out", "--features-url", url, "--model", "m")
    assert outcome.status == 0, outcome
    assert features_in_neuronpedia(read(tmp_path / "out" / f"{GRAPH}.json")) == f"{url}/{LLAMA}-step-80"
    outcome = pd_here("share", "graph", run, GRAPH, "--out", tmp_path / "ours")
    assert f"circuit-tracer start-server --graph_file_dir {tmp_path / 'ours'}" in outcome.out.replace("\n", "")


def test_what_neuronpedia_cannot_open_is_refused(run: Path, tmp_path: Path) -> None:
    nodes = (
        Node("output", "", 1, 110, 5.0, 0.0, 1.0, 0.6),
        Node("biases", "", -1, -1, 0.0, 0.0, 0.5),
        Node("embedding", "", 0, 104, 0.0, 0.0, 0.5),
    )
    small_graph("hn", nodes, ((1, 0, 1.0), (2, 0, 1.0))).save(tmp_path / "inputs.json")
    with pytest.raises(UserError, match="neither components nor residual errors"):
        share_graphs(run, [str(tmp_path / "inputs.json")], tmp_path / "out", reader=Neuronpedia("tiny"))
    share_graphs(run, [str(tmp_path / "inputs.json")], tmp_path / "out")
    assert not has_layer_in_neuronpedia(read(tmp_path / "out" / "inputs.json"))


@pytest.mark.parametrize("text", ['"', "(p=0.9)", '" (p=0.123)', "<b>", "\n"])
def test_no_text_of_an_output_hides_its_probability(run: Path, tmp_path: Path, text: str) -> None:
    graph = hand_graph()
    Graph(**{**vars(graph), "output_names": {110: text, 101: "e"}}).save(tmp_path / "g.json")
    share_graphs(run, [str(tmp_path / "g.json")], tmp_path / "out")
    name = read(tmp_path / "out" / "g.json")["nodes"][0]["clerp"]
    assert name.split("(p=")[1].split(")")[0] == "0.600"
    assert "<b" not in name


# ---- feature files ----


def test_feature_files(shared: dict[tuple[str, str], Path], run: Path, harvest: Harvest) -> None:
    folder = shared[LLAMA, "circuit-tracer"] / "features" / f"{LLAMA}-step-80"
    nodes = [node for graph in GRAPHS[LLAMA].values() for node in graph.components]
    numbering = run_numbering(run)
    assert {numbering.component(*unpair(int(file.stem))) for file in folder.iterdir()} == {
        (node.site, node.number) for node in nodes
    }
    for file in folder.iterdir():
        found = read_feature(read(file))
        assert found.index == int(file.stem)
        assert found.transcoder_id == folder.name
        site, number = numbering.component(*unpair(found.index))
        row, examples = harvest.component(site, number), harvest.examples(site, number)
        assert found.activation_frequency == pytest.approx(row["density"], rel=1e-5)
        assert sum(found.histogram) == row["firings"]
        assert len(found.quantile_values) == 100
        assert found.act_min == 0
        assert found.act_max >= max(found.quantile_values)
        for quantile, kind in zip(found.examples_quantiles, ("top", "uniform"), strict=True):
            own = [example for example in examples if example.kind == kind]
            for shown, example in zip(quantile.examples, own, strict=True):
                assert shown.tokens == [harvest.vocabulary[i].as_py() for i in example.tokens]
                assert shown.tokens_acts_list == pytest.approx(example.importances.tolist(), rel=1e-5)
                assert example.first + shown.train_token_ind == example.position
                assert max(shown.tokens_acts_list) <= found.act_max
        assert found.top_logits == [harvest.vocabulary[i].as_py() for i in harvest.weights(site, number)["promoted"]]


@given(st.lists(st.integers(0, 50), min_size=IMPORTANCE_BINS, max_size=IMPORTANCE_BINS))
def test_percentiles_are_those_of_the_histogram(counts: list[int]) -> None:
    """At most so many percent of the firings lie in bins below a percentile's own, and at least so many up to it."""
    found, total = percentiles(counts), sum(counts)
    assert found == sorted(found)
    assert sum(filled(counts)) == total
    if not total:
        assert found == [0.0] * 100
        return
    assert found[-1] == pytest.approx(len(filled(counts)) / IMPORTANCE_BINS)
    for percent, value in enumerate(found, start=1):
        # On an edge, to six digits, a value is that of the bin below.
        own = min(max(0, int(value * IMPORTANCE_BINS - 1e-4)), IMPORTANCE_BINS - 1)
        assert sum(counts[:own]) <= total * percent / 100 * (1 + 1e-4)
        assert sum(counts[: own + 1]) >= total * percent / 100 * (1 - 1e-4)


# ---- components ----


@pytest.mark.parametrize("compressed", [False, True])
def test_batches_of_the_dashboard(run: Path, harvest: Harvest, tmp_path: Path, compressed: bool) -> None:
    out = tmp_path / "out"
    flags = ["--gzip", "--model", "tiny", "--source-set", "x"] if compressed else []
    outcome = pd_here("share", "components", run, "--out", out, "--batch", 7, "--sites", "*.up_proj", *flags)
    assert outcome.status == 0, outcome
    model, source_set, ending = ("tiny", "x", "json.gz") if compressed else (LLAMA, "pd", "json")
    assert f"Neuronpedia needs a model {model} of 5 layers or more, with a source set {source_set}" in outcome.out
    layers = {site: layer for layer, site in enumerate(SITES, start=1) if "up_proj" in site}
    assert {path.name for path in (out / model).iterdir()} == {f"{layer}-{source_set}" for layer in layers.values()}
    for site, layer in layers.items():
        folder = out / model / f"{layer}-{source_set}"
        count = len(list(folder.glob("batch-*")))
        values = [read(folder / f"batch-{n}.{ending}") for n in range(count)]
        batches = [read_batch(value) for value in values]
        assert [batch.to_dict() for batch in batches] == values
        assert {(batch.model_id, batch.layer, batch.sae_set) for batch in batches} == {(model, layer, source_set)}
        assert [len(batch.features) for batch in batches[:-1]] == [7] * (count - 1)
        features = {feature.feature_index: feature for batch in batches for feature in batch.features}
        summary = harvest.summary(site)
        assert list(features) == [n for n in range(20) if summary.firings[n] > 0]
        for n, feature in features.items():
            assert feature.frac_nonzero == pytest.approx(summary.density[n], rel=1e-5)
            assert sum(feature.freq_hist_data_bar_heights) == summary.firings[n]
            assert "/" not in feature.dataset
            for shown, example in zip(feature.activations, harvest.examples(site, n), strict=True):
                assert example.first + shown.qualifying_token_index == example.position
                assert shown.bin_min - 1e-6 <= example.importance <= shown.bin_max + 1e-6
                assert (shown.bin_contains == 1) == (example.kind == "uniform" or summary.firings[n] <= 4)


def test_labels_and_logits_of_the_dashboard(run: Path, harvest: Harvest, tmp_path: Path) -> None:
    outcome = pd_here("share", "components", run, "--out", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert "2 of them labelled" in outcome.out
    folder = tmp_path / "out" / LLAMA
    [by_ada], [by_model] = read(folder / "1-pd" / "explanations.json"), read(folder / "4-pd" / "explanations.json")
    assert mistakes(by_ada, "Explanation") == mistakes(by_model, "Explanation") == []
    assert (by_ada["index"], by_ada["description"], by_ada["authorName"]) == (3, LABEL, "Ada")
    assert by_ada["explanationModelName"] is None
    assert (by_model["index"], by_model["explanationModelName"]) == (5, MODEL)
    assert not (folder / "2-pd" / "explanations.json").exists()
    [written] = [f for f in read(folder / "4-pd" / "batch-0.json")["features"] if f["feature_index"] == 5]
    weights = harvest.weights(DOWN, 5)
    assert written["pos_values"] == pytest.approx(weights["promoted_logits"], rel=1e-5)
    assert written["pos_str"] == [harvest.vocabulary[i].as_py() for i in weights["promoted"]]
    assert written["neg_values"] == pytest.approx(weights["suppressed_logits"], rel=1e-5)


def test_uploads_to_neuronpedia(run: Path, harvest: Harvest, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = pd_here("share", "components", run, "--out", out, "--for", "neuronpedia", "--model", "tiny", "--batch", 9)
    assert outcome.status == 0, outcome
    assert {path.name for path in (out / "tiny").iterdir()} == {f"{layer}-pd" for layer in range(1, 5)}
    for layer, site in enumerate(SITES, start=1):
        bodies = [read(file) for file in sorted((out / "tiny" / f"{layer}-pd").iterdir())]
        assert all(mistakes(body, "Upload") == [] for body in bodies)
        assert {(body["modelId"], body["source"]) for body in bodies} == {("tiny", f"{layer}-pd")}
        features = {feature["index"]: feature for body in bodies for feature in body["features"]}
        assert all(0 < len(body["features"]) <= 9 for body in bodies)
        summary = harvest.summary(site)
        assert list(features) == [n for n in range(SITES[site]) if summary.firings[n] > 0]
        for n, feature in features.items():
            assert feature["density"] == pytest.approx(summary.density[n], rel=1e-5)
            weights = harvest.weights(site, n)
            assert len(feature["topLogits"]) == min(len(weights["promoted"]), 20) == len(feature["bottomLogits"])
            text = {(UP, 3): LABEL, (DOWN, 5): "ends of words"}.get((site, n))
            assert [e["text"] for e in feature["explanations"]] == ([] if text is None else [text])
            for shown, example in zip(feature["activations"], harvest.examples(site, n), strict=True):
                assert len(shown["tokens"]) == len(shown["values"])
                assert max(shown["values"]) == pytest.approx(example.importances.max(), rel=1e-5)
                assert shown["quantileMin"] <= example.importance + 1e-6
                assert 0 < shown["quantileFraction"] <= 1


def test_both_exports_number_components_alike(
    shared: dict[tuple[str, str], Path], run: Path, harvest: Harvest, tmp_path: Path
) -> None:
    """A component of a graph is found in Neuronpedia as its page looks for it: in the source of its layer, by the
    number that its `feature` holds."""
    for form in ("neuronpedia", "sae-dashboard"):
        outcome = pd_here("share", "components", run, "--out", tmp_path / form, "--for", form, "--model", "tiny")
        assert outcome.status == 0, outcome
    graph = read(shared[LLAMA, "source-set"] / f"{GRAPH}.json")
    source_set = graph["metadata"]["feature_details"]["neuronpedia_source_set"]
    seen = 0
    for node, own in zip(graph["nodes"], hand_graph().nodes, strict=True):
        if node["feature_type"] != "cross layer transcoder":
            continue
        index = unpair(node["feature"])[1]
        place = Path(graph["metadata"]["scan"]) / f"{node['layer']}-{source_set}" / "batch-0.json"
        examples = [harvest.vocabulary[i].as_py() for i in harvest.examples(own.site, own.number)[0].tokens]
        [upload] = [f for f in read(tmp_path / "neuronpedia" / place)["features"] if f["index"] == index]
        [feature] = [f for f in read(tmp_path / "sae-dashboard" / place)["features"] if f["feature_index"] == index]
        assert upload["activations"][0]["tokens"] == feature["activations"][0]["tokens"] == examples
        seen += 1
    assert seen == 5


def test_components_of_a_toy(runs: Path, tmp_path: Path) -> None:
    outcome = pd_here("share", "components", runs / TOY, "--out", tmp_path / "out")
    assert outcome.status == 0, outcome
    files = [*(tmp_path / "out" / TOY).glob("*/batch-*.json")]
    assert {file.parent.name for file in files} == {"1-pd", "2-pd", "3-pd"}
    for file in files:
        for feature in read_batch(read(file)).features:
            assert all(activation.tokens[0].startswith("feature ") for activation in feature.activations)
    made = share_site(open_shared(runs / TOY, None), tmp_path / "site", most=4)
    assert (made.components, made.graphs) == (4, 0)
    assert "feature" in (tmp_path / "site" / "index.html").read_text()


# ---- the readers themselves ----


def test_the_readers_refuse() -> None:
    """What these tests rely on: another type, and a field that is not the class's, are errors."""
    activation: dict[str, Any] = {"bin_min": 0.5, "bin_max": 1.0, "bin_contains": 1.0, "tokens": ["a"], "values": [1.0]}
    feature: dict[str, Any] = {"feature_index": 3, "pos_str": [], "activations": [activation]}
    batch: dict[str, Any] = {"model_id": "m", "layer": 1, "sae_set": "pd", "features": [feature]}
    read_batch(batch)
    for wrong in (
        {**batch, "settings": {}},
        {**batch, "layer": "1"},
        {**batch, "features": [{**feature, "explanations": []}]},
        {**batch, "features": [{**feature, "activations": [{**activation, "values": ["1"]}]}]},
        {**batch, "features": [{**feature, "activations": [{**activation, "maxValue": 1.0}]}]},
    ):
        with pytest.raises((TypeError, ValueError)):
            read_batch(wrong)
