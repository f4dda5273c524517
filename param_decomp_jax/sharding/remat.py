"""Carrying out a memory policy in a forward pass: what is kept for the backward pass, what is recomputed in blocks."""

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
    """Names an intermediate for the policy."""
    return checkpoint_name(x, name)


def over_layers(
    memory: MemoryPolicy,
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    name: Intermediate = "layers",
) -> tuple[Any, Any]:
    """``lax.scan(body, carry, xs)`` under the memory policy; a single layer may change the carry's shape.

    ``xs``: may have `SomeLayers` in place of arrays, and `ByLayer`. ``name``: the intermediate whose recomputation the
    policy decides.
    """
    n = n_layers(xs)
    unrolled = memory.layers == "unroll" or n == 1
    group = 1
    if not unrolled:
        # Where nothing is recomputed, the backward pass reads slices too: it would keep those that were made in a loop.
        xs, layer = scanned(xs) if memory.recomputes(name) else (stacked(xs), lambda x: x)
        own = body
        body = lambda carry, x: own(carry, layer(x))  # noqa: E731
    if memory.recomputes(name):
        # In a scan nothing can be merged with what it recomputes: no barriers against that are needed.
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
    """What a recomputed layer keeps nevertheless."""
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
    """Into how many blocks a site with C components is cut."""
    return fitting_blocks(C, memory.component_block, "component")


def token_blocks(leading: tuple[int, ...], most: int | None) -> int:
    """Into how many blocks positions ``[B, T]`` are cut along T, each of at most ``most`` tokens; 1 without a T."""
    if most is None or len(leading) < 2:
        return 1
    return fitting_blocks(leading[1], max(1, most // leading[0]), "seq")


def over_blocks(run_block: Callable[[Any], tuple[Any, Any]], blocks: Any, n_blocks: int) -> tuple[Any, Any]:
    """Over the leading axis of ``blocks``: the sum of the first results, and the second ones stacked.

    Nothing is kept of one of several blocks, and the sum is added outside of what is recomputed, so no partial sum is
    kept either.
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
