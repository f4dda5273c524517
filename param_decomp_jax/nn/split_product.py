"""A product of two float32 matrices in split bf16 (N4), for GPUs whose tensor cores have no float32."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from param_decomp_jax.sharding.mesh import n_parts

DeltaProduct = Literal["split", "fp32"]
"""How V U is computed in Δ (N4)."""

CHUNK = 2048
"""Components per device over which a tensor core accumulates at a time (docs/measurements/split_delta.md)."""


def split_product(V: Float[Array, "*n d_in C"], U: Float[Array, "*n C d_out"]) -> Float[Array, "*n d_in d_out"]:
    """Returns ``V U`` of float32 arrays as a sum of products in bf16, each accumulated in fp32 (N4)."""
    (V1, V2), (U1, U2) = _split(V), _split(U)
    return _by_chunk(V1, U1) + (product_in_bf16(V1, U2) + product_in_bf16(V2, U1))


def product_in_bf16(x: BFloat16[Array, "*n i k"], y: BFloat16[Array, "*n k o"]) -> Float[Array, "*n i o"]:
    """Returns ``x y``, accumulated and returned in fp32."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def rounded_to_bf16(x: Float[Array, "*n"]) -> BFloat16[Array, "*n"]:
    """Returns ``x`` rounded to bf16. XLA may leave out a cast to bf16 and back, but not this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _split(x: Float[Array, "*n"]) -> tuple[BFloat16[Array, "*n"], BFloat16[Array, "*n"]]:
    """Returns ``x`` rounded to bf16, and the remainder, in bf16 as well."""
    high = rounded_to_bf16(x)
    return high, rounded_to_bf16(x - high.astype(x.dtype))


def _by_chunk(V: BFloat16[Array, "*n d_in C"], U: BFloat16[Array, "*n C d_out"]) -> Float[Array, "*n d_in d_out"]:
    """Returns ``V U`` as a sum over chunks with at most `CHUNK` components per device."""
    C = V.shape[-1]
    parts = n_parts("component", C)
    own = C // parts
    n = -(-own // CHUNK)
    if n == 1:
        return product_in_bf16(V, U)
    # Chunks are a batch axis, so that no kernel can accumulate over several of them.
    size = -(-own // n)
    V = _padded(V.reshape(*V.shape[:-1], parts, own), -1, n * size).reshape(*V.shape[:-1], parts, n, size)
    U = _padded(U.reshape(*U.shape[:-2], parts, own, U.shape[-1]), -2, n * size)
    U = U.reshape(*U.shape[:-2], n, size, U.shape[-1])
    sums = jnp.einsum("...ipkc,...pkco->...kio", V, U, preferred_element_type=jnp.float32)
    return jnp.sum(sums, axis=-3)


def _padded(x: Array, axis: int, size: int) -> Array:
    """Returns ``x`` padded with zeros to this size along an axis."""
    more = [(0, 0)] * x.ndim
    more[axis] = (0, size - x.shape[axis])
    return x if more[axis] == (0, 0) else jnp.pad(x, more)
