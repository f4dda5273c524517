"""A toy run from its configuration to its report."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.config import load_config
from param_decomp_lab.setup import set_up
from param_decomp_lab.weights.target_folder import save_target
from tests.core import toys
from tests.lab.tiny_run import ROOT, Tree, pd_here, rows, saved_steps

CONFIG = ROOT / "configs" / "toys" / "tms_5-2-id.yaml"
SMALL = (
    "pd.steps=12",
    "pd.batch_size=16",
    "pd.faithfulness_warmup_steps=3",
    "cadence={train_log_every: 1, save_every: 5}",
    "eval.every=4",
    "eval.slow_every=12",
    "eval.batch_size=8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the target is, and where the runs go."""
    config, folder = TMSConfig(n_features=5, n_hidden=2, n_hidden_layers=1), tmp_path_factory.mktemp("toy")
    save_target(folder / "target", config, toys.weights(config))
    return folder


def settings(folder: Path, number: int, *more: str) -> list[str]:
    given = (*SMALL, f"target={{folder: {folder / 'target'}}}", f"out_dir={folder}", f"run_id=p-{number:08x}", *more)
    return [argument for setting in given for argument in ("--set", setting)]


def run(folder: Path, number: int, *more: str) -> Path:
    outcome = pd_here("train", str(CONFIG), *settings(folder, number, *more))
    assert outcome.status == 0, outcome
    return folder / f"p-{number:08x}"


@pytest.fixture(scope="module")
def one_at_a_time(folder: Path) -> Path:
    return run(folder, 1, "steps_per_dispatch=1")


def test_rows_and_pictures(one_at_a_time: Path) -> None:
    evaluated = {row["step"]: row for row in rows(one_at_a_time) if "eval/tms/mmcs" in row}
    assert sorted(evaluated) == [0, 4, 8, 12]
    for row in evaluated.values():
        assert {key for key in row if key.startswith("eval/identity_ci_error/")} == {
            f"eval/identity_ci_error/{site}" for site in ("linear1", "hidden_layers.0", "linear2")
        }
        assert 0 < row["eval/tms/mmcs"] <= 1
        assert row["eval/tms/ml2r"] > 0
    pictures = {path.name for path in (one_at_a_time / "figures").iterdir()}
    assert {f"{name}_12.png" for name in ("permuted_ci", "uv_matrices", "tms_geometry")} <= pictures
    page = (one_at_a_time / "report.html").read_text()
    assert "MMCS" in page
    assert "held-out text" not in page


@pytest.mark.slow
def test_no_number_depends_on_steps_per_dispatch(one_at_a_time: Path, folder: Path) -> None:
    """Groups are cut at saves (5, 10) and evaluations (4, 8), too."""
    together = run(folder, 2, "steps_per_dispatch=7")
    for a, b in zip(rows(together), rows(one_at_a_time), strict=True):
        assert a == b
    assert saved_steps(together) == saved_steps(one_at_a_time) == [5, 10, 12]


def test_resumed_run_repeats_the_undisturbed_one(one_at_a_time: Path, folder: Path) -> None:
    """T5: what a run leaves that was killed in step 11."""
    killed = folder / "p-00000003"
    shutil.copytree(one_at_a_time, killed)
    shutil.rmtree(killed / "ckpts" / "12")
    (killed / "config.yaml").write_text((killed / "config.yaml").read_text().replace("p-00000001", "p-00000003"))
    outcome = pd_here("train", "--resume", str(killed))
    assert outcome.status == 0, outcome
    assert "at step 10 of 12" in outcome.out
    assert rows(killed) == rows(one_at_a_time)


def test_what_stands_in_for_the_tracked_run_is_on_record(one_at_a_time: Path, folder: Path) -> None:
    saved: Tree = yaml.safe_load((one_at_a_time / "config.yaml").read_text())
    assert saved["torch"]["target"]["run_path"] == "wandb:param-decomp/tms_5-2-id"
    assert saved["wrapper"]["target"]["folder"] == str(folder / "target")
    assert any("run_path" in note and str(folder / "target") in note for note in saved["notes"])


def test_evaluation_has_features_of_its_own(folder: Path) -> None:
    config = load_config(CONFIG, [*SMALL, "eval.batch_size=16", f"target={{folder: {folder / 'target'}}}"])
    setup = set_up(config, Console(quiet=True))
    assert setup.eval is not None
    held_out, trained = np.asarray(setup.eval(0)), np.asarray(setup.train(0))
    assert held_out.shape == trained.shape
    assert not np.array_equal(held_out, trained)
    np.testing.assert_array_equal(trained, np.asarray(setup.train.batch_of((), np.int32(0), np.int32(0))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["target=null"], "target: is required: the schema file's run_path (wandb:param-decomp/tms_5-2-id)"),
        (["experiment=resid_mlp"], "architecture is tms, but the experiment is resid_mlp"),
        (["pd.tied_weights=[[linear1, linear3]]"], "pd.tied_weights.0: 'linear3' is no site; the sites are linear1"),
        (["pd.tied_weights=[[linear1, hidden_layers.0]]"], "linear1 is 5 x 2 with C 20 and hidden_layers.0 2 x 2"),
        (["pd.tied_weights=[[linear1, linear2], [linear2, linear1]]"], "linear2 is in pd.tied_weights.0 already"),
        (["eval.metrics.4.identity_ci.0.n_features=6"], "is 6, but the target has 5 features"),
        (["eval.metrics.4.identity_ci.0.layer_pattern=linear7"], "linear7 matches none of the sites"),
        (["target.folder=nowhere"], "nowhere"),
    ],
)
def test_mistakes(folder: Path, changes: list[str], message: str) -> None:
    outcome = pd_here("train", str(CONFIG), *settings(folder, 99, *changes))
    assert outcome.status == 2, outcome
    assert message in " ".join(outcome.err.split()), outcome
    assert not (folder / "p-00000063").exists()
