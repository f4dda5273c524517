"""One MLP 1 → hidden … → 1 for every component, on one number per position (C4, `mlp`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.ci.affine import MLP, apply_mlp
from param_decomp_jax.nn.numerics import wide

BLOCK = 1 << 19
"""The largest number of hidden activations that are computed at once. If there are more, components are computed in
blocks: a block fits the cache, and memory does not grow with C."""


def apply_scalar_mlps(mlps: MLP, scalars: Float[Array, "C *n"]) -> Float[Array, "C *n"]:
    """Applies every component's MLP to its own scalar, in fp32 or wider. The arrays of ``mlps`` have a leading axis C.

    With one hidden layer the gradient is written by hand (`erf_layer`).
    """
    s = scalars.reshape(scalars.shape[0], -1)
    *hidden, last = mlps
    if len(hidden) == 1:
        # With y = √0.5 x, the GELU of x is √0.5 y (1 + erf y); both factors √0.5 go into the weights.
        u, v, w = (wide(a) * 0.5**0.5 for a in (hidden[0].W[:, 0], hidden[0].b, last.W[..., 0]))
        z = erf_layer(u, v, w, wide(last.b), wide(s))
    else:
        of_block = jax.checkpoint(lambda mlps, s: jax.vmap(apply_mlp)(mlps, s[..., None])[..., 0])
        z = _by_blocks(of_block, max(layer.b.shape[-1] for layer in mlps), mlps, s)
    return z.reshape(scalars.shape)


@jax.custom_vjp
def erf_layer(
    u: Float[Array, "C hidden"],
    v: Float[Array, "C hidden"],
    w: Float[Array, "C hidden"],
    b: Float[Array, "C 1"],
    s: Float[Array, "C n"],
) -> Float[Array, "C n"]:
    """Returns ``b + Σ_h w_h y_h (1 + erf y_h)`` with ``y_h = u_h s + v_h``: a layer of exact GELUs between two affine
    maps.

    The backward pass recomputes the hidden activations and their slopes and sums them by matrix-vector products. JAX's
    own, in blocks, first repeats the whole forward pass: on two cores, a step of TMS 5-2, with an identity layer or
    without, then takes 1.2 times as long (experiments/benchmarks/step_pairs.py). One exponential for both GELU and
    slope (Abramowitz and Stegun 7.1.26) gains nothing over an erf and an exponential, which take 0.35 and 0.4 ns per
    element, of 1.8 in all.
    """

    def of_block(u: Array, v: Array, w: Array, b: Array, s: Array) -> Array:
        y = _hidden(u, v, s)
        return jnp.einsum("chn,ch->cn", y + y * jax.lax.erf(y), w) + b

    return _by_blocks(of_block, u.shape[1], u, v, w, b, s)


def _erf_layer_backward(inputs: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
    def of_block(u: Array, v: Array, w: Array, b: Array, s: Array, g: Array) -> tuple[Array, ...]:
        y = _hidden(u, v, s)
        one_and_erf = 1 + jax.lax.erf(y)
        slope = one_and_erf + (2 / jnp.pi**0.5) * y * jnp.exp(-y * y)
        # Two products of a matrix with one vector each: one product with both vectors takes 3 times as long on a CPU.
        over_positions = partial(jnp.einsum, "chn,cn->ch")
        return (
            w * over_positions(slope, g * s),
            w * over_positions(slope, g),
            over_positions(y * one_and_erf, g),
            jnp.sum(g, axis=1, keepdims=True),
            g * jnp.einsum("chn,ch->cn", slope, u * w),
        )

    return _by_blocks(of_block, inputs[0].shape[1], *inputs, g)


erf_layer.defvjp(lambda *inputs: (erf_layer(*inputs), inputs), _erf_layer_backward)


def _hidden(u: Array, v: Array, s: Array) -> Float[Array, "C hidden n"]:
    return u[..., None] * s[:, None] + v[..., None]


def _by_blocks(function: Callable[..., Any], hidden: int, *arrays: Any) -> Any:
    """Applies ``function`` to trees of arrays with a leading axis C, the last of them ``[C, n]``, in blocks: as many
    components at once as fit `BLOCK` and divide C."""
    C, n = arrays[-1].shape
    block = max(d for d in range(1, C + 1) if C % d == 0 and d <= max(1, BLOCK // (n * hidden)))
    if block == C:
        return function(*arrays)
    blocks = jax.tree.map(lambda a: a.reshape(C // block, block, *a.shape[1:]), arrays)
    return jax.tree.map(lambda a: a.reshape(C, *a.shape[2:]), jax.lax.map(lambda of_block: function(*of_block), blocks))
