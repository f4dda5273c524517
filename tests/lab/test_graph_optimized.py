"""Graphs of importances that were optimised for a prompt: they fire less, and stand what the run's own stand."""

from pathlib import Path

import numpy as np
import pytest

from param_decomp_lab.graph import Graph
from param_decomp_lab.opening import Run, load_run

TEXT = "def f(x):"
HOW = {"steps": 60, "attack_steps": 5, "samples": 2}


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


@pytest.fixture(scope="module")
def graph(run: Run) -> Graph:
    return run.graph(TEXT, target=[104, 7], optimize=HOW)


def test_fewer_components_fire(graph: Graph) -> None:
    found = graph.optimized
    print(found)
    assert found is not None
