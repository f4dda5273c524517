"""Draws that do not depend on layout (M4), sources of masks (M3, A2), and the mask itself (M1)."""

from functools import partial
from typing import get_args

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import stats

from param_decomp_jax.decomposition.draws import positions, threefry_2x32, uniform
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.method.masks import (
    Constant,
    ConstantSources,
    GivenSources,
    Sources,
    Stochastic,
    StochasticSources,
    interpolate,
    tile,
)  # fmt: skip
from param_decomp_jax.sharding.mesh import indices
from tests import reference as ref
from tests.core import tiny

KEY = jax.random.key(12, impl="threefry2x32")


@partial(jax.jit, static_argnums=(1, 2))
def draw(key: jax.Array, leading: tuple[int, ...], columns: int) -> jax.Array:
    """Of all positions of an activation with these leading axes."""
    return uniform(key, positions(leading), columns)


# ---- the cipher ----

# Random123's known-answer file, threefry2x32-20: counter, key, answer.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple[int, int], key: tuple[int, int], answer: tuple[int, int]) -> None:
    high, low = (jnp.array([word], jnp.uint32) for word in counter)
    got = jax.jit(threefry_2x32)(jnp.array(key, jnp.uint32), high, low)
    assert tuple(int(word[0]) for word in got) == answer


