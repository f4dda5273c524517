"""Finds and counts the positions of a block at which the components of one site fire.

Counting takes most of a harvest's time outside the devices, so it is compiled (Numba) and goes through the firings
once. In NumPy, each step would be a pass through memory (docs/measurements/harvest.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Int64, UInt32, UInt64

from param_decomp_lab.compilation import compiled
from param_decomp_lab.harvest.files.tables import AT_ONE, OCTAVES

AT_ONCE = 1 << 13
"""Firings that are collected before they are counted: they stay in the processor's cache."""


class Tables(NamedTuple):
    """The arrays that count the firings of one site in one block.

    The first seven are added to. ``activation_sum``: of |a|. ``pairs``: how often each of the block's u different
    inputs occurs where a component fires; ``u`` is 0 if these are not counted here. ``place``: the index of the input
    at each position.

    The key of a firing is the sum of that of its position and that of its component: the firings of one component have
    independent draws, as its sample requires. ``worst_top`` (for a ≥ 0, and for a < 0), ``worst_uniform``: the ranks
    that a firing must be below to be among a component's examples. The rank in a uniform sample is the key. The rank of
    the top examples puts the largest ``λ · |a|`` first, and breaks ties by the lower halves of the keys. With whole
    keys, a component whose firings are all alike would have the same top examples as its uniform sample. The last bit
    of that rank is 1 where a < 0.
    """

    firings: Int64[np.ndarray, " C"]
    firings_at_one: Int64[np.ndarray, " C"]
    importance_max: Float32[np.ndarray, " C"]
    importance_histogram: UInt32[np.ndarray, "C bins"]
    activation_histogram: UInt32[np.ndarray, "C bins"]
    activation_sum: Float64[np.ndarray, " C"]
    pairs: Int32[np.ndarray, "C u"]
    place: Int32[np.ndarray, " n"]
    key_of_position: UInt64[np.ndarray, " n"]
    key_of_component: UInt64[np.ndarray, " C"]
    worst_top: UInt64[np.ndarray, "C 2"]
    worst_uniform: UInt64[np.ndarray, " C"]


class Ranked(NamedTuple):
    """Firings that are better than the examples so far: their numbers (see `Firings.select`) and ranks."""

    number: Int64[np.ndarray, " k"]
    rank: UInt64[np.ndarray, " k"]


class Selected(NamedTuple):
    """Some firings."""

    position: Int32[np.ndarray, " k"]
    component: Int32[np.ndarray, " k"]
    importance: Float32[np.ndarray, " k"]
    activation: Float32[np.ndarray, " k"]


class Firings(Protocol):
    """Where λ is above the threshold."""

    def __len__(self) -> int: ...

    def count(self, tables: Tables, n_firings: int) -> tuple[Ranked, Ranked]:
        """Adds all ``n_firings`` firings to ``tables``. Returns the firings that may become top examples, and those
        that may enter the uniform sample.
        """

    def select(self, number: Int64[np.ndarray, " k"]) -> Selected: ...

    def places(self) -> tuple[Int32[np.ndarray, " firings"], Int32[np.ndarray, " firings"]]:
        """Returns the position and component of all firings, in order."""

    def components_at(
        self, positions: Int64[np.ndarray, " s"]
    ) -> tuple[Int32[np.ndarray, " s"], Int32[np.ndarray, " f"], Bool[np.ndarray, " f"]]:
        """Returns how many components fire at each of these positions, and which, position by position, and whether
        their activation is negative."""

    def gather(
        self, positions: Int32[np.ndarray, "m w"], components: Int32[np.ndarray, " m"]
    ) -> tuple[Float32[np.ndarray, "m w"], Float32[np.ndarray, "m w"]]:
        """Returns the importances and activations of components at positions of the block, whether or not they fire
        there.
        """


@dataclass(frozen=True)
class HostFirings:
    """Firings in the arrays of a CPU device, which are read in place. The number of a firing is the
    index of its value.
    """

    importance: Float32[np.ndarray, "n C"]
    activation: Float32[np.ndarray, "n C"]
    threshold: np.float32

    def __len__(self) -> int:
        return int(np.count_nonzero(self.importance > self.threshold))

    def count(self, tables: Tables, n_firings: int) -> tuple[Ranked, Ranked]:
        ranked = _room_for(n_firings)
        bits = self.importance.view(np.uint32), self.activation.view(np.uint32)
        return _cut(ranked, _count_array(self.importance, *bits, self.threshold, tables, ranked))

    def select(self, number: Int64[np.ndarray, " k"]) -> Selected:
        position, component = np.divmod(number.astype(np.int32), np.int32(self.importance.shape[1]))
        return Selected(position, component, self.importance.ravel()[number], self.activation.ravel()[number])

    def places(self) -> tuple[Int32[np.ndarray, " firings"], Int32[np.ndarray, " firings"]]:
        # `np.nonzero` of two axes takes several times as long.
        flat = np.flatnonzero(self.importance > self.threshold).astype(np.int32)
        position, component = np.divmod(flat, np.int32(self.importance.shape[1]))
        return position, component

    def components_at(
        self, positions: Int64[np.ndarray, " s"]
    ) -> tuple[Int32[np.ndarray, " s"], Int32[np.ndarray, " f"], Bool[np.ndarray, " f"]]:
        fires = self.importance[positions] > self.threshold
        place, component = np.nonzero(fires)
        negative = self.activation[positions[place], component] < 0
        return fires.sum(1, dtype=np.int32), component.astype(np.int32), negative

    def gather(
        self, positions: Int32[np.ndarray, "m w"], components: Int32[np.ndarray, " m"]
    ) -> tuple[Float32[np.ndarray, "m w"], Float32[np.ndarray, "m w"]]:
        at = positions * np.int32(self.importance.shape[1]) + components[:, None]
        return self.importance.ravel().take(at), self.activation.ravel().take(at)


