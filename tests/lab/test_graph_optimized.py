"""Graphs of importances that were optimised for a prompt: fewer components fire, and stand what the run's own do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph, optimize
from param_decomp_lab.graph.optimize import LEAST_KL
from param_decomp_lab.opening import Run, load_run

TEXT = "def f(x):"
HOW = {"steps": 60, "attack_steps": 5, "attack_starts": 2, "draws": 2, "allowed": 3.0}


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


@pytest.fixture(scope="module")
def graph(run: Run) -> Graph:
    return run.graph(TEXT, target=[104, 7], optimize=HOW, nodes_share=1.0, edges_share=1.0, unfollowed=0.0)


@pytest.mark.slow
@pytest.mark.one_part
def test_fewer_components_fire(run: Run, graph: Graph) -> None:
    found = graph.optimized
    assert found is not None
    assert found.before == sum(int((np.asarray(x) > 0).sum()) for x in run.causal_importances(TEXT).values())
    assert found.after < found.before / 2
    assert graph.firing == found.after
    assert 0 < found.step <= 60


@pytest.mark.slow
@pytest.mark.one_part
def test_errors_are_those_of_its_importances(run: Run, graph: Graph) -> None:
    """The nodes of the unpruned graph have all of λ, so its reading `ci` can be run by `run.logits`."""
    masks = {name: np.zeros((len(TEXT), site.C), np.float32) for name, site in run.sites.items()}
    for node in graph.components:
        masks[node.site][node.position, node.number] = node.importance
    assert graph.optimized is not None
    errors = graph.optimized.errors_after, graph.optimized.errors_before
    for theirs, own in zip(errors, (masks, "ci"), strict=True):
        p, q = (log_softmax(np.asarray(run.logits(TEXT, m))[-1]) for m in (None, own))
        assert theirs.ci == pytest.approx(float((np.exp(p) * (p - q)).sum()), rel=1e-3)
    allowed = [max(3 * x, LEAST_KL) for x in vars(graph.optimized.errors_before).values()]
    for have, limit in zip(vars(graph.optimized.errors_after).values(), allowed, strict=True):
        assert have <= limit


@pytest.mark.slow
@pytest.mark.one_part
def test_what_stands_the_first_attacks_alone_is_not_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the candidates that of the fewest components which stands the second attacks too; without one, the start."""
    seconds: list[int] = []
    least = 0

    def errors(judge: Any, importances: Any, number: int) -> np.ndarray:
        count = optimize._count(importances, 0)
        if number == optimize.FIRST:
            return np.full(3, 0.0 if seconds or count < before else 1.0)
        seconds.append(count)
        return np.full(3, 1.0 if len(seconds) == 1 or count >= least > 0 else 1.1)

    before = sum(int((np.asarray(x) > 0).sum()) for x in run.causal_importances(TEXT).values())
    monkeypatch.setattr(optimize._Judge, "errors", errors)
    asked = {**HOW, "steps": 120, "allowed": 1.0}
    found = run.graph(TEXT, target=[104, 7], optimize=asked).optimized
    assert found is not None
    assert (found.before, found.after, found.step) == (before, before, 0)
    assert found.errors_after == found.errors_before
    assert seconds[0] == before
    candidates = seconds[1:]
    assert candidates == sorted(candidates)
    assert len(candidates) > 1
    least, seconds = candidates[1], []
    found = run.graph(TEXT, target=[104, 7], optimize=asked).optimized
    assert found is not None
    assert (found.after, found.errors_after.attack, seconds) == (least, 1.0, [before, *candidates[:2]])


def log_softmax(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x - np.log(np.exp(x - x.max()).sum()) - x.max()
    return result


@pytest.mark.slow
@pytest.mark.one_part
def test_is_kept_with_its_graph(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json").optimized == graph.optimized


@pytest.mark.slow
def test_what_lies_after_the_position_is_out(run: Run) -> None:
    graph = run.graph(TEXT, position=3, optimize={**HOW, "steps": 20, "loss": "logit"}, target=[104])
    assert graph.optimized is not None
    assert max(node.position for node in graph.components) <= 3
    assert graph.optimized.before < sum(int((np.asarray(x) > 0).sum()) for x in run.causal_importances(TEXT).values())


@pytest.mark.slow
def test_a_toy(toy: Path) -> None:
    """Whose output has no position."""
    graph = load_run(toy / "p-00000001").graph("1=0.75", optimize=HOW)
    assert graph.optimized is not None
    assert graph.optimized.after <= graph.optimized.before


@pytest.mark.parametrize(
    ("options", "says"),
    [({"loss": "mse"}, "should be kl or logit"), ({"steps": 0}, "steps"), ({"allowed": -1}, "allowed")],
)
def test_wrong_options(run: Run, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run.graph(TEXT, optimize=options)
