"""GPT: learned positions, LayerNorm before each block and at the end, biases everywhere, a head of its own.

In a layer the MLP block comes before the attention block. Matrices are kept for multiplication from the right
(``x @ W``) and stacked over layers. Such a model is trained and saved here; it is no target of a decomposition.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.memory import MemoryPolicy
from param_decomp_jax.numerics import matmul, matmul_wide, wide
from param_decomp_jax.remat import over_layers

Weights = dict[str, Any]
Part = Literal["mlp", "attention", "block"]

_INTO_RESIDUAL = ("mlp_out", "o_proj")


@dataclass(frozen=True)
class GPTConfig:
    """Architecture. ``n_positions``: longest sequence. ``dropout``: share of what a block adds to the residual stream
    that is dropped in training."""

    vocab_size: int
    n_positions: int
    d_model: int
    n_layers: int
    n_heads: int
    d_mlp: int
    dropout: float = 0.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Computation:
    """How a pass is computed. ``dtype``: of activations and of the inputs of matrix products. ``softmax_dtype``: of
    attention's scores and softmax. Both change the rounding alone; LayerNorm's statistics and the logits are in fp32.

    ``remat``: parts that keep their input alone and are made again in the backward, ``block`` being a whole layer.
    ``layers``: one scanned layer, or all written out.
    """

    dtype: Any = jnp.float32
    softmax_dtype: Any = jnp.float32
    remat: frozenset[Part] = frozenset()
    layers: Literal["scan", "unroll"] = "scan"


def weight_shapes(config: GPTConfig) -> Weights:
    """Shape of every array, in the structure of the weights."""
    d, m, n = config.d_model, config.d_mlp, config.n_layers
    matrices = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (d, d)) | {"mlp_in": (d, m), "mlp_out": (m, d)}
    layers: dict[str, tuple[int, ...]] = {name: (n, *shape) for name, shape in matrices.items()}
    layers |= {f"{name}_bias": (n, shape[1]) for name, shape in matrices.items()}
    layers |= {name: (n, d) for norm in ("mlp_norm", "attention_norm") for name in (norm, f"{norm}_bias")}
    return {
        "embed": (config.vocab_size, d),
        "positions": (config.n_positions, d),
        "layers": layers,
        "norm": (d,),
        "norm_bias": (d,),
        "head": (d, config.vocab_size),
        "head_bias": (config.vocab_size,),
    }


def init_weights(key: PRNGKeyArray, config: GPTConfig, std: float) -> Weights:
    """Random fp32 weights: N(0, std²), what writes to the residual stream times 1/√(2·n_layers); biases 0, norms 1."""
    flat, structure = jax.tree_util.tree_flatten_with_path(
        weight_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )

    def leaf(number: int, name: str, shape: tuple[int, ...]) -> Array:
        if "bias" in name:
            return jnp.zeros(shape, jnp.float32)
        if "norm" in name:
            return jnp.ones(shape, jnp.float32)
        scale = std / math.sqrt(2 * config.n_layers) if name in _INTO_RESIDUAL else std
        return scale * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)

    leaves = [leaf(number, path[-1].key, shape) for number, (path, shape) in enumerate(flat)]
    return jax.tree.unflatten(structure, leaves)


def gpt_logits(
    weights: Weights,
    config: GPTConfig,
    tokens: Int[Array, "B T"],
    how: Computation,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "B T vocab"]:
    """Next-token logits in fp32. ``key``: of what dropout drops; None drops nothing."""
    x = weights["embed"][tokens].astype(how.dtype) + weights["positions"][: tokens.shape[1]].astype(how.dtype)
    keys = jax.random.split(key, config.n_layers) if key is not None and config.dropout else None

    def recomputed(name: Part, of: Any) -> Any:
        # With its barrier in a scan too: without, XLA recomputes the MLP while attention's backward is still to come
        # (19.3 GB instead of 17.8 planned for the ladder's batch of 256 on an A5000).
        return jax.checkpoint(of) if name in how.remat else of

    mlp = recomputed("mlp", partial(_mlp, config))
    attention = recomputed("attention", partial(_attention, config, how.softmax_dtype))

    def layer(x: Array, of_layer: tuple[Mapping[str, Array], PRNGKeyArray | None]) -> tuple[Array, None]:
        w, key = of_layer
        of_mlp, of_attention = jax.random.split(key) if key is not None else (None, None)
        x = x + mlp(x, w, of_mlp)
        return x + attention(x, w, of_attention), None

    x, _ = over_layers(MemoryPolicy(layers=how.layers), recomputed("block", layer), x, (weights["layers"], keys))
    x = _layer_norm(x, weights["norm"], weights["norm_bias"], config.norm_eps)
    return matmul_wide(x, weights["head"]) + weights["head_bias"]


def _mlp(
    config: GPTConfig, x: Float[Array, "B T d"], w: Mapping[str, Array], key: PRNGKeyArray | None
) -> Float[Array, "B T d"]:
    h = _layer_norm(x, w["mlp_norm"], w["mlp_norm_bias"], config.norm_eps)
    h = jax.nn.gelu(_linear(h, w, "mlp_in"))
    return _dropped(_linear(h, w, "mlp_out"), config.dropout, key)


def _attention(
    config: GPTConfig, softmax_dtype: Any, x: Float[Array, "B T d"], w: Mapping[str, Array], key: PRNGKeyArray | None
) -> Float[Array, "B T d"]:
    B, T, d = x.shape
    head_dim = d // config.n_heads
    h = _layer_norm(x, w["attention_norm"], w["attention_norm_bias"], config.norm_eps)
    q, k, v = (_linear(h, w, name).reshape(B, T, config.n_heads, head_dim) for name in ("q_proj", "k_proj", "v_proj"))
    accumulated = jnp.promote_types(x.dtype, softmax_dtype)
    scores = jnp.einsum("BQhd,BKhd->BhQK", q, k, preferred_element_type=accumulated) * head_dim**-0.5
    past = jnp.tril(jnp.ones((T, T), bool))
    pattern = jax.nn.softmax(jnp.where(past, scores.astype(softmax_dtype), -jnp.inf), axis=-1).astype(x.dtype)
    read = jnp.einsum("BhQK,BKhd->BQhd", pattern, v).reshape(B, T, d)
    return _dropped(_linear(read, w, "o_proj"), config.dropout, key)


def _linear(x: Float[Array, "*n d_in"], w: Mapping[str, Array], name: str) -> Float[Array, "*n d_out"]:
    return matmul(x, w[name]) + w[f"{name}_bias"].astype(x.dtype)


def _layer_norm(
    x: Float[Array, "*n d"], scale: Float[Array, " d"], bias: Float[Array, " d"], eps: float
) -> Float[Array, "*n d"]:
    """``(x − mean) / √(variance + eps) · scale + bias``, in fp32; the result in the dtype of ``x``."""
    y = wide(x)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale + bias).astype(x.dtype)


def _dropped(x: Float[Array, "*s"], rate: float, key: PRNGKeyArray | None) -> Float[Array, "*s"]:
    """``x`` with each element 0 with probability ``rate``, else divided by what is kept; all of it without a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
