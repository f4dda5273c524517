"""Scaled dot-product attention with grouped heads: a plain form, one in blocks of queries, and cuDNN's kernel.

All three take and return the same arrays; they differ only in what they keep and in rounding. The memory policy chooses
one.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.memory import Attention

BLOCK = 128
"""Queries per block. At T = 2048 the scores of a block are a sixteenth of all: 32 MiB for 32 heads of one sequence in
fp32. On a CPU, no other size was faster (docs/measurements/attention.md)."""


class Window(NamedTuple):
    """A sliding window. Where ``applies`` holds, a query reads the last ``size`` keys up to its own, elsewhere all keys
    up to its own. ``applies`` belongs to one layer of a scan, so it may be traced."""

    size: int
    applies: Bool[Array, ""] | bool = True


def attend(
    q: Float[Array, "B T heads d"],
    k: Float[Array, "B T kv_heads d"],
    v: Float[Array, "B T kv_heads d"],
    causal: bool,
    implementation: Attention = "plain",
    window: Window | None = None,
    cap: float | None = None,
) -> Float[Array, "B T heads d"]:
    """Returns attention in which query head h reads key head ``h // (heads / kv_heads)``. Scores are scaled by
    ``d^-½``; the softmax is computed in fp32 or wider.

    ``window``: how far back causal attention reads. ``cap``: turns a score s into ``cap · tanh(s / cap)`` (Gemma 2).
    Raises RuntimeError for ``flash`` if JAX's CUDA plugin is installed but cuDNN cannot be found.
    """
    assert window is None or causal, "windows are of causal attention"
    if window is not None and q.shape[1] <= window.size:
        window = None
    match implementation:
        case "plain":
            return plain(q, k, v, causal, window, cap)
        case "blocked":
            return blocked(q, k, v, causal, window=window, cap=cap)
        case "flash":
            # cuDNN does not support a cap.
            if cap is not None or not (_takes(q) and _can_be_lowered_for_cuda()):
                return blocked(q, k, v, causal, window=window, cap=cap)
            flash = partial(_flash_in_window, causal, window)
            return lax.platform_dependent(q, k, v, cuda=flash, default=partial(blocked, causal=causal, window=window))


def plain(
    q: Float[Array, "B T heads d"],
    k: Float[Array, "B T kv_heads d"],
    v: Float[Array, "B T kv_heads d"],
    causal: bool,
    window: Window | None = None,
    cap: float | None = None,
) -> Float[Array, "B T heads d"]:
    """Computes attention in the reference form: all scores ``[B, heads, T, T]`` exist at once and are kept for the
    backward pass."""
    return _attend_queries(q, k, v, jnp.zeros((), jnp.int32) if causal else None, window, cap)


def blocked(
    q: Float[Array, "B T heads d"],
    k: Float[Array, "B T kv_heads d"],
    v: Float[Array, "B T kv_heads d"],
    causal: bool,
    block: int = BLOCK,
    window: Window | None = None,
    cap: float | None = None,
) -> Float[Array, "B T heads d"]:
    """Computes `plain` for ``block`` queries at a time: scores ``[B, heads, block, T]`` exist for one block only."""
    B, T, heads, d = q.shape
    block = min(block, T)
    n_blocks = -(-T // block)
    # k and v enter in fp32 and are cast per block, which changes nothing in the forward pass. The backward pass sums
    # the blocks' gradients of k and v in the dtype in which they enter. In bf16 their rounding error is 1.25 times that
    # of the plain form with any number of blocks; summed in bf16 it would be 1.5 times with 8 blocks and 2.2 times with
    # 32.
    wide_k, wide_v = wide(k), wide(v)

    # The body of a loop cannot be merged with its recomputation anyway; a single block needs the barrier.
    @partial(jax.checkpoint, prevent_cse=n_blocks == 1)
    def attend_block(wide_k: Array, wide_v: Array, queries: Array, first: Array) -> Array:
        keys, values = wide_k.astype(k.dtype), wide_v.astype(v.dtype)
        return _attend_queries(queries, keys, values, first if causal else None, window, cap)

    if n_blocks == 1:
        return attend_block(wide_k, wide_v, q, jnp.zeros((), jnp.int32))
    # Padding queries beyond T read every key, like the last query, and are cut off.
    padded = jnp.pad(q, ((0, 0), (0, n_blocks * block - T), (0, 0), (0, 0)))
    queries = padded.reshape(B, n_blocks, block, heads, d).swapaxes(0, 1)
    firsts = block * jnp.arange(n_blocks, dtype=jnp.int32)
    out = lax.map(lambda xs: attend_block(wide_k, wide_v, *xs), (queries, firsts))
    return out.swapaxes(0, 1).reshape(B, n_blocks * block, heads, d)[:, :T]


def _attend_queries(
    q: Float[Array, "B Q heads d"],
    k: Float[Array, "B T kv_heads d"],
    v: Float[Array, "B T kv_heads d"],
    first: Int[Array, ""] | None,
    window: Window | None,
    cap: float | None,
) -> Float[Array, "B Q heads d"]:
    """Returns attention for the queries at positions ``first, first + 1, …``, which read the keys up to their own. With
    ``first`` None they read every key.

    `jax.nn.dot_product_attention` computes the same, except that it rounds float64 to fp32 before the softmax.
    """
    B, Q, heads, d = q.shape
    weights = _weights(q, k, first, window, cap).astype(v.dtype)
    return jnp.einsum("BkgQT,BTkd->BQkgd", weights, v).reshape(B, Q, heads, d)


def pattern(
    q: Float[Array, "B T heads d"],
    k: Float[Array, "B T kv_heads d"],
    causal: bool,
    window: Window | None = None,
    cap: float | None = None,
) -> Float[Array, "B heads T T"]:
    """Returns the attention weights, in fp32 or wider, by which `attend` multiplies the values. They add up to 1 over
    the last axis, that of keys."""
    B, T, heads, _ = q.shape
    weights = _weights(q, k, jnp.zeros((), jnp.int32) if causal else None, window, cap)
    return weights.reshape(B, heads, T, T)


def _weights(
    q: Float[Array, "B Q heads d"],
    k: Float[Array, "B T kv_heads d"],
    first: Int[Array, ""] | None,
    window: Window | None,
    cap: float | None,
) -> Float[Array, "B kv_heads served Q T"]:
    """Returns the softmax of the scores; arguments as for `_attend_queries`."""
    B, Q, heads, d = q.shape
    groups = q.reshape(B, Q, k.shape[2], heads // k.shape[2], d)
    scores = jnp.einsum("BQkgd,BTkd->BkgQT", groups, k, preferred_element_type=wide(q).dtype) * d**-0.5
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if first is not None:
        own = first + jnp.arange(Q, dtype=jnp.int32)[:, None]
        read = jnp.arange(k.shape[1], dtype=jnp.int32)
        past = own >= read
        if window is not None:
            past &= (own - read < window.size) | ~jnp.asarray(window.applies)
        scores = jnp.where(past, scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


# ---- cuDNN ----


def _takes(q: Float[Array, "B T heads d"]) -> bool:
    """Returns whether cuDNN's kernel supports such heads, on any GPU since Ampere."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