@dataclass(frozen=True)
class ListedFirings:
    """Firings in a list, ordered by position, then by component; ``values_at`` is `gather`."""

    position: Int32[np.ndarray, " firings"]
    component: Int32[np.ndarray, " firings"]
    importance: Float32[np.ndarray, " firings"]
    activation: Float32[np.ndarray, " firings"]
    values_at: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

    def __len__(self) -> int:
        return len(self.position)

    def count(self, tables: Tables, n_firings: int) -> tuple[Ranked, Ranked]:
        ranked = _room_for(n_firings)
        bits = self.importance.view(np.uint32), self.activation.view(np.uint32)
        number = np.arange(len(self))
        return _cut(ranked, _count_list(number, self.position, self.component, *bits, tables, ranked, 0, 0))

    def select(self, number: Int64[np.ndarray, " k"]) -> Selected:
        return Selected(*(x[number] for x in (self.position, self.component, self.importance, self.activation)))

    def places(self) -> tuple[Int32[np.ndarray, " firings"], Int32[np.ndarray, " firings"]]:
        return self.position, self.component

    def components_at(
        self, positions: Int64[np.ndarray, " s"]
    ) -> tuple[Int32[np.ndarray, " s"], Int32[np.ndarray, " f"], Bool[np.ndarray, " f"]]:
        starts, stops = (np.searchsorted(self.position, positions, side) for side in ("left", "right"))
        spans = [slice(a, b) for a, b in zip(starts, stops, strict=True)]
        component = np.concatenate([np.zeros(0, np.int32), *(self.component[span] for span in spans)])
        negative = np.concatenate([np.zeros(0, bool), *(self.activation[span] < 0 for span in spans)])
        return (stops - starts).astype(np.int32), component, negative

    def gather(
        self, positions: Int32[np.ndarray, "m w"], components: Int32[np.ndarray, " m"]
    ) -> tuple[Float32[np.ndarray, "m w"], Float32[np.ndarray, "m w"]]:
        return self.values_at(positions, components)


# ---- counting ----


def _room_for(n: int) -> tuple[Ranked, Ranked]:
    top, uniform = (Ranked(np.empty(n, np.int64), np.empty(n, np.uint64)) for _ in range(2))
    return top, uniform


def _cut(ranked: tuple[Ranked, Ranked], lengths: tuple[int, int]) -> tuple[Ranked, Ranked]:
    top, uniform = (Ranked(*(x[:n] for x in one)) for one, n in zip(ranked, lengths, strict=True))
    return top, uniform


def _bins_of_first_bits() -> Int32[np.ndarray, "512"]:
    sign, exponent = np.divmod(np.arange(512, dtype=np.int32), 256)
    place = np.clip(exponent - 127, OCTAVES[0], OCTAVES[-1]) - OCTAVES[0]
    return np.where(sign == 1, len(OCTAVES) - 1 - place, len(OCTAVES) + place).astype(np.int32)


_BIN_OF_FIRST_BITS = _bins_of_first_bits()
"""The bin of an activation, by the first nine bits of its float32: the sign and the exponent, which is the integer part
of the logarithm.
"""


_AT_ONE = np.float32(AT_ONE)


