"""Arrays with a leading layer axis that are kept as one array for each layer.

An unrolled layer then reads its own array; XLA would copy a row of a stacked array first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array


class ByLayer(eqx.Module):
    """An array ``[layers, …]`` kept as one ``[…]`` per layer, or what describes such arrays: shapes, shardings."""

    layers: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.layers), *self.layers[0].shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.layers[0].dtype

    def __getitem__(self, layers: slice) -> "ByLayer":
        return ByLayer(self.layers[layers])


@dataclass(frozen=True)
class SomeLayers:
    """The layers ``first .. stop - 1`` of arrays with a leading layer axis: a tree, or a part of one.

    A loop over them indexes the arrays, because a slice taken beforehand would be a copy.
    """

    arrays: Any
    first: int
    stop: int


def is_by_layer(x: Any) -> bool:
    """Returns whether ``x`` is a `ByLayer`: the ``is_leaf`` for trees with `ByLayer` in place of arrays."""
    return isinstance(x, ByLayer)


def _is_kept(x: Any) -> bool:
    """Returns whether ``x`` stands for a plain array, or for a tree of them."""
    return isinstance(x, ByLayer | SomeLayers)


def layers_of(tree: Any, layers: slice) -> Any:
    """Returns some layers of arrays that have a leading layer axis."""
    return jax.tree.map(lambda x: x[layers], tree, is_leaf=is_by_layer)


def one_layer(tree: Any, layer: int) -> Any:
    """Returns one layer of arrays that have a leading layer axis, without that axis."""

    def take(x: Any) -> Any:
        if isinstance(x, SomeLayers):
            return one_layer(x.arrays, x.first + layer)
        return x.layers[layer] if is_by_layer(x) else x[layer]

    return jax.tree.map(take, tree, is_leaf=_is_kept)


def n_layers(tree: Any) -> int:
    """Returns the length of the leading axis, which all arrays of ``tree`` share."""
    first = jax.tree.leaves(tree, is_leaf=_is_kept)[0]
    return first.stop - first.first if isinstance(first, SomeLayers) else int(first.shape[0])


def stacked(tree: Any) -> Any:
    """Returns ``tree`` with plain arrays; several layers are copied."""

    def stack(x: Any) -> Any:
        if isinstance(x, SomeLayers):
            return stacked(layers_of(x.arrays, slice(x.first, x.stop)))
        if not is_by_layer(x):
            return x
        return x.layers[0][None] if len(x.layers) == 1 else jnp.stack(x.layers)

    return jax.tree.map(stack, tree, is_leaf=_is_kept)


def scanned(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns what a loop over the layers of ``tree`` runs over, and a function from one of its elements to the layer.

    A `SomeLayers` is indexed in the loop.
    """
    ranges: list[SomeLayers] = []

    def numbers(x: Any) -> Any:
        if not isinstance(x, SomeLayers):
            return stacked(x)
        ranges.append(SomeLayers(stacked(x.arrays), x.first, x.stop))
        return _Number(jnp.arange(x.first, x.stop), len(ranges) - 1)

    def layer(element: Any) -> Any:
        def take(x: Any) -> Any:
            if not isinstance(x, _Number):
                return x
            arrays = ranges[x.of].arrays
            return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, x.layer, keepdims=False), arrays)

        return jax.tree.map(take, element, is_leaf=lambda x: isinstance(x, _Number))

    return jax.tree.map(numbers, tree, is_leaf=_is_kept), layer


class _Number(eqx.Module):
    """The number of a layer of the range ``of``."""

    layer: Array
    of: int = eqx.field(static=True)