def test_is_the_cipher_of_jax() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (2, 1000), dtype=np.uint32)
    key, high, low = jax.random.key_data(KEY), jnp.asarray(words[0]), jnp.asarray(words[1])
    want = jax.extend.random.threefry2x32_p.bind(jnp.full_like(high, key[0]), jnp.full_like(high, key[1]), high, low)
    for a, b in zip(jax.jit(threefry_2x32)(key, high, low), want, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- uniform numbers ----


def test_every_element_is_the_cipher_at_its_index() -> None:
    """M4: at counter (row-major position, column), the upper 24 bits."""
    B, T, C = 3, 4, 5
    b, t, c = np.meshgrid(range(B), range(T), range(C), indexing="ij")
    word, _ = threefry_2x32(jax.random.key_data(KEY), jnp.asarray(b * T + t, jnp.uint32), jnp.asarray(c, jnp.uint32))
    np.testing.assert_array_equal(draw(KEY, (B, T), C), (np.asarray(word) >> 8) / 2.0**24)


@given(b=st.integers(1, 4), c=st.integers(1, 7))
@settings(max_examples=6)
def test_prefixes(b: int, c: int) -> None:
    """M4: the same first rows whatever the batch, the same first columns whatever C."""
    np.testing.assert_array_equal(draw(KEY, (4, 3), 7)[:b, :, :c], draw(KEY, (b, 3), c))


def test_leading_axes() -> None:
    """A position is its row-major number: no axis, one axis or two give the same row of numbers."""
    flat = draw(KEY, (12,), 2)
    np.testing.assert_array_equal(draw(KEY, (4, 3), 2).reshape(12, 2), flat)
    np.testing.assert_array_equal(draw(KEY, (), 2), flat[0])


def test_blocks_of_rows_and_columns() -> None:
    """M4: any part of a draw is drawn by the numbers of its rows and columns alone, in whatever order."""
    whole = np.asarray(draw(KEY, (4, 3), 7))
    rows, columns = np.array([3, 1]), np.array([6, 0, 5], np.uint32)
    part = jax.jit(uniform)(KEY, positions((4, 3))[rows], jnp.asarray(columns))
    np.testing.assert_array_equal(part, whole[rows][..., columns])


@pytest.mark.parametrize("leading", [(), (5,), (4, 3), (2, 3, 4)])
def test_positions_are_row_major_numbers(leading: tuple[int, ...]) -> None:
    number = positions(leading)
    assert number.dtype == jnp.uint32
    np.testing.assert_array_equal(number, np.arange(np.prod(leading, dtype=int)).reshape(leading))


def test_same_on_eight_devices() -> None:
    """M4: in one block or in many."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(8), ("batch",))
    shards = NamedSharding(mesh, PartitionSpec("batch"))
    split = jax.jit(lambda key: uniform(key, positions((8, 3)), 5), out_shardings=shards)(KEY)
    assert len(split.sharding.device_set) == 8
    np.testing.assert_array_equal(split, draw(KEY, (8, 3), 5))


SAMPLE = (400, 50)
"""Leading sizes of the samples of the statistical tests, of 10 columns: 200 000 numbers. Keys are fixed."""


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return np.asarray(draw(KEY, SAMPLE, 10), np.float64)


def test_range_and_grid(sample: np.ndarray) -> None:
    """M3, M4: in [0, 1), multiples of 2⁻²⁴, in fp32 also under x64."""
    assert sample.min() >= 0
    assert sample.max() < 1
    np.testing.assert_array_equal(sample * 2**24, np.round(sample * 2**24))
    assert np.any(np.round(sample * 2**24) % 2 == 1)
    assert draw(KEY, SAMPLE, 10).dtype == jnp.float32
    with jax.enable_x64(True):
        wide = draw(KEY, (2,), 3)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, draw(KEY, (2,), 3))


def test_moments_and_distribution(sample: np.ndarray) -> None:
    n = sample.size
    assert abs(sample.mean() - 1 / 2) < 4 * (1 / 12 / n) ** 0.5
    assert abs(sample.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    counts, _ = np.histogram(sample, bins=100, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-3


def assert_uncorrelated(a: np.ndarray, b: np.ndarray) -> None:
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / a.size**0.5


def test_independent_across_elements_and_keys(sample: np.ndarray) -> None:
    assert_uncorrelated(sample[1:], sample[:-1])
    assert_uncorrelated(sample[:, 1:], sample[:, :-1])
    assert_uncorrelated(sample[..., 1:], sample[..., :-1])
    other = np.asarray(draw(jax.random.fold_in(KEY, 1), SAMPLE, 10), np.float64)
    assert_uncorrelated(sample, other)
    assert np.mean(sample == other) < 1e-3
    # The output word of counter (a, b) is not that of (b, a).
    square = np.asarray(draw(KEY, (300,), 300), np.float64)
    assert_uncorrelated(square[np.triu_indices(300, 1)], square.T[np.triu_indices(300, 1)])


# ---- stochastic sources ----

C = 6
CONTINUOUS, BINOMIAL = (Stochastic(name) for name in get_args(Stochastic.__annotations__["sampling"]))
SITES = Sites(tuple(Site(f"layers.{n}.{kind}", n, kind, "x", 2, 2, C) for n in range(3) for kind in "ab"))


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def sources_at(
    kind: Stochastic, site: int, leading: tuple[int, ...] = SAMPLE, columns: int = C, use_delta: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    return tiny.drawn_at(StochasticSources(kind, KEY, use_delta), site, leading, columns)


def test_stochastic_sources_shapes_and_prefixes() -> None:
    """M3, M4: components `[…, C]`, delta `[…]`; neither depends on the batch or on C."""
    components, delta = sources_at(CONTINUOUS, 0, (4, 3))
    assert components.shape == (4, 3, C)
    assert delta is not None
    assert delta.shape == (4, 3)
    fewer, fewer_delta = sources_at(CONTINUOUS, 0, (2, 3), C - 2)
    np.testing.assert_array_equal(fewer, components[:2, :, :-2])
    np.testing.assert_array_equal(fewer_delta, delta[:2])


def test_sources_are_independent_across_sites() -> None:
    draws = [sources_at(CONTINUOUS, n) for n in range(3)]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        for x, y in zip(draws[a], draws[b], strict=True):
            assert_uncorrelated(np.asarray(x), np.asarray(y))
            assert np.mean(np.asarray(x) == np.asarray(y)) < 1e-3


def test_delta_is_independent_of_the_components() -> None:
    """M3: its own uniform draw, for both samplings, also under `binomial`."""
    components, delta = (np.asarray(x) for x in sources_at(CONTINUOUS, 4))
    for c in range(C):
        assert_uncorrelated(components[..., c], delta)
        assert np.mean(components[..., c] == delta) < 1e-3
    assert stats.chisquare(np.histogram(delta, bins=50, range=(0, 1))[0]).pvalue > 1e-3
    np.testing.assert_array_equal(sources_at(BINOMIAL, 4)[1], delta)


def test_binomial_sampling() -> None:
    """M3: Bernoulli(½), each component by itself."""
    components = np.asarray(sources_at(BINOMIAL, 4)[0])
    assert set(np.unique(components)) == {0.0, 1.0}
    assert abs(components.mean() - 0.5) < 4 * 0.5 / components.size**0.5
    for c in range(C - 1):
        assert_uncorrelated(components[..., c], components[..., c + 1])


def test_without_the_delta_component() -> None:
    """M5: no delta, the components' draw is what it was."""
    components, delta = sources_at(CONTINUOUS, 4, use_delta=False)
    assert delta is None
    np.testing.assert_array_equal(components, sources_at(CONTINUOUS, 4)[0])


def test_a_layer_gets_the_canonical_number_of_its_site() -> None:
    """M4: which draw a site gets does not depend on how sites are stacked or scans are cut."""
    stack_b = SITES.stacks[1]
    assert stack_b.sites == (1, 3, 5)
    sources = StochasticSources(CONTINUOUS, KEY, True)
    np.testing.assert_array_equal(sources.slices(stack_b, 0, 3), [1, 3, 5])
    np.testing.assert_array_equal(sources.slices(stack_b, 1, 3), [3, 5])


# ---- constant and given sources ----


@pytest.mark.parametrize("value", [0.0, 1.0, 0.25])
def test_constant_sources(value: float) -> None:
    """M3: v for every component and no delta path."""
    sources, at = ConstantSources(Constant(value)), positions((4, 3))
    components = sources.components(None, at, indices(C))
    assert sources.delta(None, at) is None
    np.testing.assert_array_equal(jnp.broadcast_to(components, (4, 3, C)), np.full((4, 3, C), value))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 3), (3, 3), (6, 3)])
