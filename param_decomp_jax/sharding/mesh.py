"""The mesh, the single table from logical axes to mesh axes, and how arrays are split by it.

Code elsewhere names logical axes only. Inside a jitted function, the mesh is that of ``jax.set_mesh``. Without a mesh,
and along mesh axes of size 1, everything here does nothing.
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
    # The nodes come after the devices of a node because they do so below. If the two differed, XLA would use an
    # all-reduce where a reduce-scatter is enough.
    "batch": ("replica", "fsdp", "nodes"),
    "batch_everywhere": ("replica", "fsdp", "nodes"),
    # At rest everything is split over all devices of a replica: components by component, other matrices by the axis
    # that their description calls "split". The nodes come last. So a device's part of what its node holds consists of
    # the parts that the same device of every node has at rest, and collecting it moves data between nodes only.
    "component": ("tensor", "fsdp", "nodes"),
    "split": ("tensor", "fsdp", "nodes"),
    # Held for a step by every node, split over its devices.
    "component_of_node": ("tensor", "fsdp"),
    "split_of_node": ("tensor", "fsdp"),
    # While a site is computed its components are split over the tensor axis alone: activations travel, not weights.
    "component_in_use": ("tensor",),
    # Arrays of matrices are split into whole matrices, over the devices of a replica or over all devices. The replicas
    # come last, so that a device's part of the first split is collected from the same device of every replica.
    "matrix_of_replica": ("tensor", "fsdp", "nodes"),
    "matrix": ("tensor", "fsdp", "nodes", "replica"),
}
"""Logical axis to mesh axes. A logical axis that is missing here is not split. To change the strategy, change this
table."""

IN_USE: dict[str, str | None] = {
    "component": "component_in_use",
    "component_of_node": "component_in_use",
    "split": None,
    "split_of_node": None,
    "batch_everywhere": None,
}
"""The logical axes that change where an array is multiplied, and what they become."""

HELD: dict[HeldBy, dict[str, str | None]] = {
    "node": {"component": "component_of_node", "split": "split_of_node"},
    "device": {"component": "component_in_use", "split": None},
}
"""The logical axes that change in a copy that is held for a step, and what they become."""


AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or an abstract one; both give the same shardings."""


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh; replica × fsdp × tensor is the number of devices. ``nodes``: the number of equal parts of
    the fsdp axis, each within a node; 1 if nodes are not told apart."""

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1
    nodes: int = 1

    @property
    def n_devices(self) -> int:
        return self.replica * self.fsdp * self.tensor


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh over the first ``shape.n_devices`` devices."""
    devices = list(jax.devices() if devices is None else devices)[: shape.n_devices]
    assert len(devices) == shape.n_devices, f"{shape} needs {shape.n_devices} devices, there are {len(devices)}"
    assert shape.fsdp % shape.nodes == 0, f"{shape}: nodes do not divide fsdp"
    sizes = (shape.replica, shape.nodes, shape.fsdp // shape.nodes, shape.tensor)
    return Mesh(np.array(devices).reshape(sizes), AXES)


@dataclass(frozen=True)
class Axes:
    """The logical names of an array's axes at rest. ``product``: whether the array enters matrix products, so that it
    is cast before it is gathered (N1). An `Axes` is a leaf in the trees that describe trees of arrays."""

    names: tuple[str | None, ...]
    product: bool = False

    @property
    def in_use(self) -> tuple[str | None, ...]:
        """The names of the axes where the array is multiplied."""
        return tuple(IN_USE.get(name, name) if name else None for name in self.names)

    def held(self, by: HeldBy | None) -> "Axes":
        """Returns the axes of the copy that is held for a step; without a copy (None), those at rest."""
        names = HELD[by] if by else {}
        return Axes(tuple(names.get(name, name) if name else None for name in self.names), self.product)

    def under(self, name: str | None = None) -> "Axes":
        """Returns the axes with one more in front."""
        return Axes((name, *self.names), self.product)

    def below(self) -> "Axes":
        """Returns the axes without the first one."""
        return Axes(self.names[1:], self.product)

    def at(self, name: str) -> int | None:
        """Returns the number of the axis of this name, at rest or in use; None if there is none."""
        wanted = IN_USE.get(name, name)
        return self.in_use.index(wanted) if wanted in self.in_use else None


def _sizes(mesh: Any) -> Mapping[str, int]:
    return dict(mesh.shape)


def physical(name: str | None, size: int, mesh: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which an axis of this name and size is split, without those of size 1 or that do not
    divide it."""
    chosen: tuple[str, ...] = ()
    parts = 1
    sizes = _sizes(mesh)
    for axis in RULES.get(name or "", ()):
        n = sizes.get(axis, 1)
        if n > 1 and size % (parts * n) == 0:
            chosen, parts = (*chosen, axis), parts * n
    return chosen


def spec(shape: Sequence[int], names: Sequence[str | None], mesh: Any) -> PartitionSpec:
    """Returns how an array of this shape is split; there may be fewer ``names`` than axes."""
    per_axis = [physical(name, size, mesh) or None for name, size in zip(names, shape, strict=False)]
    while per_axis and per_axis[-1] is None:
        per_axis.pop()
    return PartitionSpec(*(axes[0] if axes and len(axes) == 1 else axes for axes in per_axis))


def sharding(mesh: AnyMesh, shape: Sequence[int], names: Sequence[str | None]) -> NamedSharding:
    """Returns the sharding of an array of this shape whose (leading) axes have these logical names."""
    return NamedSharding(mesh, spec(shape, names, mesh))


def whole(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding in which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def n_devices() -> int:
    """Returns the number of devices of the current mesh; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else prod(_sizes(mesh).values())


def n_parts(name: str, size: int) -> int:
    """Returns the number of parts into which the current mesh splits an axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else prod(_sizes(mesh)[axis] for axis in physical(name, size, mesh))


def constrain(x: Array, *names: str | None) -> Array:
    """Returns ``x`` with the sharding of its logical axes; ``x`` itself without a mesh, or if they split nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    wanted = spec(x.shape, names, mesh)
    # A constraint that splits nothing is not emitted: inside a scan it makes XLA carry a copy.
    return jax.lax.with_sharding_constraint(x, wanted) if len(wanted) else x


def _collect(x: Array, axes: Axes, to: Axes) -> Array:
    """Returns ``x``, which is split as ``axes``, laid out as ``to``. It is collected between the nodes first, where
    links are slow, so that each part crosses them once, then within the nodes."""
    return pin(pin(x, axes.held("node")), to)


def pin(x: Array, axes: Axes) -> Array:
    """Returns ``x`` constrained to ``axes``, even if it is whole on each device: otherwise XLA may let each device
    compute with a part, and gather."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(x.shape, axes.names, mesh))


class Held(eqx.Module):
    """An array at rest, or a slice of it, together with the copy that is used in its place for a step (see `hold`).

    ``rest`` receives the gradients and is not read. ``copy`` is constant.
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
        """Applies ``function`` to the array at rest and to the copy."""
        return Held(function(self.rest), function(self.copy), self.by)

    def __getitem__(self, index: Any) -> "Held":
        return self.of_both(lambda x: x[index])

    def swapaxes(self, a: int, b: int) -> "Held":
        return self.of_both(lambda x: x.swapaxes(a, b))


def is_held(x: Any) -> bool:
    """Returns whether ``x`` is a `Held`: the ``is_leaf`` for trees with `Held` in place of arrays."""
    return isinstance(x, Held)


def hold(tree: Any, axes: Any, by: HeldBy | None, dtype: Any) -> Any:
    """Returns copies of the arrays of ``tree`` that are split at rest, as they are held for a step, and None for the
    others. All are None if ``by`` is None. Arrays that enter products are cast to ``dtype`` first (N1). A device that
    has the whole array holds a copy only if the cast changes its dtype.

    The copies are constant: `held` pairs them with the arrays that receive the gradients. ``axes`` has the structure of
    ``tree``.
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
    # Without the barrier XLA may move the gathers to where the copies are used: into loops and recomputations.
    return jax.lax.optimization_barrier(copies) if jax.tree.leaves(copies) else copies


def held(tree: Any, copies: Any, by: HeldBy | None) -> Any:
    """Returns ``tree`` with `Held` in place of the arrays that have a copy."""
    if by is None:
        return tree
    attach = lambda x, copy: x if copy is None else Held(x, copy, by)  # noqa: E731
    return jax.tree.map(attach, tree, copies, is_leaf=lambda x: x is None)


def rows_at_rest(tree: Any, rows: slice) -> Any:
    """Returns some rows of stacked arrays, without held copies: slices of those would be further copies (see
    `with_row`)."""
    return jax.tree.map(lambda x: x[rows], at_rest(tree))


def with_row(slice_: Any, tree: Any, row: Int[Array, ""]) -> Any:
    """Returns ``slice_``, one row of `rows_at_rest`, with the same row of the copies in the stacked ``tree``."""

    def attach(x: Any, own: Array) -> Any:
        if not isinstance(x, Held):
            return own
        return Held(own, jax.lax.dynamic_index_in_dim(x.copy, row, keepdims=False), x.by)

    return jax.tree.map(attach, tree, slice_, is_leaf=is_held)


def at_rest(tree: Any) -> Any:
    """Returns ``tree`` without held copies."""
    return jax.tree.map(lambda x: x.rest if is_held(x) else x, tree, is_leaf=is_held)


def gather(x: Array | Held, axes: Axes, dtype: Any) -> Array:
    """Returns ``x`` as it is multiplied: cast to ``dtype`` if it enters products, then gathered.

    Its gradient is split as the master is, by a reduce-scatter, and cast to the master's dtype.
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
    # Constrained before and after the gather, because XLA could otherwise gather the fp32 master and cast all of it.
    at_rest = constrain(x.astype(dtype), *axes.names)
    used = jax.lax.with_sharding_constraint(at_rest, spec(x.shape, axes.in_use, mesh))
    return used, jnp.zeros((0,), x.dtype)


def _gather_backward(axes: Axes, dtype: Any, master: Array, g: Array) -> tuple[Array]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return (g.astype(master.dtype),)
    sizes = _sizes(mesh)
    if sizes["tensor"] > 1 and sum(sizes[axis] > 1 for axis in RULES["batch"]) > 1:
        # With tensor and two axes of the batch above 1, XLA (JAX 0.10.2, both partitioners) returns the rows of a
        # batched product over split rows in the wrong order if its result is split over tensor and fsdp at once.
        g = jax.lax.with_sharding_constraint(g, spec(g.shape, axes.in_use, mesh))
    return (constrain(constrain(g, *axes.names).astype(master.dtype), *axes.names),)


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _in_place_of(rest: Array, used: Array, axes: Axes) -> Array:
    """Returns ``used``, with its gradient passed on to ``rest`` as `gather` does."""
    return used


_in_place_of.defvjp(
    lambda rest, used, axes: (used, jnp.zeros((0,), rest.dtype)),
    lambda axes, rest, g: (*_gather_backward(axes, None, rest, g), None),
)


def cast_tree(tree: Any, axes: Any, dtype: Any) -> Any:
    """Casts the arrays that enter products to ``dtype`` in place. What a scan slices, and what it adds up in its
    backward pass, is then no wider than the products. ``axes`` has the structure of ``tree``."""

    def cast(a: Axes, x: Any) -> Any:
        if isinstance(x, Held):
            return Held(cast(a, x.rest), x.copy, x.by)
        return constrain(x.astype(dtype), *a.names) if a.product else x

    return jax.tree.map(cast, axes, tree, is_leaf=is_axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter(x: Array, axes: Axes) -> Array:
    """Sums ``x``, a product over a split axis, over the devices and splits it as ``axes``: a reduce-scatter.

    The gradient is gathered, so that the products before it stay where their factors lie.
    """
    return constrain(x, *axes.names)


def gather_scattered(g: Array, axes: Axes) -> Array:
    """Gathers ``g``, which is split as ``axes``, for the backward pass of the products whose sum `scatter` returned."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or spec(g.shape, axes.names, mesh) == spec(g.shape, axes.in_use, mesh):
        return g
    return _collect(g, axes, Axes(axes.in_use))


scatter.defvjp(lambda x, axes: (scatter(x, axes), None), lambda axes, _, g: (gather_scattered(g, axes),))


def gather_tree(tree: Any, axes: Any, dtype: Any) -> Any:
    """Calls `gather` for every array of ``tree``; ``axes`` has the same structure."""
    return jax.tree.map(lambda a, x: gather(x, a, dtype), axes, tree, is_leaf=is_axes)


def held_axes(axes: Any, by: HeldBy | None) -> Any:
    """Returns a tree of `Axes` as they are held."""
    return jax.tree.map(lambda a: a.held(by), axes, is_leaf=is_axes)


def is_axes(x: Any) -> bool:
    """Returns whether ``x`` is an `Axes`: the ``is_leaf`` for trees of `Axes`."""
    return isinstance(x, Axes)


def replace_fields(module: Any, **fields: Any) -> Any:
    """Returns ``module`` with other values in these fields, of any type: axes, shardings, shapes, None.

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
    """Reshapes arrays ``[B, …]`` to ``[devices, nodes, rows, …]``, with the second axis over the nodes of the mesh.
    Returns None if the mesh has one node, or if its devices do not divide B."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else _sizes(mesh)
    nodes = sizes.get("nodes", 1)
    others = prod(sizes.get(axis, 1) for axis in RULES["batch"] if axis != "nodes")
    if nodes == 1 or any(x.shape[0] % (nodes * others) for x in arrays):
        return None
    assert RULES["batch"][-1] == "nodes"
    return tuple(x.reshape(others, nodes, -1, *x.shape[1:]) for x in arrays)


def sum_over_nodes(x: Array) -> Array:
    """Returns the sum of ``x`` over its first axis, of which each node has its own part, in the dtype of ``x``.

    A product over the rows of `by_node` then becomes a reduce-scatter over the devices of each node, followed by one
    over the nodes of the results.
    """
    anywhere = PartitionSpec.UNCONSTRAINED
    x = jax.lax.with_sharding_constraint(x, PartitionSpec("nodes", *(anywhere,) * (x.ndim - 1)))
    # `jnp.sum` would send fp32 between devices.
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))


# --- cutting an axis into blocks, each from every device's own part ---


def split_blocks(x: Array, axis: int, n_blocks: int, name: str) -> Array:
    """Reshapes ``[..., size, ...]`` to ``[n_blocks, ..., size / n_blocks, ...]`` without moving data between devices.

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
    """Inverts `split_blocks`: returns the array whose blocks these are."""
    n_blocks, size = blocks.shape[0], blocks.shape[0] * blocks.shape[axis + 1]
    parts = n_parts(name, size)
    x = blocks.reshape(n_blocks, *blocks.shape[1 : axis + 1], parts, -1, *blocks.shape[axis + 2 :])
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], size, *x.shape[axis + 3 :])


def fitting_blocks(size: int, largest: int | None, name: str) -> int:
    """Returns the smallest number of equal blocks of at most ``largest`` elements (all devices together); 1 for None.

    If no block can be that small, the blocks are the smallest possible: one element of every device.
    """
    if largest is None:
        return 1
    own = size // n_parts(name, size)
    return next((n for n in range(1, own + 1) if own % n == 0 and size // n <= largest), own)


def split_tree(tree: Any, axes: Any, n_blocks: int, name: str) -> Any:
    """Calls `split_blocks` for the arrays of ``tree`` that have an axis of this name; the others become None."""

    def cut_leaf(a: Axes, x: Any) -> Any:
        axis = a.at(name)
        if axis is None:
            return None
        # A held copy is cut like the array at rest, because its devices have whole runs of the parts.
        each = partial(split_blocks, axis=axis, n_blocks=n_blocks, name=name)
        return x.of_both(each) if isinstance(x, Held) else each(x)

    return jax.tree.map(cut_leaf, axes, tree, is_leaf=is_axes)


def with_block(tree: Any, block: Any) -> Any:
    """Returns ``tree`` with the arrays that `split_tree` has cut replaced by one block of each."""
    return jax.tree.map(lambda b, x: x if b is None else b, block, tree, is_leaf=lambda x: x is None or is_held(x))


def indices(size: int) -> UInt32[Array, " size"]:
    """Returns the global numbers 0 … size − 1 of the elements of an axis, to be cut along with it (M4)."""
    return jnp.arange(size, dtype=jnp.uint32)
