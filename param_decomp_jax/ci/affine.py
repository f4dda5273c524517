"""Affine layers and the MLPs made of them (C4)."""

from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.numerics import matmul_wide

HIDDEN_GAIN = 2**0.5
"""Gain of the initial weights into a hidden layer; 1 into an output."""


class Affine(eqx.Module):
    """``x @ W + b``; leading axes of the arrays, if any, are layers or blocks that a scan or vmap takes apart."""

    W: Float[Array, "*stack d_in d_out"]
    b: Float[Array, "*stack d_out"]

    def __call__(self, x: Float[Array, "*n d_in"]) -> Float[Array, "*n d_out"]:
        """Product with inputs in the dtype of ``x``, result in fp32 or wider."""
        return matmul_wide(x, self.W) + self.b


def init_affine(key: PRNGKeyArray, stack: tuple[int, ...], d_in: int, d_out: int, gain: float) -> Affine:
    """Weights N(0, gain²/d_in), biases zero, fp32."""
    W = gain / d_in**0.5 * jax.random.normal(key, (*stack, d_in, d_out), jnp.float32)
    return Affine(W, jnp.zeros((*stack, d_out), jnp.float32))


MLP = tuple[Affine, ...]


def init_mlp(key: PRNGKeyArray, stack: tuple[int, ...], widths: tuple[int, ...]) -> MLP:
    """An MLP through ``widths`` (input, hidden …, output)."""
    last = len(widths) - 2
    return tuple(
        init_affine(jax.random.fold_in(key, n), stack, d_in, d_out, 1.0 if n == last else HIDDEN_GAIN)
        for n, (d_in, d_out) in enumerate(pairwise(widths))
    )


def apply_mlp(mlp: MLP, x: Float[Array, "*n d_in"]) -> Float[Array, "*n d_out"]:
    """Affine, exact (erf) GELU, …, affine; no GELU after the last. Result in fp32 or wider."""
    *hidden, last = mlp
    for layer in hidden:
        x = jax.nn.gelu(layer(x), approximate=False).astype(x.dtype)
    return last(x)
