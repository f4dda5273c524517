"""Products in which every row has a matrix of its own, one of a few: the matrices of experts.

A position takes k experts; its k *slots* are an axis of their own, ``[*n, k]``, behind those of the positions. Rows are
laid out by expert in blocks, each of one expert alone, and multiplied block by block. `jax.lax.ragged_dot` computes the
same, but as JAX 0.10.2 lowers it for a GPU it keeps a copy of all rows for every expert: 16 GiB beyond its arguments
for 32,768 slots, 64 experts and matrices of 2048 x 1024 with their gradients, where this takes 1.1 GiB.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.nn.numerics import einsum_wide, matmul_wide
from param_decomp_jax.sharding.mesh import constrain, n_parts


class ExpertGroups(eqx.Module):
    """Which expert every slot takes, and where its row lies among the blocks of its device.

    ``chosen``: the expert's number. ``place``: of a slot, its row in the blocks. ``expert``: of each block.
    """

    chosen: Int[Array, "*n k"]
    place: Int[Array, "parts slots"]
    expert: Int[Array, "parts blocks"]
    block: int = eqx.field(static=True)


def group(chosen: Int[Array, "*n k"], n_experts: int) -> ExpertGroups:
    """Lays out the slots; every device those of its own rows of the batch."""
    parts = n_parts("batch", chosen.shape[0])
    slots = chosen.reshape(parts, -1)
    n = slots.shape[1]
    # Half the mean: so a quarter of the rows is padding on average, and there are three blocks an expert at most.
    block = max(1, n // (2 * n_experts))
    n_blocks = -(-(n + n_experts * (block - 1)) // block)

    def lay_out(slots: Int[Array, " slots"]) -> tuple[Int[Array, " slots"], Int[Array, " blocks"]]:
        # By counting, not by sorting: a table of slots x experts is small beside their rows, and compiles in no time.
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
    """``x_j @ W[chosen_j]`` for every slot j, with inputs in the dtype of ``x``, given in fp32 or wider.

    ``x``: a row for every slot, or (s = 1) one that all slots of a position share.
    """
    *leading, k = groups.chosen.shape
    parts, n = groups.place.shape
    shared = x.shape[-2] == 1 and k > 1
    rows = constrain(x.reshape(parts, -1, x.shape[-1]), "batch")
    W = W.astype(x.dtype)

    def multiply(rows: Array, place: Array, expert: Array) -> Array:
        n_rows = expert.shape[0] * groups.block
        # From slots to rows by a gather: of the rows that pad, the product is not used.
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
    """`grouped_matmul_wide`, given in the dtype of ``x``."""
    return grouped_matmul_wide(x, W, groups).astype(x.dtype)


def product_wide(x: Array, W: Array, groups: ExpertGroups | None) -> Array:
    """``x @ W`` in fp32 or wider; with ``groups``, of slots with their experts' matrices."""
    return matmul_wide(x, W) if groups is None else grouped_matmul_wide(x, W, groups)


def at_chosen(x: Array, groups: ExpertGroups) -> Array:
    """What each slot's expert has at the slot's position: of ``x [experts, *n, …]``, ``[*n, k, …]``. Axes of positions
    may be 1 in ``x``, where all share them."""
    leading = groups.chosen.shape[:-1]
    n = len(leading)
    if x.shape[1] == 1 and leading[0] > 1:
        # Shared by the rows of the batch: picked where they are, for of every row's copies only k experts' are used.
        places = [jnp.zeros((), jnp.int32) if size == 1 else jnp.arange(size)[(..., *(None,) * (n - a))]
                 for a, size in enumerate(x.shape[1 : n + 1])]  # fmt: skip
        return x[(groups.chosen, *places)]
    x = jnp.moveaxis(x, 0, n)  # [*n, experts, …]
    index = groups.chosen.reshape(*groups.chosen.shape, *(1,) * (x.ndim - n - 1))
    return jnp.take_along_axis(jnp.broadcast_to(x, (*leading, *x.shape[n:])), index, axis=n)


class OverPositions(eqx.Module):
    """Sums over the positions of what a site has at each: over all of them, or with ``groups`` over those at which each
    expert is taken (X4)."""

    groups: ExpertGroups | None = None
    n_experts: int = eqx.field(static=True, default=0)

    def sum(self, x: Float[Array, "*n C"]) -> Float[Array, "*experts C"]:
        if self.groups is None:
            return jnp.sum(x, axis=tuple(range(x.ndim - 1)))
        return sum_by_expert(x, self.groups, self.n_experts)

    def counts(self, bins: Int[Array, "*n C"], n_bins: int) -> Int[Array, "*experts C bins"]:
        """How often each bin occurs, for each component."""
        flat = bins.reshape(-1, bins.shape[-1])
        if self.groups is None:
            return jax.vmap(lambda column: jnp.bincount(column, length=n_bins), in_axes=1)(flat)
        own = flat + n_bins * self.groups.chosen.reshape(-1, 1)
        counts = jax.vmap(lambda column: jnp.bincount(column, length=n_bins * self.n_experts), in_axes=1)(own)
        return jnp.moveaxis(counts.reshape(-1, self.n_experts, n_bins), 1, 0)


def sum_by_expert(x: Array, groups: ExpertGroups, n_experts: int) -> Array:
    """The sum over each expert's slots: of ``x [*n, k, …]``, ``[experts, …]``."""
    flat = x.reshape(-1, *x.shape[groups.chosen.ndim :])
    return jax.ops.segment_sum(flat, groups.chosen.reshape(-1), n_experts)
