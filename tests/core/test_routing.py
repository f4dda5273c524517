"""Routing (R3)."""

from functools import partial
from itertools import combinations
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from param_decomp_jax.decomposition.draws import positions, uniform
from param_decomp_jax.method.routing import (
    Everywhere,
    Routing,
    StaticProbability,
    UniformKSubset,
    draw_routes,
    uniform_k_subset,
)  # fmt: skip
from tests import reference as ref

KEY = jax.random.key(3, impl="threefry2x32")
SAMPLE = (300, 100)
"""Leading sizes of the samples of the statistical tests. The key is fixed."""
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

subset = jax.jit(uniform_k_subset)


@partial(jax.jit, static_argnums=(0, 2, 3))
def draw(routing: Routing, key: jax.Array, leading: tuple[int, ...], n_live: int) -> jax.Array | None:
    """At all positions of an activation with these leading axes."""
    return draw_routes(routing, key, positions(leading), n_live)


def codes(routes: np.ndarray) -> np.ndarray:
    """The set of routed sites as a binary number."""
    return (routes * 2 ** np.arange(routes.shape[-1])).sum(axis=-1)


# ---- from uniform numbers to routes ----


@given(data=st.data(), n=st.sampled_from([1, 2, 3, 7]))
@settings(max_examples=60)
def test_against_reference(data: st.DataObject, n: int) -> None:
    """The k smallest scores, ties by site order; few different scores, so that ties are many."""
    score = st.sampled_from([0.0, 0.25, 0.5, ALMOST_ONE])
    scores = np.array(data.draw(st.lists(score, min_size=4 * n, max_size=4 * n)), np.float32).reshape(4, n)
    size = np.array(data.draw(st.lists(st.floats(0, ALMOST_ONE, width=32), min_size=4, max_size=4)), np.float32)
    k = np.minimum(1 + np.floor(size * np.float32(n)), n)
    want = ref.uniform_k_subset(k, scores.T).T
    np.testing.assert_array_equal(subset(jnp.asarray(size), jnp.asarray(scores)), want)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 224])
def test_k_is_between_one_and_n(n: int) -> None:
    """Also for the largest uniform number, whose product with n rounds to n in fp32."""
    scores = jnp.tile(jnp.linspace(0, 0.9, n), (2, 1))
    routes = subset(jnp.array([0.0, ALMOST_ONE]), scores)
    np.testing.assert_array_equal(np.sum(routes, axis=-1), [1, n])


def test_equal_scores_go_by_site_order() -> None:
    routes = subset(jnp.array([0.0, 0.3, 0.6, 0.9]), jnp.full((4, 4), 0.5))
    np.testing.assert_array_equal(routes, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])


# ---- draws ----


def test_k_and_subsets_are_uniform() -> None:
    """k uniform in 1 … n, then every k-subset equally likely."""
    n = 4
    routes = np.asarray(draw(UniformKSubset(), KEY, SAMPLE, n))
    assert routes.shape == (*SAMPLE, n)
    counts = np.bincount(routes.sum(axis=-1).ravel(), minlength=n + 1)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-3

    observed = np.bincount(codes(routes).ravel(), minlength=2**n)
    subsets = [chosen for k in range(1, n + 1) for chosen in combinations(range(n), k)]
    expected = [routes[..., 0].size / n / comb(n, len(chosen)) for chosen in subsets]
    seen = [observed[sum(2**site for site in chosen)] for chosen in subsets]
    assert stats.chisquare(seen, expected).pvalue > 1e-3


def test_positions_and_keys_are_independent() -> None:
    """M4: the subsets at neighbouring positions, rows, and in two forwards say nothing about each other."""
    a = codes(np.asarray(draw(UniformKSubset(), KEY, SAMPLE, 2)))
    b = codes(np.asarray(draw(UniformKSubset(), jax.random.fold_in(KEY, 1), SAMPLE, 2)))
    for x, y in ((a[:, 0::2], a[:, 1::2]), (a[0::2], a[1::2]), (a, b)):
        table = np.zeros((3, 3))
        np.add.at(table, (x.ravel() - 1, y.ravel() - 1), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("routing", [UniformKSubset(), StaticProbability(0.5)])
def test_rows_do_not_depend_on_the_batch(routing: UniformKSubset | StaticProbability) -> None:
    """M4."""
    np.testing.assert_array_equal(draw(routing, KEY, (6, 3), 4)[:2], draw(routing, KEY, (2, 3), 4))


def test_static_probability() -> None:
    """Each site by itself with probability p."""
    p, n = 0.3, 3
    routes = np.asarray(draw(StaticProbability(p), KEY, SAMPLE, n))
    u = np.asarray(uniform(KEY, positions(SAMPLE), n))
    np.testing.assert_array_equal(routes, ref.static_probability(u, p))
    observed = np.bincount(codes(routes).ravel(), minlength=2**n)
    sizes = [bin(code).count("1") for code in range(2**n)]
    expected = [routes[..., 0].size * p**k * (1 - p) ** (n - k) for k in sizes]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_static_probability_at_its_ends() -> None:
    assert np.all(draw(StaticProbability(1.0), KEY, SAMPLE, 2))
    assert not np.any(draw(StaticProbability(0.0), KEY, SAMPLE, 2))


def test_everywhere_draws_nothing() -> None:
    assert draw_routes(Everywhere(), KEY, positions((2, 3)), 4) is None


def test_one_live_site_is_routed_everywhere() -> None:
    assert np.all(draw(UniformKSubset(), KEY, (50, 40), 1))
