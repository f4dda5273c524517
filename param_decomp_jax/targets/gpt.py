"""GPT: learned positions, LayerNorm before each block and at the end, biases everywhere, a separate head.

In a layer the MLP block comes before the attention block. Matrices are kept for multiplication from the right (``x @
W``) and stacked over layers; biases are frozen and always on. `pd pretrain`, which trains such a model (`gpt_logits`),
and the target that is decomposed (`GPT`) share the code of a layer. Files have our own format: one tensor per layer and
matrix, as it is used, ``x @ W`` with W ``[d_in, d_out]``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.decomposition.sites import Matrix, Sites, Units
from param_decomp_jax.nn.fused_kl import Head
from param_decomp_jax.nn.numerics import layer_norm, matmul, matmul_wide
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import gather
from param_decomp_jax.sharding.remat import over_layers
from param_decomp_jax.targets.architecture import Architecture, Tensors, TokenInputs
from param_decomp_jax.targets.base import LayerLinears, Weights, hooked
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.points import Point, points_of_layers

Part = Literal["mlp", "attention", "block"]
Product = Callable[[str, Array, Array], Array]
"""How a layer applies a matrix: its kind, the activation, W."""
Attend = Callable[[Array, Array, Array], Array]
"""Causal attention: maps queries, keys and values ``[B, T, heads, d]`` to what each position reads, in the same
shape."""

KINDS = ("mlp_in", "mlp_out", "q_proj", "k_proj", "v_proj", "o_proj")
"""The six matrices of a layer, in order of application."""
_READS = {
    "mlp_in": "mlp_in", "mlp_out": "mlp_hidden",
    "q_proj": "attn_in", "k_proj": "attn_in", "v_proj": "attn_in", "o_proj": "attn_out",
}  # fmt: skip


@dataclass(frozen=True)
class GPTConfig(Architecture):
    """The sizes of a GPT. ``n_positions``: the longest sequence. ``dropout``: the share of a block's output that is
    dropped in training."""

    vocab_size: int
    n_positions: int
    d_model: int
    n_layers: int
    n_heads: int
    d_mlp: int
    dropout: float = field(default=0.0, metadata={"range": (0.0, 1.0)})
    norm_eps: float = 1e-5

    name = "param_decomp_gpt"
    title = "GPT"
    model_classes = ("GPT",)

    @property
    def inputs(self) -> TokenInputs:
        return TokenInputs(self.vocab_size, self.n_positions)

    def matrix_shape(self, kind: str) -> tuple[int, int]:
        """Returns ``(d_in, d_out)`` of one of the six matrices."""
        d, m = self.d_model, self.d_mlp
        return {"mlp_in": (d, m), "mlp_out": (m, d)}.get(kind, (d, d))

    def faces(self, kind: str) -> Units:
        """Returns the units that a kind of matrix faces (L7)."""
        side: Literal["output", "input"] = "input" if kind in ("mlp_out", "o_proj") else "output"
        if kind in ("mlp_in", "mlp_out"):
            return Units("neuron", side, self.d_mlp)
        return Units("attention_head", side, self.n_heads)

    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(
            Matrix(
                f"layers.{layer}.{kind}", layer, kind, _READS[kind], *self.matrix_shape(kind), faces=self.faces(kind)
            )
            for layer in range(self.n_layers)
            for kind in KINDS
        )

    @property
    def residual_width(self) -> int:
        return self.d_model

    def points(self) -> tuple[Point, ...]:
        """The points of R6. In a layer, those of the MLP come first."""
        return points_of_layers(self.n_layers, ("resid_pre", "mlp_out", "attn_out", "resid_post"))

    def weight_shapes(self) -> dict[str, Any]:
        d, n = self.d_model, self.n_layers
        layers: dict[str, tuple[int, ...]] = {kind: (n, *self.matrix_shape(kind)) for kind in KINDS}
        layers |= {f"{kind}_bias": (n, self.matrix_shape(kind)[1]) for kind in KINDS}
        layers |= {name: (n, d) for norm in ("mlp_norm", "attention_norm") for name in (norm, f"{norm}_bias")}
        return {
            "embed": (self.vocab_size, d),
            "positions": (self.n_positions, d),
            "layers": layers,
            "norm": (d,),
            "norm_bias": (d,),
            "head": (d, self.vocab_size),
            "head_bias": (self.vocab_size,),
        }

    def tensors(self) -> dict[str, Any]:
        shapes = self.weight_shapes()
        layers = {
            name: Tensors(tuple(f"layers.{layer}.{name}" for layer in range(self.n_layers)), stacked=True)
            for name in shapes.pop("layers")
        }
        return {"layers": layers, **{name: Tensors((name,)) for name in shapes}}

    def target(self, sites: Sites, memory: MemoryPolicy = PLAIN, compute_dtype: Any = jnp.float32) -> "GPT":
        return GPT(self, sites, memory, compute_dtype)

    def describe(self) -> str:
        width = f"{self.n_layers} layers of width {self.d_model:,}, MLP {self.d_mlp:,}"
        return f"GPT, {width}, {self.n_heads} heads, {self.n_positions:,} positions, vocabulary {self.vocab_size:,}"


@dataclass(frozen=True)
class GPTComputation:
    """How a pass is computed. ``dtype``: that of activations and of the inputs of matrix products. ``softmax_dtype``:
    that of attention's scores and softmax. Both change only the rounding; LayerNorm's statistics and the logits are in
    fp32.

    ``remat``: parts that keep only their input and are recomputed in the backward pass; ``block`` is a whole layer.
    ``layers``: one scanned layer, or all layers unrolled.
    """

    dtype: Any = jnp.float32
    softmax_dtype: Any = jnp.float32
    remat: frozenset[Part] = frozenset()
    layers: Literal["scan", "unroll"] = "scan"


def gpt_logits(
    weights: Weights,
    config: GPTConfig,
    tokens: Int[Array, "B T"],
    how: GPTComputation,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "B T vocab"]:
    """Returns next-token logits in fp32. ``key``: the random key of dropout; None drops nothing."""
    x = weights["embed"][tokens].astype(how.dtype) + weights["positions"][: tokens.shape[1]].astype(how.dtype)
    keys = jax.random.split(key, config.n_layers) if key is not None and config.dropout else None

    def recomputed(name: Part, of: Any) -> Any:
        # The barrier is kept in a scan too. Without it, XLA recomputes the MLP before attention's backward pass (19.3
        # GB instead of 17.8 planned for the ladder's batch of 256 on an A5000).
        return jax.checkpoint(of) if name in how.remat else of

    mlp = recomputed("mlp", partial(_trained_mlp, config))
    attention = recomputed("attention", partial(_trained_attention, config, how.softmax_dtype))

    def layer(x: Array, of_layer: tuple[Mapping[str, Array], PRNGKeyArray | None]) -> tuple[Array, None]:
        w, key = of_layer
        of_mlp, of_attention = jax.random.split(key) if key is not None else (None, None)
        x = x + mlp(x, w, of_mlp)
        return x + attention(x, w, of_attention), None

    x, _ = over_layers(MemoryPolicy(layers=how.layers), recomputed("block", layer), x, (weights["layers"], keys))
    x = layer_norm(x, config.norm_eps, weights["norm"], weights["norm_bias"])
    return matmul_wide(x, weights["head"]) + weights["head_bias"]


def _trained_mlp(
    config: GPTConfig, x: Float[Array, "B T d"], w: Mapping[str, Array], key: PRNGKeyArray | None
) -> Float[Array, "B T d"]:
    return _dropped(_mlp(config, x, w, _product), config.dropout, key)


def _trained_attention(
    config: GPTConfig, softmax_dtype: Any, x: Float[Array, "B T d"], w: Mapping[str, Array], key: PRNGKeyArray | None
) -> Float[Array, "B T d"]:
    return _dropped(_attention(config, x, w, _product, partial(_attend, softmax_dtype)), config.dropout, key)


def _product(kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]) -> Float[Array, "*n d_out"]:
    return matmul(x, W)


def _attend(
    softmax_dtype: Any, q: Float[Array, "B T h d"], k: Float[Array, "B T h d"], v: Float[Array, "B T h d"]
) -> Float[Array, "B T h d"]:
    T, head_dim = q.shape[1], q.shape[-1]
    accumulated = jnp.promote_types(q.dtype, softmax_dtype)
    scores = jnp.einsum("BQhd,BKhd->BhQK", q, k, preferred_element_type=accumulated) * head_dim**-0.5
    past = jnp.tril(jnp.ones((T, T), bool))
    pattern = jax.nn.softmax(jnp.where(past, scores.astype(softmax_dtype), -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("BhQK,BKhd->BQhd", pattern, v)


def _mlp(
    config: GPTConfig, x: Float[Array, "B T d"], w: Mapping[str, Array], product: Product
) -> Float[Array, "B T d"]:
    """Returns what the MLP block adds to the residual stream."""
    h = layer_norm(x, config.norm_eps, w["mlp_norm"], w["mlp_norm_bias"])
    h = jax.nn.gelu(_affine(product, h, w, "mlp_in"))
    return _affine(product, h, w, "mlp_out")


def _attention(
    config: GPTConfig, x: Float[Array, "B T d"], w: Mapping[str, Array], product: Product, attend: Attend
) -> Float[Array, "B T d"]:
    """Returns what the attention block adds to the residual stream."""
    B, T, d = x.shape
    head_dim = d // config.n_heads
    h = layer_norm(x, config.norm_eps, w["attention_norm"], w["attention_norm_bias"])
    q, k, v = (
        _affine(product, h, w, name).reshape(B, T, config.n_heads, head_dim) for name in ("q_proj", "k_proj", "v_proj")
    )
    return _affine(product, attend(q, k, v).reshape(B, T, d), w, "o_proj")


def _affine(
    product: Product, x: Float[Array, "*n d_in"], w: Mapping[str, Array], kind: str
) -> Float[Array, "*n d_out"]:
    return product(kind, x, w[kind]) + w[f"{kind}_bias"].astype(x.dtype)


def _dropped(x: Float[Array, "*s"], rate: float, key: PRNGKeyArray | None) -> Float[Array, "*s"]:
    """Returns ``x`` with each element 0 with probability ``rate`` and otherwise divided by 1 − ``rate``; ``x`` itself
    without a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


