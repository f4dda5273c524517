"""Llama: RMSNorm, rotary embedding (with the Llama-3.1 scaling), grouped-query attention, SwiGLU.

Matrices are kept for multiplication from the right (``x @ W``) and stacked over layers. The forward ends at the last
hidden state; the head belongs to the error, which may then take it in blocks of tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.attention import attend
from param_decomp_jax.fused_kl import Head, fused_kl
from param_decomp_jax.memory import PLAIN, MemoryPolicy
from param_decomp_jax.mesh import Axes, constrain, gather
from param_decomp_jax.numerics import kl_divergence, matmul_wide, rms_norm
from param_decomp_jax.remat import named, token_blocks
from param_decomp_jax.rotary import frequencies, rotate
from param_decomp_jax.sites import Matrix, Sites
from param_decomp_jax.targets.base import (
    Forward,
    LayerLinears,
    Linears,
    UniformLayers,
    Weights,
    run_layers,
    site_weights,
)  # fmt: skip
from param_decomp_jax.targets.plain_linears import FROZEN, UNTOUCHED

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven matrices of a layer, in order of application."""

_READS = {
    "q_proj": "attn_in", "k_proj": "attn_in", "v_proj": "attn_in", "o_proj": "attn_out",
    "gate_proj": "mlp_in", "up_proj": "mlp_in", "down_proj": "mlp_hidden",
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """The frequency scaling of Llama 3.1 (Hugging Face's ``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture, with the meanings of Hugging Face's ``config.json``."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def matrix_shape(self, kind: str) -> tuple[int, int]:
        """``(d_in, d_out)`` of one of the seven matrices."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "q_proj": (self.d_model, q),
            "k_proj": (self.d_model, kv),
            "v_proj": (self.d_model, kv),
            "o_proj": (q, self.d_model),
            "gate_proj": (self.d_model, self.d_mlp),
            "up_proj": (self.d_model, self.d_mlp),
            "down_proj": (self.d_mlp, self.d_model),
        }[kind]


def module_name(layer: int, kind: str) -> str:
    """Hugging Face's module name without ``model.``: ``layers.18.mlp.up_proj``."""
    return f"layers.{layer}.{'self_attn' if kind in KINDS[:4] else 'mlp'}.{kind}"


def matrices(config: LlamaConfig) -> tuple[Matrix, ...]:
    """Every matrix that can be a site, in canonical order."""
    return tuple(
        Matrix(module_name(layer, kind), layer, kind, _READS[kind], *config.matrix_shape(kind))
        for layer in range(config.n_layers)
        for kind in KINDS
    )


def weight_shapes(config: LlamaConfig) -> dict[str, Any]:
    """Shape of every array, in the structure of the weights."""
    d, n = config.d_model, config.n_layers
    layers = {kind: (n, *config.matrix_shape(kind)) for kind in KINDS}
    shapes: dict[str, Any] = {
        "embed": (config.vocab_size, d),
        "layers": {"input_norm": (n, d), "post_norm": (n, d), **layers},
        "norm": (d,),
    }
    if not config.tied:
        shapes["head"] = (d, config.vocab_size)
    return shapes


