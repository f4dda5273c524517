"""What an evaluation measures at the interval of figures alone: attacks, active components at each position, λ of the
first rows."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from param_decomp_lab.config import load_config
from param_decomp_lab.eval.evaluation import Evaluation, Measurements
from param_decomp_lab.metrics.active_per_position import THRESHOLDS
from param_decomp_lab.probe.subject import run_subject
from param_decomp_lab.setup import set_up
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests.core import tiny as core
from tests.lab.test_evaluation import STEP, Evaluated, Reference
from tests.lab.tiny_run import LIGHT, SITES, Tiny, pd_here, rows

ATTACK = "init: random, step_size: 0.1, mask_scope: shared_across_batch"
FAST = f"{{type: PGDReconLoss, n_steps: 2, {ATTACK}}}"
SLOW = [
    f"{{type: SlowPGDReconLoss, name: PGDReconLoss_3, n_steps: 3, {ATTACK}}}",
    f"{{type: SlowPGDReconLoss, name: PGDReconLoss_0, n_steps: 0, {ATTACK}}}",
    "{type: CIActiveCountsPerPosition}",
    "{type: CIHeatMap, n_components: 5, n_rows: 2, n_positions: 3}",
]
FIGURES = ("active_per_position", "ci_heat_map")
BLOCKS = "memory={preset: lean, component_block: 4}"


def evaluated(tiny: Tiny, metrics: list[str], *sets: str) -> Evaluated:
    """A state in mid-training, on the mesh of the configuration."""
    config = load_config(tiny.config, [f"eval.metrics=[{', '.join(metrics)}]", *sets])
    setup = set_up(ResolvedConfig(config), Console(quiet=True))
    assert setup.eval is not None
    state = core.ruffled_state(setup.problem, leading=setup.leading)
    evaluation = Evaluation(config, setup.problem, setup.eval, setup.mesh, lambda: setup.text)
    return Evaluated(config, setup, evaluation, state)


def slow(of: Evaluated) -> tuple[Measurements, Measurements]:
    """What is measured between figures, and at figures."""
    with jax.set_mesh(of.setup.mesh):
        fast = of.evaluation.fast(of.state, of.setup.weights, STEP, lambda: False)
        return fast, of.evaluation.slow(of.state, of.setup.weights, STEP, fast, lambda: False)


def snapshot(of: Evaluated) -> Any:
    return of.evaluation._snapshot(of.state, of.setup.weights, lambda: False)


@pytest.fixture(scope="module")
def whole(tiny: Tiny) -> Evaluated:
    return evaluated(tiny, [FAST, *SLOW])


@pytest.fixture(scope="module")
def measured(whole: Evaluated) -> tuple[Measurements, Measurements]:
    return slow(whole)


def test_only_what_is_fast_is_measured_between_figures(
    tiny: Tiny, whole: Evaluated, measured: tuple[Measurements, Measurements]
) -> None:
    fast, both = measured
    assert fast.row.keys() == {"eval/loss/PGDReconLoss"}
    assert both.row.keys() == {f"eval/loss/PGDReconLoss{end}" for end in ("", "_3", "_0")}
    assert both.row["eval/loss/PGDReconLoss"] == fast.row["eval/loss/PGDReconLoss"]
    assert both.row["eval/loss/PGDReconLoss_3"] > both.row["eval/loss/PGDReconLoss_0"]
    # To the letter: the program between figures has nothing of it.
    alone = evaluated(tiny, [FAST])
    assert lowered(alone, "evaluation") == lowered(whole, "evaluation")
    assert [*of_probe(alone)] == ["evaluation", "figures"]
    assert alone.evaluation._slow is None


def of_probe(of: Evaluated) -> Any:
    outline = of.setup.outline
    return of.evaluation.programs(outline.state, outline.weights, of.evaluation._batches(0))


def lowered(of: Evaluated, name: str) -> str:
    found: str = of_probe(of)[name].lower().as_text()
    return found


def test_a_slow_attack_is_the_attack(tiny: Tiny) -> None:
    """With the draws of its place among the terms, whatever program it is in."""
    values = []
    for kind in ("PGDReconLoss", "SlowPGDReconLoss"):
        beside = "hidden_acts_reconstruction: {coeff: 0.5, points: [resid_post.0]}"
        metric = f"{{type: {kind}, name: attack, n_steps: 3, {ATTACK}, {beside}}}"
        row = slow(evaluated(tiny, ["{type: UnmaskedReconLoss}", metric]))[1].row
        values.append({key: value for key, value in row.items() if "attack" in key})
    assert len(values[0]) == 3  # with its two parts
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("sets", [(), (BLOCKS,), ("mesh={fsdp: 8}",), ("mesh={fsdp: 4, tensor: 2}", BLOCKS)])
def test_active_components_at_each_position(tiny: Tiny, sets: tuple[str, ...]) -> None:
    """Against NumPy, from the reference's λ of the same rows; on one device and on eight, in blocks and whole."""
    of = evaluated(tiny, [SLOW[2]], *sets)
    [counts] = slow(of)[1].means
    expected = []
    for number in range(2):
        lower = Reference(of, number).lower
        active = [np.concatenate([np.asarray(x) > t for x in lower.values()], axis=-1) for t in THRESHOLDS]
        expected.append(np.stack([a.sum(-1).mean(0) for a in active], axis=-1))
    assert counts.shape == expected[0].shape
    assert counts[:, 0].std() > 0.1  # positions differ
    np.testing.assert_allclose(counts, np.mean(expected, axis=0), atol=1e-4)


