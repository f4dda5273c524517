"""Section 4: masks from importances and sources, and where sources come from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_aot.traffic import traffic
from param_decomp_jax.decomposition.draws import positions
from param_decomp_jax.method.masks import (
    Constant,
    ConstantSources,
    GivenSources,
    Sources,
    Stochastic,
    StochasticSources,
    interpolate,
    source_axes,
    tile,
)
from param_decomp_jax.sharding.mesh import Axes, MeshShape, constrain, gather_tree, indices, is_axes, make_mesh
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
    sources, at = ConstantSources(Constant(value)), positions(LEADING)
    source = sources.components(None, at, indices(5))
    assert sources.delta(None, at) is None
    assert (interpolate(importance, source) == (importance if value == 0 else 1)).all()


def test_stochastic_is_fp32_and_in_range() -> None:
    source, delta = tiny.drawn_at(stochastic(), 2, (50, 20), 6)
    assert source.dtype == delta.dtype == jnp.float32
    for x in source, delta:
        assert x.min() >= 0
        assert x.max() < 1
        assert abs(float(x.mean()) - 0.5) < 4 / np.sqrt(12 * x.size)
    assert delta.shape == (50, 20)


def test_binomial() -> None:
    """M3: Bernoulli(½) for the components, U[0, 1) for the delta still."""
    source, delta = tiny.drawn_at(stochastic(sampling="binomial"), 2, (50, 20), 6)
    assert set(np.unique(source)) == {0, 1}
    assert abs(float(source.mean()) - 0.5) < 4 / np.sqrt(4 * source.size)
    assert len(np.unique(delta)) == delta.size


def test_no_delta() -> None:
    """M5; and the components' draw is the same with and without."""
    with_delta, without = (tiny.drawn_at(stochastic(use_delta=use), 1, LEADING, 5) for use in (True, False))
    assert without[1] is None
    assert (with_delta[0] == without[0]).all()


def test_draws_are_independent_across_sites_keys_and_channels() -> None:
    """M4: no correlation beyond chance, 5 standard deviations."""
    n = (64, 32)
    columns = [np.asarray(x).reshape(-1, x.shape[-1]).T for x in (
        tiny.drawn_at(stochastic(0), 0, n, 3)[0], tiny.drawn_at(stochastic(0), 1, n, 3)[0],
        tiny.drawn_at(stochastic(1), 0, n, 3)[0], tiny.drawn_at(stochastic(0), 0, n, 3)[1][..., None],
        tiny.drawn_at(stochastic(0), 1, n, 3)[1][..., None],
    )]  # fmt: skip
    correlation = np.corrcoef(np.concatenate(columns)) - np.eye(11)
    assert np.abs(correlation).max() < 5 / np.sqrt(n[0] * n[1])


@pytest.mark.parametrize("sampling", ["continuous", "binomial"])
def test_a_block_of_components_draws_by_its_columns(sampling: str) -> None:
    """M4: any components of a site, at any rows, have the draws that they have among all."""
    kind, at, columns = stochastic(sampling=sampling), positions(LEADING), np.array([5, 0, 3], np.uint32)
    whole, delta = tiny.drawn_at(kind, 2, LEADING, 7)
    part = kind.components(jnp.asarray(2), at[1:], jnp.asarray(columns))
    np.testing.assert_array_equal(part, whole[1:][..., columns])
    np.testing.assert_array_equal(kind.delta(jnp.asarray(2), at[1:]), delta[1:])


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
    given, at = GivenSources(bundle, 6), positions((6, 4))
    row = jax.tree.map(lambda x: x[0], given.slices(stack, 1, 2))
    got, got_delta = given.components(row, at, indices(stack.C)), given.delta(row, at)
    np.testing.assert_allclose(got, ref.expand_scope(components[1], (6, 4)), rtol=1e-6)
    np.testing.assert_allclose(got_delta, ref.expand_scope(delta[1], (6, 4)), rtol=1e-6)


def test_the_gradient_of_a_shared_delta_is_summed_over_the_batch_once() -> None:
    """All-reduces as executed, for two layers in a scan: one, and the sum itself."""
    stack, mesh = SITES.stacks[0], make_mesh(MeshShape(fsdp=8))
    x = np.random.default_rng(0).uniform(size=(2, 8, 4)).astype(np.float32)

    def loss(delta: jax.Array, x: jax.Array) -> jax.Array:
        given = GivenSources({stack.name: Sources(jnp.zeros((2, 1, 4, stack.C)), delta)}, 8)

        def add(total: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            own = gather_tree(layer[0], given.axes(stack), jnp.float32)
            return jnp.sin(total + layer[1] * given.delta(own, positions((8, 4)))), None

        layers = given.slices(stack, 0, 2), constrain(x, None, "batch")
        return jnp.sum(jax.lax.scan(add, jnp.zeros((8, 4)), layers)[0])

    delta = np.random.default_rng(1).uniform(size=(2, 1, 4)).astype(np.float32)
    gradient = jax.jit(jax.grad(loss))
    with jax.set_mesh(mesh):
        got = gradient(delta, x)
        found = traffic(gradient.lower(delta, x).compile().as_text()).collectives
    assert sum(n for c, n in found.items() if c.kind == "all-reduce") == 1
    np.testing.assert_allclose(got, gradient(delta, x), rtol=1e-5)


def test_tile() -> None:
    """A2: source i serves the rows i, i + n, …"""
    source = jnp.arange(3.0)[:, None]
    assert tile(source, 6)[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert tile(source, 3) is source
    assert tile(source[:1], 6).shape == (1, 1)
    with pytest.raises(AssertionError, match="3 sources do not tile a batch of 4"):
        tile(source, 4)


@pytest.mark.parametrize("use_delta", [True, False])
@pytest.mark.parametrize(
    ("lead", "of_lead", "of_components"),
    [
        ((1, 1), (None, None), "component"),
        ((1, 4), (None, "seq"), "component"),
        ((2, 4), (None, "seq"), "component"),
        ((6, 4), ("batch", "seq"), "component_in_use"),
        ((1,), (None,), "component"),
        ((6,), ("batch",), "component_in_use"),
    ],
    ids=str,
)
def test_axes_of_sources(
    lead: tuple[int, ...], of_lead: tuple[str | None, ...], of_components: str, use_delta: bool
) -> None:
    """D2: split with the batch where each of its 6 rows has its own, by component where rows share them."""
    stack = SITES.stacks[0]
    shapes = (stack.n_layers, *lead, stack.C), (stack.n_layers, *lead)
    sources = Sources(jnp.zeros(shapes[0]), jnp.zeros(shapes[1]) if use_delta else None)
    axes = source_axes(sources, 6)
    assert axes.components == Axes((None, *of_lead, of_components))
    assert axes.delta == (Axes((None, *of_lead)) if use_delta else None)
    one_layer = GivenSources({stack.name: sources}, 6).axes(stack)
    assert one_layer.components == axes.components.below()
    # A shared delta is sliced with a row for each of the batch; two that tile it stay two.
    rows = 2 if lead[0] == 2 else 6
    assert one_layer.delta == (Axes((None if rows == 2 else "batch", *of_lead[1:])) if use_delta else None)
    sliced = GivenSources({stack.name: sources}, 6).slices(stack, 1, 2)
    assert sliced.delta is None or sliced.delta.shape == (1, rows, *lead[1:])
    assert jax.tree.structure(one_layer, is_leaf=is_axes) == jax.tree.structure(sources)
