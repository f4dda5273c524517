"""Other roundings than any machine's here: products and sums whose last bit is moved, up, down or not at all.

It stands for processors that nobody here has. A test that it breaks compares what two programs have computed more
strictly than their roundings allow, or rests on which of two nearly equal numbers is larger. Integers stay as they are:
every machine adds them up exactly. Only programs of the test's own process are meant; what a test starts runs without.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir  # for the rules that are wrapped; `jax.interpreters.mlir` does not give them out
from jax._src.lax.lax import dot_general_p, reduce_sum_p

ULP = 2.0**-23


def install(seed: int) -> None:
    """From now on in this process, for every program with fp32 products and sums, compiled for the CPU."""
    for primitive in (dot_general_p, reduce_sum_p):
        mlir.register_lowering(primitive, _noisy(_rule(primitive), seed), platform="cpu")
    jax.clear_caches()


def _rule(primitive: Any) -> Any:
    found = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
    return getattr(found, "rule", found)


def _noisy(rule: Any, seed: int) -> Any:
    def lowered(ctx: Any, *arguments: Any, **parameters: Any) -> Any:
        (exact,) = rule(ctx, *arguments, **parameters)
        # Other noise in the programs of several devices: these add up in another order.
        own = seed + 1000 * ctx.module_context.axis_context.num_devices
        after = ctx.replace(primitive=None, avals_in=list(ctx.avals_out))
        return mlir.lower_fun(lambda x: _moved(x, own), multiple_results=False)(after, exact)

    return lowered


def _moved(x: jax.Array, seed: int) -> jax.Array:
    if x.dtype != jnp.float32:
        return x
    hashed = jnp.full(x.shape, seed, jnp.uint32)
    for axis in range(x.ndim):
        hashed = hashed * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        hashed ^= hashed >> 15
    step = (hashed % 3).astype(jnp.float32) - 1
    return jnp.where(x == jnp.round(x), x, x * (1 + step * ULP))
