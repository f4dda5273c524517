"""Inputs of the toy models: how often a feature is active, its values, and what a batch depends on."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_jax.targets.features import SparseFeatures
from tests.core import tiny

MANY = 4096
INDEPENDENT = SparseFeatures(8, 0.1)
SIGNED = SparseFeatures(8, 0.3, low=-1.0)
ONE = SparseFeatures(8, 0.1, generation="exactly_one_active")
SIGNED_ONE = SparseFeatures(8, 0.5, low=-1.0, generation="exactly_one_active")
SPECS = [INDEPENDENT, SIGNED, ONE, SIGNED_ONE]


@partial(jax.jit, static_argnums=(0, 3))
def batch(spec: SparseFeatures, seed: Any, step: Any, size: int) -> jax.Array:
    return spec.batch(jax.random.key(seed), step, size)


def sample(spec: SparseFeatures) -> np.ndarray:
    return tiny.array(batch(spec, 3, 1, MANY))


def assert_share(active: np.ndarray, p: float) -> None:
    """Every column's share of ones is p within five standard errors."""
    error = (p * (1 - p) / len(active)) ** 0.5
    np.testing.assert_allclose(active.mean(axis=0), p, atol=5 * error)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values(spec: SparseFeatures) -> None:
    """U[low, 1): inside, to both ends, mean and variance of each feature; the others are exactly 0."""
    x = sample(spec)
    assert batch(spec, 3, 1, MANY).dtype == jnp.float32
    values = x[x != 0]
    assert spec.low <= values.min() < spec.low + 0.02
    assert 0.98 < values.max() < 1
    width = 1 - spec.low
    for n in range(spec.n_features):
        own = x[:, n][x[:, n] != 0]
        assert abs(own.mean() - (1 + spec.low) / 2) < 5 * width / (12 * own.size) ** 0.5
        assert abs(own.var() / (width**2 / 12) - 1) < 5 * (0.8 / own.size) ** 0.5


@pytest.mark.parametrize("spec", [INDEPENDENT, SIGNED], ids=str)
def test_features_are_active_independently(spec: SparseFeatures) -> None:
    active = sample(spec) != 0
    p = spec.probability
    assert_share(active, p)
    pairs = np.triu_indices(spec.n_features, k=1)
    assert_share((active[:, :, None] & active[:, None, :])[:, *pairs], p * p)
    assert_share(active[1:] & active[:-1], p * p)  # nor does a row know of the row before
    assert_share(~active.any(axis=1, keepdims=True), (1 - p) ** spec.n_features)


@pytest.mark.parametrize("spec", [ONE, SIGNED_ONE], ids=str)
def test_exactly_one_is_active(spec: SparseFeatures) -> None:
    """Each as likely, whatever ``probability``."""
    active = sample(spec) != 0
    assert (active.sum(axis=1) == 1).all()
    assert_share(active, 1 / spec.n_features)
    assert_share(active[1:] & active[:-1], spec.n_features**-2)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_never_and_always(probability: float) -> None:
    share = (sample(SparseFeatures(8, probability)) != 0).mean()
    assert abs(share - probability) < 1e-3


@settings(max_examples=25)
@given(spec=st.sampled_from([SIGNED, ONE]), seed=st.integers(0, 2**32 - 1), step=st.integers(0, 2**31 - 1))
def test_a_row_does_not_depend_on_the_batch_size(spec: SparseFeatures, seed: int, step: int) -> None:
    """M4: the first rows of a larger batch are the smaller batch; every row is a legal one."""
    seed, step = np.uint32(seed), np.int32(step)
    x = np.asarray(batch(spec, seed, step, 16))
    np.testing.assert_array_equal(batch(spec, seed, step, 5), x[:5])
    assert ((x == 0) | ((spec.low <= x) & (x < 1))).all()
    if spec.generation == "exactly_one_active":
        assert ((x != 0).sum(axis=1) <= 1).all()  # one whose value may be 0, once in 2²⁴


@settings(max_examples=15)
@given(spec=st.sampled_from([SIGNED, ONE]), seed=st.integers(0, 2**32 - 2), step=st.integers(0, 2**31 - 2))
def test_other_keys_and_steps_give_other_batches(spec: SparseFeatures, seed: int, step: int) -> None:
    def rows(seed: int, step: int) -> bytes:
        return np.asarray(batch(spec, np.uint32(seed), np.int32(step), 16)).tobytes()

    assert rows(seed, step) == rows(seed, step)
    assert len({rows(seed, step), rows(seed, step + 1), rows(seed + 1, step)}) == 3


def test_columns_and_the_number_of_features() -> None:
    """Independent features: more of them have the same first columns. One active: the choice is another."""
    few, many = (batch(SparseFeatures(n, 0.3), 0, 0, 64) for n in (5, 9))
    np.testing.assert_array_equal(few, many[:, :5])
    one = batch(SparseFeatures(5, 0.3, generation="exactly_one_active"), 0, 0, 64)
    more = batch(SparseFeatures(9, 0.3, generation="exactly_one_active"), 0, 0, 64)
    assert not np.array_equal(one, more[:, :5])


def test_the_same_inside_and_outside_of_a_compiled_program() -> None:
    """A traced step or a number, one device or the batch split over eight."""
    key, size = jax.random.key(3), 16
    want = np.asarray(SIGNED.batch(key, 7, size))
    split = jax.NamedSharding(jax.make_mesh((8,), ("rows",)), jax.P("rows"))
    by_rows = jax.jit(lambda step: SIGNED.batch(key, step, size), out_shardings=split)(jnp.asarray(7))
    assert len({str(shard.index) for shard in by_rows.addressable_shards}) == 8
    np.testing.assert_array_equal(by_rows, want)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(batch(SIGNED, 3, 7, size), want)
