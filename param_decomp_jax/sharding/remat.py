"""Functions that carry out a memory policy in a forward pass: what is kept for the backward pass, and what is
recomputed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from param_decomp_jax.sharding.by_layer import n_layers, one_layer, scanned, stacked
from param_decomp_jax.sharding.memory import OFFLOADABLE, Intermediate, MemoryPolicy
from param_decomp_jax.sharding.mesh import fitting_blocks


def named(x: Array, name: Intermediate) -> Array:
    """Names an intermediate, so that the policy can save or offload it."""
    return checkpoint_name(x, name)


def over_layers(
    memory: MemoryPolicy,
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    name: Intermediate = "layers",
) -> tuple[Any, Any]:
    """Runs ``lax.scan(body, carry, xs)`` under the memory policy. A single layer may change the carry's shape.

    ``xs``: may have `SomeLayers` and `ByLayer` in place of arrays. ``name``: the intermediate that the policy keeps or
    recomputes.
    """
    n = n_layers(xs)
    unrolled = memory.layers == "unroll" or n == 1
    group = 1
    if not unrolled:
        # Without recomputation the backward pass reads slices too, and slices made in the loop would all be kept for
        # it.
        xs, layer = scanned(xs) if memory.recomputes(name) else (stacked(xs), lambda x: x)
        own = body
        body = lambda carry, x: own(carry, layer(x))  # noqa: E731
    if memory.recomputes(name):
        # Within a scan, nothing can be merged with its recomputation, so barriers against that are not needed.
        body = jax.checkpoint(body, policy=_inside(memory), prevent_cse=unrolled)
        if memory.layer_group is not None:
            group = max(size for size in range(1, min(memory.layer_group, n) + 1) if n % size == 0)
    if unrolled:
        return _unrolled(body, carry, xs, n)
    if group in (1, n):
        return lax.scan(body, carry, xs)
    grouped = jax.tree.map(lambda x: x.reshape(n // group, group, *x.shape[1:]), xs)
    run_group = jax.checkpoint(lambda c, x: lax.scan(body, c, x), prevent_cse=False)
    carry, ys = lax.scan(run_group, carry, grouped)
    return carry, jax.tree.map(lambda y: y.reshape(n, *y.shape[2:]), ys)


def _inside(memory: MemoryPolicy) -> Any:
    """Returns the policy for what a recomputed layer keeps nevertheless."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(memory.save & (OFFLOADABLE | {"deltas"})),
        names_which_can_be_offloaded=sorted(memory.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _unrolled(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, n: int) -> tuple[Any, Any]:
    ys = []
    for layer in range(n):
        carry, y = body(carry, one_layer(xs, layer))
        ys.append(y)
    return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *ys)


def component_blocks(memory: MemoryPolicy, C: int) -> int:
    """Returns the number of blocks into which a site with C components is cut."""
    return fitting_blocks(C, memory.component_block, "component")


def token_blocks(leading: tuple[int, ...], most: int | None) -> int:
    """Returns the number of blocks into which positions ``[B, T]`` are cut along T, with at most ``most`` tokens each;
    1 without T."""
    if most is None or len(leading) < 2:
        return 1
    return fitting_blocks(leading[1], max(1, most // leading[0]), "seq")


def over_blocks(run_block: Callable[[Any], tuple[Any, Any]], blocks: Any, n_blocks: int) -> tuple[Any, Any]:
    """Runs ``run_block`` over the leading axis of ``blocks``; returns the sum of the first results, and the second ones
    stacked.

    With several blocks, each is recomputed in the backward pass. The sum is taken outside of what is recomputed, so
    partial sums are not kept either.
    """
    if n_blocks == 1:
        total, found = run_block(jax.tree.map(lambda x: x[0], blocks))
        return total, jax.tree.map(lambda x: x[None], found)
    recomputed = jax.checkpoint(run_block, prevent_cse=False)
    shapes, _ = jax.eval_shape(run_block, jax.tree.map(lambda x: x[0], blocks))
    start = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)

    def add(total: Any, block: Any) -> tuple[Any, Any]:
        own, found = recomputed(block)
        return jax.tree.map(jnp.add, total, own), found

    return lax.scan(add, start, blocks)
