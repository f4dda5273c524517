"""Mixtures of experts: which experts a position takes, and the sum of their outputs, without computing the others."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.nn.grouped import group
from param_decomp_jax.nn.numerics import matmul_wide
from param_decomp_jax.sharding.mesh import gather
from param_decomp_jax.targets.base import LayerLinears
from param_decomp_jax.targets.plain_linears import EXPERT_KINDS
from param_decomp_jax.targets.transformer_config import Experts


def mixture(
    experts: Experts,
    h: Float[Array, "B T d"],
    w: Mapping[str, Array],
    linear: LayerLinears,
    act: Callable[[Array], Array],
) -> Float[Array, "B T d"]:
    """Returns what the experts add (X1). ``act``: their activation function.

    The weighted sum over a position's experts is computed in the dtype of ``h``, because in fp32 it would need a copy
    of all their outputs.
    """
    logits = matmul_wide(h, gather(w["router"], linear.frozen, h.dtype))
    chosen = linear.choose(logits, experts.per_token)
    weights = expert_weights(experts, logits, chosen)
    groups = group(chosen, experts.n)
    gate, up, down = EXPERT_KINDS
    shared = h[..., None, :]
    hidden = act(linear.grouped(gate, shared, w[gate], groups)) * linear.grouped(up, shared, w[up], groups)
    return jnp.einsum("...kd,...k->...d", linear.grouped(down, hidden, w[down], groups), weights.astype(h.dtype))


def expert_weights(
    experts: Experts, logits: Float[Array, "*n experts"], chosen: Int[Array, "*n k"]
) -> Float[Array, "*n k"]:
    """Returns the weights of the experts that a position takes (X1).

    Normalised weights are the softmax over these experts alone. A quotient of two softmaxes would be 0 / 0 if a masked
    pass finds all of the clean pass's experts unlikely.
    """
    if experts.normalised:
        return jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1))
    return jnp.take_along_axis(jax.nn.softmax(logits), chosen, axis=-1)
