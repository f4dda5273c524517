"""Reconstruction (section 5): which sites are live x how positions are routed x where the sources come from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.adversary import FreshAttack, PersistentAttack, attack, initial_sources
from param_decomp_jax.components import Components, masked_site
from param_decomp_jax.masks import (
    Bundle,
    Constant,
    ConstantSources,
    GivenSources,
    SourceKind,
    Stochastic,
    StochasticSources,
    interpolate,
)  # fmt: skip
from param_decomp_jax.numerics import matmul, wide
from param_decomp_jax.routing import Everywhere, Routing, draw_routes
from param_decomp_jax.sites import PRE_IDENTITY, Sites, Stack
from param_decomp_jax.targets.base import Forward, Target, Weights
from param_decomp_jax.targets.plain_linears import RESIDUAL, output_record


@dataclass(frozen=True)
class AllSites:
    """One forward with every site live."""


@dataclass(frozen=True)
class EachSite:
    """One forward for every site, it alone live (the schema's Layerwise)."""


@dataclass(frozen=True)
class Chunks:
    """One forward for every group of ``sites_per_chunk`` consecutive sites; the last may be smaller (R4)."""

    sites_per_chunk: int


LiveSets = AllSites | EachSite | Chunks
SourceSpec = Stochastic | Constant | FreshAttack | PersistentAttack


@dataclass(frozen=True)
class Reconstruction:
    """A term: coefficient x mean over its forwards of the error of each (R1, or R2's exception for ``hidden_acts``)."""

    name: str
    coeff: float
    live: LiveSets
    routing: Routing
    sources: SourceSpec
    n_samples: int = 1
    error: Literal["output", "hidden_acts"] = "output"


def live_sets(live: LiveSets, n_sites: int) -> tuple[tuple[int, ...], ...]:
    """Canonical numbers of the live sites of every forward (before samples)."""
    everything = tuple(range(n_sites))
    match live:
        case AllSites():
            return (everything,)
        case EachSite():
            return tuple((n,) for n in everything)
        case Chunks(size):
            return tuple(everything[start : start + size] for start in range(0, n_sites, size))


def n_samples(term: Reconstruction) -> int:
    """Draws per live set: those of R5, but one where every draw would be the same."""
    draws_sources = isinstance(term.sources, Stochastic | FreshAttack)
    return term.n_samples if draws_sources or not isinstance(term.routing, Everywhere) else 1


def n_forwards(term: Reconstruction, n_sites: int) -> int:
    """Masked forwards that enter the term's mean; an attack's own are not counted."""
    return len(live_sets(term.live, n_sites)) * n_samples(term)


def n_attack_passes(term: Reconstruction, n_sites: int) -> int:
    """Forward and backward passes in which an attack climbs before the term's forwards (A1, A3)."""
    match term.sources:
        case FreshAttack(n_steps=n):
            return n * n_forwards(term, n_sites)
        case PersistentAttack(n_warmup_steps=n):
            return n
        case _:
            return 0


class Scene(NamedTuple):
    """What every masked forward of a batch shares."""

    target: Target
    weights: Weights
    inputs: Array
    clean: Forward
    leading: tuple[int, ...]
    use_delta: bool


@dataclass
class MaskedLayer:
    """One layer of a masked pass: live kinds get the masked product, the others ``xW`` (F3)."""

    live: dict[str, dict[str, Any]]
    sources: SourceKind
    records_outputs: frozenset[str]
    records: dict[str, Array] = field(default_factory=dict)

    def enter(self, x: Float[Array, "*n d"]) -> None:
        pass

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        return self._site(kind, self._site(kind + PRE_IDENTITY, x, None), W)

    def _site(self, kind: str, x: Float[Array, "*n d_in"], W: Array | None) -> Float[Array, "*n d_out"]:
        """The product of one matrix; W None is the identity."""
        if kind in self.live:
            site = self.live[kind]
            importance = site["importance"]
            source, delta = self.sources.at(site["source"], x.shape[:-1], importance.shape[-1])
            mask = interpolate(importance, source)
            y = masked_site(x, W, site["V"], site["U"], mask, delta, site["route"])
        else:
            y = x if W is None else matmul(x, W)
        if kind in self.records_outputs:
            self.records[output_record(kind)] = y
        return y


@dataclass(frozen=True)
class MaskedLinears:
    """A pass in which the sites ``live`` (canonical numbers) are masked.

    ``importances``: λ by stack, ``[layers, …, C]``. ``routes``: ``[…, live sites]`` or None (everywhere).
    """

    sites: Sites
    live: tuple[int, ...]
    components: Components
    importances: dict[str, Array]
    sources: SourceKind
    routes: Float[Array, "*n live"] | None
    record_outputs: bool = False

    def _live_stacks(self, layer: int) -> tuple[Stack, ...]:
        live = set(self.live)
        return tuple(
            stack for stack in self.sites.stacks if layer in stack.layers and stack.sites[layer - stack.first] in live
        )

    def cuts(self) -> frozenset[int]:
        """Where the set of live stacks changes, and, if outputs are recorded, the edges of the segments."""
        layers = [layer for segment in self.sites.segments for layer in (*range(segment.first, segment.stop + 1),)]
        edges = {segment.first for segment in self.sites.segments} | {s.stop for s in self.sites.segments}
        return frozenset(
            layer
            for layer in layers
            if (self.record_outputs and layer in edges) or self._live_stacks(layer) != self._live_stacks(layer - 1)
        )

    def slices(self, first: int, stop: int) -> Any:
        def of_stack(stack: Stack) -> dict[str, Any]:
            rows = slice(first - stack.first, stop - stack.first)
            slots = [self.live.index(n) for n in stack.sites[rows]]
            return {
                "V": self.components[stack.name].V[rows],
                "U": self.components[stack.name].U[rows],
                "importance": self.importances[stack.name][rows],
                "route": None if self.routes is None else jnp.stack([self.routes[..., slot] for slot in slots]),
                "source": self.sources.slices(stack, first, stop),
            }

        return {stack.kind: of_stack(stack) for stack in self._live_stacks(first)}

    def layer(self, first: int, stop: int, slice_: Any) -> MaskedLayer:
        recorded = frozenset(s.kind for s in self.sites.stacks if first in s.layers) if self.record_outputs else ()
        return MaskedLayer(slice_, self.sources, frozenset(recorded))


def clean_residual(scene: Scene, live: tuple[int, ...]) -> tuple[int, Array]:
    """F6: where a forward with these live sites leaves the clean pass, and the clean residual there."""
    layer = scene.target.sites.all[live[0]].layer
    records = scene.clean.records
    first = max(start for start in records if start <= layer)
    return layer, records[first][RESIDUAL][layer - first]


def run_masked(
    scene: Scene,
    live: tuple[int, ...],
    components: Components,
    importances: dict[str, Array],
    sources: SourceKind,
    routes: Array | None = None,
    record_outputs: bool = False,
) -> Forward:
    """One masked forward, begun at its first live layer (F6) unless outputs are recorded at every site."""
    if routes is not None:
        routes = routes.astype(jnp.float32)
    linears = MaskedLinears(scene.target.sites, live, components, importances, sources, routes, record_outputs)
    start = None if record_outputs else clean_residual(scene, live)
    return scene.target.forward(scene.weights, scene.inputs, linears, start)


def forward_error(
    scene: Scene,
    live: tuple[int, ...],
    components: Components,
    importances: dict[str, Array],
    sources: SourceKind,
    routes: Array | None,
    error: Literal["output", "hidden_acts"] = "output",
) -> Float[Array, ""]:
    """The reconstruction error of one masked forward (R1, or R2's exception)."""
    hidden = error == "hidden_acts"
    masked = run_masked(scene, live, components, importances, sources, routes, record_outputs=hidden)
    if hidden:
        return hidden_acts_error(scene.target.sites, scene.clean, masked)
    return scene.target.error(scene.weights, scene.clean.output, masked.output)


def hidden_acts_error(sites: Sites, clean: Forward, masked: Forward) -> Float[Array, ""]:
    """R2's exception: sum of squared differences of every site's output over the number of elements."""
    total, elements = jnp.zeros(()), 0
    for segment in sites.segments:
        for stack in segment.stacks:
            name = output_record(stack.kind)
            a = wide(clean.records[segment.first][name])
            b = jnp.concatenate([
                wide(records[name]) for first, records in sorted(masked.records.items())
                if segment.first <= first < segment.stop
            ])  # fmt: skip
            total, elements = total + jnp.sum((a - b) ** 2), elements + a.size
    return total / elements


def reconstruction(
    term: Reconstruction,
    scene: Scene,
    components: Components,
    importances: dict[str, Array],
    key: PRNGKeyArray,
    bundle: Bundle | None = None,
) -> Float[Array, ""]:
    """Mean error over the term's forwards, without its coefficient. ``bundle``: sources of a persistent term."""
    sites = scene.target.sites
    errors: list[Array] = []
    for live in live_sets(term.live, len(sites)):
        for _ in range(n_samples(term)):
            of_routes, of_sources = jax.random.split(jax.random.fold_in(key, len(errors)))
            routes = draw_routes(term.routing, of_routes, scene.leading, len(live))
            sources = _sources(term, scene, live, components, importances, routes, of_sources, bundle)
            errors.append(forward_error(scene, live, components, importances, sources, routes, term.error))
    return jnp.mean(jnp.stack(errors))


def _sources(
    term: Reconstruction,
    scene: Scene,
    live: tuple[int, ...],
    components: Components,
    importances: dict[str, Array],
    routes: Array | None,
    key: PRNGKeyArray,
    bundle: Bundle | None,
) -> SourceKind:
    match term.sources:
        case Stochastic() as kind:
            return StochasticSources(kind, key, scene.use_delta)
        case Constant() as kind:
            return ConstantSources(kind)
        case PersistentAttack():
            assert bundle is not None
            return GivenSources(bundle)
        case FreshAttack() as kind:
            held = jax.lax.stop_gradient((components, importances))

            def error(bundle: Bundle) -> Array:
                return forward_error(scene, live, *held, GivenSources(bundle), routes, term.error)

            start = initial_sources(kind, key, scene.target.sites, live, scene.leading, scene.use_delta)
            return GivenSources(attack(kind, error, start))


def persistent_error(
    scene: Scene, components: Components, importances: dict[str, Array]
) -> Callable[[Bundle], Float[Array, ""]]:
    """What the warm-up ascents climb (A3): all sites live, routed everywhere, components and λ held."""
    held = jax.lax.stop_gradient((components, importances))
    everything = tuple(range(len(scene.target.sites)))
    return lambda bundle: forward_error(scene, everything, *held, GivenSources(bundle), None)
