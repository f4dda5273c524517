"""Reconstruction (section 5): which sites are live x how positions are routed x where the sources come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from param_decomp_jax.ci import ImportanceReader, Summarise
from param_decomp_jax.decomposition.draws import positions, uniform
from param_decomp_jax.decomposition.schedules import AnySchedule, value_at
from param_decomp_jax.decomposition.sites import Sites, Stack
from param_decomp_jax.method.adversary import FreshAttack, PersistentAttack, Pool, attack, initial_sources
from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch
from param_decomp_jax.method.masked import MaskedLinears, Stream, split_rows, summary_record
from param_decomp_jax.method.masks import (
    Bundle,
    Constant,
    ConstantSources,
    GivenSources,
    MergedSources,
    SourceKind,
    Sources,
    Stochastic,
    StochasticSources,
    source_axes,
)  # fmt: skip
from param_decomp_jax.method.micro_batches import sum_over_parts
from param_decomp_jax.method.routing import Everywhere, Routing, draw_routes
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.memory import Intermediate
from param_decomp_jax.sharding.mesh import held, hold, indices
from param_decomp_jax.targets.base import Forward, Target
from param_decomp_jax.targets.plain_linears import output_record
from param_decomp_jax.targets.points import Point, match_points, point_name


@dataclass(frozen=True)
class AllSites:
    """One forward with every site live."""


@dataclass(frozen=True)
class EachSite:
    """One forward for every site, with only that site live (the schema's Layerwise)."""


@dataclass(frozen=True)
class Chunks:
    """One forward for every group of ``sites_per_chunk`` consecutive sites; the last may be smaller (R4)."""

    sites_per_chunk: int


@dataclass(frozen=True)
class Merged:
    """A8: each row of the batch has the sources of an attack with probability ``adv_fraction``, else stochastic ones.

    The term's routing applies to the stochastic rows.
    """

    attack: PersistentAttack
    stochastic: Stochastic
    adv_fraction: float | AnySchedule


LiveSets = AllSites | EachSite | Chunks
SourceSpec = Stochastic | Constant | FreshAttack | PersistentAttack | Merged


ErrorKind = Literal["output", "hidden_acts"]


@dataclass(frozen=True)
class Beside:
    """R6: activations that are compared in addition to the output, in the same forward.

    ``points``: patterns on the names of the target's points. ``adversary_objective``: what persistent sources ascend:
    the error of the output alone, or the sum.
    """

    coeff: float | AnySchedule
    points: tuple[str, ...]
    adversary_objective: Literal["output", "term"] = "output"


@dataclass(frozen=True)
class Reconstruction:
    """A term: coefficient x the mean error of its forwards (R1, or R2's exception for ``hidden_acts``; R6 adds what is
    ``beside``)."""

    name: str
    coeff: float | AnySchedule
    live: LiveSets
    routing: Routing
    sources: SourceSpec
    n_samples: int = 1
    error: ErrorKind = "output"
    beside: Beside | None = None


class AtStep(NamedTuple):
    """The numbers of a term at one step. ``adv_fraction``: that of a merged term (A8). ``beside``: the coefficient of
    R6."""

    adv_fraction: float | Float[Array, ""] | None = None
    beside: float | Float[Array, ""] | None = None


def at_step(term: Reconstruction, step: Int[Array, ""], total: int) -> AtStep:
    """Returns a term's numbers at ``step`` of ``total``; after the last step, those of the last."""
    step = jnp.minimum(step, total - 1)
    fraction = value_at(term.sources.adv_fraction, step, total) if isinstance(term.sources, Merged) else None
    return AtStep(fraction, None if term.beside is None else value_at(term.beside.coeff, step, total))


def points_of(term: Reconstruction, target: Target) -> tuple[Point, ...]:
    """Returns the points of the target at which a term compares, in order. Raises UnfitPoints for patterns that do not
    fit."""
    return () if term.beside is None else match_points(target.architecture.points(), term.beside.points)


def ascends_output_alone(term: Reconstruction) -> bool:
    """Returns whether persistent sources ascend another error than parameters descend (R6), which takes forwards of its
    own."""
    beside = term.beside
    return beside is not None and beside.adversary_objective == "output" and attack_of(term) is not None


def live_sets(live: LiveSets, n_sites: int) -> tuple[tuple[int, ...], ...]:
    """Returns the canonical numbers of the live sites of every forward (before samples)."""
    everything = tuple(range(n_sites))
    match live:
        case AllSites():
            return (everything,)
        case EachSite():
            return tuple((n,) for n in everything)
        case Chunks(size):
            return tuple(everything[start : start + size] for start in range(0, n_sites, size))


def attack_of(term: Reconstruction) -> PersistentAttack | None:
    """Returns the attack of a term whose sources persist; None for other terms."""
    match term.sources:
        case PersistentAttack() as attack:
            return attack
        case Merged(attack=attack):
            return attack
        case _:
            return None


def n_samples(term: Reconstruction) -> int:
    """Returns the number of draws per live set: that of R5, or one if all draws would be the same."""
    draws_sources = isinstance(term.sources, Stochastic | FreshAttack | Merged)
    return term.n_samples if draws_sources or not isinstance(term.routing, Everywhere) else 1


def n_forwards(term: Reconstruction, n_sites: int) -> int:
    """Returns the number of masked forwards in the term's mean, without those of an attack."""
    return len(live_sets(term.live, n_sites)) * n_samples(term)


def n_routed_ascents(term: Reconstruction) -> int:
    """Returns the number of warm-up ascents that have their own routes (A3): those of a persistent term on subsets."""
    if isinstance(term.routing, Everywhere) or not isinstance(term.sources, PersistentAttack):
        return 0
    return term.sources.n_warmup_steps


def n_attack_passes(term: Reconstruction, n_sites: int) -> int:
    """Returns the number of forward and backward passes of an attack besides the term's own forwards (A1, A3, R6)."""
    match term.sources:
        case FreshAttack(n_steps=n):
            return n * n_forwards(term, n_sites)
        case PersistentAttack(n_warmup_steps=n) | Merged(attack=PersistentAttack(n_warmup_steps=n)):
            return n + ascends_output_alone(term) * n_forwards(term, n_sites)
        case _:
            return 0


class MaskedForwards(NamedTuple):
    """The results of masked forwards that ran together: those of each forward, and the summaries of the sites' logits.

    ``summaries``: by stack, ``[layers, C, …]``; empty without `Summarise`. ``differences``: ``‖masked − clean‖²`` of
    each forward, by point (R6).
    """

    forwards: list[Forward]
    summaries: dict[str, Array]
    differences: list[dict[str, Float[Array, ""]]]


def run_masked(
    batch: DecomposedBatch,
    streams: Sequence[Stream],
    record_outputs: bool = False,
    summarise: Summarise | None = None,
    output_name: Intermediate = "site_outputs",
) -> MaskedForwards:
    """Runs the masked forwards of these streams, each from its first live layer (F6). Results are in the order given.

    ``summarise`` needs every site to be live in one of the streams.
    """
    order = sorted(range(len(streams)), key=lambda i: streams[i].live[0])
    ordered = tuple(streams[i] for i in order)
    clean_pass, target = batch.clean_pass, batch.target
    residuals = tuple(clean_pass.residual(stream.live) for stream in ordered)
    linears = MaskedLinears(
        target.sites, ordered, residuals, batch.components, batch.reader, clean_pass.at, clean_pass.forward.records,
        target.memory, record_outputs, summarise, output_name, target.joins_rows, clean_pass.at_hook,
    )  # fmt: skip
    joint = target.forward(clean_pass.weights, clean_pass.inputs, linears, linears.start())
    outputs = split_rows(joint.output, len(ordered))
    records: list[dict[int, dict[str, Array]]] = [{first: {} for first in joint.records} for _ in ordered]
    for stack in target.sites.stacks if record_outputs else ():
        name = output_record(stack.kind)
        for first, by_name in joint.records.items():
            if name in by_name:
                by_row = jnp.swapaxes(by_name[name], 0, 1)
                for i, own in enumerate(split_rows(by_row, linears.n_running(first))):
                    records[i][first][name] = jnp.swapaxes(own, 0, 1)
    found = {i: Forward(outputs[n], records[n]) for n, i in enumerate(order)}
    summaries = {} if summarise is None else {
        stack.name: _stack_record(joint, stack, summary_record(stack.kind)) for stack in target.sites.stacks
    }  # fmt: skip
    differences = dict(zip(order, _differences(linears, joint.records), strict=True))
    numbers = range(len(streams))
    return MaskedForwards([found[i] for i in numbers], summaries, [differences[i] for i in numbers])


def _differences(linears: MaskedLinears, records: Mapping[int, dict[str, Array]]) -> list[dict[str, Float[Array, ""]]]:
    """Returns the sum of squares of each stream's difference from the clean pass, by point; 0 before the stream
    starts."""
    found = [{point.name: jnp.zeros(()) for point in stream.points} for stream in linears.streams]
    for first, own in records.items():
        for hook, streams in linears.compared(first).items():
            sums = jnp.sum(own[hook], axis=tuple(range(2, own[hook].ndim)))  # [layers, streams]
            for row in range(sums.shape[0]):
                for place, i in enumerate(streams):
                    found[i][point_name(hook, first + row)] = sums[row, place]
    return found


def _stack_record(forward: Forward, stack: Stack, name: str) -> Array:
    """Returns a record of all layers of a stack, joined from the scans in which it was recorded."""
    parts = [records[name] for first, records in sorted(forward.records.items()) if first in stack.layers]
    return jnp.concatenate(parts)


class ForwardErrors(NamedTuple):
    """The errors of masked forwards. ``by_stream``: R1, or R2's exception. ``summaries``: as in `MaskedForwards`.
    ``at_points``: ``‖masked − clean‖² / ‖clean‖²`` of each forward, by the name of the point (R6)."""

    by_stream: Float[Array, " streams"]
    summaries: dict[str, Array]
    at_points: list[dict[str, Float[Array, ""]]]


def relative(difference: Float[Array, ""], norm: Float[Array, ""]) -> Float[Array, ""]:
    """Returns ``‖masked − clean‖² / ‖clean‖²`` (R6). Both can be 0 in a batch of a toy without an active feature; the
    difference is then not divided."""
    return difference / jnp.where(norm == 0, 1, norm)


def with_points(
    output: Float[Array, ""], at_points: Mapping[str, Float[Array, ""]], coeff: float | Float[Array, ""] | None
) -> Float[Array, ""]:
    """Returns the error of the output plus ``coeff`` times the mean of the errors at points (R6); without points, the
    former."""
    if not at_points:
        return output
    assert coeff is not None
    return output + coeff * sum(at_points.values()) / len(at_points)


def term_error(found: ForwardErrors, now: AtStep) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns a term's value, the mean of the errors of its forwards. With points, it also returns its parts: the mean
    error of the output (`output`) and of each point."""
    output = jnp.mean(found.by_stream)
    means = {name: jnp.mean(jnp.stack([own[name] for own in found.at_points])) for name in found.at_points[0]}
    return with_points(output, means, now.beside), {"output": output, **means} if means else {}


def errors(
    batch: DecomposedBatch,
    streams: Sequence[Stream],
    kinds: Sequence[ErrorKind],
    summarise: Summarise | None = None,
    output_name: Intermediate = "site_outputs",
) -> ForwardErrors:
    """Returns the reconstruction error of each masked forward (R1, or R2's exception), and those at its points (R6).
    All forwards run together."""

    def batch_errors(clean_pass: CleanPass, reader: ImportanceReader, streams: Sequence[Stream]) -> ForwardErrors:
        target, clean = clean_pass.target, clean_pass.forward
        part = DecomposedBatch(clean_pass, batch.components, reader)
        record_outputs = "hidden_acts" in kinds
        forwards, summaries, differences = run_masked(part, streams, record_outputs, summarise, output_name)
        outputs = [f.output for f, kind in zip(forwards, kinds, strict=True) if kind == "output"]
        with jax.named_scope("error"):
            output_errors = iter(_output_errors(clean_pass, outputs) if outputs else ())
        found = [
            hidden_acts_error(target.sites, clean, masked) if kind == "hidden_acts" else next(output_errors)
            for masked, kind in zip(forwards, kinds, strict=True)
        ]
        norms = clean_pass.point_squares  # of the whole batch, even if this is a part of it
        at_points = [{name: relative(x, norms[name]) for name, x in own.items()} for own in differences]
        return ForwardErrors(jnp.stack(found), summaries, at_points)

    n = batch.target.memory.micro_batches
    if n == 1:
        return batch_errors(batch.clean_pass, batch.reader, streams)
    total: ForwardErrors = sum_over_parts(batch_errors, batch.clean_pass, batch.reader, streams, n)
    return total._replace(by_stream=total.by_stream / n)


def _output_errors(clean_pass: CleanPass, outputs: Sequence[Any]) -> Float[Array, " streams"]:
    """Returns R1 of each masked output."""
    target, reference = clean_pass.target, clean_pass.reference
    if reference is None:
        reference = jax.lax.stop_gradient(target.reference(clean_pass.weights, clean_pass.forward.output))
    return target.errors(clean_pass.weights, reference, outputs)


def hidden_acts_error(sites: Sites, clean: Forward, masked: Forward) -> Float[Array, ""]:
    """Returns R2's exception: the sum of squared differences of all sites' outputs, divided by the number of
    elements."""
    total, elements = jnp.zeros(()), 0
    for segment in sites.segments:
        for stack in segment.stacks:
            name = output_record(stack.kind)
            a = wide(clean.records[segment.first][name])
            b = wide(_stack_record(masked, stack, name))
            total, elements = total + jnp.sum((a - b) ** 2), elements + a.size
    return total / float(elements)  # beyond int32 in a large run


class ForwardDraws(eqx.Module):
    """The random numbers of one masked forward, as arrays.

    ``routes``: ``[*leading, live sites]`` in canonical order; None if every position is routed. ``sources``: those of
    the stacks with a live site, in [0, 1]: stochastic sources as they enter the masks, or the start of a fresh attack;
    None for constant and persistent sources. Rows of sites that are not live are not used.

    ``rows``: for a merged term (A8), a number for every row, which is adversarial if `adv_fraction` is above that
    number. ``particle``: for a pool (A9), the source that every row uses.
    """

    routes: Bool[Array, "*leading live"] | None
    sources: Bundle | None
    rows: Float[Array, " B"] | None = None
    particle: Int[Array, " B"] | None = None


TermDraws = PRNGKeyArray | Sequence[ForwardDraws]
"""The draws of all forwards of a term, ordered by live set, then by sample, followed by those of its
`n_routed_ascents`; or the key that all of them are drawn from (M4)."""


def draw_forwards(
    term: Reconstruction, key: PRNGKeyArray, sites: Sites, leading: tuple[int, ...], use_delta: bool
) -> list[ForwardDraws]:
    """Returns as arrays what `streams` draws from ``key`` for the term's forwards, and `warm_up_error` for its ascents.

    ``leading``: global axes of an activation before its last one.
    """
    at = positions(leading)
    found: list[ForwardDraws] = []
    for live in live_sets(term.live, len(sites)):
        for _ in range(n_samples(term)):
            routes_key, sources_key = jax.random.split(jax.random.fold_in(key, len(found)))
            routes = draw_routes(term.routing, routes_key, at, len(live))
            sources: Bundle | None
            rows: Array | None = None
            match term.sources:
                case Stochastic() as kind:
                    sources = draw_stochastic(kind, sources_key, sites, live, at, use_delta)
                case Merged(stochastic=kind):
                    sources = draw_stochastic(kind, sources_key, sites, live, at, use_delta)
                    rows = draw_rows(sources_key, leading[0])
                case FreshAttack() as kind:
                    sources = initial_sources(kind, sources_key, sites, live, leading, use_delta)
                case Constant() | PersistentAttack():
                    sources = None
            found.append(ForwardDraws(routes, sources, rows, _drawn_particle(term, key, leading[0])))
    for ascent in range(n_routed_ascents(term)):
        routes = draw_ascent_routes(term, key, jnp.asarray(ascent), at, len(sites))
        found.append(ForwardDraws(routes, None))
    return found


ROWS = 1 << 24
"""The number that `draw_rows` folds into the key of a forward's sources, above all numbers of sites."""


def draw_rows(key: PRNGKeyArray, batch: int) -> Float[Array, " B"]:
    """Draws the number of every row that decides whether the row is adversarial (A8). ``key``: that of the forward's
    sources."""
    return uniform(jax.random.fold_in(key, ROWS), positions((batch,)), 1)[:, 0]


def draw_particle(term: Reconstruction, draws: TermDraws, leading: tuple[int, ...]) -> Int[Array, "B *ones"] | None:
    """Draws the source of its pool that every row uses in this step (A9), with axes of size 1 in place of those of
    positions. None for a term without a pool."""
    found = draws[0].particle if isinstance(draws, Sequence) else _drawn_particle(term, draws, leading[0])
    return None if found is None else found.reshape(-1, *(1 for _ in leading[1:]))


def _drawn_particle(term: Reconstruction, key: PRNGKeyArray, batch: int) -> Int[Array, " B"] | None:
    attack = attack_of(term)
    if attack is None or not isinstance(attack.scope, Pool):
        return None
    u = uniform(jax.random.fold_in(key, 1), positions((batch,)), 1)[:, 0]  # 0 is the key of the one forward
    # If fp32 rounds u · size up to size, the last one is taken.
    return jnp.minimum((u * attack.scope.size).astype(jnp.int32), attack.scope.size - 1)


def draw_ascent_routes(
    term: Reconstruction, key: PRNGKeyArray, ascent: Int[Array, ""], at: UInt32[Array, "*leading"], n_sites: int
) -> Bool[Array, "*leading n_sites"] | None:
    """Draws the routes of a warm-up ascent (A3), whose number follows those of the term's forwards."""
    routes_key, _ = jax.random.split(jax.random.fold_in(key, n_forwards(term, n_sites) + ascent))
    return draw_routes(term.routing, routes_key, at, n_sites)


def draw_stochastic(
    kind: Stochastic, key: PRNGKeyArray, sites: Sites, live: tuple[int, ...], at: UInt32[Array, "*n"], use_delta: bool
) -> Bundle:
    """Draws the stochastic sources of one forward as arrays, for the stacks with a live site (M3)."""
    sources = StochasticSources(kind, key, use_delta)

    def draw_site(site: Array, C: int) -> Sources:
        return Sources(sources.components(site, at, indices(C)), sources.delta(site, at))

    return {
        stack.name: jax.tree.map(stack.lay_out, jax.lax.map(partial(draw_site, C=stack.C), jnp.asarray(stack.sites)))
        for stack in sites.stacks
        if set(live) & set(stack.sites)
    }


def streams(
    term: Reconstruction,
    batch: DecomposedBatch,
    draws: TermDraws,
    bundle: Bundle | None = None,
    now: AtStep = AtStep(),  # noqa: B008
) -> list[Stream]:
    """Returns the forwards of a term, after running its fresh attack if it has one. ``bundle``: the sources of a
    persistent term. ``now``: the term's numbers at this step."""
    n_sites = len(batch.target.sites)
    if isinstance(draws, Sequence):
        wanted, ascents = n_forwards(term, n_sites), n_routed_ascents(term)
        has = f"{term.name} has {wanted} forwards" + f" and {ascents} ascents" * (ascents > 0)
        assert len(draws) == wanted + ascents, f"{has}, draws are given for {len(draws)}"
    found: list[Stream] = []
    for live in live_sets(term.live, n_sites):
        for _ in range(n_samples(term)):
            number = len(found)
            own = draws[number] if isinstance(draws, Sequence) else jax.random.fold_in(draws, number)
            found.append(_stream(term, batch, live, own, bundle, now))
    return found


def _stream(
    term: Reconstruction,
    batch: DecomposedBatch,
    live: tuple[int, ...],
    draws: PRNGKeyArray | ForwardDraws,
    bundle: Bundle | None,
    now: AtStep,
) -> Stream:
    """Returns one forward of a term. ``draws``: its own draws, or the key for them."""
    clean_pass, points = batch.clean_pass, points_of(term, batch.target)
    sites, use_delta, n_rows = clean_pass.target.sites, clean_pass.use_delta, clean_pass.batch
    given: Bundle | None = None
    own_rows: Array | None = None
    if isinstance(draws, ForwardDraws):
        routes, given, own_rows = draws.routes, draws.sources, draws.rows
        is_random = isinstance(term.sources, Stochastic | FreshAttack | Merged)
        assert is_random == (given is not None), f"{term.name} {'needs' if is_random else 'takes no'} given sources"
        live_stacks = [stack.name for stack in sites.stacks if set(live) & set(stack.sites)]
        missing = [] if given is None else [name for name in live_stacks if name not in given]
        assert not missing, f"{term.name}: no sources are given for {', '.join(missing)}"
    else:
        routes_key, draws = jax.random.split(draws)
        routes = draw_routes(term.routing, routes_key, clean_pass.at, len(live))
    sources: SourceKind
    match term.sources:
        case Stochastic() as kind:
            sources = StochasticSources(kind, draws, use_delta) if given is None else GivenSources(given, n_rows)
        case Merged(stochastic=kind):
            assert bundle is not None
            drawn = StochasticSources(kind, draws, use_delta) if given is None else GivenSources(given, n_rows)
            rows = draw_rows(draws, n_rows) if given is None else own_rows
            assert now.adv_fraction is not None
            assert rows is not None, f"{term.name} needs given rows"
            adversarial = jnp.less(rows, now.adv_fraction)
            row_size = prod(clean_pass.leading[1:])
            sources = MergedSources(given_sources(clean_pass, bundle), drawn, adversarial, row_size)
            if routes is not None:
                routes = routes | adversarial.reshape(-1, *(1,) * (routes.ndim - 1))
        case Constant() as kind:
            sources = ConstantSources(kind)
        case PersistentAttack():
            assert bundle is not None
            sources = given_sources(clean_pass, bundle)
        case FreshAttack() as kind:
            error = attacked_error(batch, live, routes, term.error, points, now.beside)
            start = given
            if start is None:
                start = initial_sources(kind, draws, sites, live, clean_pass.leading, use_delta)
            sources = given_sources(clean_pass, attack(kind, error, start))
    return Stream(live, sources, routes, points)


def given_sources(clean_pass: CleanPass, bundle: Bundle) -> GivenSources:
    """Returns the sources of an attack on a batch, with the policy's held copies of those that the rows share."""
    sites, by = clean_pass.target.sites, clean_pass.target.memory.held_by("sources")
    of_experts = {stack.name for stack in sites.stacks if stack.experts is not None}
    axes = {name: source_axes(own, clean_pass.batch, name in of_experts) for name, own in bundle.items()}
    return GivenSources(held(bundle, hold(bundle, axes, by, jnp.float32), by), clean_pass.batch)


def reconstruction(
    term: Reconstruction,
    batch: DecomposedBatch,
    draws: TermDraws,
    bundle: Bundle | None = None,
    now: AtStep = AtStep(),  # noqa: B008
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the mean error over the term's forwards, without its coefficient, and its parts, if any (`term_error`).
    ``bundle``, ``now``: as in `streams`."""
    found = streams(term, batch, draws, bundle, now)
    return term_error(errors(batch, found, [term.error] * len(found)), now)


def warm_up_error(
    term: Reconstruction,
    batch: DecomposedBatch,
    draws: TermDraws,
    now: AtStep = AtStep(),  # noqa: B008
) -> Callable[[Bundle, Int[Array, ""]], Float[Array, ""]]:
    """Returns the error that warm-up ascents maximise (A3, R6), as a function of the sources and the ascent's number.
    All sites are live and routed as in the term; components and λ are constant. ``now``: the term's numbers at this
    step."""
    n_sites = len(batch.target.sites)
    points = () if ascends_output_alone(term) else points_of(term, batch.target)
    live, n_ascents = tuple(range(n_sites)), n_routed_ascents(term)
    given: Array | None = None
    if isinstance(draws, Sequence) and n_ascents:
        of_ascents = draws[n_forwards(term, n_sites) :]
        by_ascent = [draw.routes for draw in of_ascents if draw.routes is not None]
        wanted = f"{term.name} has {n_ascents} warm-up ascents, each with routes of its own"
        assert len(by_ascent) == len(of_ascents) == n_ascents, f"{wanted}; given are {len(by_ascent)}"
        given = jnp.stack(by_ascent)

    def error(bundle: Bundle, ascent: Int[Array, ""]) -> Float[Array, ""]:
        routes: Array | None = None
        if given is not None:
            routes = given[ascent]
        elif n_ascents:
            assert not isinstance(draws, Sequence)
            routes = draw_ascent_routes(term, draws, ascent, batch.clean_pass.at, n_sites)
        return attacked_error(batch, live, routes, "output", points, now.beside)(bundle)

    return error


def attacked_error(
    batch: DecomposedBatch,
    live: tuple[int, ...],
    routes: Array | None,
    kind: ErrorKind,
    points: tuple[Point, ...] = (),
    coeff: float | Float[Array, ""] | None = None,
) -> Callable[[Bundle], Float[Array, ""]]:
    """Returns the error of one forward as a function of its sources; components and λ are constant. ``points``,
    ``coeff``: those of R6."""
    constant = batch.constant()

    def error(bundle: Bundle) -> Float[Array, ""]:
        stream = Stream(live, given_sources(batch.clean_pass, bundle), routes, points)
        found = errors(constant, [stream], [kind], output_name="attack_outputs")
        return with_points(found.by_stream[0], found.at_points[0], coeff)

    return error
