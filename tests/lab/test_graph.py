"""Attribution graphs of runs: what is followed, what is kept, and what a file holds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph
from param_decomp_lab.opening import Run, load_run

TEXT = "def f(x):"


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


@pytest.fixture(scope="module")
def graph(run: Run) -> Graph:
    return run.graph(TEXT, threshold=-1.0, most_followed=10**6, unfollowed=0.0, nodes_share=1.0, edges_share=1.0)


def test_everything_is_in_a_graph_that_is_not_pruned(graph: Graph, run: Run) -> None:
    assert graph.firing == len(TEXT) * sum(site.C for site in run.sites.values())
    shares = graph.shares
    assert shares.influence == pytest.approx(1)
    assert shares.embeddings + shares.rests + shares.biases + shares.not_followed == pytest.approx(1, abs=1e-5)
    assert shares.not_followed == pytest.approx(0, abs=1e-6)
    print(shares, len(graph.nodes), len(graph.edges), [n.id for n in graph.components[:5]])
