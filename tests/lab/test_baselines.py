"""`pd eval --baselines`: the run's own point is its evaluation, and what is written, printed and refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from param_decomp_lab.baselines.figure import comparison_figure
from param_decomp_lab.baselines.measure import LAMBDA, ON_OFF, OWN, Comparison, Point, matched_k
from param_decomp_lab.baselines.parts import BASELINES
from param_decomp_lab.display.numbers import number
from param_decomp_lab.opening import load_run
from param_decomp_lab.setup.language_model import evaluation_source, held_out_rows
from tests.lab.tiny_run import BATCH, STEPS, Outcome, pd_here


@pytest.fixture(scope="module")
def run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("baselines") / finished.name))


@pytest.fixture(scope="module")
def outcome(run: Path) -> Outcome:
    return pd_here("eval", run, "--baselines", "--batches", 1, "--attack", "5,10")


@pytest.fixture(scope="module")
def found(run: Path, outcome: Outcome) -> Comparison:
    assert outcome.status == 0, outcome
    raw: dict[str, Any] = json.loads((run / "evals" / f"baselines_{STEPS}.json").read_text())
    del raw["data"]
    points = tuple(Point(**{**point, "attacked": tuple(point["attacked"])}) for point in raw.pop("points"))
    return Comparison(**{**raw, "lengths": tuple(raw["lengths"]), "points": points})


def test_the_run_s_own_point_is_its_evaluation(run: Path, found: Comparison) -> None:
    """KL and cross-entropy of `run.logits` with λ as masks, and L0, on the same batch."""
    opened = load_run(run)
    batch = np.asarray(evaluation_source(opened.config, held_out_rows(opened.config), opened.mesh)(0))
    assert batch.shape[0] == BATCH
    plain, masked = (jax.nn.log_softmax(opened.logits(batch, masks)) for masks in (None, "ci"))
    kl = float((np.exp(plain) * (plain - masked)).sum(axis=-1).mean())
    assert found.own.error == pytest.approx(kl, rel=1e-3)
    of_next = (np.take_along_axis(np.asarray(x[:, :-1]), batch[:, 1:, None], axis=-1) for x in (plain, masked))
    before, after = (-float(x.mean()) for x in of_next)
    assert found.own.cross_entropy == pytest.approx(after - before, rel=1e-3, abs=1e-5)
    l0 = [float((np.asarray(x) > 0).sum(axis=-1).mean()) for x in opened.causal_importances(batch).values()]
    assert found.own.l0 == pytest.approx(np.mean(l0), rel=1e-4)
    assert found.own.l0 == pytest.approx(found.own_on_off.l0, rel=1e-4)


def test_every_curve(found: Comparison) -> None:
    assert set(found.matched) == set(BASELINES)
    k = matched_k(found.own.l0)
    for name in BASELINES:
        points = sorted((p for p in found.points if p.parts == name), key=lambda p: p.number)
        assert points[-1].error < points[0].error / 10
        assert [bool(p.attacked) for p in points] == [p.number == k for p in points]
    for point in (found.own, found.own_on_off, *found.matched.values()):
        assert len(point.attacked) == 2
        assert point.attacked[0] <= point.attacked[1] * 1.05 + 1e-7
    assert found.best.error == min(p.error for p in found.matched.values())
    kinds = [(p.chosen, p.number) for p in found.points if p.parts == OWN]
    assert (LAMBDA, 0.0) in kinds
    assert (ON_OFF, 0.5) in kinds
    assert len(set(kinds)) == len(kinds)


def test_what_is_printed_and_written(run: Path, outcome: Outcome, found: Comparison) -> None:
    for words in ("weighted singular vectors", "attack 10", "times that of the best"):
        assert words in outcome.out.replace("\n", " ")
    assert (run / "figures" / f"baselines_{STEPS}.png").read_bytes().startswith(b"\x89PNG")
    assert found.positions == BATCH * 16


def test_the_figure_of_one_number_of_parts(found: Comparison) -> None:
    """A bar for the decomposition and each baseline, with its error; of many numbers of parts, curves by L0."""
    matched = replace(found, points=(found.own, found.own_on_off, *found.matched.values()))
    left, right = comparison_figure(matched).axes
    assert [bar.get_width() for bar in left.patches] == [max(p.error, 0) for p in (found.own, *found.matched.values())]
    assert left.texts[0].get_text() == number(found.own.error)
    assert list(right.get_xticks()) == [0, *found.lengths]
    assert not comparison_figure(found).axes[0].patches


@pytest.mark.slow
def test_a_toy(toy: Path, tmp_path: Path) -> None:
    outcome = pd_here(
        "eval", toy / "p-00000001", "--baselines", "--batches", 1, "--attack", "", "--out", tmp_path / "toy.json"
    )
    assert outcome.status == 0, outcome
    assert "At L0" in outcome.out
    assert json.loads((tmp_path / "toy.json").read_text())["points"][0]["cross_entropy"] is None
    assert (tmp_path / "toy.png").is_file()
    fewer = ("--matched", "--out", tmp_path / "matched.json")
    outcome = pd_here("eval", toy / "p-00000001", "--baselines", "--batches", 1, "--attack", "", *fewer)
    assert "At L0" in outcome.out
    all_points, matched = (json.loads((tmp_path / name).read_text())["points"] for name in ("toy.json", "matched.json"))
    assert len(matched) == 2 + len(BASELINES)
    assert all(point in all_points for point in matched)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--metric", "CI_L0"), "takes no metrics"),
        (("--attack", "x"), "numbers of steps"),
        (("--batches", "0"), "batches"),
    ],
)
def test_what_is_refused(run: Path, words: tuple[str, ...], says: str) -> None:
    outcome = pd_here("eval", run, "--baselines", *words)
    assert outcome.status != 0
    assert says in outcome.err.replace("\n", " ")
