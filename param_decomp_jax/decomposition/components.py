"""V and U of every stack, and the two parts of a masked site (F2)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from param_decomp_jax.decomposition.draws import draw_per_site
from param_decomp_jax.decomposition.sites import Sites, Stack
from param_decomp_jax.nn.grouped import ExpertGroups, product_wide
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.nn.split_product import DeltaProduct, product_in_bf16, rounded_to_bf16, split_product
from param_decomp_jax.sharding.mesh import Axes, constrain, gather, gather_scattered, replace_fields, scatter


class Factors(eqx.Module):
    """The factors of a site, or, with leading axes, of a stack. Component c is the rank-one matrix ``V[:, c] ⊗ U[c,
    :]``."""

    V: Float[Array, "*lead d_in C"]
    U: Float[Array, "*lead C d_out"]


Components = dict[str, Factors]
"""Factors by stack name. Trained components leave out the stacks that are views of others (T4); `with_views` adds
them."""


def init_components(key: PRNGKeyArray, sites: Sites) -> Components:
    """Draws V ~ N(0, 1/d_in) and U ~ N(0, 1/C) in fp32. A site's draw depends on its canonical number, not on its
    stack."""

    def factors(stack: Stack) -> Factors:
        def draw(key: PRNGKeyArray) -> tuple[Array, Array]:
            V_key, U_key = jax.random.split(key)
            V = jax.random.normal(V_key, (stack.d_in, stack.C), jnp.float32)
            return V, jax.random.normal(U_key, (stack.C, stack.d_out), jnp.float32)

        V, U = map(stack.lay_out, draw_per_site(draw, key, stack.sites))
        return Factors(V / stack.d_in**0.5, U / stack.C**0.5)

    trained = [s for s in sites.stacks if s.name not in sites.views]
    return {stack.name: factors(stack) for stack in trained}


def with_views(trained: Components, sites: Sites) -> Components:
    """Adds the stacks that are views (T4) to the trained ones. A tied stack has ``V₂ = U₁ᵀ`` and ``U₂ = V₁ᵀ``, so the
    gradients of the two add up."""

    def factors(name: str) -> Factors:
        if name not in sites.views:
            return trained[name]
        first = trained[sites.views[name]]
        return replace_fields(first, V=first.U.swapaxes(1, 2), U=first.V.swapaxes(1, 2))  # they may be `Held`

    return {stack.name: factors(stack.name) for stack in sites.stacks}


def delta(
    W: Float[Array, "*n d_in d_out"], factors: Factors, product: DeltaProduct = "fp32"
) -> Float[Array, "*n d_in d_out"]:
    """Returns Δ = W − V U: what the components do not yet explain. ``product``: how V U is computed (N4)."""
    V, U = factors.V, factors.U
    split = product == "split" and V.dtype == jnp.float32
    return wide(W) - (_split_on_nvidia(V, U) if split else scatter(_in_fp32(V, U), _by_column(W)))


def _in_fp32(V: Float[Array, "*n d_in C"], U: Float[Array, "*n C d_out"]) -> Float[Array, "*n d_in d_out"]:
    return jnp.matmul(V, U, precision="highest")  # the default on GPUs is TF32


def _by_column(product: Float[Array, "*n d_in d_out"]) -> Axes:
    """The axes of Δ and V U: both are split by column."""
    return Axes((*(None,) * (product.ndim - 1), "split"))


@jax.custom_vjp
def _split_on_nvidia(V: Float[Array, "*n d_in C"], U: Float[Array, "*n C d_out"]) -> Float[Array, "*n d_in d_out"]:
    """Computes V U, split by column: as ``split`` of N4 on NVIDIA GPUs, as ``fp32`` elsewhere."""
    product = jax.lax.platform_dependent(V, U, cuda=split_product, default=_in_fp32)
    return constrain(product, *_by_column(product).names)


def _split_on_nvidia_backward(factors: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    def in_bf16(V: Array, U: Array, g: Array) -> tuple[Array, Array]:
        # Rounded before devices send it to each other.
        g = gather_scattered(rounded_to_bf16(g), _by_column(g))
        return product_in_bf16(g, rounded_to_bf16(U).mT), product_in_bf16(rounded_to_bf16(V).mT, g)

    def in_fp32(V: Array, U: Array, g: Array) -> tuple[Array, Array]:
        _, pullback = jax.vjp(_in_fp32, V, U)
        return pullback(gather_scattered(g, _by_column(g)))

    found: tuple[Array, Array] = jax.lax.platform_dependent(*factors, g, cuda=in_bf16, default=in_fp32)
    return found


_split_on_nvidia.defvjp(lambda V, U: (_split_on_nvidia(V, U), (V, U)), _split_on_nvidia_backward)


def look_up(table: Float[Array, "n d"], rows: Int[Array, "*n"], axes: Axes) -> Float[Array, "*n d"]:
    """Returns rows of a table. ``axes``: how the table is split, which is by column if at all."""
    split = axes.names[-1]
    if split is None:
        return constrain(table[rows], "batch")
    # Each device looks up its own columns for the whole batch, so rows move between devices and the table does not.
    columns = constrain(table, None, split)[gather(rows, Axes(("batch_everywhere",)), rows.dtype)]
    return constrain(columns, *(None,) * rows.ndim, split)


def row_or_product(x: Array, W: Array, groups: ExpertGroups | None) -> Array:
    """Returns ``xW`` in fp32 or wider, or the rows of a table W where ``x`` has their numbers (integers; F7)."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return constrain(wide(W[x]), "batch")
    return product_wide(x, W, groups)