@compiled
def _count_list(
    number: Int64[np.ndarray, " k"],
    position: Int32[np.ndarray, " k"],
    component: Int32[np.ndarray, " k"],
    importance_bits: UInt32[np.ndarray, " k"],
    activation_bits: UInt32[np.ndarray, " k"],
    tables: Tables,
    ranked: tuple[Ranked, Ranked],
    n_top: int,
    n_uniform: int,
) -> tuple[int, int]:
    """Counts firings, and appends those of a low rank to the ``n_top`` and ``n_uniform`` of ``ranked``."""
    firings, at_one, importance_max, importances, activations, activation_sum, pairs, place = tables[:8]
    of_position, of_component, worst_top, worst_uniform = tables[8:]
    (top, top_rank), (uniform, uniform_rank) = ranked
    importance, activation = importance_bits.view(np.float32), activation_bits.view(np.float32)
    n_bins, low, half, last = importances.shape[1], np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1)
    for i in range(len(number)):
        p, c = position[i], component[i]
        firings[c] += 1
        at_one[c] += importance[i] >= _AT_ONE
        importance_max[c] = max(importance_max[c], importance[i])
        activation_sum[c] += abs(activation[i])
        importances[c, min(max(int(np.ceil(importance[i] * np.float32(n_bins))) - 1, 0), n_bins - 1)] += 1
        activations[c, _BIN_OF_FIRST_BITS[activation_bits[i] >> 23]] += 1
        if pairs.shape[1]:
            pairs[c, place[p]] += 1
        key = of_position[p] + of_component[c]
        if key < worst_uniform[c]:
            uniform[n_uniform], uniform_rank[n_uniform] = number[i], key
            n_uniform += 1
        # The bits of floats that are not negative are in the order of the floats.
        size = np.float32(importance[i] * abs(activation[i])).view(np.uint32)
        negative = np.uint64(activation_bits[i] >> 31)
        rank = ((low - np.uint64(size)) << half) | (key & (low - last)) | negative
        if rank < worst_top[c, negative]:
            top[n_top], top_rank[n_top] = number[i], rank
            n_top += 1
    return n_top, n_uniform


@compiled
def _count_array(
    importance: Float32[np.ndarray, "n C"],
    importance_bits: UInt32[np.ndarray, "n C"],
    activation_bits: UInt32[np.ndarray, "n C"],
    threshold: np.float32,
    tables: Tables,
    ranked: tuple[Ranked, Ranked],
) -> tuple[int, int]:
    n, C = importance.shape
    size = max(AT_ONCE, C + 1)
    number, position, component = np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
    lam, a = np.empty(size, np.uint32), np.empty(size, np.uint32)
    found = n_top = n_uniform = 0
    for p in range(n):
        first = found
        for c in range(C):
            # Always written, and overwritten if nothing fires, because an unpredictable branch would take longer.
            component[found] = c
            found += importance[p, c] > threshold
        for i in range(first, found):
            c = component[i]
            number[i], position[i], lam[i], a[i] = p * C + c, p, importance_bits[p, c], activation_bits[p, c]
        if found + C >= size or p == n - 1:
            these = number[:found], position[:found], component[:found], lam[:found], a[:found]
            n_top, n_uniform = _count_list(*these, tables, ranked, n_top, n_uniform)
            found = 0
    return n_top, n_uniform


# ---- finding them ----


def find_firings(
    importance: Float[Array, "1 n C"], activation: Float[Array, "1 n C"], n_valid: int, threshold: float
) -> Firings:
    """The firings of one site in the first ``n_valid`` positions of one block, from arrays of one device.

    A CPU's arrays are read in place. From other devices only the firings are fetched, which are few of the values.
    """
    if next(iter(importance.devices())).platform == "cpu":
        lam, a = (np.asarray(x)[0, :n_valid] for x in (importance, activation))
        return HostFirings(lam, a, np.float32(threshold))
    return _from_device(importance, activation, n_valid, threshold)


def _from_device(importance: Array, activation: Array, n_valid: int, threshold: float) -> ListedFirings:
    n_firings = int(_number(importance, n_valid, threshold))
    size = _rounded(n_firings)
    found = jax.device_get(_compact(importance, activation, n_valid, threshold, size))
    flat, lam, a = (x[:n_firings] for x in found)
    position, component = np.divmod(flat, np.int32(importance.shape[-1]))

    def values_at(positions: np.ndarray, components: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        m = len(components)
        rows = np.zeros((_rounded(m), positions.shape[1]), np.int32)
        columns = np.zeros(_rounded(m), np.int32)
        rows[:m], columns[:m] = positions, components
        lam, a = jax.device_get(_take(importance, activation, rows, columns))
        return lam[:m], a[:m]

    return ListedFirings(position, component, lam, a, values_at)


def _rounded(n: int) -> int:
    """Rounds up to a power of two, so that only a few sizes are compiled."""
    return 1 << max(0, n - 1).bit_length()


@jax.jit
def _number(importance: Array, n_valid: int, threshold: float) -> Array:
    return jnp.sum(_fires(importance, n_valid, threshold), dtype=jnp.int32)


def _fires(importance: Float[Array, "1 n C"], n_valid: int, threshold: float) -> Bool[Array, "1 n C"]:
    return (importance > threshold) & (jnp.arange(importance.shape[1]) < n_valid)[:, None]


def _compacted(
    importance: Array, activation: Array, n_valid: int, threshold: float, size: int
) -> tuple[Array, Array, Array]:
    [flat] = jnp.nonzero(_fires(importance, n_valid, threshold).ravel(), size=size, fill_value=0)
    return flat.astype(jnp.int32), importance.ravel()[flat], activation.ravel()[flat]


_compact = jax.jit(_compacted, static_argnums=4)


@jax.jit
def _take(importance: Array, activation: Array, positions: Array, components: Array) -> tuple[Array, Array]:
    return importance[0, positions, components[:, None]], activation[0, positions, components[:, None]]
