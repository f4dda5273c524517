"""Masks (section 4): what sources are, where they come from, and the masks built from them and λ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from param_decomp_jax.decomposition.draws import uniform, uniform_of_keys
from param_decomp_jax.decomposition.sites import Stack
from param_decomp_jax.nn.grouped import ExpertGroups, at_chosen
from param_decomp_jax.sharding.mesh import Axes, at_rest, replace_fields


@dataclass(frozen=True)
class Stochastic:
    """Stochastic sources (M3), drawn anew for every forward: U[0, 1) or Bernoulli(½) for the components, U[0, 1) for
    the delta."""

    sampling: Literal["continuous", "binomial"] = "continuous"


@dataclass(frozen=True)
class Constant:
    """Constant sources (M3): every source is ``value`` and the delta is off. 0 gives m = λ, 1 gives m = 1."""

    value: float


class Sources(eqx.Module):
    """The sources of one stack. ``lead``: axes that broadcast against, or tile over, the leading axes of an activation.
    For experts' matrices, ``layers`` is two axes (X6).

    The delta has an array of its own, because C + 1 does not shard (M5). None means no delta path. ``added``: the
    numbers of F8, which only interventions have, with the leading axes of ``components``.
    """

    components: Float[Array, "*layers_lead C"]
    delta: Float[Array, "*layers_lead"] | None
    added: Float[Array, "*layers_lead C"] | None = None


Bundle = dict[str, Sources]
"""One source for every live site, by stack. A bundle feeds exactly one loss term (A6)."""


def interpolate(importance: Float[Array, "*n C"], source: Float[Array, "*#n #C"]) -> Float[Array, "*n C"]:
    """Returns the mask of M1, ``m = λ + (1 − λ) · source``. So λ = 1 keeps a component fully on."""
    return importance + (1 - importance) * source


@runtime_checkable
class SourceKind(Protocol):
    """Where one forward's sources come from, by layer and by block of components."""

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        """Returns the part for the layers ``first .. stop - 1``, with a leading layer axis."""
        ...

    def axes(self, stack: Stack) -> Any:
        """Returns the logical axes of one layer's slice, in its structure."""
        ...

    def components(
        self, slice_: Any, at: UInt32[Array, "*n"], columns: UInt32[Array, " C"], groups: ExpertGroups | None = None
    ) -> Float[Array, "*#n_slots #C"]:
        """Returns component sources of one layer's site at these positions, for the components with these global
        numbers.

        ``groups``: the slots of experts, if the site is one of experts; every slot then gets the sources of its expert
        at its position (X6).
        """
        ...

    def delta(
        self, slice_: Any, at: UInt32[Array, "*n"], groups: ExpertGroups | None = None
    ) -> Float[Array, "*#n_slots"] | None:
        """Returns the raw delta source (M2); None without a delta path."""
        ...

    def added(
        self, slice_: Any, at: UInt32[Array, "*n"], groups: ExpertGroups | None = None
    ) -> Float[Array, "*#n_slots C"] | None:
        """Returns the numbers of F8; None if there are none."""
        ...


