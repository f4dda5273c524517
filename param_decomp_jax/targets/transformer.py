"""The decoder that a `transformer_config.py:TransformerConfig` describes, as a target.

Matrices are kept for multiplication from the right (``x @ W``) and stacked over layers; biases are frozen and always
on. All layers run in one scan, with a sliding window or without, because the window is a number that belongs to the
layer. Layers with experts and layers without are separate runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites, Stack
from param_decomp_jax.nn.attention import Window
from param_decomp_jax.nn.fused_kl import Head
from param_decomp_jax.nn.numerics import layer_norm, matmul_wide, rms_norm
from param_decomp_jax.nn.rotary import frequencies, rotate
from param_decomp_jax.sharding.by_layer import stacked
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import gather
from param_decomp_jax.targets.base import LayerLinears, UniformLayers, Weights, alike, hooked, site_weights
from param_decomp_jax.targets.decoder import NORMALIZED, Decoder
from param_decomp_jax.targets.experts import mixture
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.transformer_config import EMBED, QKV, SLICES, TransformerConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
IN_WINDOW, DEPTH = "in_window", "depth"
"""Numbers of a layer that its scan slices along with its weights."""


def rotary_frequencies(config: TransformerConfig) -> np.ndarray:
    """Returns angular frequencies ``[turning / 2]`` in radians per position, scaled as configured."""
    assert config.rope_theta is not None
    plain = frequencies(config.turning, config.rope_theta)
    return plain if config.rope_scaling is None else config.rope_scaling.scaled(plain, config.rope_theta)


@dataclass(frozen=True)
class Transformer(Decoder):
    """A decoder of any family."""

    architecture: TransformerConfig

    @property
    def joins_rows(self) -> bool:
        return True

    @property
    def writes_residual(self) -> frozenset[str]:
        """The kinds of matrices whose output is added to the residual stream, for experts with a weight. There are none
        if a norm follows each block."""
        kinds = ("o_proj", "down_proj", "experts.down_proj")
        return frozenset(kinds if self.architecture.norms == "before" else ())

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks of a layer. TransformerLens' ``ln2`` is the norm before the MLP, not one after it."""
        c = self.architecture
        middle = () if c.parallel else ("hook_resid_mid",)
        normalized = () if c.norms == "after" else (NORMALIZED,)
        mlp = ("hook_mlp_in", "mlp.hook_in", "mlp.hook_out", "hook_mlp_out")
        return super().hooks | {"hook_attn_out", *middle, *normalized, *mlp}

    @property
    def centers(self) -> bool:
        return self.architecture.norm == "layer" and self.architecture.norms == "before"

    def normalized(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        c = self.architecture
        ones = jnp.ones(x.shape[-1])
        return layer_norm(x, c.norm_eps, ones, 0 * ones) if c.norm == "layer" else rms_norm(x, c.norm_eps)

    def embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        return self._placed(self.look_up(weights["embed"], tokens), weights)

    def _placed(self, x: Float[Array, "B T d"], w: Mapping[str, Any]) -> Float[Array, "B T d"]:
        """Returns embeddings as they enter the first layer: scaled, with their positions added."""
        if self.architecture.embed_scale != 1:
            x = x * jnp.asarray(self.architecture.embed_scale, x.dtype)
        if self.architecture.learned_positions is not None:
            x = x + gather(w["positions"], self.frozen, self.compute_dtype)[: x.shape[1]]
        return x

    def _embedding(self, x: Int[Array, "B T"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B T d"]:
        """Computes layer −1 (F7): from tokens to the input of the first layer."""
        return self._placed(linear.look_up(EMBED, x, w[EMBED], self.compute_dtype), w)

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        c = self.architecture
        layers = dict(weights["layers"])
        if c.window is not None:
            layers[IN_WINDOW] = jnp.isin(jnp.arange(c.n_layers), jnp.asarray(c.window_layers))
        if c.scale_by_layer:
            layers[DEPTH] = jnp.arange(1, c.n_layers + 1, dtype=jnp.float32)
        groups = []
        if any(stack.lookup for stack in self.sites.stacks):
            own = {name: weights[name][None] for name in (EMBED, "positions") if name in weights}
            groups.append(UniformLayers(self._embedding, own, -1, 0))
        if c.experts is None:
            return (*groups, UniformLayers(self.layer, layers, 0, c.n_layers))
        done = {"dense": 0, "experts": 0}
        for run in c.runs():
            first, stop = run[0], run[-1] + 1
            of = "dense" if c.has_mlp(first) else "experts"
            rows = slice(done[of], done[of] + len(run))
            done[of] += len(run)
            own = {name: x[first:stop] for name, x in layers.items()} | {n: x[rows] for n, x in weights[of].items()}
            groups.append(UniformLayers(self.layer, own, first, stop))
        return groups

    def layer(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "rows T d"]:
        attended = self._added("attention_out_norm", self._attention(x, w, linear), w)
        after_attention = self._sum(x, hooked(linear, "hook_attn_out", attended), linear)
        if not self.architecture.parallel:
            after_attention = hooked(linear, "hook_resid_mid", after_attention)
        mlp_reads = hooked(linear, "hook_mlp_in", x if self.architecture.parallel else after_attention)
        given = hooked(linear, "mlp.hook_out", self._mlp(mlp_reads, w, linear))
        added = hooked(linear, "hook_mlp_out", self._added("mlp_out_norm", given, w))
        return self._sum(after_attention, added, linear)

    # ---- the two blocks ----

    def _attention(
        self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears
    ) -> Float[Array, "rows T d"]:
        c = self.architecture
        q, k, v = alike(linear, *self._queries_keys_values(self._read("input_norm", x, w), w, linear))
        if c.qk_norm == "all":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        if c.clip is not None:
            q, k, v = (jnp.clip(y, -c.clip, c.clip) for y in (q, k, v))
        B, T, _ = q.shape
        q = q.reshape(B, T, c.n_heads, c.head_dim)
        k, v = (y.reshape(B, T, c.n_kv_heads, c.head_dim) for y in (k, v))
        if c.qk_norm == "head":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k = self._placed_heads(q, k, w)
        window = None if c.window is None else Window(c.window, w[IN_WINDOW])
        attended = self.attend(linear, q, k, v, window, c.attention_cap)
        return self._affine("o_proj", attended.reshape(B, T, -1), w, linear)

    def _placed_heads(
        self, q: Float[Array, "n T heads d"], k: Float[Array, "m S kv_heads d"], w: Mapping[str, Array]
    ) -> tuple[Float[Array, "n T heads d"], Float[Array, "m S kv_heads d"]]:
        """Returns queries and keys rotated by their positions, from 0 on, and scaled to make up for attention's
        ``d^-½``."""
        c = self.architecture
        if c.rope_theta is not None:
            factor = 1.0 if c.rope_scaling is None else c.rope_scaling.attention_factor
            turn = partial(rotate, per_position=rotary_frequencies(c), pairs=c.rotary_pairs, factor=factor)
            q, k = turn(q), turn(k)
        if c.query_scale is not None:
            q = q * jnp.asarray(c.query_scale * c.head_dim**0.5, q.dtype)
        if c.scale_by_layer:
            q = q / w[DEPTH].astype(q.dtype)
        return q, k

    def queries_and_keys(
        self, weights: Weights, layer: int, q: Float[Array, "n T _"], k: Float[Array, "m S _"]
    ) -> tuple[Float[Array, "n T heads d"], Float[Array, "m S kv_heads d"]]:
        """Applies their norm's weight, the rotation and the scales, but not biases, the norm's division, or
        clipping."""
        c = self.architecture
        layers = next(g for g in self.uniform_layers(weights) if g.first <= layer < g.stop)
        own = layers.slice_weights(layer, layer + 1)
        w = {name: stacked(own[name])[0] for name in ("q_norm", "k_norm", DEPTH) if name in own}
        scales = (self._scale(w["q_norm"]), self._scale(w["k_norm"])) if c.qk_norm is not None else (1.0, 1.0)
        if c.qk_norm == "all":
            q, k = q * scales[0], k * scales[1]
        q, k = q.reshape(*q.shape[:2], c.n_heads, -1), k.reshape(*k.shape[:2], c.n_kv_heads, -1)
        if c.qk_norm == "head":
            q, k = q * scales[0], k * scales[1]
        return self._placed_heads(q, k, w)

    def _queries_keys_values(
        self, h: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears
    ) -> list[Float[Array, "_ T _"]]:
        if self.architecture.fused is not None and not self.sliced:
            y = self._affine(QKV, h, w, linear)
            return [self._slice(y, kind) for kind in SLICES]
        return [self._affine(kind, h, w, linear) for kind in SLICES]

    def _mlp(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "rows T d"]:
        c = self.architecture
        h, act = hooked(linear, "mlp.hook_in", self._read("post_norm", x, w)), ACTIVATIONS[c.activation]
        if "router" in w:
            assert c.experts is not None
            return mixture(c.experts, h, w, linear, act)
        if c.gated:
            gate = act(self._affine("gate_proj", h, w, linear))
            gate, up = alike(linear, gate, self._affine("up_proj", h, w, linear))
            return self._affine("down_proj", gate * up, w, linear)
        return self._affine("down_proj", act(self._affine("up_proj", h, w, linear)), w, linear)

    # ---- what they are made of ----

    @staticmethod
    def _sum(
        x: Float[Array, "B T d"], added: Float[Array, "more T d"], linear: LayerLinears
    ) -> Float[Array, "rows T d"]:
        x, added = alike(linear, x, added)
        return x + added

    def _affine(self, kind: str, x: Array, w: Mapping[str, Array], linear: LayerLinears) -> Array:
        y = linear(kind, x, self._of_kind(w, kind, ""))
        return (
            y + self._of_kind(w, kind, "_bias").astype(y.dtype) if self._stored(kind) in self.architecture.biases else y
        )

    def _stored(self, kind: str) -> str:
        """Returns the kind of the matrix in which the weights keep this one."""
        return QKV if self.architecture.fused is not None and kind in SLICES else kind

    def _of_kind(self, w: Mapping[str, Array], kind: str, ending: str) -> Array:
        """Returns a matrix of a layer or of many, or its bias; for part of a fused matrix, the slice."""
        stored = self._stored(kind)
        array = w[stored + ending]
        return array if stored == kind else self._slice(array, kind)

    def _slice(self, fused: Float[Array, "*n qkv"], kind: str) -> Float[Array, "*n _"]:
        """Returns the columns of queries, keys or values."""
        c = self.architecture
        if c.fused == "heads":
            by_head = fused.reshape(*fused.shape[:-1], c.n_heads, len(SLICES), c.head_dim)
            return by_head[..., SLICES.index(kind), :].reshape(*fused.shape[:-1], -1)
        widths = [c.matrix_shape(part)[1] for part in SLICES]
        start = sum(widths[: SLICES.index(kind)])
        return fused[..., start : start + c.matrix_shape(kind)[1]]

    @cached_property
    def sliced(self) -> bool:
        """Whether slices of the fused matrix are sites; if so, they are multiplied one by one."""
        return any(site.kind.removesuffix(PRE_IDENTITY) in SLICES for site in self.sites.all)

    def _read(self, name: str, x: Array, w: Mapping[str, Array]) -> Array:
        """Returns what a block reads: the residual stream, normalised if the block has a norm before it."""
        return self._norm(x, w[name], w.get(f"{name}_bias")) if name in w else x

    def _added(self, name: str, y: Array, w: Mapping[str, Array]) -> Array:
        """Returns what a block adds: its output, normalised if the block has a norm after it."""
        return self._read(name, y, w)

    def _norm(self, x: Float[Array, "*n d"], weight: Float[Array, " d"], bias: Array | None = None) -> Array:
        c = self.architecture
        if c.norm == "layer":
            assert bias is not None
            return layer_norm(x, c.norm_eps, weight, bias)
        return rms_norm(x, c.norm_eps, self._scale(weight))

    def _scale(self, weight: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return weight + 1 if self.architecture.norm == "rms_plus_one" else weight

    # ---- the end ----

    def head(self, weights: Weights, dtype: Any) -> Head:
        matrix = (
            gather(weights["embed"], self.frozen, dtype).T
            if self.architecture.tied
            else gather(weights["head"], self.frozen, dtype)
        )
        norm = [weights[name] for name in ("norm", "norm_bias") if name in weights]
        return Head(self._logits, matrix, *norm)

    def _logits(self, head: Float[Array, "d vocab"], *norm_and_hidden: Array) -> Float[Array, "*n vocab"]:
        *norm, hidden = norm_and_hidden
        logits, cap = matmul_wide(self._norm(hidden, *norm), head), self.architecture.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def final_scale(self, weights: Weights) -> Float[Array, " d"]:
        return self._scale(weights["norm"])

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "*lead d_in d_out"]]:
        groups = self.uniform_layers(weights)

        def matrix(stack: Stack) -> Array:
            layers = next(g for g in groups if g.first <= stack.first < g.stop)
            own = layers.slice_weights(stack.first, stack.first + stack.n_layers)
            stored = self._stored(stack.kind)
            return self._of_kind({stored: stacked(own[stored])}, stack.kind, "")

        return site_weights(self.sites, matrix)


class Family(TransformerConfig):
    """The base class of a family: the description, and the network that it makes."""

    def target(self, sites: Sites, memory: MemoryPolicy = PLAIN, compute_dtype: Any = jnp.float32) -> Transformer:
        return Transformer(self, sites, memory, compute_dtype)


def language_logits(
    weights: Weights,
    config: TransformerConfig,
    tokens: Int[Array, "B T"],
    memory: MemoryPolicy = PLAIN,
    dtype: Any = None,
) -> Float[Array, "B T vocab"]:
    """Returns logits in fp32 of the undecomposed network. ``dtype``: that of activations; None for that of the
    weights."""
    model = Transformer(config, Sites(()), memory, weights["embed"].dtype if dtype is None else dtype)
    return model.logits(weights, model.forward(weights, tokens, UNTOUCHED).output)
