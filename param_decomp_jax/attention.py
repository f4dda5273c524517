"""Scaled dot-product attention with grouped heads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.numerics import wide


def attend(
    q: Float[Array, "B T heads d"], k: Float[Array, "B T kv_heads d"], v: Float[Array, "B T kv_heads d"], causal: bool
) -> Float[Array, "B T heads d"]:
    """Query head h reads key head ``h // (heads / kv_heads)``; scores and softmax in fp32 or wider.

    `jax.nn.dot_product_attention` is the same but for float64, which it rounds to fp32 before the softmax.
    """
    B, T, heads, d = q.shape
    groups = q.reshape(B, T, k.shape[2], heads // k.shape[2], d)
    scores = jnp.einsum("BTkgd,BSkd->BkgTS", groups, k, preferred_element_type=wide(q).dtype) * d**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BkgTS,BSkd->BTkgd", weights, v).reshape(B, T, heads, d)
