"""The KL of R1 without ever holding ``[tokens, vocab]``: by blocks of tokens, each with its gradient at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from param_decomp_jax.mesh import constrain, cut, uncut
from param_decomp_jax.numerics import kl_divergence

Head = Callable[[Float[Array, "B T d"]], Float[Array, "B T vocab"]]


def fused_kl(
    head: Head, clean: Float[Array, "B T d"], masked: Float[Array, "B T d"], n_blocks: int
) -> Float[Array, ""]:
    """Mean over positions of KL(softmax(head(clean)) ‖ softmax(head(masked))), in nats, differentiable by ``masked``.

    The head is frozen, so the gradient with respect to ``masked`` is all that the backward pass needs: it is made in
    the forward pass, block by block, and kept as ``[B, T, d]``. ``n_blocks`` divides T.
    """
    n_positions = masked.shape[0] * masked.shape[1]

    def of_block(masked: Float[Array, "B t d"], clean: Float[Array, "B t d"]) -> Float[Array, ""]:
        return jnp.sum(kl_divergence(head(clean), head(masked))) / n_positions

    def blocks(x: Float[Array, "B T d"]) -> Float[Array, "n B t d"]:
        return constrain(cut(x, 1, n_blocks, "seq"), None, "batch")

    @jax.custom_vjp
    def kl(masked: Float[Array, "B T d"]) -> Float[Array, ""]:
        return jnp.sum(lax.map(lambda pair: of_block(*pair), (blocks(masked), blocks(clean))))

    def forward(masked: Float[Array, "B T d"]) -> tuple[Array, Array]:
        values, gradients = lax.map(lambda pair: jax.value_and_grad(of_block)(*pair), (blocks(masked), blocks(clean)))
        return jnp.sum(values), constrain(uncut(gradients, 1, "seq"), "batch")

    def backward(gradient: Float[Array, "B T d"], g: Float[Array, ""]) -> tuple[Array]:
        return ((g * gradient).astype(gradient.dtype),)

    kl.defvjp(forward, backward)
    return kl(masked)
