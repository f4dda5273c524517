"""Squashings (C1 to C3): values and gradients, at the ties above all."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_jax.ci.squash import Squashing, lower_leaky, squashings
from tests import reference as ref

NAMES: tuple[Squashing, ...] = get_args(Squashing)
SIDES = ("lower", "upper")
TIES = [0.0, -0.0, 1.0]
AROUND = [-1e-30, 1e-30, np.nextafter(np.float32(1), 0), np.nextafter(np.float32(1), 2)]
POINTS = np.array([*TIES, *AROUND, *np.linspace(-3, 3, 25), -40.0, 40.0], np.float32)
LENGTH = 12


@partial(jax.jit, static_argnums=(0, 1))
def core(name: Squashing, side: str, z: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The squashing's value, and the cotangent of z for the cotangent g."""
    value, vjp = jax.vjp(squashings(name)[SIDES.index(side)], z)
    return value, vjp(g)[0]


def assert_like_reference(name: Squashing, side: str, z: np.ndarray, g: np.ndarray, tolerance: float) -> None:
    got, got_gradient = core(name, side, jnp.asarray(z), jnp.asarray(g))
    var = ref.Var(z)
    want = getattr(ref, side)(var, name)
    np.testing.assert_allclose(got, want.value, rtol=tolerance, atol=tolerance)
    want_gradient = ref.gradients((want * g.astype(np.float64)).sum(), var)
    np.testing.assert_allclose(got_gradient, want_gradient, rtol=tolerance, atol=tolerance * max(1.0, *np.abs(g)))


@pytest.mark.parametrize("g", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_against_reference(name: Squashing, side: str, g: float) -> None:
    assert_like_reference(name, side, POINTS, np.full_like(POINTS, g), 3e-6)
    with jax.enable_x64(True):
        assert_like_reference(name, side, POINTS.astype(np.float64), np.full(POINTS.shape, g), 1e-12)


# Per squashing: derivatives at z = 0 and z = 1. For λ of leaky_hard (C1) they depend on the cotangent's sign.
TIE_DERIVATIVES = [
    ("leaky_hard", "lower", 2.0, (0.0, 2.0)),
    ("leaky_hard", "lower", -2.0, (-0.02, -2.0)),
    ("leaky_hard", "upper", 2.0, (2.0, 2.0)),
    ("leaky_hard", "upper", -2.0, (-2.0, -2.0)),
    ("upper_leaky_hard", "lower", -2.0, (-2.0, -2.0)),
    ("hard", "lower", 2.0, (2.0, 2.0)),
    ("hard", "upper", -2.0, (-2.0, -2.0)),
    ("two_sided_leaky_hard", "lower", 2.0, (2.0, 2.0)),
]


@pytest.mark.parametrize(("name", "side", "g", "want"), TIE_DERIVATIVES)
def test_gradient_at_the_ties(name: Squashing, side: str, g: float, want: tuple[float, float]) -> None:
    value, gradient = core(name, side, jnp.array([0.0, 1.0]), jnp.array([g, g]))
    np.testing.assert_array_equal(value, [0.0, 1.0])
    np.testing.assert_allclose(gradient, want, rtol=1e-6)


def test_only_leaky_hard_has_two_sides() -> None:
    """C3: λ = υ for every other name."""
    for name in NAMES:
        lower, upper = squashings(name)
        assert (lower is upper) == (name != "leaky_hard")


def test_the_leak_sees_the_sum_of_cotangents() -> None:
    """C1 with λ used by two losses: what decides is the sign of their sum, not of each."""

    def loss(z: jax.Array, a: float, b: float) -> jax.Array:
        importance = lower_leaky(z)
        return jnp.sum(a * importance + b * importance)

    z = jnp.full((1,), -0.5)
    np.testing.assert_allclose(jax.grad(loss)(z, -3.0, 2.0), [-0.01], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(loss)(z, -2.0, 3.0), [0.0])


def finite(bound: float) -> st.SearchStrategy[list[float]]:
    """No subnormal numbers: XLA flushes them to zero on a CPU."""
    element = st.floats(-bound, bound, width=32, allow_subnormal=False) | st.sampled_from(TIES)
    return st.lists(element, min_size=LENGTH, max_size=LENGTH)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=20)
def test_all_finite_numbers(name: Squashing, side: str, data: st.DataObject) -> None:
    # The definition of swish_hard is a difference of numbers as large as z: in fp32 its error grows with z.
    bound = 8.0 if name == "swish_hard" else float(np.finfo(np.float32).max)
    z, g = data.draw(finite(bound)), data.draw(finite(100.0))
    assert_like_reference(name, side, np.array(z, np.float32), np.array(g, np.float32), 1e-5)
