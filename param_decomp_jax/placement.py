"""The mesh, the one table from logical axes to mesh axes, and global arrays from host arrays."""

from collections.abc import Callable, Sequence
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


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Every array of ``tree`` (host or device, whole in every process) on every device of the mesh."""
    return jax.tree.map(lambda x: from_host(np.asarray(x), sharding(mesh)), tree)
