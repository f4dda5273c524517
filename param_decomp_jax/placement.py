"""Where a run's arrays lie: shardings of its state and weights, and global arrays from host arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from param_decomp_jax.adversary import Adversary
from param_decomp_jax.components import Components, components_axes
from param_decomp_jax.masks import source_axes
from param_decomp_jax.mesh import AnyMesh, Axes, is_axes, replace_fields, sharding
from param_decomp_jax.state import Decomposition, State

WHOLE = Axes(())


def batch_sharding(mesh: AnyMesh, shape: tuple[int, ...]) -> NamedSharding:
    """Rows of a batch of this shape over the devices."""
    return sharding(mesh, shape, ("batch",))


def state_axes(decomposition: Decomposition, state: State) -> State:
    """Logical axes of every array of ``state`` (arrays or shapes), in its structure.

    Moments lie with what they are moments of; persistent sources with the batch where every row has its own (D2).
    """
    components, ci = components_axes(state.components), state.ci.axes()
    of_experts = {name for name, factors in state.components.items() if factors.V.ndim > 3}

    def adversary_axes(adversary: Adversary) -> Any:
        def bundle(sources: Any) -> Any:
            return {name: source_axes(s, decomposition.batch_size, name in of_experts) for name, s in sources.items()}

        axes: Any = jax.tree.map(lambda _: WHOLE, adversary)
        return replace_fields(
            axes,
            raw=bundle(adversary.raw),
            mean=adversary.mean and bundle(adversary.mean),
            square=adversary.square and bundle(adversary.square),
        )

    axes: Any = jax.tree.map(lambda _: WHOLE, state)
    return replace_fields(
        axes,
        components=components,
        ci=ci,
        components_moments=moments_axes(state.components_moments, state.components, components),
        ci_moments=moments_axes(state.ci_moments, state.ci, ci),
        adversaries={name: adversary_axes(a) for name, a in state.adversaries.items()},
    )


def moments_axes(moments: Any, parameters: Any, axes: Any) -> Any:
    """Logical axes of an optimiser's state: what in it has the parameters' structure lies like them."""
    structure: Any = jax.tree.structure(parameters)

    def alike(part: Any) -> bool:
        return bool(jax.tree.structure(part) == structure)

    def part_axes(part: Any) -> Any:
        if not alike(part):
            return WHOLE
        # A factored moment (Adafactor's) has fewer axes than its parameter.
        return jax.tree.map(lambda a, p, x: a if x.shape == p.shape else WHOLE, axes, parameters, part, is_leaf=is_axes)

    return jax.tree.map(part_axes, moments, is_leaf=alike)


def moments_shardings(mesh: AnyMesh, optimizer: optax.GradientTransformation, components: Components) -> Any:
    """Shardings of the state of an optimiser of components, in its structure."""
    moments = jax.eval_shape(optimizer.init, components)
    return shardings(mesh, moments_axes(moments, components, components_axes(components)), moments)


def state_shardings(mesh: AnyMesh, decomposition: Decomposition, state: State) -> State:
    """Shardings in the structure of ``state`` (arrays or shapes); what is offloaded lies in pinned host memory."""
    placed = shardings(mesh, state_axes(decomposition, state), state)
    offloaded = decomposition.memory.offload_state

    def on_host(part: Any, arrays: Any) -> Any:
        def host_sharding(where: NamedSharding, x: Any) -> NamedSharding:
            return where.with_memory_kind("pinned_host") if len(x.shape) > 0 else where

        return jax.tree.map(host_sharding, part, arrays)

    for name in ("components_moments", "ci_moments"):
        if name in offloaded:
            placed = replace_fields(placed, **{name: on_host(getattr(placed, name), getattr(state, name))})
    if "sources_moments" in offloaded:
        moved = {}
        for name, adversary in state.adversaries.items():
            own = placed.adversaries[name]
            mean, square = on_host(own.mean, adversary.mean), on_host(own.square, adversary.square)
            moved[name] = replace_fields(own, mean=mean, square=square)
        placed = replace_fields(placed, adversaries=moved)
    return placed


def shardings(mesh: AnyMesh, axes: Any, arrays: Any) -> Any:
    """A sharding for every array (or shape) of a tree, from the description of its axes."""
    return jax.tree.map(lambda a, x: sharding(mesh, x.shape, a.names), axes, arrays, is_leaf=is_axes)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Abstract arrays (`jax.ShapeDtypeStruct`) from shapes and a sharding for each."""
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings)


def from_host(array: np.ndarray, where: NamedSharding) -> jax.Array:
    """A global array from a host array that every process has whole; no check across processes, no collective."""
    pick: Callable[[Any], np.ndarray] = lambda index: array[index]  # noqa: E731
    return jax.make_array_from_callback(array.shape, where, pick)


def process_batch_rows(mesh: AnyMesh, size: int) -> tuple[int, int]:
    """First row, and the one after the last, that this process's devices hold of a batch of ``size`` rows.

    Everything in between is counted too, should the mesh not keep a process's devices together.
    """
    held: Mapping[Any, Any] = batch_sharding(mesh, (size,)).addressable_devices_indices_map((size,))
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
