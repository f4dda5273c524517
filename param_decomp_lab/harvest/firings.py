"""The positions of a block at which the components of one site fire."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

Gather = Callable[[Int[np.ndarray, "m w"], Int[np.ndarray, " m"]], tuple[np.ndarray, np.ndarray]]
"""Importances and activations ``[m, w]`` of components at positions of the block, whether they fire there or not."""


@dataclass(frozen=True)
class Firings:
    """Where λ is above the threshold, in order of the positions, then of the components.

    ``position``: within the block. ``gather``: values at other positions, for the surroundings of an example.
    """

    position: Int32[np.ndarray, " firings"]
    component: Int32[np.ndarray, " firings"]
    importance: Float32[np.ndarray, " firings"]
    activation: Float32[np.ndarray, " firings"]
    gather: Gather

    def __len__(self) -> int:
        return len(self.position)


def find_firings(importance: Float[Array, "1 n C"], activation: Float[Array, "1 n C"], threshold: float) -> Firings:
    """The firings of one site in one block, from arrays of one device.

    A CPU's arrays are read where they lie. From other devices only what fires is fetched: few of the values.
    """
    if next(iter(importance.devices())).platform == "cpu":
        return _from_host(np.asarray(importance)[0], np.asarray(activation)[0], threshold)
    return _from_device(importance, activation, threshold)


def _from_host(importance: np.ndarray, activation: np.ndarray, threshold: float) -> Firings:
    # Neither `np.nonzero` of two axes, nor a division, nor a mask as index: several times slower.
    n, C = importance.shape
    fires = importance > np.float32(threshold)
    flat = np.flatnonzero(fires)
    position = np.repeat(np.arange(n, dtype=np.int32), np.diff(np.searchsorted(flat, np.arange(n + 1) * C)))
    component = flat.astype(np.int32) - position * np.int32(C)

    def gather(positions: np.ndarray, components: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return importance[positions, components[:, None]], activation[positions, components[:, None]]

    return Firings(position, component, importance.ravel().take(flat), activation.ravel().take(flat), gather)


def _from_device(importance: Array, activation: Array, threshold: float) -> Firings:
    n_firings = int(_count(importance, threshold))
    size = _rounded(n_firings)
    found = jax.device_get(_compact(importance, activation, threshold, size))
    flat, lam, a = (x[:n_firings] for x in found)
    position, component = np.divmod(flat, np.int32(importance.shape[-1]))

    def gather(positions: np.ndarray, components: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        m = len(components)
        rows = np.zeros((_rounded(m), positions.shape[1]), np.int32)
        columns = np.zeros(_rounded(m), np.int32)
        rows[:m], columns[:m] = positions, components
        lam, a = jax.device_get(_take(importance, activation, rows, columns))
        return lam[:m], a[:m]

    return Firings(position, component, lam, a, gather)


def _rounded(n: int) -> int:
    """The next power of two: few sizes to compile for."""
    return 1 << max(0, n - 1).bit_length()


@jax.jit
def _count(importance: Array, threshold: float) -> Array:
    return jnp.sum(importance > threshold, dtype=jnp.int32)


def _compacted(importance: Array, activation: Array, threshold: float, size: int) -> tuple[Array, Array, Array]:
    [flat] = jnp.nonzero(importance.ravel() > threshold, size=size, fill_value=0)
    return flat.astype(jnp.int32), importance.ravel()[flat], activation.ravel()[flat]


_compact = jax.jit(_compacted, static_argnums=3)


@jax.jit
def _take(importance: Array, activation: Array, positions: Array, components: Array) -> tuple[Array, Array]:
    return importance[0, positions, components[:, None]], activation[0, positions, components[:, None]]
