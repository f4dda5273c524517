"""How a memory policy keeps the train state between updates: in pinned host memory, or in fewer bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.memory import MemoryPolicy, StatePart


def fetch(memory: MemoryPolicy, part: StatePart, state: Any, gradients: Any = None) -> Any:
    """Returns a part of the train state as its update computes with it: on the device, in fp32 or wider.

    ``gradients``: those that the update waits for, if they come late in the step. Arrays on the host are fetched after
    them. By default, XLA copies them at the beginning of the step, and they take as much of the device as if they had
    never left.
    """
    if part in memory.offload_state and gradients is not None:
        state, _ = lax.optimization_barrier((state, gradients))

    def fetch_array(x: Array) -> Array:
        if not _is_moment(x):
            return x
        here = jax.device_put(x, jax.memory.Space.Device) if part in memory.offload_state else x
        return wide(here)

    return jax.tree.map(fetch_array, state)


def store(memory: MemoryPolicy, part: StatePart, state: Any) -> Any:
    """Returns a part of the train state as it is kept."""
    dtype = dict(memory.state_dtypes).get(part)

    def store_array(x: Array) -> Array:
        if not _is_moment(x):
            return x
        kept = x if dtype is None else x.astype(dtype)
        return jax.device_put(kept, jax.memory.Space.Host) if part in memory.offload_state else kept

    return jax.tree.map(store_array, state)


def _is_moment(x: Array) -> bool:
    """Returns whether the policy applies to an array: counts keep their dtype and place."""
    return x.ndim > 0 and bool(jnp.issubdtype(x.dtype, jnp.floating))
