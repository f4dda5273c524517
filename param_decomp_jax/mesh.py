"""The mesh, the one table from logical axes to mesh axes, and what follows from it for an array.

Code elsewhere names logical axes. Inside a jitted function the mesh is the one of ``jax.set_mesh``; without one, and
along mesh axes of size 1, everything here does nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

AXES = ("replica", "fsdp", "tensor")

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("replica", "fsdp"),
    "batch_everywhere": ("replica", "fsdp"),
    # At rest everything is split over all devices of a replica: components by component, other matrices by the axis
    # that is named so in their description.
    "component": ("tensor", "fsdp"),
    "split": ("tensor", "fsdp"),
    # While a site is computed its components are split over the tensor axis alone: activations travel, not weights.
    "component_in_use": ("tensor",),
}
"""Logical axis to mesh axes. A logical axis that is not here is not split; changing strategy is changing this table."""

IN_USE: dict[str, str | None] = {"component": "component_in_use", "split": None, "batch_everywhere": None}
"""What a logical axis becomes where its array is multiplied; others stay."""


AnyMesh = Mesh | AbstractMesh
"""A mesh of devices or an abstract one; shardings are the same on both."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the three mesh axes; their product is the number of devices."""

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def n_devices(self) -> int:
        return self.replica * self.fsdp * self.tensor


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first ``shape.n_devices`` devices."""
    devices = list(jax.devices() if devices is None else devices)[: shape.n_devices]
    assert len(devices) == shape.n_devices, f"{shape} needs {shape.n_devices} devices, there are {len(devices)}"
    return Mesh(np.array(devices).reshape(shape.replica, shape.fsdp, shape.tensor), AXES)


@dataclass(frozen=True)
class Axes:
    """Logical names of an array's axes at rest. ``product``: it goes into matrix products, so it is cast before it is
    gathered (N1). A leaf of the trees that describe trees of arrays."""

    names: tuple[str | None, ...]
    product: bool = False

    @property
    def in_use(self) -> tuple[str | None, ...]:
        """The same where it is multiplied."""
        return tuple(IN_USE.get(name, name) if name else None for name in self.names)

    def under(self, name: str | None = None) -> "Axes":
        """With one more axis in front."""
        return Axes((name, *self.names), self.product)

    def below(self) -> "Axes":
        """Without the first axis."""
        return Axes(self.names[1:], self.product)

    def at(self, name: str) -> int | None:
        """Number of the axis of this name, at rest or in use."""
        wanted = IN_USE.get(name, name)
        return self.in_use.index(wanted) if wanted in self.in_use else None


def _sizes(mesh: Any) -> Mapping[str, int]:
    return dict(mesh.shape)


def physical(name: str | None, size: int, mesh: Any) -> tuple[str, ...]:
    """Mesh axes over which an axis of this name and size is split, without those of size 1 or that do not divide."""
    chosen: tuple[str, ...] = ()
    parts = 1
    sizes = _sizes(mesh)
    for axis in RULES.get(name or "", ()):
        n = sizes.get(axis, 1)
        if n > 1 and size % (parts * n) == 0:
            chosen, parts = (*chosen, axis), parts * n
    return chosen


def spec(shape: Sequence[int], names: Sequence[str | None], mesh: Any) -> PartitionSpec:
    """How an array of this shape is split; ``names`` may be fewer than its axes."""
    per_axis = [physical(name, size, mesh) or None for name, size in zip(names, shape, strict=False)]
    while per_axis and per_axis[-1] is None:
        per_axis.pop()
    return PartitionSpec(*(axes[0] if axes and len(axes) == 1 else axes for axes in per_axis))


def sharding(mesh: AnyMesh, shape: Sequence[int], names: Sequence[str | None]) -> NamedSharding:
    """Sharding of an array of this shape whose (leading) axes have these logical names."""
    return NamedSharding(mesh, spec(shape, names, mesh))


def whole(mesh: AnyMesh) -> NamedSharding:
    """Every device holds all of it."""
    return NamedSharding(mesh, PartitionSpec())


def n_parts(name: str, size: int) -> int:
    """Into how many parts the mesh in force splits an axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else prod(_sizes(mesh)[axis] for axis in physical(name, size, mesh))


