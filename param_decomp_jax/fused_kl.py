"""The KL of R1 without ever holding ``[tokens, vocab]``: by blocks of tokens, each with its gradient at once."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from param_decomp_jax.mesh import constrain, cut, uncut
from param_decomp_jax.numerics import kl_divergence

Head = Callable[[Float[Array, "B T d"]], Float[Array, "B T vocab"]]


def fused_kl(
    head: Head, clean: Float[Array, "B T d"], masked: Sequence[Float[Array, "B T d"]], n_blocks: int
) -> Float[Array, " streams"]:
    """For each of ``masked``: mean over positions of KL(softmax(head(clean)) ‖ softmax(head(masked))), in nats.

    Differentiable by ``masked``. The head is frozen, so their gradients are all that the backward pass needs: they are
    made in the forward pass, block by block, and kept as ``[B, T, d]``. ``n_blocks`` divides T.
    """
    n_positions = clean.shape[0] * clean.shape[1]

    def blocks(x: Float[Array, "B T d"]) -> Float[Array, "n B t d"]:
        return constrain(cut(x, 1, n_blocks, "seq"), None, "batch")

    def of_block(clean: Float[Array, "B t d"], masked: Sequence[Float[Array, "B t d"]]) -> list[tuple[Array, Array]]:
        """By stream, its share of the mean and the gradient of that."""
        logits = head(clean)

        def share(masked: Float[Array, "B t d"]) -> Float[Array, ""]:
            return jnp.sum(kl_divergence(logits, head(masked))) / n_positions

        return [jax.value_and_grad(share)(x) for x in masked]

    @jax.custom_vjp
    def kl(masked: Sequence[Float[Array, "B T d"]]) -> Float[Array, " streams"]:
        return forward(masked)[0]

    def forward(masked: Sequence[Float[Array, "B T d"]]) -> tuple[Array, list[Array]]:
        found = lax.map(lambda block: of_block(*block), (blocks(clean), [blocks(x) for x in masked]))
        values = jnp.stack([jnp.sum(value) for value, _ in found])
        return values, [constrain(uncut(gradient, 1, "seq"), "batch") for _, gradient in found]

    def backward(gradients: list[Array], g: Float[Array, " streams"]) -> tuple[list[Array]]:
        return ([(g[i] * gradient).astype(gradient.dtype) for i, gradient in enumerate(gradients)],)

    kl.defvjp(forward, backward)
    return kl(list(masked))
