"""Averages of attributions: against the edges of graphs of the same rows, and how they are kept."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.averages import AverageRequest, average_attributions
from param_decomp_lab.graph.incoming import Incoming
from param_decomp_lab.harvest.files import Averages, harvest_of
from param_decomp_lab.opening import Run, load_run
from tests.lab.test_browse import LLAMA, TOY
from tests.lab.tiny_run import pd_here

ROWS = 3


@pytest.fixture(scope="module")
def mine(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(harvested, tmp_path_factory.mktemp("averages") / "runs"))


@pytest.fixture(scope="module")
def run(mine: Path) -> Run:
    return load_run(mine / LLAMA)


@pytest.fixture(scope="module")
def averages(run: Run) -> Averages:
    said: list[tuple[int, int, str]] = []
    found = average_attributions(run, run.harvest, AverageRequest(ROWS, 400), lambda *about: said.append(about))
    assert said[-1][0] <= said[-1][1]
    return found


def test_averages_are_those_of_the_graphs_of_the_rows(run: Run, averages: Averages) -> None:
    """Σ λ_s ℓ_s ∂A_t/∂ℓ_s, from the edges into t at every position of every row."""
    site, number = "layers.1.mlp.up_proj", 3
    names = list(run.sites)
    numerator = {name: np.zeros(x.C) for name, x in run.sites.items()}
    total = {name: np.zeros(x.C) for name, x in run.sites.items()}
    squares = 0.0
    for row in range(ROWS):
        incoming = Incoming(run, run.as_batch(run.harvest.row(row)[None])[0], -1.0)
        firing = incoming.firing
        targets = np.flatnonzero((firing.site == names.index(site)) & (firing.number == number))
        squares += float((firing.activation[targets] ** 2).mean()) / ROWS
        weights = incoming.of_components(targets).weights[:, : len(firing)].sum(axis=0) * firing.importance
        for k, name in enumerate(names):
            own = firing.site == k
            np.add.at(numerator[name], firing.number[own], weights[own])
            np.add.at(total[name], firing.number[own], firing.importance[own])
    theirs = {(edge.site, edge.component): edge.weight for edge in averages.into(site, number)}
    scale = max(map(abs, theirs.values()))
    for name in names:
        for c in np.flatnonzero(total[name] > 0):
            want = numerator[name][c] / total[name][c] / np.sqrt(squares)
            assert theirs.get((name, int(c)), 0.0) == pytest.approx(want, abs=1e-4 * scale)
    assert {name for name, _ in theirs} == {"layers.0.mlp.down_proj"}


def test_both_ways(averages: Averages) -> None:
    edges = averages.table.to_pylist()
    assert len(edges) == len(averages) > 0
    named = averages.harvest.named
    edge = edges[len(edges) // 2]
    (target,), (source,) = (named(np.asarray([edge[end]])) for end in ("target", "source"))
    assert (*source, pytest.approx(edge["weight"])) in averages.into(*target)
    assert (*target, pytest.approx(edge["weight"])) in averages.out_of(*source)
    for found in (averages.into(*target), averages.out_of(*source)):
        sizes = [abs(edge.weight) for edge in found]
        assert sizes == sorted(sizes, reverse=True)


def test_the_largest_are_kept(run: Run, averages: Averages) -> None:
    site = "layers.1.mlp.up_proj"
    firings = np.asarray(run.harvest.components(site, ["firings"])["firings"])
    least = int(firings.max())
    few = average_attributions(run, run.harvest, AverageRequest(ROWS, 2, least))
    for c in range(run.sites[site].C):
        want = averages.into(site, c)[:2] if firings[c] >= least else []
        # Computed in other company, with other roundings: of two that are nearly equal either may be kept.
        assert [abs(edge.weight) for edge in few.into(site, c)] == pytest.approx([abs(edge.weight) for edge in want])
    assert 0 < few.targets < averages.targets
    with pytest.raises(UserError, match="edges to average"):
        average_attributions(run, run.harvest, AverageRequest(ROWS, 2, 10**9))


@pytest.mark.slow
def test_a_toy(mine: Path) -> None:
    """Of a TMS the second matrix comes directly from what is between it and the first."""
    outcome = pd_here("graph", mine / TOY, "--dataset", "--rows", 50, "--largest", 3, "--least-firings", 1)
    assert outcome.status == 0, outcome
    assert "edges into" in outcome.out
    averages = harvest_of(mine / TOY, 12).averages
    assert {edge.site for c in range(2) for edge in averages.into("linear2", c)} == {"hidden_layers.0"}
    assert averages.into("linear1", 0) == []


def test_damaged_or_wrong(run: Run, averages: Averages, mine: Path) -> None:
    for words, message in (
        (("--dataset", "x"), "give a prompt, or --dataset"),
        ((), "give a prompt, or --dataset"),
        (("--dataset", "--out", mine / "g.json"), "kept beside the harvest"),
    ):
        outcome = pd_here("graph", mine / LLAMA, *words)
        assert outcome.status != 0
        assert message in outcome.err.replace("\n", " ")
    (averages.folder / "edges.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="is damaged"):
        Averages(averages.folder, run.harvest.index).into("layers.0.mlp.down_proj", 0)