def component_gate(
    mask: Float[Array, "*n C"], delta_mask: Float[Array, "*#n"] | None, route: Float[Array, "*n"] | None
) -> Float[Array, "*n C"]:
    """Returns ``g = r (m − δ)`` of F2, in fp32. Without a ``delta_mask`` δ is 0 (no delta path); without a ``route`` r
    is 1 (routed everywhere)."""
    g = mask if delta_mask is None else mask - delta_mask[..., None]
    return g if route is None else route[..., None] * g


def through_components(
    x: Shaped[Array, "*#x"],
    V: Float[Array, "*experts d_in C"],
    U: Float[Array, "*experts C d_out"],
    g: Float[Array, "*n C"],
    groups: ExpertGroups | None = None,
    added: Float[Array, "*n C"] | None = None,
) -> Float[Array, "*n d_out"]:
    """Returns the part ``((xV) ⊙ g) U`` of F2 in fp32 or wider. It is a sum over components, so any block of them can
    be given.

    ``g``: from `component_gate`. It is cast for the product (N1), and may have several consecutive rows for each row of
    ``x``. ``groups``: the slots of each expert, where the matrices are those of experts. ``added``: ``r s`` of F8, if
    there is any.
    """
    inner = row_or_product(x, V, groups)
    if x.shape[0] != g.shape[0] and groups is None:
        inner = jnp.repeat(inner, g.shape[0] // x.shape[0], axis=0)
    inner = inner * g if added is None else inner * g + added
    return product_wide(inner.astype(V.dtype if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype), U, groups)


def past_components(
    x: Shaped[Array, "*#x"],
    W: Float[Array, "*experts d_in d_out"] | None,
    delta_mask: Float[Array, "*#n"] | None,
    route: Float[Array, "*n"] | None,
    groups: ExpertGroups | None = None,
) -> Float[Array, "*n d_out"] | None:
    """Returns the part ``a · xW`` of F2 in fp32 or wider, with ``a = 1 − r (1 − δ)``; None if a is 0 everywhere.

    ``W``: None stands for the identity. ``delta_mask``, ``route``: as for `component_gate`.
    """
    if delta_mask is None and route is None:
        return None
    a = delta_mask
    if route is not None:
        a = 1 - route if a is None else 1 - route * (1 - a)
    assert a is not None
    if W is None:
        return a[..., None] * wide(x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return a[..., None] * row_or_product(x, W, groups)
    return _scaled_product(jnp.broadcast_to(a, x.shape[:-1] if groups is None else groups.chosen.shape), x, W, groups)


@jax.custom_vjp
def _scaled_product(
    a: Float[Array, "*n"],
    x: Float[Array, "*#n d_in"],
    W: Float[Array, "*experts d_in d_out"],
    groups: ExpertGroups | None,
) -> Float[Array, "*n d_out"]:
    """Returns ``a · xW`` for a frozen W.

    The gradient with respect to a is computed as a sum over ``d_in``, of x times the product that x's own gradient
    needs anyway. So ``xW`` in fp32, the widest array of a layer, is not kept for the backward pass.
    """
    return a[..., None] * product_wide(x, W, groups)


def _scaled_product_backward(
    kept: tuple[Array, Array, Array, ExpertGroups | None], g: Array
) -> tuple[Array, Array, None, None]:
    a, x, W, groups = kept
    back = product_wide(g.astype(x.dtype), W.swapaxes(-1, -2), groups)
    to_x = (a[..., None] * back).astype(x.dtype)
    if x.shape != to_x.shape:  # one row is shared by the slots of a position
        to_x = jnp.sum(to_x, axis=-2, keepdims=True)
    return jnp.sum(wide(x) * back, axis=-1).astype(a.dtype), to_x, None, None


_scaled_product.defvjp(
    lambda a, x, W, groups: (_scaled_product(a, x, W, groups), (a, x, W, groups)), _scaled_product_backward
)


def components_axes(components: Components) -> Any:
    """Returns the logical axes of every array, in the structure of ``components``. Arrays are split by component."""
    return {
        name: replace_fields(factors, V=with_lead(V_AXES, factors.V.ndim), U=with_lead(U_AXES, factors.U.ndim))
        for name, factors in components.items()
    }


V_AXES, U_AXES = Axes((None, "component"), product=True), Axes(("component", None), product=True)
"""The axes of one site's factors."""


def with_lead(axes: Axes, ndim: int) -> Axes:
    """Returns ``axes`` with leading axes of layers and experts, ``ndim`` axes in all."""
    return Axes((*(None,) * (ndim - len(axes.names)), *axes.names), axes.product)


def site_axes(stack: Stack) -> tuple[Axes, Axes]:
    """Returns the axes of V and U in one layer of a stack."""
    n = 2 if stack.experts is None else 3
    return with_lead(V_AXES, n), with_lead(U_AXES, n)
