"""The mesh, the one table from logical axes to mesh axes, and what follows from it for an array.

Code elsewhere names logical axes. Inside a jitted function the mesh is the one of ``jax.set_mesh``; without one, and
along mesh axes of size 1, everything here does nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from param_decomp_jax.sharding.memory import HeldBy

AXES = ("replica", "nodes", "fsdp", "tensor")
"""``nodes`` and ``fsdp`` are the two levels of what users call fsdp: between nodes and within one."""

RULES: dict[str, tuple[str, ...]] = {
    # The nodes come after the devices of a node, here because they do below: where the two differ, XLA makes an
    # all-reduce of what could be a reduce-scatter.
    "batch": ("replica", "fsdp", "nodes"),
    "batch_everywhere": ("replica", "fsdp", "nodes"),
    # At rest everything is split over all devices of a replica: components by component, other matrices by the axis
    # that is named so in their description. The nodes come last, so that a device's part of what its node holds is made
    # of the parts that the same device of every node has at rest: to collect it, data moves between nodes only.
    "component": ("tensor", "fsdp", "nodes"),
    "split": ("tensor", "fsdp", "nodes"),
    # Held for a step by every node, split over its devices.
    "component_of_node": ("tensor", "fsdp"),
    "split_of_node": ("tensor", "fsdp"),
    # While a site is computed its components are split over the tensor axis alone: activations travel, not weights.
    "component_in_use": ("tensor",),
    # Of an array of matrices: whole ones, some of them on each device of a replica, or on each device of all. The
    # replicas come last, so that what they have of the first is collected within the place of a device.
    "matrix_of_replica": ("tensor", "fsdp", "nodes"),
    "matrix": ("tensor", "fsdp", "nodes", "replica"),
}
"""Logical axis to mesh axes. A logical axis that is not here is not split; changing strategy is changing this table."""

IN_USE: dict[str, str | None] = {
    "component": "component_in_use",
    "component_of_node": "component_in_use",
    "split": None,
    "split_of_node": None,
    "batch_everywhere": None,
}
"""What a logical axis becomes where its array is multiplied; others stay."""

HELD: dict[HeldBy, dict[str, str | None]] = {
    "node": {"component": "component_of_node", "split": "split_of_node"},
    "device": {"component": "component_in_use", "split": None},
}
"""What a logical axis becomes in a copy that is held for a step; others stay."""


AnyMesh = Mesh | AbstractMesh
"""A mesh of devices or an abstract one; shardings are the same on both."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh; replica × fsdp × tensor is the number of devices. ``nodes``: into how many equal parts, each
    within a node, the fsdp axis is divided; 1 where no difference is made."""

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1
    nodes: int = 1

    @property
    def n_devices(self) -> int:
        return self.replica * self.fsdp * self.tensor


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first ``shape.n_devices`` devices."""
    devices = list(jax.devices() if devices is None else devices)[: shape.n_devices]
    assert len(devices) == shape.n_devices, f"{shape} needs {shape.n_devices} devices, there are {len(devices)}"
    assert shape.fsdp % shape.nodes == 0, f"{shape}: nodes do not divide fsdp"
    sizes = (shape.replica, shape.nodes, shape.fsdp // shape.nodes, shape.tensor)
    return Mesh(np.array(devices).reshape(sizes), AXES)


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

    def held(self, by: HeldBy | None) -> "Axes":
        """The axes of the copy that is held for a step; without a copy (None), those at rest."""
        names = HELD[by] if by else {}
        return Axes(tuple(names.get(name, name) if name else None for name in self.names), self.product)

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


def n_devices() -> int:
    """Devices of the mesh in force; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else prod(_sizes(mesh).values())


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


def _collect(x: Array, axes: Axes, to: Axes) -> Array:
    """``x``, split as ``axes``, laid out as ``to``: between the nodes first, where the links are slow, so that each
    part crosses them once, then within them."""
    return pin(pin(x, axes.held("node")), to)


def pin(x: Array, axes: Axes) -> Array:
    """``x`` where ``axes`` has it, said even where it is whole on each device: XLA may else have each of them compute
    with a part, and gather."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(x.shape, axes.names, mesh))


class Held(eqx.Module):
    """An array at rest, or a slice of it, with the copy that is used in its place for a step (see `hold`).

    ``rest`` is what gradients go to, and is not read. ``copy`` is constant.
    """

    rest: Array
    copy: Array
    by: HeldBy = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.copy.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.copy.dtype

    def of_both(self, function: Callable[[Any], Any]) -> "Held":
        """``function`` of what rests and of the copy."""
        return Held(function(self.rest), function(self.copy), self.by)

    def __getitem__(self, index: Any) -> "Held":
        return self.of_both(lambda x: x[index])

    def swapaxes(self, a: int, b: int) -> "Held":
        return self.of_both(lambda x: x.swapaxes(a, b))


def is_held(x: Any) -> bool:
    """For `jax.tree.map` over trees with `Held` in place of arrays."""
    return isinstance(x, Held)


def hold(tree: Any, axes: Any, by: HeldBy | None, dtype: Any) -> Any:
    """Copies of the arrays of ``tree`` that are split at rest, as they are held for a step; None for the others, and
    nothing but None where ``by`` is None. Arrays that enter products are cast to ``dtype`` first (N1). A device that
    has all of an array holds a copy for that alone.

    The copies are constant: `held` says whose gradients are taken. ``axes`` has the structure of ``tree``.
    """

    def hold_leaf(a: Axes, x: Array) -> Array | None:
        mesh = jax.sharding.get_abstract_mesh()
        if by is None:
            return None
        cast = jax.lax.stop_gradient(x).astype(dtype if a.product else x.dtype)
        if mesh.empty or spec(x.shape, a.names, mesh) == spec(x.shape, a.held(by).names, mesh):
            return cast if by == "device" and cast.dtype != x.dtype else None
        return _collect(constrain(cast, *a.names), a, a.held(by))

    copies = jax.tree.map(hold_leaf, axes, tree, is_leaf=is_axes)
    # Pinned: else XLA may move the gathers to where the copies are used, into loops and what is recomputed.
    return jax.lax.optimization_barrier(copies) if jax.tree.leaves(copies) else copies


def held(tree: Any, copies: Any, by: HeldBy | None) -> Any:
    """``tree`` with `Held` in place of the arrays that have a copy."""
    if by is None:
        return tree
    attach = lambda x, copy: x if copy is None else Held(x, copy, by)  # noqa: E731
    return jax.tree.map(attach, tree, copies, is_leaf=lambda x: x is None)


def rows_at_rest(tree: Any, rows: slice) -> Any:
    """Some rows of stacked arrays, without copies: slices of these would be further copies (see `with_row`)."""
    return jax.tree.map(lambda x: x[rows], at_rest(tree))


def with_row(slice_: Any, tree: Any, row: Int[Array, ""]) -> Any:
    """``slice_``, one row of `rows_at_rest`, with that row of the copies in the stacked ``tree``."""

    def attach(x: Any, own: Array) -> Any:
        if not isinstance(x, Held):
            return own
        return Held(own, jax.lax.dynamic_index_in_dim(x.copy, row, keepdims=False), x.by)

    return jax.tree.map(attach, tree, slice_, is_leaf=is_held)


def at_rest(tree: Any) -> Any:
    """``tree`` without copies."""
    return jax.tree.map(lambda x: x.rest if is_held(x) else x, tree, is_leaf=is_held)


def gather(x: Array | Held, axes: Axes, dtype: Any) -> Array:
    """``x`` as it is multiplied: cast to ``dtype`` if it enters products, then gathered.

    The gradient goes back cast to the master's dtype and split as the master is: a reduce-scatter.
    """
    if isinstance(x, Held):
        used = gather(x.copy, axes.held(x.by), dtype)
        return _in_place_of(x.rest, jax.lax.stop_gradient(used), axes)
    dtype = jnp.dtype(dtype) if axes.product else x.dtype
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or spec(x.shape, axes.names, mesh) == spec(x.shape, axes.in_use, mesh):
        x = x.astype(dtype)
        return pin(x, axes) if axes.product else constrain(x, *axes.names)
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
    if mesh.empty:
        return (g.astype(master.dtype),)
    sizes = _sizes(mesh)
    if sizes["tensor"] > 1 and sum(sizes[axis] > 1 for axis in RULES["batch"]) > 1:
        # With tensor and two axes of the batch above 1, XLA (JAX 0.10.2, both partitioners) gives the rows of a batched
        # product over split rows in a wrong order where its result is to be split over tensor and fsdp at once.
        g = jax.lax.with_sharding_constraint(g, spec(g.shape, axes.in_use, mesh))
    return (constrain(constrain(g, *axes.names).astype(master.dtype), *axes.names),)


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _in_place_of(rest: Array, used: Array, axes: Axes) -> Array:
    """``used``, whose gradient goes to ``rest`` as that of `gather` does."""
    return used


_in_place_of.defvjp(
    lambda rest, used, axes: (used, jnp.zeros((0,), rest.dtype)),
    lambda axes, rest, g: (*_gather_backward(axes, None, rest, g), None),
)


def cast_tree(tree: Any, axes: Any, dtype: Any) -> Any:
    """Arrays that enter products cast to ``dtype``, where they lie: what a scan slices, and what it adds up in its
    backward, is then no wider than the products that come of it. ``axes`` has the structure of ``tree``."""

    def cast(a: Axes, x: Any) -> Any:
        if isinstance(x, Held):
            return Held(cast(a, x.rest), x.copy, x.by)
        return constrain(x.astype(dtype), *a.names) if a.product else x

    return jax.tree.map(cast, axes, tree, is_leaf=is_axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter(x: Array, axes: Axes) -> Array:
    """``x``, a product over a split axis, summed over the devices and split as ``axes``: a reduce-scatter.

    The gradient is gathered, so that the products before it stay where their factors lie.
    """
    return constrain(x, *axes.names)


def gather_scattered(g: Array, axes: Axes) -> Array:
    """``g``, split as ``axes``, as the products need it whose sum was scattered so."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or spec(g.shape, axes.names, mesh) == spec(g.shape, axes.in_use, mesh):
        return g
    return _collect(g, axes, Axes(axes.in_use))


scatter.defvjp(lambda x, axes: (scatter(x, axes), None), lambda axes, _, g: (gather_scattered(g, axes),))


def gather_tree(tree: Any, axes: Any, dtype: Any) -> Any:
    """`gather` for every array of ``tree``; ``axes`` has its structure."""
    return jax.tree.map(lambda a, x: gather(x, a, dtype), axes, tree, is_leaf=is_axes)


def held_axes(axes: Any, by: HeldBy | None) -> Any:
    """A tree of `Axes`, as held."""
    return jax.tree.map(lambda a: a.held(by), axes, is_leaf=is_axes)


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


# --- sums over rows of the batch, in two stages: over the devices of each node, then over the nodes ---


def by_node(*arrays: Array) -> tuple[Array, ...] | None:
    """Arrays ``[B, …]`` as ``[devices, nodes, rows, …]``, the second axis over the nodes of the mesh; None where it has
    one, or its devices do not divide B."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else _sizes(mesh)
    nodes = sizes.get("nodes", 1)
    others = prod(sizes.get(axis, 1) for axis in RULES["batch"] if axis != "nodes")
    if nodes == 1 or any(x.shape[0] % (nodes * others) for x in arrays):
        return None
    assert RULES["batch"][-1] == "nodes"
    return tuple(x.reshape(others, nodes, -1, *x.shape[1:]) for x in arrays)


def sum_over_nodes(x: Array) -> Array:
    """The sum, in the dtype of ``x``, over its first axis, of which each node has its own part.

    A product over the rows of `by_node` then becomes a reduce-scatter over the devices of each node and one over the
    nodes, each of what the first one has left.
    """
    anywhere = PartitionSpec.UNCONSTRAINED
    x = jax.lax.with_sharding_constraint(x, PartitionSpec("nodes", *(anywhere,) * (x.ndim - 1)))
    # Not `jnp.sum`, which would have fp32 sent.
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))


