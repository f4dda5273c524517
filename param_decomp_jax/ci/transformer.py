"""The global CI transformer (C4, C9): one small transformer reads every site's clean input at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.affine import (
    Affine,
    GatedAffine,
    GlobalCI,
    HiddenLayer,
    JointAffine,
    TransformerMLP,
    apply_mlp,
    boundaries,
    init_heads,
    init_joint_affine,
    init_mlp,
    init_swiglu,
    read_by,
)
from param_decomp_jax.ci.taps import Reads, Taps
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.nn.attention import attend
from param_decomp_jax.nn.numerics import matmul, rms_norm
from param_decomp_jax.nn.rotary import frequencies, rotate
from param_decomp_jax.sharding.memory import Attention, MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, constrain, gather_tree, replace_fields
from param_decomp_jax.sharding.remat import over_layers

EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class GlobalTransformer:
    """The settings of a CI transformer. ``mlp_hidden``: the widths of the hidden layers of each block's MLP.
    ``max_len``: the longest sequence that it takes.

    For C9: ``causal``: whether a position reads only itself and earlier ones. ``n_kv_heads``: the number of key and
    value heads; None: as many as query heads. ``mlp_type``: the kind of the hidden layers. ``learned_norm_scale``:
    whether the norms of the blocks have weights. For C10: ``taps``: what a global function reads; None: the inputs of
    all sites.
    """

    d_model: int
    n_blocks: int
    mlp_hidden: tuple[int, ...]
    n_heads: int
    max_len: int = 2048
    rope_base: float = 10000.0
    causal: bool = False
    n_kv_heads: int | None = None
    mlp_type: Literal["gelu", "swiglu"] = "gelu"
    learned_norm_scale: bool = False
    taps: Taps | None = None

    @property
    def kv_width(self) -> int:
        """The width of the keys, and of the values, of all heads."""
        return self.d_model // self.n_heads * (self.n_kv_heads or self.n_heads)


class Norms(eqx.Module):
    """The weights of the two RMS norms of a block (C9): before attention, and before the MLP."""

    attn: Float[Array, "*blocks d"]
    mlp: Float[Array, "*blocks d"]


class Block(eqx.Module):
    """The weights of all blocks, stacked on one leading axis, or on two (C6). ``norms``: None if norms have no
    weights."""

    q: Float[Array, "*blocks d d"]
    k: Float[Array, "*blocks d kv"]
    v: Float[Array, "*blocks d kv"]
    o: Float[Array, "*blocks d d"]
    mlp: TransformerMLP
    norms: Norms | None = None

    def axes(self) -> Any:
        """Returns the axes of one block: every matrix is split by output, vectors are split."""
        matrix, vector = Axes((None, "split"), product=True), Axes(("split",))

        def layer_axes(layer: HiddenLayer) -> Any:
            if isinstance(layer, GatedAffine):
                return replace_fields(layer, gate=layer_axes(layer.gate), up=layer_axes(layer.up))
            return replace_fields(layer, W=matrix, b=vector)

        norms = None if self.norms is None else replace_fields(self.norms, attn=vector, mlp=vector)
        mlp = tuple(map(layer_axes, self.mlp))
        return replace_fields(self, q=matrix, k=matrix, v=matrix, o=matrix, mlp=mlp, norms=norms)


class TransformerCI(GlobalCI):
    """The global CI transformer. ``project``: maps the concatenation of what is read, each array RMS-normalised, to
    ``d_model``."""

    project: JointAffine
    blocks: Block
    heads: dict[str, Affine]
    config: GlobalTransformer = eqx.field(static=True)
    boundaries: tuple[int, ...] = eqx.field(static=True, default=())

    def features(
        self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy
    ) -> Float[Array, "*n d"]:
        """Returns the last hidden state, from what is read. ``leading``: ``(B, T)`` or ``(B,)``."""
        read = read_by(self.boundaries, inputs)
        h = self.project(read, leading, lambda x: rms_norm(x.astype(compute_dtype), EPS), memory)
        axes = self.blocks.axes()
        return through_blocks(
            self.config, self.blocks, h.astype(compute_dtype), memory, lambda w: gather_tree(w, axes, compute_dtype)
        )

    def axes(self) -> Any:
        """Returns the axes: every matrix is split by output, the heads by component."""
        return replace_fields(
            self,
            project=self.project.axes(),
            blocks=jax.tree.map(Axes.under, self.blocks.axes()),
            heads=self.heads_axes(),
        )


def through_blocks(
    config: GlobalTransformer,
    blocks: Block,
    h: Float[Array, "*n d"],
    memory: MemoryPolicy,
    ready: Callable[[Block], Block] = lambda w: w,
) -> Float[Array, "*n d"]:
    """Returns ``h`` after all blocks. ``ready``: turns one block's weights, as a scan slices them, into what is
    multiplied."""
    no_sequence = h.ndim == 2
    h = h[:, None] if no_sequence else h
    assert h.shape[1] <= config.max_len, f"sequence of {h.shape[1]} beyond max_len {config.max_len}"

    def block(h: Array, w: Block) -> tuple[Array, None]:
        w = ready(w)
        before_attention, before_mlp = (None, None) if w.norms is None else (w.norms.attn, w.norms.mlp)
        h = h + attended(config, rms_norm(h, EPS, before_attention), w, memory.attention)
        return constrain(h + apply_mlp(w.mlp, rms_norm(h, EPS, before_mlp)).astype(h.dtype), "batch"), None

    h, _ = over_layers(memory, block, constrain(h, "batch"), blocks, "ci")
    return h[:, 0] if no_sequence else h


def attended(
    config: GlobalTransformer, y: Float[Array, "B T d"], w: Block, attention: Attention
) -> Float[Array, "B T d"]:
    """Returns the output of attention with rotary embedding on ``y``, with the matrices of one block."""
    B, T, d = y.shape
    width = d // config.n_heads
    turning = frequencies(width, config.rope_base)

    def heads(x: Array) -> Array:
        return x.reshape(B, T, -1, width)

    queries, keys = rotate(heads(matmul(y, w.q)), turning), rotate(heads(matmul(y, w.k)), turning)
    return matmul(attend(queries, keys, heads(matmul(y, w.v)), config.causal, attention).reshape(B, T, d), w.o)


def init_transformer(config: GlobalTransformer, key: PRNGKeyArray, sites: Sites) -> TransformerCI:
    """Draws fresh weights (C4): the projection with gain √2 over the width of the concatenation, attention from
    U(±1/√d_model)."""
    to_input, to_attention, to_mlp, to_heads = jax.random.split(key, 4)
    return TransformerCI(
        project=init_joint_affine(to_input, sites, config.d_model, config.taps),
        blocks=init_blocks(config, to_attention, to_mlp),
        heads=init_heads(to_heads, sites, config.d_model),
        config=config,
        boundaries=boundaries(config.taps, sites),
    )


def init_blocks(config: GlobalTransformer, to_attention: PRNGKeyArray, to_mlp: PRNGKeyArray) -> Block:
    """Draws fresh weights of a transformer's blocks; those of norms are 1."""
    d, n, kv = config.d_model, config.n_blocks, config.kv_width
    bound = d**-0.5
    q, k, v, o = (
        jax.random.uniform(key, (n, d, width), jnp.float32, -bound, bound)
        for key, width in zip(jax.random.split(to_attention, 4), (d, kv, kv, d), strict=True)
    )
    init = {"gelu": init_mlp, "swiglu": init_swiglu}[config.mlp_type]
    # These are two arrays, because a step reuses the memory of the state that it is given.
    norms = Norms(*(jnp.ones((n, d), jnp.float32) for _ in range(2))) if config.learned_norm_scale else None
    return Block(q, k, v, o, init(to_mlp, (n,), (d, *config.mlp_hidden, d)), norms)
