"""Masks (section 4): what a source is, where it comes from, and the mask built from it and λ."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.draws import uniform
from param_decomp_jax.sites import Stack


@dataclass(frozen=True)
class Stochastic:
    """M3: fresh every draw, U[0, 1) or Bernoulli(½) for the components, U[0, 1) for the delta."""

    sampling: Literal["continuous", "binomial"] = "continuous"


@dataclass(frozen=True)
class Constant:
    """M3: every source is ``value`` and the delta is off; 0 gives m = λ, 1 gives m = 1."""

    value: float


class Sources(eqx.Module):
    """Sources of one stack. ``lead`` are axes that broadcast against, or tile over, the leading axes of an activation.

    The delta channel is an array of its own: C + 1 does not shard (M5). None: no delta path.
    """

    components: Float[Array, "layers *lead C"]
    delta: Float[Array, "layers *lead"] | None


Bundle = dict[str, Sources]
"""One source for every live site, by stack; feeds exactly one loss term (A6)."""


def interpolate(importance: Float[Array, "*n C"], source: Float[Array, "*#n #C"]) -> Float[Array, "*n C"]:
    """M1: ``m = λ + (1 − λ) · source``, so λ = 1 pins a component on."""
    return importance + (1 - importance) * source


@runtime_checkable
class SourceKind(Protocol):
    """Where one forward's sources come from, layer by layer."""

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        """What `at` needs for the layers ``first .. stop - 1``, with a leading layer axis."""
        ...

    def at(
        self, slice_: Any, leading: tuple[int, ...], C: int
    ) -> tuple[Float[Array, "*#n #C"], Float[Array, "*#n"] | None]:
        """Component sources and delta of one layer's site (M2: the delta is raw)."""
        ...


@dataclass(frozen=True)
class StochasticSources:
    """Drawn where they are used, from the forward's key and the site's canonical number (M4)."""

    kind: Stochastic
    key: PRNGKeyArray
    use_delta: bool

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        return jnp.asarray(stack.sites[first - stack.first : stop - stack.first])

    def at(self, slice_: Any, leading: tuple[int, ...], C: int) -> tuple[Array, Array | None]:
        of_components, of_delta = jax.random.split(jax.random.fold_in(self.key, slice_))
        source = uniform(of_components, leading, C)
        if self.kind.sampling == "binomial":
            source = (source < 0.5).astype(source.dtype)
        return source, uniform(of_delta, leading, 1)[..., 0] if self.use_delta else None


@dataclass(frozen=True)
class ConstantSources:
    """The same number everywhere, no delta path."""

    kind: Constant

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        return None

    def at(self, slice_: Any, leading: tuple[int, ...], C: int) -> tuple[Array, Array | None]:
        return jnp.full((1,) * (len(leading) + 1), self.kind.value), None


@dataclass(frozen=True)
class GivenSources:
    """Sources that somebody chose: an adversary, or a test."""

    bundle: Bundle

    def slices(self, stack: Stack, first: int, stop: int) -> Any:
        return jax.tree.map(lambda x: x[first - stack.first : stop - stack.first], self.bundle[stack.name])

    def at(self, slice_: Any, leading: tuple[int, ...], C: int) -> tuple[Array, Array | None]:
        delta = None if slice_.delta is None else tile(slice_.delta, leading[0])
        return tile(slice_.components, leading[0]), delta


def tile(source: Float[Array, "rows *lead"], batch: int) -> Float[Array, "tiled *lead"]:
    """A2: source i serves the batch rows i, i + n, …; a single row, or as many as the batch has, stays as it is."""
    n = source.shape[0]
    if n in (1, batch):
        return source
    assert batch % n == 0, f"{n} sources do not tile a batch of {batch}"
    return jnp.tile(source, (batch // n,) + (1,) * (source.ndim - 1))
