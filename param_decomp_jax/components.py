"""V and U of every stack, and the masked site (F1, F2)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.numerics import matmul, matmul_wide, wide
from param_decomp_jax.sites import Sites


class Factors(eqx.Module):
    """Factors of a stack of sites; component c of a layer is the rank-one matrix ``V[:, c] ⊗ U[c, :]``."""

    V: Float[Array, "layers d_in C"]
    U: Float[Array, "layers C d_out"]


Components = dict[str, Factors]
"""By stack name. As trained: without the stacks that are views of others (T4); `with_views` adds them."""


def init_components(key: PRNGKeyArray, sites: Sites) -> Components:
    """V ~ N(0, 1/d_in), U ~ N(0, 1/C), fp32; a site's draw depends on its canonical number, not on its stack."""

    def factors(numbers: tuple[int, ...], d_in: int, d_out: int, C: int) -> Factors:
        keys = [jax.random.split(jax.random.fold_in(key, n)) for n in numbers]
        V = jnp.stack([jax.random.normal(k, (d_in, C), jnp.float32) for k, _ in keys])
        U = jnp.stack([jax.random.normal(k, (C, d_out), jnp.float32) for _, k in keys])
        return Factors(V / d_in**0.5, U / C**0.5)

    trained = [s for s in sites.stacks if s.name not in sites.views]
    return {s.name: factors(s.sites, s.d_in, s.d_out, s.C) for s in trained}


def with_views(trained: Components, sites: Sites) -> Components:
    """Factors of every stack: a tied one is ``V₂ = U₁ᵀ``, ``U₂ = V₁ᵀ`` (T4), so gradients of the two add."""

    def factors(name: str) -> Factors:
        if name not in sites.views:
            return trained[name]
        first = trained[sites.views[name]]
        return Factors(first.U.swapaxes(1, 2), first.V.swapaxes(1, 2))

    return {stack.name: factors(stack.name) for stack in sites.stacks}


def delta(W: Float[Array, "*n d_in d_out"], factors: Factors) -> Float[Array, "*n d_in d_out"]:
    """Δ = W − V U: what the components do not yet explain, in true fp32 (GPUs would take TF32 by themselves)."""
    return wide(W) - jnp.matmul(factors.V, factors.U, precision="highest")


def masked_site_with_delta(
    x: Float[Array, "*n d_in"],
    W: Float[Array, "d_in d_out"],
    V: Float[Array, "d_in C"],
    U: Float[Array, "C d_out"],
    mask: Float[Array, "*n C"],
    delta_mask: Float[Array, "*n"],
    route: Float[Array, "*n"],
) -> Float[Array, "*n d_out"]:
    """F1, as the definition reads: ``r · (((xV) ⊙ m) U + δ · xΔ) + (1 − r) · xW``. Kept to hold F2 against."""
    masked = matmul(matmul(x, V) * mask.astype(x.dtype), U)
    unexplained = matmul(x, W - V @ U)
    r = route[..., None].astype(x.dtype)
    return r * (masked + delta_mask[..., None].astype(x.dtype) * unexplained) + (1 - r) * matmul(x, W)


def masked_site(
    x: Float[Array, "*n d_in"],
    W: Float[Array, "d_in d_out"] | None,
    V: Float[Array, "d_in C"],
    U: Float[Array, "C d_out"],
    mask: Float[Array, "*n C"],
    delta_mask: Float[Array, "*#n"] | None,
    route: Float[Array, "*n"] | None,
) -> Float[Array, "*n d_out"]:
    """F2: ``a · xW + ((xV) ⊙ g) U`` with ``g = r (m − δ)`` and ``a = 1 − r (1 − δ)``; Δ is never formed.

    ``W`` None: the identity. ``delta_mask`` None: no delta path (δ = 0). ``route`` None: routed everywhere (r = 1).
    Masks and routes come in fp32; g and a are built there and cast for the products (N1). Both products are
    accumulated and added in fp32.
    """
    g, a = mask, None
    if delta_mask is not None:
        g, a = mask - delta_mask[..., None], delta_mask
    if route is not None:
        g = route[..., None] * g
        a = 1 - route if a is None else 1 - route * (1 - a)
    y = matmul_wide((matmul_wide(x, V) * g).astype(x.dtype), U)
    if a is not None:
        y = y + a[..., None] * (wide(x) if W is None else matmul_wide(x, W))
    return y.astype(x.dtype)