def constrain(x: Array, *names: str | None) -> Array:
    """``x`` with the sharding of its logical axes; ``x`` itself without a mesh, or where they split nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    wanted = spec(x.shape, names, mesh)
    # A constraint that splits nothing is not emitted: inside a scan it makes XLA carry a copy.
    return jax.lax.with_sharding_constraint(x, wanted) if len(wanted) else x


def gather(x: Array, axes: Axes, dtype: Any) -> Array:
    """``x`` as it is multiplied: cast to ``dtype`` if it enters products, then gathered.

    The gradient goes back cast to the master's dtype and split as the master is: a reduce-scatter.
    """
    dtype = jnp.dtype(dtype) if axes.product else x.dtype
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or spec(x.shape, axes.names, mesh) == spec(x.shape, axes.in_use, mesh):
        return constrain(x.astype(dtype), *axes.names)
    return _gather(x, axes, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, axes: Axes, dtype: Any) -> Array:
    return _gather_forward(x, axes, dtype)[0]


def _gather_forward(x: Array, axes: Axes, dtype: Any) -> tuple[Array, Array]:
    mesh = jax.sharding.get_abstract_mesh()
    # Pinned before and after: XLA would else gather the fp32 master and cast the whole of it.
    at_rest = constrain(x.astype(dtype), *axes.names)
    used = jax.lax.with_sharding_constraint(at_rest, spec(x.shape, axes.in_use, mesh))
    return used, jnp.zeros((0,), x.dtype)


def _gather_backward(axes: Axes, dtype: Any, master: Array, g: Array) -> tuple[Array]:
    mesh = jax.sharding.get_abstract_mesh()
    if all(n > 1 for n in _sizes(mesh).values()):
        # With replica, fsdp and tensor all above 1, XLA (JAX 0.10.2, both partitioners) gives the rows of a batched
        # product over split rows in a wrong order where its result is to be split over tensor and fsdp at once.
        g = jax.lax.with_sharding_constraint(g, spec(g.shape, axes.in_use, mesh))
    return (constrain(constrain(g, *axes.names).astype(master.dtype), *axes.names),)


_gather.defvjp(_gather_forward, _gather_backward)


def cast_tree(tree: Any, axes: Any, dtype: Any) -> Any:
    """Arrays that enter products cast to ``dtype``, where they lie: what a scan slices, and what it adds up in its
    backward, is then no wider than the products that come of it. ``axes`` has the structure of ``tree``."""
    return jax.tree.map(
        lambda a, x: constrain(x.astype(dtype), *a.names) if a.product else x, axes, tree, is_leaf=is_axes
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter(x: Array, axes: Axes) -> Array:
    """``x``, a product over a split axis, summed over the devices and split as ``axes``: a reduce-scatter.

    The gradient is gathered, so that the products before it stay where their factors lie.
    """
    return constrain(x, *axes.names)


def _scatter_backward(axes: Axes, _: None, g: Array) -> tuple[Array]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or spec(g.shape, axes.names, mesh) == spec(g.shape, axes.in_use, mesh):
        return (g,)
    return (jax.lax.with_sharding_constraint(g, spec(g.shape, axes.in_use, mesh)),)


scatter.defvjp(lambda x, axes: (scatter(x, axes), None), _scatter_backward)


def gather_tree(tree: Any, axes: Any, dtype: Any) -> Any:
    """`gather` for every array of ``tree``; ``axes`` has its structure."""
    return jax.tree.map(lambda a, x: gather(x, a, dtype), axes, tree, is_leaf=is_axes)


def is_axes(x: Any) -> bool:
    """For `jax.tree.map` over trees of `Axes`."""
    return isinstance(x, Axes)


def replace_fields(module: Any, **fields: Any) -> Any:
    """``module`` with other values in these fields, whatever they are: axes, shardings, shapes, nothing.

    Unlike `dataclasses.replace` it does not go through the constructor, whose annotations are of arrays.
    """
    unknown = fields.keys() - vars(module).keys()
    assert not unknown, f"{type(module).__name__} has no {', '.join(sorted(unknown))}"
    new = object.__new__(type(module))
    for name, value in {**vars(module), **fields}.items():
        object.__setattr__(new, name, value)
    return new


# --- cutting an axis into blocks, each from every device's own part ---


def cut(x: Array, axis: int, n_blocks: int, name: str) -> Array:
    """``[..., size, ...]`` to ``[n_blocks, ..., size / n_blocks, ...]``, and nothing moves between devices.

    With the axis split over n devices, block j has the elements ``d · size/n + j · b + i`` for every device d and
    every i below b = size / (n · n_blocks).
    """
    if n_blocks == 1:
        return x[None]
    size = x.shape[axis]
    parts = n_parts(name, size)
    b = size // (parts * n_blocks)
    assert parts * n_blocks * b == size, f"{n_blocks} blocks do not cut {size} elements on {parts} parts"
    x = x.reshape(*x.shape[:axis], parts, n_blocks, b, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis + 1, 0)
    return x.reshape(n_blocks, *x.shape[1 : axis + 1], parts * b, *x.shape[axis + 3 :])


def uncut(blocks: Array, axis: int, name: str) -> Array:
    """The inverse of `cut`: the array whose blocks these are."""
    n_blocks, size = blocks.shape[0], blocks.shape[0] * blocks.shape[axis + 1]
    parts = n_parts(name, size)
    x = blocks.reshape(n_blocks, *blocks.shape[1 : axis + 1], parts, -1, *blocks.shape[axis + 2 :])
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], size, *x.shape[axis + 3 :])


def fitting_blocks(size: int, largest: int | None, name: str) -> int:
    """The smallest number of equal blocks of at most ``largest`` elements (all devices together); 1 for None.

    Where no block is as small as asked, the smallest there is: one element of every device.
    """
    if largest is None:
        return 1
    own = size // n_parts(name, size)
    return next((n for n in range(1, own + 1) if own % n == 0 and size // n <= largest), own)


def cut_tree(tree: Any, axes: Any, n_blocks: int, name: str) -> Any:
    """`cut` for the arrays of ``tree`` that have an axis of this name; the others are None in the result."""

    def cut_leaf(a: Axes, x: Array) -> Array | None:
        axis = a.at(name)
        return None if axis is None else cut(x, axis, n_blocks, name)

    return jax.tree.map(cut_leaf, axes, tree, is_leaf=is_axes)


def with_block(tree: Any, block: Any) -> Any:
    """``tree`` with what `cut_tree` has cut replaced by one block of it."""
    return jax.tree.map(lambda b, x: x if b is None else b, block, tree, is_leaf=lambda x: x is None)


def indices(size: int) -> UInt32[Array, " size"]:
    """Global numbers 0 … size − 1 of the elements of an axis, to be cut along with it (M4)."""
    return jnp.arange(size, dtype=jnp.uint32)
