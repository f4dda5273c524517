"""A toy run from its configuration to its report."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from param_decomp_lab.config import load_config
from param_decomp_lab.setup import set_up
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.tracking import collapse
from tests.lab.tiny_run import Tree, pd_here, rows, saved_steps
from tests.lab.toy_run import CONFIG, SMALL, save_toy, settings


@pytest.fixture(scope="module")
def run(toy: Path) -> Path:
    return toy / "p-00000001"


def test_rows_and_pictures(run: Path) -> None:
    evaluated = {row["step"]: row for row in rows(run) if "eval/tms/mmcs" in row}
    assert sorted(evaluated) == [0, 4, 8, 12]
    for row in evaluated.values():
        assert {key for key in row if key.startswith("eval/identity_ci_error/")} == {
            f"eval/identity_ci_error/{site}" for site in ("linear1", "hidden_layers.0", "linear2")
        }
        assert 0 < row["eval/tms/mmcs"] <= 1
        assert row["eval/tms/ml2r"] > 0
    pictures = {path.name for path in (run / "figures").iterdir()}
    assert {f"{name}_12.png" for name in ("permuted_ci", "uv_matrices", "tms_geometry")} <= pictures
    page = (run / "report.html").read_text()
    assert "MMCS" in page
    assert "held-out text" not in page


@pytest.mark.slow
def test_no_number_depends_on_steps_per_dispatch(run: Path, tmp_path: Path) -> None:
    """Groups are cut at saves (5, 10) and evaluations (4, 8), too."""
    save_toy(tmp_path)
    outcome = pd_here("train", CONFIG, *settings(tmp_path, 2, "steps_per_dispatch=7"))
    assert outcome.status == 0, outcome
    together = tmp_path / "p-00000002"
    for a, b in zip(rows(together), rows(run), strict=True):
        assert a == b
    assert saved_steps(together) == saved_steps(run) == [5, 10, 12]


@pytest.mark.slow
def test_resumed_run_repeats_the_undisturbed_one(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: what a run leaves that was killed in step 11. The gradients before count for a warning of their growth."""
    for name, value in (("LIMIT", 1e-3), ("LEAST_ROWS", 5), ("TAIL_LIMIT", 1e-3), ("LEAST_STEPS", 1), ("N_WINDOWS", 1)):
        monkeypatch.setattr(collapse, name, value)
    monkeypatch.setattr(collapse, "may_collapse", lambda losses: True)
    killed = tmp_path / run.name
    shutil.copytree(run, killed)
    shutil.rmtree(killed / "ckpts" / "12")
    outcome = pd_here("train", "--resume", str(killed))
    assert outcome.status == 0, outcome
    assert "at step 10 of 12" in outcome.out
    assert outcome.out.count("the CI function's gradients are") == 1
    assert outcome.out.count("one in twenty of the CI function's gradients") == 1
    assert rows(killed) == rows(run)


def test_what_stands_in_for_the_tracked_run_is_on_record(run: Path, toy: Path) -> None:
    saved: Tree = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["torch"]["target"]["run_path"] == "wandb:param-decomp/tms_5-2-id"
    assert saved["wrapper"]["target"]["folder"] == str(toy / "target")
    assert any("run_path" in note and str(toy / "target") in note for note in saved["notes"])


def test_evaluation_has_features_of_its_own(toy: Path) -> None:
    config = load_config(CONFIG, [*SMALL, "eval.batch_size=16", f"target={{folder: {toy / 'target'}}}"])
    setup = set_up(ResolvedConfig(config), Console(quiet=True))
    assert setup.eval is not None
    held_out, trained = np.asarray(setup.eval(0)), np.asarray(setup.train(0))
    assert held_out.shape == trained.shape
    assert not np.array_equal(held_out, trained)
    np.testing.assert_array_equal(trained, np.asarray(setup.train.batch_of((), np.int32(0), np.int32(0))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["target=null"], "target.run_path: 'wandb:param-decomp/tms_5-2-id' is neither a folder or a checkpoint"),
        (["experiment=resid_mlp"], "architecture is tms, but the experiment is resid_mlp"),
        (["pd.tied_weights=[[linear1, linear3]]"], "pd.tied_weights.0: unknown site 'linear3'; the sites are linear1"),
        (["pd.tied_weights=[[linear1, hidden_layers.0]]"], "linear1 is 5 x 2 with C 20 and hidden_layers.0 2 x 2"),
        (["pd.tied_weights=[[linear1, linear2], [linear2, linear1]]"], "linear2 is in pd.tied_weights.0 already"),
        (["eval.metrics.4.identity_ci.0.n_features=6"], "is 6, but the target has 5 features"),
        (["eval.metrics.4.identity_ci.0.layer_pattern=linear7"], "linear7 matches none of the sites"),
        (["target.folder=nowhere"], "nowhere"),
    ],
)
def test_mistakes(toy: Path, changes: list[str], message: str) -> None:
    outcome = pd_here("train", CONFIG, *settings(toy, 99, *changes))
    assert outcome.status == 2, outcome
    assert message in " ".join(outcome.err.split()), outcome
    assert not (toy / "p-00000063").exists()