@dataclass(frozen=True)
class StochasticSources:
    """Sources that are drawn where they are used, from the forward's key and the site's canonical number (M4)."""

    kind: Stochastic
    key: PRNGKeyArray
    use_delta: bool

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        return jnp.asarray([stack.of_layer(layer) if stack.experts else stack.of_layer(layer)[0]
                            for layer in range(first, stop)])  # fmt: skip

    def axes(self, stack: Stack) -> Any:
        return Axes(())

    def components(self, slice_: Any, at: Array, columns: Array, groups: ExpertGroups | None = None) -> Array:
        source = self._draw(0, slice_, at, columns, groups)
        return (source < 0.5).astype(source.dtype) if self.kind.sampling == "binomial" else source

    def delta(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return self._draw(1, slice_, at, jnp.zeros(1, jnp.uint32), groups)[..., 0] if self.use_delta else None

    def added(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return None

    def _draw(self, which: int, sites: Array, at: Array, columns: Array, groups: ExpertGroups | None) -> Array:
        """Draws sources. ``which``: 0 for components, 1 for deltas. ``sites``: the site's canonical number, or every
        expert's."""
        if groups is None:
            return uniform(self._keys(sites)[which], at, columns)
        keys = jax.random.key_data(jax.vmap(lambda site: self._keys(site)[which])(sites))
        slots = jnp.broadcast_to(at[..., None], groups.chosen.shape)
        return uniform_of_keys(keys[groups.chosen], slots, columns)

    def _keys(self, site: Array) -> tuple[PRNGKeyArray, PRNGKeyArray]:
        components_key, delta_key = jax.random.split(jax.random.fold_in(self.key, site))
        return components_key, delta_key


@dataclass(frozen=True)
class ConstantSources:
    """Sources with the same number everywhere, and no delta path."""

    kind: Constant

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        return None

    def axes(self, stack: Stack) -> Any:
        return None

    def components(self, slice_: Any, at: Array, columns: Array, groups: ExpertGroups | None = None) -> Array:
        return jnp.full((1,) * (at.ndim + 1 if groups is None else groups.chosen.ndim + 1), self.kind.value)

    def delta(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return None

    def added(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return None


@dataclass(frozen=True)
class GivenSources:
    """Sources given as arrays, by an adversary or a caller. ``batch``: the number of rows of the global batch.

    In a slice, a delta that all rows share is repeated for each row. Its gradient is then summed over the batch once,
    after all layers, and not in every layer.
    """

    bundle: Bundle
    batch: int

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        own = jax.tree.map(lambda x: x[first - stack.first : stop - stack.first], self.bundle[stack.name])
        rows = _row_axis(stack)
        if own.delta is None or own.delta.shape[rows] > 1:
            return own
        shape = own.delta.shape
        return replace_fields(own, delta=jnp.broadcast_to(own.delta, (*shape[:rows], self.batch, *shape[rows + 1 :])))

    def axes(self, stack: Stack) -> Any:
        own = jax.tree.map(Axes.below, source_axes(self.bundle[stack.name], self.batch, stack.experts is not None))
        delta, rows = self.bundle[stack.name].delta, _row_axis(stack)
        if delta is None or delta.shape[rows] > 1:
            return own
        names = own.delta.names
        return replace_fields(own, delta=Axes((*names[: rows - 1], "batch", *names[rows:])))

    def components(self, slice_: Any, at: Array, columns: Array, groups: ExpertGroups | None = None) -> Array:
        return self._at(slice_.components, at, groups)

    def delta(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return None if slice_.delta is None else self._at(slice_.delta, at, groups)

    def added(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return None if slice_.added is None else self._at(slice_.added, at, groups)

    def _at(self, source: Array, at: Array, groups: ExpertGroups | None) -> Array:
        if groups is None:
            return tile(source, at.shape[0])
        return at_chosen(jax.vmap(lambda of_expert: tile(of_expert, at.shape[0]))(source), groups)


@dataclass(frozen=True)
class MergedSources:
    """The sources of A8: an adversary's in the adversarial rows of the batch, stochastic ones in the others.

    ``adversarial``: one value for each row of the global batch. ``row_size``: the number of positions of a row.
    """

    attack: GivenSources
    stochastic: StochasticSources | GivenSources
    adversarial: Bool[Array, " B"]
    row_size: int

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        return self.attack.slices(stack, first, stop), self.stochastic.slices(stack, first, stop)

    def axes(self, stack: Stack) -> Any:
        return self.attack.axes(stack), self.stochastic.axes(stack)

    def components(self, slice_: Any, at: Array, columns: Array, groups: ExpertGroups | None = None) -> Array:
        of_attack, other = slice_
        return self._by_row(
            at,
            self.attack.components(of_attack, at, columns, groups),
            self.stochastic.components(other, at, columns, groups),
        )

    def delta(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        of_attack, other = slice_
        first, second = self.attack.delta(of_attack, at, groups), self.stochastic.delta(other, at, groups)
        return None if first is None or second is None else self._by_row(at, first, second)

    def added(self, slice_: Any, at: Array, groups: ExpertGroups | None = None) -> Array | None:
        return None

    def _by_row(self, at: Array, of_attack: Array, other: Array) -> Array:
        row = at[(slice(None), *(slice(1),) * (at.ndim - 1))] // self.row_size
        adversarial = self.adversarial[row]
        return jnp.where(adversarial.reshape(*row.shape, *(1,) * (other.ndim - row.ndim)), of_attack, other)


def given_parts(sources: SourceKind) -> tuple[GivenSources, ...]:
    """Returns the parts of ``sources`` that are given as arrays."""
    match sources:
        case GivenSources():
            return (sources,)
        case MergedSources(attack=attack, stochastic=stochastic):
            return (attack, *given_parts(stochastic))
        case _:
            return ()


def with_given_parts(sources: SourceKind, parts: Sequence[GivenSources]) -> SourceKind:
    """Returns ``sources`` with ``parts`` in place of its `given_parts`."""
    match sources:
        case GivenSources():
            (own,) = parts
            return own
        case MergedSources():
            attack, *rest = parts
            stochastic = with_given_parts(sources.stochastic, rest)
            assert isinstance(stochastic, StochasticSources | GivenSources)
            return replace(sources, attack=attack, stochastic=stochastic)
        case _:
            return sources


def _row_axis(stack: Stack) -> int:
    """Returns the axis of a stack's sources that broadcasts against the batch, or tiles it."""
    return 1 if stack.experts is None else 2


def source_axes(sources: Sources, batch: int, experts: bool = False, pool: bool = False) -> Any:
    """Returns the logical axes of a stack's sources: split with the batch if each of its rows has its own, else by
    component.

    ``experts``: whether they belong to experts' matrices. ``pool``: whether each row has several (A9).
    """
    sources, n = at_rest(sources), (2 if experts else 1) + pool
    shape = sources.components.shape
    per_row = shape[n] == batch
    lead = (*(None,) * n, "batch" if per_row else None, *("seq" if size > 1 else None for size in shape[n + 1 : -1]))
    columns = "component_in_use" if per_row else "component"

    def array_axes(x: Any) -> Axes:
        return Axes((*lead, columns) if x.ndim == sources.components.ndim else lead)

    return jax.tree.map(array_axes, sources)


def tile(source: Float[Array, "rows *lead"], batch: int) -> Float[Array, "tiled *lead"]:
    """Tiles sources over the batch (A2): source i serves the batch rows i, i + n, …. A single row, or as many rows as
    the batch has, stays as it is."""
    n = source.shape[0]
    if n in (1, batch):
        return source
    assert batch % n == 0, f"{n} sources do not tile a batch of {batch}"
    return jnp.tile(source, (batch // n,) + (1,) * (source.ndim - 1))
