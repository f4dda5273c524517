"""Mixtures of experts: which experts a token takes, and the sum of what these add, without computing the others."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.mesh import gather
from param_decomp_jax.numerics import matmul_wide
from param_decomp_jax.targets.plain_linears import FROZEN
from param_decomp_jax.targets.transformer_config import Experts


class Routing(NamedTuple):
    """Of each token, the experts it takes, in order of their weight, and these weights."""

    chosen: Int[Array, "*n k"]
    weights: Float[Array, "*n k"]


def route(experts: Experts, h: Float[Array, "*n d"], router: Float[Array, "d E"]) -> Routing:
    """The ``per_token`` experts of highest probability; weights in fp32, over all experts unless ``normalised``."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(matmul_wide(h, router)), experts.per_token)
    if experts.normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(chosen, weights)


def mixture(experts: Experts, h: Float[Array, "B T d"], w: Mapping[str, Array]) -> Float[Array, "B T d"]:
    """What the experts add: tokens sorted by expert, a grouped product for each matrix, and the weighted sum of each
    token's experts in the dtype of ``h`` (in fp32 it would cost a copy of all their outputs)."""
    routing = route(experts, h, gather(w["router"], FROZEN, h.dtype))
    gate, up, down = (gather(w[kind], FROZEN.under(), h.dtype) for kind in ("gate_proj", "up_proj", "down_proj"))
    tokens = h.reshape(-1, h.shape[-1])
    slots = routing.chosen.reshape(-1)
    order = jnp.argsort(slots, stable=True)
    sizes = jnp.bincount(slots, length=experts.n).astype(jnp.int32)
    x = tokens[order // experts.per_token]
    hidden = jax.nn.silu(jax.lax.ragged_dot(x, gate, sizes)) * jax.lax.ragged_dot(x, up, sizes)
    y = jax.lax.ragged_dot(hidden, down, sizes)
    by_token = y[jnp.argsort(order)].reshape(*h.shape[:-1], experts.per_token, h.shape[-1])
    return jnp.einsum("...kd,...k->...d", by_token, routing.weights.astype(h.dtype))