def test_tile(shape: tuple[int, int]) -> None:
    """A2: source i serves rows i, i + n, …"""
    source = np.random.default_rng(0).uniform(size=(*shape, C)).astype(np.float32)
    want = ref.expand_scope(source, (6, 3))
    np.testing.assert_array_equal(np.broadcast_to(tile(jnp.asarray(source), 6), want.shape), want)
    if shape[0] == 2:
        np.testing.assert_array_equal(tile(jnp.asarray(source), 6)[:, 0, 0], np.tile(source[:, 0, 0], 3))


def test_tile_must_divide() -> None:
    with pytest.raises(AssertionError, match="do not tile"):
        tile(jnp.zeros((4, 1)), 6)


@pytest.mark.parametrize("with_delta", [True, False])
def test_given_sources(with_delta: bool) -> None:
    stack = SITES.stacks[0]
    rng = np.random.default_rng(1)
    components = jnp.asarray(rng.uniform(size=(3, 2, 3, C)), jnp.float32)
    delta = jnp.asarray(rng.uniform(size=(3, 2, 3)), jnp.float32) if with_delta else None
    sources, at = GivenSources({stack.name: Sources(components, delta)}, 6), positions((6, 3))
    slices = sources.slices(stack, 1, 3)
    for row, layer in enumerate((1, 2)):
        slice_ = jax.tree.map(lambda x, row=row: x[row], slices)
        got, got_delta = sources.components(slice_, at, indices(C)), sources.delta(slice_, at)
        np.testing.assert_array_equal(got, ref.expand_scope(np.asarray(components[layer]), (6, 3)))
        assert (got_delta is None) == (delta is None)
        if delta is not None:
            np.testing.assert_array_equal(got_delta, ref.expand_scope(np.asarray(delta[layer]), (6, 3)))


# ---- M1 ----

unit = st.floats(0, 1, width=32, allow_subnormal=False)
jit_interpolate = jax.jit(interpolate)


@given(pairs=st.lists(st.tuples(unit, unit), min_size=8, max_size=8))
def test_interpolate(pairs: list[tuple[float, float]]) -> None:
    importance, source = np.array(pairs, np.float32).T
    mask = np.asarray(jit_interpolate(jnp.asarray(importance), jnp.asarray(source)))
    np.testing.assert_allclose(mask, ref.component_mask(importance.astype(float), source.astype(float)), rtol=1e-6)
    np.testing.assert_array_equal(mask[importance == 1], 1.0)
    np.testing.assert_array_equal(mask[source == 0], importance[source == 0])
    assert np.all((mask >= 0) & (mask <= 1))


def test_interpolate_broadcasts_and_differentiates() -> None:
    """∂m/∂λ = 1 − source, ∂m/∂source = 1 − λ, summed over what a shared source serves."""
    rng = np.random.default_rng(2)
    importance, source = rng.uniform(size=(4, 3, C)), rng.uniform(size=(1, 3, C))
    with jax.enable_x64(True):
        importance_gradient, source_gradient = jax.grad(lambda *x: jnp.sum(interpolate(*x)), argnums=(0, 1))(
            jnp.asarray(importance), jnp.asarray(source)
        )
    np.testing.assert_allclose(importance_gradient, np.broadcast_to(1 - source, (4, 3, C)), rtol=1e-12)
    np.testing.assert_allclose(source_gradient, (1 - importance).sum(axis=0, keepdims=True), rtol=1e-12)