@pytest.mark.parametrize("sets", [(), ("mesh={fsdp: 4, tensor: 2}", BLOCKS)])
def test_rows_of_the_heat_map(tiny: Tiny, sets: tuple[str, ...]) -> None:
    of = evaluated(tiny, [SLOW[3]], *sets)
    references = [Reference(of, number) for number in range(2)]
    with jax.set_mesh(of.setup.mesh):
        found = snapshot(of).rows
    np.testing.assert_array_equal(found.tokens, references[0].tokens[:2, :3])
    for name, C in SITES.items():
        means = np.mean([np.asarray(batch.lower[name]).reshape(-1, C).mean(0) for batch in references], axis=0)
        own = found.sites[name]
        np.testing.assert_allclose(means[own.components], -np.sort(-means)[:5], atol=1e-5)
        expected = np.asarray(references[0].lower[name])[:2, :3, own.components]
        np.testing.assert_allclose(own.importances, expected, atol=1e-5)


def test_figures_are_drawn(whole: Evaluated, measured: tuple[Measurements, Measurements], tmp_path: Path) -> None:
    drawn = whole.evaluation.figures(whole.state, whole.setup.weights, STEP, measured[1], tmp_path, lambda: False)
    assert {path.name for path in drawn.values()} == {f"{name}_{STEP}.png" for name in FIGURES}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    tokens = snapshot(whole).rows.tokens
    assert snapshot(whole).token_names(tokens) == [whole.setup.text.tokens(row) for row in tokens.tolist()]  # type: ignore[union-attr]


def test_parts_of_a_run_that_are_probed(tiny: Tiny, whole: Evaluated) -> None:
    subject = run_subject(whole.config)
    names = [name for name in subject.phases if name in of_probe(whole)]
    assert names == ["evaluation", "slow evaluation", "figures", "rows of figures"]
    for name in names:
        phase = subject.phases[name](whole.setup.mesh)
        jax.eval_shape(phase.program.function, *phase.program.arguments)


@pytest.mark.slow
def test_a_run(tiny: Tiny, tmp_path: Path) -> None:
    """At steps 0, 4 and 8 evaluated, at 0 and 8 with figures; afterwards `pd eval` measures all."""
    metrics = f"metrics: [{', '.join([FAST, *SLOW])}]"
    evaluation = f"eval={{batch_size: 8, n_steps: 1, every: 4, slow_every: 8, {metrics}}}"
    assert pd_here(*tiny.train(tmp_path, 1, *LIGHT[:-1], "pd.steps=8", evaluation)).status == 0
    run = tmp_path / "p-00000001"
    steps = {
        name: [row["step"] for row in rows(run) if f"eval/loss/{name}" in row]
        for name in ("PGDReconLoss", "PGDReconLoss_3")
    }
    assert steps == {"PGDReconLoss": [0, 4, 8], "PGDReconLoss_3": [0, 8]}
    assert {path.name for path in (run / "figures").iterdir()} == {
        f"{name}_{step}.png" for name in FIGURES for step in (0, 8)
    }
    out = tmp_path / "found.json"
    assert pd_here("eval", run, "--out", out).status == 0
    last = rows(run)[-1]
    found = json.loads(out.read_text())
    assert found["row"] == {key: value for key, value in last.items() if key.startswith("eval/")}
    assert len(found["figures"]) == 2
    assert "PGDReconLoss_3" in (run / "report.html").read_text()


def test_check_says_when(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    given = ["eval.every=4", "eval.slow_every=12", f"eval.metrics=[{', '.join([FAST, *SLOW])}]"]
    sets = [word for assignment in given for word in ("--set", assignment)]
    outcome = pd_here("check", tiny.config, *sets)
    assert outcome.status == 0, outcome
    lines = [line.split() for line in outcome.out.splitlines()]
    every = {line[0]: line[1:] for line in lines if line and line[0].startswith(("PGDReconLoss", "CI"))}
    assert every["PGDReconLoss"][:2] == ["4", "3"]
    assert every["PGDReconLoss_3"][:2] == ["12", "4"]
    assert every["CIActiveCountsPerPosition"][0] == every["CIHeatMap"][0] == "12"


def test_it_is_not_trained_on(tiny: Tiny) -> None:
    loss = f"pd.loss_metrics=[{{type: SlowPGDReconLoss, coeff: 1, n_steps: 3, {ATTACK}}}]"
    outcome = pd_here("check", tiny.config, "--set", loss)
    assert outcome.status == 2
    said = "pd.loss_metrics.0.type: 'SlowPGDReconLoss' is measured in evaluations alone; train on PGDReconLoss, which"
    assert said in " ".join(outcome.err.split())
