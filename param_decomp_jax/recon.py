"""Reconstruction (section 5): which sites are live x how positions are routed x where the sources come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.adversary import FreshAttack, PersistentAttack, attack, initial_sources
from param_decomp_jax.ci import Judge
from param_decomp_jax.components import Components
from param_decomp_jax.masked import MaskedLinears, Stream, Summarise, apart, summary_record
from param_decomp_jax.masks import (
    Bundle,
    Constant,
    ConstantSources,
    GivenSources,
    SourceKind,
    Stochastic,
    StochasticSources,
)  # fmt: skip
from param_decomp_jax.memory import Intermediate
from param_decomp_jax.micro_batches import sum_over_parts
from param_decomp_jax.numerics import wide
from param_decomp_jax.routing import Everywhere, Routing, draw_routes
from param_decomp_jax.scene import Scene
from param_decomp_jax.sites import Sites, Stack
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


class Together(NamedTuple):
    """What masked forwards that were run together give: each its own, and what was summed up of the sites' logits.

    ``summaries``: by stack, ``[layers, C, …]``; empty if nothing was asked for.
    """

    forwards: list[Forward]
    summaries: dict[str, Array]


def run_masked(
    scene: Scene,
    components: Components,
    judge: Judge,
    streams: Sequence[Stream],
    record_outputs: bool = False,
    summarise: Summarise | None = None,
    output_name: Intermediate = "site_outputs",
) -> Together:
    """The masked forwards of these streams, in the order given, each begun at its first live layer (F6).

    ``summarise`` needs every site to be live in one of them.
    """
    order = sorted(range(len(streams)), key=lambda i: streams[i].live[0])
    ordered = tuple(streams[i] for i in order)
    residuals = tuple(scene.residual(stream.live) for stream in ordered)
    target = scene.target
    linears = MaskedLinears(
        target.sites, ordered, residuals, components, judge, scene.at, target.memory, record_outputs, summarise,
        output_name,
    )  # fmt: skip
    together = target.forward(scene.weights, scene.inputs, linears, linears.start())
    outputs = apart(together.output, len(ordered))
    records: list[dict[int, dict[str, Array]]] = [{first: {} for first in together.records} for _ in ordered]
    for stack in target.sites.stacks if record_outputs else ():
        name = output_record(stack.kind)
        for first, of_layers in together.records.items():
            if name in of_layers:
                by_row = jnp.swapaxes(of_layers[name], 0, 1)
                for i, own in enumerate(apart(by_row, linears.present(first))):
                    records[i][first][name] = jnp.swapaxes(own, 0, 1)
    found = {i: Forward(outputs[n], records[n]) for n, i in enumerate(order)}
    summaries = {} if summarise is None else {
        stack.name: _of_stack(together, stack, summary_record(stack.kind)) for stack in target.sites.stacks
    }  # fmt: skip
    return Together([found[i] for i in range(len(streams))], summaries)


def _of_stack(forward: Forward, stack: Stack, name: str) -> Array:
    """A record of a stack's layers, whatever runs of layers it was recorded in."""
    parts = [of[name] for first, of in sorted(forward.records.items()) if first in stack.layers]
    return jnp.concatenate(parts)


def errors(
    scene: Scene,
    components: Components,
    judge: Judge,
    streams: Sequence[Stream],
    kinds: Sequence[ErrorKind],
    summarise: Summarise | None = None,
    output_name: Intermediate = "site_outputs",
) -> tuple[Float[Array, " streams"], dict[str, Array]]:
    """The reconstruction error of each masked forward (R1, or R2's exception), all of them run together.

    And the summaries of all sites' logits if they are asked for (see `Together`).
    """

    def of_batch(scene: Scene, judge: Judge, streams: Sequence[Stream]) -> tuple[Array, dict[str, Array]]:
        forwards, summaries = run_masked(
            scene, components, judge, streams, "hidden_acts" in kinds, summarise, output_name
        )
        outputs = [f.output for f, kind in zip(forwards, kinds, strict=True) if kind == "output"]
        with jax.named_scope("error"):
            of_outputs = iter(scene.target.errors(scene.weights, scene.clean.output, outputs) if outputs else ())
        found = [
            hidden_acts_error(scene.target.sites, scene.clean, masked) if kind == "hidden_acts" else next(of_outputs)
            for masked, kind in zip(forwards, kinds, strict=True)
        ]
        return jnp.stack(found), summaries

    n = scene.target.memory.micro_batches
    if n == 1:
        return of_batch(scene, judge, streams)
    total, summaries = sum_over_parts(of_batch, scene, judge, streams, n)
    return total / n, summaries


def hidden_acts_error(sites: Sites, clean: Forward, masked: Forward) -> Float[Array, ""]:
    """R2's exception: sum of squared differences of every site's output over the number of elements."""
    total, elements = jnp.zeros(()), 0
    for segment in sites.segments:
        for stack in segment.stacks:
            name = output_record(stack.kind)
            a = wide(clean.records[segment.first][name])
            b = wide(_of_stack(masked, stack, name))
            total, elements = total + jnp.sum((a - b) ** 2), elements + a.size
    return total / float(elements)  # beyond int32 in a large run


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
    return jnp.mean(errors(scene, components, judge, found, [term.error] * len(found))[0])


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
        return errors(scene, components, judge, [stream], [kind], output_name="attack_outputs")[0][0]

    return error
