"""Logits that transformers computed, reproduced from the folders it wrote."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_lab.weights.target_folder import load_target

GOLDEN = Path(__file__).parent.parent / "golden" / "llama"


@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("name", ["scaled", "sharded_tied"])
def test_logits_of_transformers_are_reproduced(name, layers):
    config, weights = load_target(GOLDEN / name)
    golden = np.load(GOLDEN / name / "logits.npz")
    with jax.default_matmul_precision("highest"):
        ours = language_logits(weights, config, jnp.asarray(golden["tokens"]), MemoryPolicy(layers=layers))
    assert ours.dtype == np.float32
    scale = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(ours / scale, golden["logits"] / scale, atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours, golden["logits"], rtol=1e-4, atol=1e-4)


def test_the_fixtures_differ_where_they_should():
    scaled, sharded = (load_target(GOLDEN / name) for name in ("scaled", "sharded_tied"))
    assert scaled[0].rope_scaling is not None
    assert scaled[0].n_kv_heads == 2
    assert "head" in scaled[1]
    assert sharded[0].tied
    assert "head" not in sharded[1]
    assert len(list((GOLDEN / "sharded_tied").glob("*.safetensors"))) > 1


def test_the_scaling_of_the_rotary_frequencies_matters_in_the_fixture():
    """Otherwise the golden logits would not test it."""
    config, weights = load_target(GOLDEN / "scaled")
    golden = np.load(GOLDEN / "scaled" / "logits.npz")
    plain = language_logits(weights, dataclasses.replace(config, rope_scaling=None), jnp.asarray(golden["tokens"]))
    assert np.abs(plain - golden["logits"]).max() > 0.1 * np.abs(golden["logits"]).max()
