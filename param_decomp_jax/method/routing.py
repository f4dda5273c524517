"""Routing (R3): at which positions a live site is masked, and at which it multiplies by W."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from param_decomp_jax.decomposition.draws import uniform


@dataclass(frozen=True)
class Everywhere:
    """Every live site at every position."""


@dataclass(frozen=True)
class UniformKSubset:
    """At each position independently: k uniform in 1 … n, then a uniform k-subset of the n live sites."""


@dataclass(frozen=True)
class StaticProbability:
    """At each position each live site independently with probability ``p``."""

    p: float


Routing = Everywhere | UniformKSubset | StaticProbability


def uniform_k_subset(size: Float[Array, "*n"], scores: Float[Array, "*n sites"]) -> Bool[Array, "*n sites"]:
    """The k sites of smallest score, with k = 1 + ⌊size · sites⌋ for ``size`` in [0, 1); ties go by site order."""
    # Where fp32 rounds size · n up to n, k is n + 1: every site, as k = n has it.
    k = 1 + (size * scores.shape[-1]).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(scores, axis=-1, stable=True), axis=-1)
    return rank < k[..., None]


def draw_routes(
    routing: Routing, key: PRNGKeyArray, at: UInt32[Array, "*leading"], n_live: int
) -> Bool[Array, "*leading n_live"] | None:
    """Routes of one forward for its live sites in canonical order; None where every position is masked.

    ``at``: global numbers of the positions (M4).
    """
    match routing:
        case Everywhere():
            return None
        case UniformKSubset():
            draws = uniform(key, at, 1 + n_live)
            return uniform_k_subset(draws[..., 0], draws[..., 1:])
        case StaticProbability(p):
            return uniform(key, at, n_live) < p
