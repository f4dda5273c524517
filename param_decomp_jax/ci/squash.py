"""Squashing functions (C1 to C3): from one logit to the lower and the upper causal importance.

The derivatives are part of the method and differ from those of the values. `jnp.clip` has derivative ½ at a tie, and
the one-sided leak of C1 is not a derivative at all: it depends on the sign of the incoming gradient.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LEAK = 0.01
"""α of C1 to C3."""

Squashing = Literal["normal", "hard", "leaky_hard", "upper_leaky_hard", "swish_hard", "two_sided_leaky_hard"]
Squash = Callable[[Float[Array, "*n"]], Float[Array, "*n"]]


@jax.custom_vjp
def lower_leaky(z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the lower causal importance λ(z) = clip(z, 0, 1), with the one-sided leak of C1."""
    return jnp.clip(z, 0, 1)


def _lower_leaky_forward(z: Array) -> tuple[Array, Array]:
    return jnp.clip(z, 0, 1), z


def _lower_leaky_backward(z: Array, g: Array) -> tuple[Array]:
    # At or below 0, only gradients whose descent raises z pass, so that a dead component can come back.
    below = jnp.where(g < 0, LEAK * g, jnp.zeros_like(g))
    return (jnp.where(z <= 0, below, jnp.where(z <= 1, g, jnp.zeros_like(g))),)


lower_leaky.defvjp(_lower_leaky_forward, _lower_leaky_backward)


@jax.custom_jvp
def upper_leaky(z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the upper causal importance υ(z) of C2: the identity on [0, 1] (ties included), slope α above, 0
    below."""
    return jnp.where(z > 1, 1 + LEAK * (z - 1), jnp.clip(z, 0, 1))


@upper_leaky.defjvp
def _upper_leaky_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (t,) = primals, tangents
    slope = jnp.where(z > 1, LEAK, jnp.where(z < 0, 0.0, 1.0)).astype(z.dtype)
    return upper_leaky(z), slope * t


@jax.custom_jvp
def hard(z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns clip(z, 0, 1), with derivative 1 on the closed interval [0, 1] (C3)."""
    return jnp.clip(z, 0, 1)


@hard.defjvp
def _hard_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (t,) = primals, tangents
    return hard(z), jnp.where((z >= 0) & (z <= 1), t, jnp.zeros_like(t))


@jax.custom_jvp
def two_sided_leaky(z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the identity on [0, 1] (ties included), with slope α on both sides of it (C3)."""
    return jnp.where(z < 0, LEAK * z, jnp.where(z > 1, 1 + LEAK * (z - 1), z))


@two_sided_leaky.defjvp
def _two_sided_leaky_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (t,) = primals, tangents
    return two_sided_leaky(z), jnp.where((z >= 0) & (z <= 1), t, LEAK * t)


def swish_hard(z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns a smooth hard sigmoid made of swishes with β = 10 (C3)."""
    beta = 10.0

    def s(x: Array) -> Array:
        return x * jax.nn.sigmoid(beta * x)

    def d(x: Array) -> Array:
        return x * jax.nn.sigmoid(-beta * x)

    u = z - 0.5
    return 0.5 + d(u - 0.5) - s(u) + s(u + 0.5) - d(u)


def squashings(name: Squashing) -> tuple[Squash, Squash]:
    """Returns the pair (λ, υ) of a schema name: λ feeds masks, υ feeds importance minimality (C3)."""
    match name:
        case "leaky_hard":
            return lower_leaky, upper_leaky
        case "normal":
            return jax.nn.sigmoid, jax.nn.sigmoid
        case "hard":
            return hard, hard
        case "upper_leaky_hard":
            return upper_leaky, upper_leaky
        case "swish_hard":
            return swish_hard, swish_hard
        case "two_sided_leaky_hard":
            return two_sided_leaky, two_sided_leaky
