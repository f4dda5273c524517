"""The KL of R1 in blocks of tokens, each with its gradient, so that ``[tokens, vocab]`` never exists as a whole."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from param_decomp_jax.nn.numerics import kl_divergence
from param_decomp_jax.sharding.mesh import constrain, join_blocks, split_blocks

Head = jax.tree_util.Partial
"""A map from ``[B, T, d]`` to ``[B, T, vocab]``: a static function and its arrays, which are frozen.

It is not a closure, because what a function with its own derivative closes over is lost if the KL is in a branch (A6).
"""


def fused_kl(
    head: Head, clean: Float[Array, "B T d"], masked: Sequence[Float[Array, "B T d"]], n_blocks: int
) -> Float[Array, " streams"]:
    """Returns, for each of ``masked``, the mean over positions of KL(softmax(head(clean)) ‖ softmax(head(masked))), in
    nats.

    Differentiable with respect to ``masked``. The head is frozen, so the backward pass needs only the gradients of
    ``masked``. They are computed in the forward pass, block by block, and kept as ``[B, T, d]``. ``n_blocks`` divides
    T.
    """
    return _kl(n_blocks, head, clean, list(masked))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kl(n_blocks: int, head: Head, clean: Array, masked: list[Array]) -> Float[Array, " streams"]:
    return _forward(n_blocks, head, clean, masked)[0]


def _forward(n_blocks: int, head: Head, clean: Array, masked: list[Array]) -> tuple[Array, list[Array]]:
    n_positions = clean.shape[0] * clean.shape[1]

    def blocks(x: Float[Array, "B T d"]) -> Float[Array, "n B t d"]:
        return constrain(split_blocks(x, 1, n_blocks, "seq"), None, "batch")

    def block_kl(clean: Float[Array, "B t d"], masked: Sequence[Float[Array, "B t d"]]) -> list[tuple[Array, Array]]:
        """Returns, for each stream, the block's share of the mean and the gradient of that share."""
        logits = head(clean)

        def share(masked: Float[Array, "B t d"]) -> Float[Array, ""]:
            return jnp.sum(kl_divergence(logits, head(masked))) / n_positions

        return [jax.value_and_grad(share)(x) for x in masked]

    found = lax.map(lambda block: block_kl(*block), (blocks(clean), [blocks(x) for x in masked]))
    values = jnp.stack([jnp.sum(value) for value, _ in found])
    return values, [constrain(join_blocks(gradient, 1, "seq"), "batch") for _, gradient in found]


def _backward(n_blocks: int, gradients: list[Array], g: Float[Array, " streams"]) -> tuple[Any, Any, list[Array]]:
    # The head and the clean pass are constant, so they get no gradient.
    return None, None, [(g[i] * gradient).astype(gradient.dtype) for i, gradient in enumerate(gradients)]


_kl.defvjp(_forward, _backward)
