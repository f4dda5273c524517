"""Section 4: masks from importances and sources, and where sources come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.masks import (
    Constant,
    ConstantSources,
    GivenSources,
    Sources,
    Stochastic,
    StochasticSources,
    interpolate,
    tile,
)
from tests import reference as ref
from tests.core import tiny

SITES = tiny.target().sites
LEADING = (3, 4)


def stochastic(seed: int = 0, sampling: str = "continuous", use_delta: bool = True) -> StochasticSources:
    return StochasticSources(Stochastic(sampling), jax.random.key(seed), use_delta)


def test_interpolation() -> None:
    """M1: λ = 1 pins a component on, whatever the source."""
    rng = np.random.default_rng(0)
    importance, source = rng.uniform(size=(*LEADING, 5)), rng.uniform(size=(1, 4, 5))
    importance[..., 2] = 1
    mask = interpolate(jnp.asarray(importance, jnp.float32), jnp.asarray(source, jnp.float32))
    np.testing.assert_allclose(mask, ref.component_mask(importance, source), rtol=1e-6)
    assert (mask[..., 2] == 1).all()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant(value: float) -> None:
    """M3: 0 gives m = λ, 1 gives m = 1; no delta."""
    importance = jnp.asarray(np.random.default_rng(0).uniform(size=(*LEADING, 5)), jnp.float32)
    source, delta = ConstantSources(Constant(value)).at(None, LEADING, 5)
    assert delta is None
    assert (interpolate(importance, source) == (importance if value == 0 else 1)).all()


def test_stochastic_is_fp32_and_in_range() -> None:
    source, delta = stochastic().at(jnp.asarray(2), (50, 20), 6)
    assert source.dtype == delta.dtype == jnp.float32
    for x in source, delta:
        assert x.min() >= 0
        assert x.max() < 1
        assert abs(float(x.mean()) - 0.5) < 4 / np.sqrt(12 * x.size)
    assert delta.shape == (50, 20)


def test_binomial() -> None:
    """M3: Bernoulli(½) for the components, U[0, 1) for the delta still."""
    source, delta = stochastic(sampling="binomial").at(jnp.asarray(2), (50, 20), 6)
    assert set(np.unique(source)) == {0, 1}
    assert abs(float(source.mean()) - 0.5) < 4 / np.sqrt(4 * source.size)
    assert len(np.unique(delta)) == delta.size


def test_no_delta() -> None:
    """M5; and the components' draw is the same with and without."""
    with_delta, without = (stochastic(use_delta=use).at(jnp.asarray(1), LEADING, 5) for use in (True, False))
    assert without[1] is None
    assert (with_delta[0] == without[0]).all()


def test_draws_are_independent_across_sites_keys_and_channels() -> None:
    """M4: no correlation beyond chance, 5 standard deviations."""
    n = (64, 32)
    columns = [np.asarray(x).reshape(-1, x.shape[-1]).T for x in (
        stochastic(0).at(jnp.asarray(0), n, 3)[0], stochastic(0).at(jnp.asarray(1), n, 3)[0],
        stochastic(1).at(jnp.asarray(0), n, 3)[0], stochastic(0).at(jnp.asarray(0), n, 3)[1][..., None],
        stochastic(0).at(jnp.asarray(1), n, 3)[1][..., None],
    )]  # fmt: skip
    correlation = np.corrcoef(np.concatenate(columns)) - np.eye(11)
    assert np.abs(correlation).max() < 5 / np.sqrt(n[0] * n[1])


def test_a_site_draws_by_its_canonical_number_however_it_is_stacked() -> None:
    """M4: `slices` gives the number, for any cut of a stack."""
    kind = stochastic()
    numbers = [int(n) for stack in SITES.stacks for n in kind.slices(stack, stack.first, stack.first + stack.n_layers)]
    assert sorted(numbers) == list(range(len(SITES)))
    q = SITES.stacks[0]
    assert q.n_layers == 2
    assert [int(n) for n in kind.slices(q, 1, 2)] == [q.sites[1]]


def test_given_sources_are_cut_by_layer_and_tiled() -> None:
    stack = SITES.stacks[0]
    rng = np.random.default_rng(0)
    components, delta = rng.uniform(size=(2, 2, 4, stack.C)), rng.uniform(size=(2, 2, 4))
    bundle = {stack.name: Sources(jnp.asarray(components, jnp.float32), jnp.asarray(delta, jnp.float32))}
    given = GivenSources(bundle)
    rows = given.slices(stack, 1, 2)
    got, got_delta = given.at(jax.tree.map(lambda x: x[0], rows), (6, 4), stack.C)
    np.testing.assert_allclose(got, ref.expand_scope(components[1], (6, 4)), rtol=1e-6)
    np.testing.assert_allclose(got_delta, ref.expand_scope(delta[1], (6, 4)), rtol=1e-6)


def test_tile() -> None:
    """A2: source i serves the rows i, i + n, …"""
    source = jnp.arange(3.0)[:, None]
    assert tile(source, 6)[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert tile(source, 3) is source
    assert tile(source[:1], 6).shape == (1, 1)
    with pytest.raises(AssertionError, match="3 sources do not tile a batch of 4"):
        tile(source, 4)