# --- cutting an axis into blocks, each from every device's own part ---


def split_blocks(x: Array, axis: int, n_blocks: int, name: str) -> Array:
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


def join_blocks(blocks: Array, axis: int, name: str) -> Array:
    """The inverse of `split_blocks`: the array whose blocks these are."""
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


def split_tree(tree: Any, axes: Any, n_blocks: int, name: str) -> Any:
    """`split_blocks` for the arrays of ``tree`` that have an axis of this name; the others are None in the result."""

    def cut_leaf(a: Axes, x: Any) -> Any:
        axis = a.at(name)
        if axis is None:
            return None
        # A held copy is cut as what rests is: its devices have whole runs of the parts.
        each = partial(split_blocks, axis=axis, n_blocks=n_blocks, name=name)
        return x.of_both(each) if isinstance(x, Held) else each(x)

    return jax.tree.map(cut_leaf, axes, tree, is_leaf=is_axes)


def with_block(tree: Any, block: Any) -> Any:
    """``tree`` with what `split_tree` has cut replaced by one block of it."""
    return jax.tree.map(lambda b, x: x if b is None else b, block, tree, is_leaf=lambda x: x is None or is_held(x))


def indices(size: int) -> UInt32[Array, " size"]:
    """Global numbers 0 … size − 1 of the elements of an axis, to be cut along with it (M4)."""
    return jnp.arange(size, dtype=jnp.uint32)