def weight_axes(config: LlamaConfig) -> dict[str, Any]:
    """Logical axes of every array, in the structure of the weights: matrices are split by output."""

    def axes(path: tuple[Any, ...], shape: tuple[int, ...]) -> Axes:
        return Axes((None,) * len(shape)) if "norm" in path[-1].key else Axes((*(None,) * (len(shape) - 1), "split"))

    return jax.tree_util.tree_map_with_path(axes, weight_shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def init_weights(key: PRNGKeyArray, config: LlamaConfig) -> Weights:
    """Random fp32 weights: N(0, 0.02²), a layer's output matrices scaled by 1/√(2·n_layers), norms 1."""
    flat, structure = jax.tree_util.tree_flatten_with_path(
        weight_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    leaves = []
    for number, (path, shape) in enumerate(flat):
        name = path[-1].key
        if "norm" in name:
            leaves.append(jnp.ones(shape, jnp.float32))
        else:
            scale = 0.02 / math.sqrt(2 * config.n_layers) if name in ("o_proj", "down_proj") else 0.02
            leaves.append(scale * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32))
    return jax.tree.unflatten(structure, leaves)


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angular frequencies ``[head_dim / 2]`` in radians per position; scaled as Llama 3.1 does when configured."""
    plain = frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling is None:
        return plain
    s = config.rope_scaling
    # Turns over the original context: many turns stay as they are, few are stretched by `factor`, smooth in between.
    turns = s.original_max_position_embeddings * plain / (2 * np.pi)
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / s.factor


@dataclass(frozen=True)
class Llama:
    """The target of sections 1 and 2. ``compute_dtype``: of activations and of the inputs of products (N1)."""

    config: LlamaConfig
    sites: Sites
    memory: MemoryPolicy = PLAIN
    compute_dtype: Any = jnp.float32

    def forward(
        self, weights: Weights, inputs: Int[Array, "B T"], linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Token ids to the last hidden state (before the final norm), ``[B, T, d_model]``."""
        first, x = start if start is not None else (0, self._embed(weights, inputs))
        return Forward(*run_layers(self.uniform_layers(weights), x, linears, first, self.memory))

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        """All layers are alike."""
        return (UniformLayers(self._layer, weights["layers"], 0, self.config.n_layers),)

    def _embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        # Each device looks up its own columns for the whole batch; rows move, the table does not.
        columns = constrain(weights["embed"], None, "split")[gather(tokens, Axes(("batch_everywhere",)), tokens.dtype)]
        return constrain(constrain(columns, None, None, "split").astype(self.compute_dtype), "batch")

    def _layer(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B T d"]:
        config = self.config
        B, T, _ = x.shape
        h = rms_norm(x, config.rms_norm_eps, w["input_norm"])
        q = linear("q_proj", h, w["q_proj"]).reshape(B, T, config.n_heads, config.head_dim)
        k = linear("k_proj", h, w["k_proj"]).reshape(B, T, config.n_kv_heads, config.head_dim)
        v = linear("v_proj", h, w["v_proj"]).reshape(B, T, config.n_kv_heads, config.head_dim)
        turning = rotary_frequencies(config)
        q, k = rotate(q, turning), rotate(k, turning)
        attended = named(attend(q, k, v, True, self.memory.attention), "attention").reshape(B, T, -1)
        x = x + linear("o_proj", attended, w["o_proj"])
        h = rms_norm(x, config.rms_norm_eps, w["post_norm"])
        hidden = jax.nn.silu(linear("gate_proj", h, w["gate_proj"])) * linear("up_proj", h, w["up_proj"])
        return x + linear("down_proj", hidden, w["down_proj"])

    def logits(self, weights: Weights, hidden: Float[Array, "*n d"]) -> Float[Array, "*n vocab"]:
        """Next-token logits in fp32 (at least) from the forward's output."""
        return self._head(self._gathered_head(weights, hidden.dtype), weights["norm"], hidden)

    def _gathered_head(self, weights: Weights, dtype: Any) -> Float[Array, "d vocab"]:
        if self.config.tied:
            return gather(weights["embed"], FROZEN, dtype).T
        return gather(weights["head"], FROZEN, dtype)

    def _head(self, head: Float[Array, "d vocab"], norm: Float[Array, " d"], hidden: Float[Array, "*n d"]) -> Array:
        return matmul_wide(rms_norm(hidden, self.config.rms_norm_eps, norm), head)

    def errors(
        self, weights: Weights, clean: Float[Array, "B T d"], masked: Sequence[Float[Array, "B T d"]]
    ) -> Float[Array, " streams"]:
        """R1: mean over positions of KL(softmax(clean) ‖ softmax(masked))."""
        head = Head(self._head, self._gathered_head(weights, clean.dtype), weights["norm"])
        if self.memory.recomputes("vocabulary"):
            n_blocks = token_blocks(clean.shape[:-1], self.memory.vocabulary_block)
            return fused_kl(head, clean, masked, n_blocks)
        logits = head(clean)
        return jnp.stack([jnp.mean(kl_divergence(logits, head(x))) for x in masked])

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "layers d_in d_out"]]:
        """W of every site, by stack."""
        layers = weights["layers"]
        return site_weights(self.sites, lambda s: layers[s.kind][s.first : s.first + s.n_layers])

    def weight_axes(self, weights: Weights) -> Any:
        """`weight_axes` of the configuration."""
        return weight_axes(self.config)


def language_logits(
    weights: Weights, config: LlamaConfig, tokens: Int[Array, "B T"], memory: MemoryPolicy = PLAIN
) -> Float[Array, "B T vocab"]:
    """The network as it stands, no site decomposed: fp32 logits."""
    model = Llama(config, Sites(()), memory, weights["embed"].dtype)
    return model.logits(weights, model.forward(weights, tokens, UNTOUCHED).output)
