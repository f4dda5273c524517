"""Routing (R3): the positions at which a live site is masked; at the others it multiplies by W."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from param_decomp_jax.decomposition.draws import uniform


@dataclass(frozen=True)
class Everywhere:
    """Routes every live site at every position."""


@dataclass(frozen=True)
class UniformKSubset:
    """Routes, at each position independently, a uniform k-subset of the n live sites, with k uniform in 1 … n."""


@dataclass(frozen=True)
class StaticProbability:
    """Routes each live site at each position independently with probability ``p``."""

    p: float


Routing = Everywhere | UniformKSubset | StaticProbability


def uniform_k_subset(size: Float[Array, "*n"], scores: Float[Array, "*n sites"]) -> Bool[Array, "*n sites"]:
    """Selects the k sites of smallest score, with k = 1 + ⌊size · sites⌋ for ``size`` in [0, 1). Ties are broken by
    site order."""
    # If fp32 rounds size · n up to n, k is n + 1, which selects every site like k = n.
    k = 1 + (size * scores.shape[-1]).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(scores, axis=-1, stable=True), axis=-1)
    return rank < k[..., None]


def draw_routes(
    routing: Routing, key: PRNGKeyArray, at: UInt32[Array, "*leading"], n_live: int
) -> Bool[Array, "*leading n_live"] | None:
    """Draws the routes of one forward for its live sites, in canonical order; None if every position is masked.

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
