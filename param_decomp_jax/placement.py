"""The mesh, the one table from logical axes to mesh axes, and global arrays from host arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from param_decomp_jax.adversary import PerBatchPerPosition, RepeatAcrossBatch
from param_decomp_jax.state import Decomposition, State

AXES = ("replica", "fsdp", "tensor")

RULES: dict[str, tuple[str, ...]] = {"batch": ("replica", "fsdp")}
"""Logical axis to mesh axes. A logical axis that is not here is not split; changing strategy is changing this table."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the three mesh axes; their product is the number of devices."""

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def n_devices(self) -> int:
        return self.replica * self.fsdp * self.tensor

    @property
    def batch_parts(self) -> int:
        """Into how many parts a batch is split."""
        return self.replica * self.fsdp


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first ``shape.n_devices`` devices."""
    devices = list(jax.devices() if devices is None else devices)[: shape.n_devices]
    assert len(devices) == shape.n_devices, f"{shape} needs {shape.n_devices} devices, there are {len(devices)}"
    return Mesh(np.array(devices).reshape(shape.replica, shape.fsdp, shape.tensor), AXES)


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
    """Sharding of an array whose leading axes have these logical names; mesh axes of size 1 are dropped."""

    def physical(name: str | None) -> tuple[str, ...] | None:
        axes = tuple(axis for axis in RULES.get(name or "", ()) if mesh.shape[axis] > 1)
        return axes or None

    parts = [physical(name) for name in logical]
    return NamedSharding(mesh, PartitionSpec(*parts) if any(parts) else PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the devices."""
    return sharding(mesh, "batch")


def state_shardings(mesh: Mesh, decomposition: Decomposition, state: State) -> State:
    """Shardings in the structure of ``state`` (arrays or shapes): whole, but sources per row with the batch (D2)."""
    whole = sharding(mesh)
    shardings = jax.tree.map(lambda _: whole, state)

    def of_sources(x: Any) -> NamedSharding:
        return whole if x.ndim == 0 else sharding(mesh, None, "batch")

    for name, (_, attack) in decomposition.persistent.items():
        parts = batch_sharding(mesh)
        match attack.scope:
            case PerBatchPerPosition():
                split = True
            case RepeatAcrossBatch(n):
                split = n % parts.num_devices == 0
            case _:
                split = False
        if split:
            placed = jax.tree.map(of_sources, state.adversaries[name])
            shardings = eqx.tree_at(lambda s, name=name: s.adversaries[name], shardings, placed)
    return shardings


def from_host(array: np.ndarray, where: NamedSharding) -> jax.Array:
    """A global array from a host array that every process has whole; no check across processes, no collective."""
    pick: Callable[[Any], np.ndarray] = lambda index: array[index]  # noqa: E731
    return jax.make_array_from_callback(array.shape, where, pick)


def process_batch_rows(mesh: Mesh, size: int) -> tuple[int, int]:
    """First row, and the one after the last, that this process's devices hold of a batch of ``size`` rows.

    Everything in between is counted too, should the mesh not keep a process's devices together.
    """
    held: Mapping[Any, Any] = batch_sharding(mesh).addressable_devices_indices_map((size,))
    parts = [rows.indices(size) for (rows,) in held.values()]
    assert parts, "this process has no device in the mesh"
    return min(start for start, _, _ in parts), max(stop for _, stop, _ in parts)


def from_process_rows(rows: np.ndarray, where: NamedSharding, axis: int, first: int, size: int) -> jax.Array:
    """A global array with ``size`` rows on ``axis``, of which this process has those from ``first`` on: ``rows``.

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
    """A global array, each process asking ``read`` only for the slices that its own devices hold.

    ``read`` gets a slice with bounds for every axis and gives that part in a host array which nobody else holds. It is
    asked once for every different slice, and the host array is let go before the next one is read: the host holds one
    slice at a time. (`jax.make_array_from_callback` holds all of them until the last one has been read.) Replicas on
    other devices of the process are copied from device to device. No collective and no check across processes: what
    this costs does not depend on their number.
    """
    held: dict[tuple[tuple[int, int, int], ...], jax.Array] = {}
    parts = []
    indices: Mapping[jax.Device, Any] = where.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        bounds = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        source = held[bounds] if bounds in held else read(tuple(slice(*b) for b in bounds))
        # A transfer reads the host array until it is done; waiting frees that memory before the next read.
        held[bounds] = jax.device_put(source, device).block_until_ready()
        del source
        parts.append(held[bounds])
    return jax.make_array_from_single_device_arrays(shape, where, parts)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Every array of ``tree`` (host or device, whole in every process) on every device of the mesh."""
    return jax.tree.map(lambda x: from_host(np.asarray(x), sharding(mesh)), tree)
