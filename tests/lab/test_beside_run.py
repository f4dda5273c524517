"""A run with hidden activations beside the output (R6), nonlinearity locality (L7) and taps (C10): check, training,
report, resuming."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_lab.weights.target_folder import save_target
from tests.core import toys
from tests.lab.tiny_run import ROOT, pd_here, rows, saved_arrays
from tests.lab.toy_run import settings

CONFIG = ROOT / "configs" / "toys" / "resid_mlp2.yaml"
TARGET = ResidMLPConfig(n_features=5, d_embed=6, d_mlp=4, n_layers=2)
CLIMBS = "scope: {type: single_source}, optimizer: {type: sign, lr_schedule: 0.1}"
KEPT = f"type: PersistentPGDReconLoss, name: late, {CLIMBS}"
FALLING = "{start_val: 2, fn_type: linear, final_val_frac: 0.5}"
BESIDE = f"hidden_acts_reconstruction: {{coeff: {FALLING}, points: ['resid_post.*']}}"
FRESH = "type: PGDReconLoss, init: random, step_size: 0.1, n_steps: 1, mask_scope: shared_across_batch"
THRESHOLD = "{start_val: 0.5, fn_type: cosine, final_val_frac: 0.1}"
NEURONS = f"type: NonlinearityLocalityLoss, unit_kind_coefficients: {{neuron: 2}}, relative_threshold: {THRESHOLD}"
TERMS = (
    f"pd.loss_metrics=[{{{KEPT}, start_frac: 0.5, {BESIDE}, coeff: 0.5}}, {{{NEURONS}, coeff: 0.1}}, "
    f"{{type: CIMaskedReconLoss, coeff: 1, {BESIDE}}}]",
    "pd.ci_config={mode: global, fn_type: global_shared_mlp, hidden_dims: [8], input_tap: all_block_resids}",
    "pd.steps=4",
    "cadence={train_log_every: 1, save_every: 2}",
    "data.feature_probability=0.5",
    "pd.faithfulness_warmup_steps=0",
    "pd.tied_weights=null",
    "eval.every=4",
    "eval.slow_every=4",
    f"eval.metrics=[{{{KEPT}, {BESIDE}, adversary_objective: term}}, {{{FRESH}, {BESIDE}}}, {{{NEURONS}}}]",
)
PARTS = ("output", "resid_post.0", "resid_post.1")


def test_the_whole_way(tmp_path: Path) -> None:
    save_target(tmp_path / "target", TARGET, toys.weights(TARGET))
    given = settings(tmp_path, 1, *TERMS)
    said = " ".join(pd_here("check", CONFIG, *given).out.split())
    for words in (
        "beside the output resid_post.*, times 2 linear to 1; sources climb the output's error alone",
        "soft count of neurons (times 2) per component",
        "late hidden activations 1.3333",
        "relative threshold",
    ):
        assert words in said, said
    outcome = pd_here("train", CONFIG, *given)
    assert outcome.status == 0, outcome
    run = tmp_path / "p-00000001"
    found = rows(run)
    for row in found:
        step = row["step"]
        on = {"CIMaskedReconLoss", *(["late"] if step >= 2 else [])} if step < 4 else set()
        assert {k for k in row if k.startswith("train/loss/") and "/" in k[11:]} == {
            f"train/loss/{name}/{part}" for name in on for part in PARTS
        }
        for name in on:
            own = {part: row[f"train/loss/{name}/{part}"] for part in PARTS}
            points = (own["resid_post.0"] + own["resid_post.1"]) / 2
            coeff = row[f"train/schedules/{name}_hidden_acts_coeff"]
            assert coeff == pytest.approx(2 - step / 3)
            assert row[f"train/loss/{name}"] == pytest.approx(own["output"] + coeff * points, rel=1e-5)
        assert ("train/loss/late" in row) == ("late" in on)
    last = found[-1]
    for name in ("late", "PGDReconLoss"):
        own = {part: last[f"eval/loss/{name}/{part}"] for part in PARTS}
        points = (own["resid_post.0"] + own["resid_post.1"]) / 2
        assert last[f"eval/loss/{name}"] == pytest.approx(own["output"] + points, rel=1e-5)  # the last coefficient is 1
    assert last["eval/loss/NonlinearityLocalityLoss"] > 2
    assert found[0]["train/schedules/NonlinearityLocalityLoss_relative_threshold"] == pytest.approx(0.5)
    page = (run / "report.html").read_text()
    assert "CIMaskedReconLoss: output, and relative errors at points" in page
    assert "late/" not in outcome.out + outcome.err  # a line of the terminal has no room for parts
    assert "attack (PGDReconLoss/output)" not in page

    killed = tmp_path / "killed" / run.name
    shutil.copytree(run, killed)
    shutil.rmtree(killed / "ckpts" / "4")
    resumed = pd_here("train", "--resume", killed)
    assert resumed.status == 0, resumed
    assert "at step 2 of 4" in resumed.out
    assert rows(killed) == found
    for name, x in saved_arrays(run, 4).items():
        np.testing.assert_array_equal(saved_arrays(killed, 4)[name], x, err_msg=name)