class MissingCudnn(RuntimeError):
    """JAX's CUDA plugin is installed, but not the library that provides its attention kernel."""


@cache
def _can_be_lowered_for_cuda() -> bool:
    """Returns False if JAX has no CUDA plugin: it can then neither trace the kernel nor lower anything for a GPU."""
    heads = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(partial(_cudnn, False, None), heads, heads, heads)
    except RuntimeError as error:
        if "not detected" in str(error):
            return False
        raise MissingCudnn(f"JAX's CUDA plugin cannot load cuDNN (pip install nvidia-cudnn-cu13): {error}") from error
    return True


def _flash_in_window(causal: bool, window: Window | None, q: Array, k: Array, v: Array) -> Array:
    if window is None or window.applies is True:
        return _flash(causal, None if window is None else window.size, q, k, v)
    # The kernel's window is static, so a scan over layers with and without a window chooses between two kernels.
    inside, everywhere = partial(_flash, causal, window.size), partial(_flash, causal, None)
    out: Array = lax.cond(window.applies, inside, everywhere, q, k, v)
    return out


def _cudnn(causal: bool, window: int | None, q: Array, k: Array, v: Array) -> Array:
    # The window of a causal mask counts the keys before the query's own.
    before = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=before, implementation="cudnn")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(causal: bool, window: int | None, q: Array, k: Array, v: Array) -> Array:
    """Calls `_cudnn`, also under `jax.vmap` with only some arrays mapped: the kernel's own rule assumes that all
    are."""
    return _cudnn(causal, window, *_mapped_alike((q, k, v)))


def _flash_forward(causal: bool, window: int | None, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    return jax.vjp(partial(_cudnn, causal, window), *_mapped_alike((q, k, v)))


def _flash_backward(causal: bool, window: int | None, pullback: Any, gradient: Array) -> tuple[Array, Array, Array]:
    pullback, gradient = _mapped_alike((pullback, gradient))
    return pullback(gradient)


_flash.defvjp(_flash_forward, _flash_backward)


@jax.custom_batching.custom_vmap
def _mapped_alike(arrays: Any) -> Any:
    """Returns the arrays unchanged; under `jax.vmap`, all are mapped if one is."""
    return arrays


@_mapped_alike.def_vmap
def _map_all(size: int, mapped: Sequence[Any], arrays: Any) -> tuple[Any, Any]:
    spread = jax.tree.map(lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape)), arrays, mapped[0])
    return spread, jax.tree.map(lambda _: True, mapped[0])
