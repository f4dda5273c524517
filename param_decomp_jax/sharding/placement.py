"""Shardings of trees of arrays, and global arrays from host arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from param_decomp_jax.sharding.mesh import AnyMesh, is_axes, sharding


def batch_sharding(mesh: AnyMesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of a batch of this shape: its rows over the devices."""
    return sharding(mesh, shape, ("batch",))


def shardings(mesh: AnyMesh, axes: Any, arrays: Any) -> Any:
    """Returns a sharding for every array (or shape) of a tree, from the description of its axes."""
    return jax.tree.map(lambda a, x: sharding(mesh, x.shape, a.names), axes, arrays, is_leaf=is_axes)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns abstract arrays (`jax.ShapeDtypeStruct`) from shapes and a sharding for each."""
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings)


def from_host(array: np.ndarray, where: NamedSharding) -> jax.Array:
    """Returns a global array from a host array that every process has whole. There is no check across processes and no
    collective."""
    pick: Callable[[Any], np.ndarray] = lambda index: array[index]  # noqa: E731
    return jax.make_array_from_callback(array.shape, where, pick)


def process_batch_rows(mesh: AnyMesh, size: int) -> tuple[int, int]:
    """Returns the first row, and the one after the last, of a batch of ``size`` rows that this process's devices hold.

    All rows in between are included, even if the mesh does not keep a process's devices together.
    """
    held: Mapping[Any, Any] = batch_sharding(mesh, (size,)).addressable_devices_indices_map((size,))
    parts = [rows.indices(size) for (rows,) in held.values()]
    assert parts, "this process has no device in the mesh"
    return min(start for start, _, _ in parts), max(stop for _, stop, _ in parts)


def from_process_rows(rows: np.ndarray, where: NamedSharding, axis: int, first: int, size: int) -> jax.Array:
    """Returns a global array with ``size`` rows on ``axis``. ``rows`` are this process's rows, from ``first`` on.

    ``rows`` must cover what ``where`` puts on this process's devices (`process_batch_rows`). No collective.
    """

    def pick(index: Any) -> np.ndarray:
        start, stop, _ = index[axis].indices(size)
        assert first <= start < stop <= first + rows.shape[axis], f"rows {start} to {stop} are another process's"
        return rows[(*index[:axis], slice(start - first, stop - first), *index[axis + 1 :])]

    return jax.make_array_from_callback((*rows.shape[:axis], size, *rows.shape[axis + 1 :]), where, pick)


def from_slices(
    shape: tuple[int, ...], where: NamedSharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Returns a global array for which each process calls ``read`` only for the slices that its own devices hold.

    ``read`` gets a slice with bounds for every axis and returns that part in a host array that nobody else holds. It is
    called once for every distinct slice, and the host array is freed before the next one is read, so the host holds one
    slice at a time. (`jax.make_array_from_callback` holds all of them until the last one has been read.) Replicas on
    other devices of the process are copied from device to device. There is no collective and no check across processes,
    so the cost does not depend on their number.
    """
    held: dict[tuple[tuple[int, int, int], ...], jax.Array] = {}
    parts = []
    indices: Mapping[jax.Device, Any] = where.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        bounds = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        source = held[bounds] if bounds in held else read(tuple(slice(*b) for b in bounds))
        # A transfer uses the host array until it is done. Waiting for it frees that memory before the next read.
        held[bounds] = jax.device_put(source, device).block_until_ready()
        del source
        parts.append(held[bounds])
    return jax.make_array_from_single_device_arrays(shape, where, parts)
