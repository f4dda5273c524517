"""Computes 32-bit fingerprints of arrays, independent of their devices, their sharding and the number of processes.

All arithmetic is on integers, so the order of summation does not matter. A fingerprint is one reduction on the array's
devices: on a GPU without a temporary array of its size (XLA plans 18 KB for 151 MB on an H100); on a CPU with one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from param_decomp_jax.sharding.by_layer import ByLayer

GOLDEN = 0x9E3779B9
"""2³² over the golden ratio, added to positions, since `_mixed` maps 0 to 0."""
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprints(arrays: Mapping[str, jax.Array | ByLayer]) -> dict[str, str]:
    """Returns the `fingerprint` of each array. Arrays are processed one at a time, and those in host memory are on the
    device only meanwhile.
    """
    return {name: fingerprint(array) for name, array in arrays.items()}


def fingerprint(array: jax.Array | ByLayer) -> str:
    """Returns the fingerprint of an array: 8 hex digits. Must be called in all processes that hold a part of it."""
    if isinstance(array, ByLayer):
        # The fingerprint of the stacked array, of which each layer is a part.
        program = partial(_layer_program(array.layers[0]), whole=array.shape)
        parts = [np.asarray(program(x, np.uint32(n))) for n, x in enumerate(array.layers)]
        return _digits(np.sum(parts, dtype=np.uint32))
    return _digits(fingerprint_program(array)(array))


def _layer_program(array: jax.Array) -> Any:
    def sum_layer(x: Array, layer: UInt32[Array, ""], whole: tuple[int, ...]) -> UInt32[Array, ""]:
        return _sum_part(x[None], jnp.zeros(x.ndim + 1, jnp.uint32).at[0].set(layer), whole)

    return jax.jit(sum_layer, static_argnames="whole", out_shardings=_whole_on(array.sharding))


class PartwiseFingerprint:
    """Computes the `fingerprint` of an array of this ``shape`` from parts, so that the host never holds all of it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self._sum = shape, np.uint32(0)

    def add(self, part: Sequence[slice], values: np.ndarray) -> None:
        """Adds a part; every entry must be in exactly one. ``part``: the position of ``values`` in the array."""
        start = np.array([axis.start for axis in part], np.uint32)
        self._sum = np.add(self._sum, np.asarray(_part_program(values, start, self._shape)))

    def __str__(self) -> str:
        return _digits(self._sum)


def _digits(total: Any) -> str:
    return f"{int(np.asarray(total)):08x}"


def combine_fingerprints(found: Mapping[str, str]) -> str:
    """Combines fingerprints by name into one of 16 hex digits."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(found.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def fingerprint_program(array: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """The jitted function that `fingerprint` calls."""
    where = array.sharding
    waits = getattr(where, "memory_kind", None) == "pinned_host"
    return jax.jit(_from_host if waits else sum_entries, out_shardings=_whole_on(where))


def _whole_on(where: Any) -> NamedSharding | None:
    """Returns a sharding that is whole on every device, so that every process can read the result."""
    return NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else None


def _from_host(x: Array) -> UInt32[Array, ""]:
    return sum_entries(jax.device_put(x, jax.memory.Space.Device))


def sum_entries(x: Array) -> UInt32[Array, ""]:
    """Σ mix(bits(x_i) xor mix(i)) mod 2³², with i the position in the whole array.

    ``mix`` is one-to-one, so a change of one entry is always detected; any other damage is missed once in 2³².
    """
    return _sum_part(x, jnp.zeros(x.ndim, jnp.uint32), x.shape)


def _sum_part(x: Array, start: UInt32[Array, " axes"], whole: tuple[int, ...]) -> UInt32[Array, ""]:
    """`sum_entries` over a part that begins at index ``start`` of an array of shape ``whole``."""
    words = _words(x)
    entry_axes = words.shape[x.ndim :]
    place = jnp.full(words.shape, GOLDEN, jnp.uint32)
    stride = 1
    for axis, size in reversed(list(enumerate((*whole, *entry_axes)))):
        first = start[axis] if axis < x.ndim else jnp.uint32(0)
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place += (first + along) * jnp.uint32(stride % (1 << 32))
        stride *= size
    return jnp.sum(_mixed(words ^ _mixed(place)), dtype=jnp.uint32)


_part_program = partial(jax.jit, static_argnums=2)(_sum_part)


def _words(x: Array) -> Array:
    """The bits of every entry as uint32; a 64-bit entry becomes two, on a new axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)


def _mixed(h: Array) -> Array:
    """The last step of MurmurHash3: one-to-one, and every bit of ``h`` flips about half of the result's bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
