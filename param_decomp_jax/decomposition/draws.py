"""Random draws that do not depend on layout (M4).

A draw depends only on a key and on the element's global index. It is the same on one device and on eight, whole or in
blocks. Each element is one evaluation of the Threefry-2x32 block cipher (Salmon et al. 2011) on the counter (position,
column). It is written out here because JAX's own primitive lowers to a loop on CPU (1.5 ms against 0.3 ms for 1024 x
192 elements on one core), and because slicing `jax.random.uniform` is not the draw of the slice.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

T = TypeVar("T")

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry_2x32(
    key: UInt32[Array, "2 *#s"], high: UInt32[Array, "*s"], low: UInt32[Array, "*s"]
) -> tuple[UInt32[Array, "*s"], UInt32[Array, "*s"]]:
    """Returns the two output words of 20-round Threefry-2x32 at counter ``(high, low)``. ``key``: one, or one per
    element."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = high + schedule[0], low + schedule[1]
    for block in range(5):
        for r in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << jnp.uint32(r)) | (y >> jnp.uint32(32 - r))) ^ x
        x, y = x + schedule[(block + 1) % 3], y + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def positions(leading: tuple[int, ...]) -> UInt32[Array, "*leading"]:
    """Returns row-major numbers of the positions of an activation with these (global) leading axes; they must be below
    2³²."""
    number = jnp.zeros(leading, jnp.uint32)
    for axis, size in enumerate(leading):
        number = number * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leading, axis)
    return number


def uniform(
    key: PRNGKeyArray, at: UInt32[Array, "*leading"], columns: int | UInt32[Array, " columns"]
) -> Float[Array, "*leading columns"]:
    """Draws U[0, 1) in fp32, in multiples of 2⁻²⁴. An element depends only on the key, its position and its column.

    ``at``: global numbers of the positions (see `positions`). ``columns``: global numbers of the columns, or the number
    of columns, counted from 0. So the first rows of a draw ``[batch, seq, C]`` do not depend on the size of the batch,
    and a block of it can be drawn from the block's numbers.
    """
    if isinstance(columns, int):
        columns = jnp.arange(columns, dtype=jnp.uint32)
    return uniform_of_keys(jax.random.key_data(key), at, columns)


def uniform_of_keys(
    keys: UInt32[Array, "*#leading 2"], at: UInt32[Array, "*leading"], columns: UInt32[Array, " columns"]
) -> Float[Array, "*leading columns"]:
    """Draws like `uniform`, from the data of one key, or of one key for every element of ``at``."""
    shape = (*at.shape, *columns.shape)
    with jax.named_scope("draws"):
        word, _ = threefry_2x32(
            jnp.moveaxis(keys, -1, 0)[..., None] if keys.ndim > 1 else keys,
            jnp.broadcast_to(at[..., None], shape),
            jnp.broadcast_to(columns, shape),
        )
        return (word >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def draw_per_site(draw: Callable[[PRNGKeyArray], T], key: PRNGKeyArray, numbers: tuple[int, ...]) -> T:
    """Calls ``draw`` for each site of a stack and stacks the results. A site's key depends only on ``key`` and its
    canonical number.

    The draws run in a loop. Unrolled, the draws of 96 sites took the GPU compiler over ten minutes and 10 GB. Both give
    the same bits (`vmap` does not).
    """
    return jax.lax.map(lambda n: draw(jax.random.fold_in(key, n)), jnp.asarray(numbers, jnp.uint32))
