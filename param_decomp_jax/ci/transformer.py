"""The global CI transformer (C4): one small bidirectional transformer reads every site's clean input at once."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.attention import attend
from param_decomp_jax.ci.affine import HIDDEN_GAIN, MLP, Affine, apply_mlp, init_affine, init_mlp
from param_decomp_jax.numerics import matmul, matmul_wide, rms_norm
from param_decomp_jax.rotary import frequencies, rotate
from param_decomp_jax.sites import Sites

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
    """Weights of all blocks, stacked on a leading axis."""

    q: Float[Array, "*blocks d d"]
    k: Float[Array, "*blocks d d"]
    v: Float[Array, "*blocks d d"]
    o: Float[Array, "*blocks d d"]
    mlp: MLP


class TransformerCI(eqx.Module):
    """``project``: the input projection, cut by stack (its rows are the concatenation of all sites' inputs)."""

    project: dict[str, Float[Array, "layers d_in d"]]
    bias: Float[Array, " d"]
    blocks: Block
    heads: dict[str, Affine]
    config: GlobalTransformer = eqx.field(static=True)

    def features(self, inputs: dict[str, Array], compute_dtype: Any) -> Float[Array, "*batch T d"]:
        """The last hidden state, from the clean inputs ``[layers, B, T, d_in]`` (or ``[layers, B, d_in]``)."""
        h = self.bias
        for name, x in inputs.items():
            # The concatenation is never built: a sum over sites of each site's rows of the projection.
            def add(h: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
                x, W = row
                return h + matmul_wide(rms_norm(x.astype(compute_dtype), EPS), W), None

            start = jnp.broadcast_to(h, (*x.shape[1:-1], self.config.d_model))
            h, _ = jax.lax.scan(add, start, (x, self.project[name]))
        no_sequence = h.ndim == 2
        h = h[:, None] if no_sequence else h
        assert h.shape[1] <= self.config.max_len, f"sequence of {h.shape[1]} beyond max_len {self.config.max_len}"
        h, _ = jax.lax.scan(lambda h, block: (self._block(h, block), None), h.astype(compute_dtype), self.blocks)
        return h[:, 0] if no_sequence else h

    def _block(self, h: Float[Array, "B T d"], w: Block) -> Float[Array, "B T d"]:
        B, T, d = h.shape
        turning = frequencies(d // self.config.n_heads, self.config.rope_base)

        def heads(y: Array) -> Array:
            return y.reshape(B, T, self.config.n_heads, d // self.config.n_heads)

        y = rms_norm(h, EPS)
        q, k = rotate(heads(matmul(y, w.q)), turning), rotate(heads(matmul(y, w.k)), turning)
        attended = attend(q, k, heads(matmul(y, w.v)), causal=False)
        h = h + matmul(attended.reshape(B, T, d), w.o)
        return h + apply_mlp(w.mlp, rms_norm(h, EPS)).astype(h.dtype)

    def logits(
        self, head: Affine, features: Float[Array, "*n d"], x: Float[Array, "*n d_in"], V: Float[Array, "d_in C"]
    ) -> Float[Array, "*n C"]:
        return head(features)


def init_transformer(config: GlobalTransformer, key: PRNGKeyArray, sites: Sites) -> TransformerCI:
    """Fresh weights (C4): projection gain √2 over the width of the concatenation, attention U(±1/√d_model)."""
    to_input, to_attention, to_mlp, to_heads = jax.random.split(key, 4)
    d, n = config.d_model, config.n_blocks
    width = sum(site.d_in for site in sites.all)

    def projection(number: int, d_in: int) -> Array:
        return jax.random.normal(jax.random.fold_in(to_input, number), (d_in, d), jnp.float32)

    bound = d**-0.5
    q, k, v, o = (
        jax.random.uniform(of, (n, d, d), jnp.float32, -bound, bound) for of in jax.random.split(to_attention, 4)
    )

    def head(number: int, C: int) -> Affine:
        return init_affine(jax.random.fold_in(to_heads, number), (), d, C, 1.0)

    return TransformerCI(
        project={
            s.name: HIDDEN_GAIN / width**0.5 * jnp.stack([projection(site, s.d_in) for site in s.sites])
            for s in sites.stacks
        },
        bias=jnp.zeros((d,), jnp.float32),
        blocks=Block(q, k, v, o, init_mlp(to_mlp, (n,), (d, *config.mlp_hidden, d))),
        heads={
            s.name: jax.tree.map(lambda *rows: jnp.stack(rows), *[head(site, s.C) for site in s.sites])
            for s in sites.stacks
        },
        config=config,
    )
