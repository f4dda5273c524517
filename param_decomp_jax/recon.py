"""Reconstruction (section 5): which sites are live x how positions are routed x where the sources come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.adversary import FreshAttack, PersistentAttack, attack, initial_sources
from param_decomp_jax.ci import Judge
from param_decomp_jax.components import Components
from param_decomp_jax.masked import MaskedLinears, Stream, apart
from param_decomp_jax.masks import (
    Bundle,
    Constant,
    ConstantSources,
    GivenSources,
    SourceKind,
    Stochastic,
    StochasticSources,
)  # fmt: skip
from param_decomp_jax.micro_batches import mean_over_parts
from param_decomp_jax.numerics import wide
from param_decomp_jax.routing import Everywhere, Routing, draw_routes
from param_decomp_jax.scene import Scene
from param_decomp_jax.sites import Sites
from param_decomp_jax.targets.base import Forward
from param_decomp_jax.targets.plain_linears import output_record


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


ErrorKind = Literal["output", "hidden_acts"]


@dataclass(frozen=True)
class Reconstruction:
    """A term: coefficient x mean over its forwards of the error of each (R1, or R2's exception for ``hidden_acts``)."""

    name: str
    coeff: float
    live: LiveSets
    routing: Routing
    sources: SourceSpec
    n_samples: int = 1
    error: ErrorKind = "output"


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


def run_masked(
    scene: Scene, components: Components, judge: Judge, streams: Sequence[Stream], record_outputs: bool = False
) -> list[Forward]:
    """The masked forwards of these streams, begun at their first live layers (F6); in the order given."""
    order = sorted(range(len(streams)), key=lambda i: streams[i].live[0])
    ordered = tuple(streams[i] for i in order)
    residuals = tuple(scene.residual(stream.live) for stream in ordered)
    target = scene.target
    linears = MaskedLinears(
        target.sites, ordered, residuals, components, judge, scene.at, target.memory, record_outputs
    )
    together = target.forward(scene.weights, scene.inputs, linears, linears.start())
    outputs = apart(together.output, len(ordered))
    records: list[dict[int, dict[str, Array]]] = [{} for _ in ordered]
    for first, of_layers in together.records.items():
        for name, rows in of_layers.items():
            by_layer = jnp.swapaxes(rows, 0, 1)
            for i, record in enumerate(apart(by_layer, linears.present(first))):
                records[i].setdefault(first, {})[name] = jnp.swapaxes(record, 0, 1)
    found = {i: Forward(outputs[n], records[n]) for n, i in enumerate(order)}
    return [found[i] for i in range(len(streams))]


def errors(
    scene: Scene, components: Components, judge: Judge, streams: Sequence[Stream], kinds: Sequence[ErrorKind]
) -> Float[Array, " streams"]:
    """The reconstruction error of each masked forward (R1, or R2's exception), all of them run together."""

    def of_batch(scene: Scene, judge: Judge, streams: Sequence[Stream]) -> Float[Array, " streams"]:
        forwards = run_masked(scene, components, judge, streams, record_outputs="hidden_acts" in kinds)

        outputs = [f.output for f, kind in zip(forwards, kinds, strict=True) if kind == "output"]
        of_outputs = iter(scene.target.errors(scene.weights, scene.clean.output, outputs) if outputs else ())
        return jnp.stack([
            hidden_acts_error(scene.target.sites, scene.clean, masked) if kind == "hidden_acts" else next(of_outputs)
            for masked, kind in zip(forwards, kinds, strict=True)
        ])  # fmt: skip

    n = scene.target.memory.micro_batches
    return of_batch(scene, judge, streams) if n == 1 else mean_over_parts(of_batch, scene, judge, streams, n)


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
    judge: Judge,
    key: PRNGKeyArray,
    bundle: Bundle | None = None,
) -> Float[Array, ""]:
    """Mean error over the term's forwards, without its coefficient. ``bundle``: sources of a persistent term."""
    found = streams(term, scene, components, judge, key, bundle)
    return jnp.mean(errors(scene, components, judge, found, [term.error] * len(found)))


def streams(
    term: Reconstruction,
    scene: Scene,
    components: Components,
    judge: Judge,
    key: PRNGKeyArray,
    bundle: Bundle | None = None,
) -> list[Stream]:
    """The forwards of a term. ``bundle``: sources of a persistent term. A fresh attack is carried out here."""
    found: list[Stream] = []
    for live in live_sets(term.live, len(scene.target.sites)):
        for _ in range(n_samples(term)):
            of_routes, of_sources = jax.random.split(jax.random.fold_in(key, len(found)))
            routes = draw_routes(term.routing, of_routes, scene.at, len(live))
            sources = _sources(term, scene, live, components, judge, routes, of_sources, bundle)
            found.append(Stream(live, sources, routes))
    return found


def _sources(
    term: Reconstruction,
    scene: Scene,
    live: tuple[int, ...],
    components: Components,
    judge: Judge,
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
            return GivenSources(bundle, scene.batch)
        case FreshAttack() as kind:
            error = attacked_error(scene, components, judge, live, routes, term.error)
            start = initial_sources(kind, key, scene.target.sites, live, scene.leading, scene.use_delta)
            return GivenSources(attack(kind, error, start), scene.batch)


def persistent_error(scene: Scene, components: Components, judge: Judge) -> Callable[[Bundle], Float[Array, ""]]:
    """What the warm-up ascents climb (A3): all sites live, routed everywhere, components and λ held."""
    return attacked_error(scene, components, judge, tuple(range(len(scene.target.sites))), None, "output")


def attacked_error(
    scene: Scene,
    components: Components,
    judge: Judge,
    live: tuple[int, ...],
    routes: Array | None,
    kind: ErrorKind,
) -> Callable[[Bundle], Float[Array, ""]]:
    """The error of one forward as a function of its sources, components and λ held."""
    components = jax.lax.stop_gradient(components)
    judge = replace(judge, judgement=jax.lax.stop_gradient(judge.judgement))

    def error(bundle: Bundle) -> Float[Array, ""]:
        stream = Stream(live, GivenSources(bundle, scene.batch), routes)
        return errors(scene, components, judge, [stream], [kind])[0]

    return error
