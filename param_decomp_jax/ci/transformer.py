"""The global CI transformer (C4): one small bidirectional transformer reads every site's clean input at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.affine import (
    MLP,
    Affine,
    GlobalCI,
    JointAffine,
    apply_mlp,
    init_heads,
    init_joint_affine,
    init_mlp,
)
from param_decomp_jax.ci.inputs import CIInputs
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
    """``mlp_hidden``: widths of the hidden layers of each block's MLP. ``max_len``: longest sequence admitted."""

    d_model: int
    n_blocks: int
    mlp_hidden: tuple[int, ...]
    n_heads: int
    max_len: int = 2048
    rope_base: float = 10000.0


class Block(eqx.Module):
    """Weights of all blocks, stacked on a leading axis, or on two (C6)."""

    q: Float[Array, "*blocks d d"]
    k: Float[Array, "*blocks d d"]
    v: Float[Array, "*blocks d d"]
    o: Float[Array, "*blocks d d"]
    mlp: MLP

    def axes(self) -> Any:
        """Of one block: every matrix is split by output."""
        matrix = Axes((None, "split"), product=True)
        mlp = tuple(replace_fields(layer, W=matrix, b=Axes(("split",))) for layer in self.mlp)
        return replace_fields(self, q=matrix, k=matrix, v=matrix, o=matrix, mlp=mlp)


class TransformerCI(GlobalCI):
    """``project``: from the concatenation of all sites' inputs, each RMS-normalised, to ``d_model``."""

    project: JointAffine
    blocks: Block
    heads: dict[str, Affine]
    config: GlobalTransformer = eqx.field(static=True)

    def features(
        self, inputs: CIInputs, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy
    ) -> Float[Array, "*n d"]:
        """The last hidden state, from the clean inputs; ``leading`` is ``(B, T)``, or ``(B,)``."""
        h = self.project(inputs, leading, lambda x: rms_norm(x.astype(compute_dtype), EPS), memory)
        axes = self.blocks.axes()
        return through_blocks(
            self.config, self.blocks, h.astype(compute_dtype), memory, lambda w: gather_tree(w, axes, compute_dtype)
        )

    def axes(self) -> Any:
        """Every matrix is split by output, the heads by component."""
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
    """``h`` after all blocks. ``ready``: from one block's weights as they come to what is multiplied."""
    no_sequence = h.ndim == 2
    h = h[:, None] if no_sequence else h
    assert h.shape[1] <= config.max_len, f"sequence of {h.shape[1]} beyond max_len {config.max_len}"

    def block(h: Array, w: Block) -> tuple[Array, None]:
        w = ready(w)
        h = attended(h, (w.q, w.k, w.v, w.o), config.n_heads, config.rope_base, memory.attention)
        return constrain(h + apply_mlp(w.mlp, rms_norm(h, EPS)).astype(h.dtype), "batch"), None

    h, _ = over_layers(memory, block, constrain(h, "batch"), blocks, "ci")
    return h[:, 0] if no_sequence else h


def attended(
    h: Float[Array, "B T d"], w: tuple[Array, Array, Array, Array], n_heads: int, rope_base: float, attention: Attention
) -> Float[Array, "B T d"]:
    """``h`` plus bidirectional attention on its norm, with rotary embedding. ``w``: q, k, v and o, ``[d, d]``."""
    B, T, d = h.shape
    q, k, v, o = w
    turning = frequencies(d // n_heads, rope_base)

    def heads(y: Array) -> Array:
        return y.reshape(B, T, n_heads, d // n_heads)

    y = rms_norm(h, EPS)
    queries, keys = rotate(heads(matmul(y, q)), turning), rotate(heads(matmul(y, k)), turning)
    return h + matmul(attend(queries, keys, heads(matmul(y, v)), False, attention).reshape(B, T, d), o)


def init_transformer(config: GlobalTransformer, key: PRNGKeyArray, sites: Sites) -> TransformerCI:
    """Fresh weights (C4): projection gain √2 over the width of the concatenation, attention U(±1/√d_model)."""
    to_input, to_attention, to_mlp, to_heads = jax.random.split(key, 4)
    return TransformerCI(
        project=init_joint_affine(to_input, sites.stacks, config.d_model),
        blocks=init_blocks(config, to_attention, to_mlp),
        heads=init_heads(to_heads, sites, config.d_model),
        config=config,
    )


def init_blocks(config: GlobalTransformer, to_attention: PRNGKeyArray, to_mlp: PRNGKeyArray) -> Block:
    """Fresh weights of a transformer's blocks."""
    d, n = config.d_model, config.n_blocks
    bound = d**-0.5
    q, k, v, o = (
        jax.random.uniform(k, (n, d, d), jnp.float32, -bound, bound) for k in jax.random.split(to_attention, 4)
    )
    return Block(q, k, v, o, init_mlp(to_mlp, (n,), (d, *config.mlp_hidden, d)))
