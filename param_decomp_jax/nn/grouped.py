"""Products in which every row is multiplied by one of a few matrices: those of experts.

A position takes k experts. Its k *slots* are an axis of their own, ``[*n, k]``, behind those of the positions. Rows are
laid out in blocks, each for one expert, and multiplied block by block. `jax.lax.ragged_dot` computes the same, but as
JAX 0.10.2 lowers it for a GPU it keeps a copy of all rows for every expert: 16 GiB beyond its arguments for 32,768
slots, 64 experts and matrices of 2048 x 1024 with their gradients, where this takes 1.1 GiB.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.nn.numerics import einsum_wide, matmul_wide
from param_decomp_jax.sharding.mesh import constrain, n_parts


class ExpertGroups(eqx.Module):
    """The expert that every slot takes, and the slot's row in the blocks of its device.

    ``chosen``: the number of each slot's expert. ``place``: the row of each slot in the blocks. ``expert``: the number
    of each block's expert.
    """

    chosen: Int[Array, "*n k"]
    place: Int[Array, "parts slots"]
    expert: Int[Array, "parts blocks"]
    block: int = eqx.field(static=True)


def group(chosen: Int[Array, "*n k"], n_experts: int) -> ExpertGroups:
    """Assigns slots to rows of blocks. Every device does so for its own rows of the batch."""
    parts = n_parts("batch", chosen.shape[0])
    slots = chosen.reshape(parts, -1)
    n = slots.shape[1]
    # A block is half the mean number of slots per expert. So on average a quarter of the rows is padding, and there are
    # at most three blocks per expert.
    block = max(1, n // (2 * n_experts))
    n_blocks = -(-(n + n_experts * (block - 1)) // block)

    def lay_out(slots: Int[Array, " slots"]) -> tuple[Int[Array, " slots"], Int[Array, " blocks"]]:
        # Counted, not sorted: a table of slots x experts is small compared with their rows, and compiles fast.
        taken = (slots[:, None] == jnp.arange(n_experts)).astype(jnp.int32)
        rank = jnp.sum(jnp.cumsum(taken, axis=0) * taken, axis=1) - 1
        padded = -(-jnp.sum(taken, axis=0) // block) * block
        ends = jnp.cumsum(padded)
        expert = jnp.sum(ends <= jnp.arange(n_blocks)[:, None] * block, axis=1)
        return (ends - padded)[slots] + rank, jnp.minimum(expert, n_experts - 1)

    place, expert = jax.vmap(lay_out)(constrain(slots, "batch"))
    return ExpertGroups(chosen, place, expert, block)


def grouped_matmul_wide(
    x: Float[Array, "*n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
) -> Float[Array, "*n k d_out"]:
    """Returns ``x_j @ W[chosen_j]`` for every slot j in fp32 or wider, with inputs in the dtype of ``x``.

    ``x``: a row for every slot, or (s = 1) one that all slots of a position share.
    """
    *leading, k = groups.chosen.shape
    parts, n = groups.place.shape
    shared = x.shape[-2] == 1 and k > 1
    rows = constrain(x.reshape(parts, -1, x.shape[-1]), "batch")
    W = W.astype(x.dtype)

    def multiply(rows: Array, place: Array, expert: Array) -> Array:
        n_rows = expert.shape[0] * groups.block
        # Rows are gathered from slots. The products of padding rows are not used.
        slot_of_row = jnp.zeros(n_rows, place.dtype).at[place].set(jnp.arange(n, dtype=place.dtype))
        used = jnp.zeros(n_rows, bool).at[place].set(True)
        laid_out = jnp.where(used[:, None], rows[slot_of_row // k if shared else slot_of_row], 0)
        blocks = laid_out.reshape(expert.shape[0], groups.block, -1)
        y = einsum_wide("gbd,gdo->gbo", blocks, W[expert])
        return y.reshape(n_rows, -1)[place]

    y = jax.vmap(multiply)(rows, groups.place, groups.expert)
    return constrain(y, "batch").reshape(*leading, k, W.shape[-1])


def grouped_matmul(
    x: Float[Array, "*n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
) -> Float[Array, "*n k d_out"]:
    """Returns `grouped_matmul_wide` in the dtype of ``x``."""
    return grouped_matmul_wide(x, W, groups).astype(x.dtype)


def product_wide(x: Array, W: Array, groups: ExpertGroups | None) -> Array:
    """Returns ``x @ W`` in fp32 or wider; with ``groups``, slots are multiplied by their experts' matrices."""
    return matmul_wide(x, W) if groups is None else grouped_matmul_wide(x, W, groups)


def at_chosen(x: Array, groups: ExpertGroups) -> Array:
    """Selects what each slot's expert has at the slot's position: ``[*n, k, …]`` from ``x [experts, *n, …]``. Axes of
    positions are 1 in ``x`` if all positions share one value."""
    leading = groups.chosen.shape[:-1]
    n = len(leading)
    if x.shape[1] == 1 and leading[0] > 1:
        # The rows of the batch share ``x``, so it is indexed without being repeated: each row would use only k experts
        # of its copy.
        places = [jnp.zeros((), jnp.int32) if size == 1 else jnp.arange(size)[(..., *(None,) * (n - a))]
                 for a, size in enumerate(x.shape[1 : n + 1])]  # fmt: skip
        return x[(groups.chosen, *places)]
    x = jnp.moveaxis(x, 0, n)  # [*n, experts, …]
    index = groups.chosen.reshape(*groups.chosen.shape, *(1,) * (x.ndim - n - 1))
    return jnp.take_along_axis(jnp.broadcast_to(x, (*leading, *x.shape[n:])), index, axis=n)


class OverPositions(eqx.Module):
    """Sums over positions of what a site has at each. With ``groups``, each expert's sum runs over the positions that
    take it (X4)."""

    groups: ExpertGroups | None = None
    n_experts: int = eqx.field(static=True, default=0)

    def sum(self, x: Float[Array, "*n C"]) -> Float[Array, "*experts C"]:
        if self.groups is None:
            return jnp.sum(x, axis=tuple(range(x.ndim - 1)))
        return sum_by_expert(x, self.groups, self.n_experts)

    def counts(self, bins: Int[Array, "*n C"], n_bins: int) -> Int[Array, "*experts C bins"]:
        """Counts how often each bin occurs for each component."""
        flat = bins.reshape(-1, bins.shape[-1])
        if self.groups is None:
            return jax.vmap(lambda column: jnp.bincount(column, length=n_bins), in_axes=1)(flat)
        own = flat + n_bins * self.groups.chosen.reshape(-1, 1)
        counts = jax.vmap(lambda column: jnp.bincount(column, length=n_bins * self.n_experts), in_axes=1)(own)
        return jnp.moveaxis(counts.reshape(-1, self.n_experts, n_bins), 1, 0)


def sum_by_expert(x: Array, groups: ExpertGroups, n_experts: int) -> Array:
    """Returns the sum over each expert's slots: ``[experts, …]`` from ``x [*n, k, …]``."""
    flat = x.reshape(-1, *x.shape[groups.chosen.ndim :])
    return jax.ops.segment_sum(flat, groups.chosen.reshape(-1), n_experts)