@dataclass(frozen=True)
class GPT(Decoder):
    """A GPT as a target, without dropout."""

    architecture: GPTConfig

    @property
    def writes_residual(self) -> frozenset[str]:
        return frozenset({"o_proj", "mlp_out"})

    def embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        positions = gather(weights["positions"], self.frozen, self.compute_dtype)[: tokens.shape[1]]
        return self.look_up(weights["embed"], tokens) + positions

    def layer(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B T d"]:
        x = x + hooked(linear, "hook_mlp_out", _mlp(self.architecture, x, w, linear))
        attended = _attention(self.architecture, x, w, linear, partial(self.attend, linear))
        return x + hooked(linear, "hook_attn_out", attended)

    def queries_and_keys(
        self, weights: Weights, layer: int, q: Float[Array, "n T _"], k: Float[Array, "m S _"]
    ) -> tuple[Float[Array, "n T heads d"], Float[Array, "m S heads d"]]:
        """Returns them unchanged."""
        heads = self.architecture.n_heads
        return q.reshape(*q.shape[:2], heads, -1), k.reshape(*k.shape[:2], heads, -1)

    def head(self, weights: Weights, dtype: Any) -> Head:
        arrays = (weights[name] for name in ("head_bias", "norm", "norm_bias"))
        return Head(self._logits, gather(weights["head"], self.frozen, dtype), *arrays)

    def _logits(
        self,
        head: Float[Array, "d vocab"],
        bias: Float[Array, " vocab"],
        norm: Float[Array, " d"],
        norm_bias: Float[Array, " d"],
        hidden: Float[Array, "*n d"],
    ) -> Float[Array, "*n vocab"]:
        return matmul_wide(layer_norm(hidden, self.architecture.norm_eps, norm, norm_bias), head) + bias
