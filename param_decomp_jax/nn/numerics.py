"""Precision rules (N1, N2) and the one divergence the method uses."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.sharding.mesh import by_node, sum_over_nodes


def wide(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Returns ``x`` in fp32, or in float64 if it is in float64 already: the precision of statistics, losses and masks
    (N2)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def matmul(x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]) -> Float[Array, "*n d_out"]:
    """Returns ``x @ W`` with inputs and output in the dtype of ``x`` (N1: masters are cast right before the
    product)."""
    return x @ W.astype(x.dtype)


def matmul_wide(x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]) -> Float[Array, "*n d_out"]:
    """Returns ``x @ W`` with inputs in the dtype of ``x``, accumulated and returned in fp32 or wider."""
    return einsum_wide("...i,io->...o", x, W.astype(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_wide(spec: str, x: Float[Array, "..."], W: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns a product of two arrays of one dtype, accumulated in fp32 or wider and returned so.

    The products of the backward pass take their inputs in the dtype of the arrays, too (N1), and return gradients in
    the dtype of what they are gradients of. By default JAX computes them in fp32, at half the speed or less, and
    devices send each other twice the bytes.
    """
    return jnp.einsum(spec, x, W, preferred_element_type=wide(x).dtype)


def _einsum_wide_backward(spec: str, inputs: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, W = inputs
    of_x, of_W, of_y = spec.replace("->", ",").split(",")
    g = g.astype(x.dtype)
    to_x = jnp.einsum(f"{of_y},{of_W}->{of_x}", g, W)
    if of_x.startswith("...") and (nodes := by_node(x, g)) is not None:
        of_node = jnp.einsum(f"dn{of_x},dn{of_y}->n{of_W}", *nodes)
        return to_x, sum_over_nodes(of_node)
    return to_x, jnp.einsum(f"{of_x},{of_y}->{of_W}", x, g)


einsum_wide.defvjp(lambda spec, x, W: (einsum_wide(spec, x, W), (x, W)), _einsum_wide_backward)


def rms_norm(x: Float[Array, "*n d"], eps: float, scale: Float[Array, " d"] | None = None) -> Float[Array, "*n d"]:
    """``x / √(mean(x²) + eps)``, times ``scale`` if given. Statistics are in fp32, the result in the dtype of ``x``."""
    y = wide(x)
    y = (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return y if scale is None else y * scale.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*n d"], eps: float, scale: Float[Array, " d"], bias: Float[Array, " d"]
) -> Float[Array, "*n d"]:
    """``(x − mean) / √(variance + eps) · scale + bias``, computed in fp32 and returned in the dtype of ``x``."""
    y = wide(x)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale + bias).astype(x.dtype)


def kl_divergence(clean: Float[Array, "*n vocab"], masked: Float[Array, "*n vocab"]) -> Float[Array, "*n"]:
    """KL(softmax(clean) ‖ softmax(masked)) per position, in nats, from logits in fp32 or wider (R1)."""
    return divergence_from(jax.nn.log_softmax(wide(clean)), masked)


def divergence_from(log_p: Float[Array, "*n vocab"], masked: Float[Array, "*n vocab"]) -> Float[Array, "*n"]:
    """Returns `kl_divergence`, given the logarithms of the clean probabilities in fp32 or wider."""
    log_q = jax.nn.log_softmax(wide(masked))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def mean_squared_error(clean: Float[Array, "*n d"], masked: Float[Array, "*n d"]) -> Float[Array, ""]:
    """Returns R1 for toys: the mean of the squared differences over all elements, in fp32 or wider."""
    return jnp.mean((wide(clean) - wide(masked)) ** 2)
