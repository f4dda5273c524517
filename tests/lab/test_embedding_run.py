"""A run with the embedding as a site (F7): trained, evaluated, opened, exported, harvested."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from param_decomp_lab import load_run
from tests.lab.tiny_run import LIGHT, Tiny, pd_here

SITE = "embed_tokens"


@pytest.mark.slow
def test_from_training_to_a_harvest(tiny: Tiny, tmp_path: Path) -> None:
    targets = (
        "pd.decomposition_targets=[{module_pattern: model.embed_tokens, C: 8}, {module_pattern: '*up_proj', C: 6}]"
    )
    settings = [assignment for assignment in LIGHT if assignment != "eval=null"]
    metrics = "eval.metrics=[{type: CEandKLLosses, rounding_threshold: 0}, {type: CI_L0, groups: null}]"
    outcome = pd_here(*tiny.train(tmp_path, 1, *settings, targets, metrics))
    assert outcome.status == 0, outcome
    folder = tmp_path / "p-00000001"
    assert (folder / "report.html").is_file()

    run = load_run(folder)
    tokens = np.array([[5, 7, 5, 200]])
    V, U = run.factors(SITE)
    assert (V.shape, U.shape, run.matrix(SITE).shape) == ((256, 8), (8, 16), (256, 16))
    activations = np.asarray(run.activations(tokens, SITE)[SITE])
    np.testing.assert_allclose(activations, V[tokens] * np.linalg.norm(U, axis=1), rtol=1e-4, atol=1e-6)
    importances = np.asarray(run.causal_importances(tokens, SITE)[SITE])
    assert importances.shape == (1, 4, 8)
    np.testing.assert_allclose(importances[0, 0], importances[0, 2], rtol=1e-5)  # a layerwise function; the same row
    clean = np.asarray(run.logits(tokens))
    off = np.asarray(run.logits(tokens, {SITE: np.zeros(8)}))
    assert clean.shape == off.shape == (1, 4, 256)
    assert np.abs(clean - off).max() > 1e-3

    exported = tmp_path / "exported"
    assert pd_here("export", folder, "--out", exported).status == 0
    tensors = {name: x for file in exported.rglob("*.safetensors") for name, x in load_file(file).items()}
    assert any(SITE in name and x.shape in ((256, 8), (8, 256)) for name, x in tensors.items()), sorted(tensors)
    described = [path for path in exported.glob("*.json") if SITE in path.read_text()]
    assert all(json.loads(path.read_text()) for path in described)
    assert described

    outcome = pd_here("harvest", folder, "--tokens", "64", "--devices", "1")
    assert outcome.status == 0, outcome
