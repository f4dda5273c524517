"""Adversaries (section 7): sources chosen to change the output as much as they can."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.decomposition.draws import draw_per_site, positions, uniform
from param_decomp_jax.decomposition.schedules import AnySchedule, first_step
from param_decomp_jax.decomposition.sites import Sites, Stack
from param_decomp_jax.method.masks import Bundle, Sources
from param_decomp_jax.method.offload import fetch, store
from param_decomp_jax.sharding.memory import MemoryPolicy


@dataclass(frozen=True)
class FreshAttack:
    """A fresh attack (A1): ``n_steps`` signed ascents from a new start at every step. The result is a constant in the
    loss."""

    init: Literal["random", "ones", "zeroes"]
    step_size: float
    n_steps: int
    scope: Literal["unique_per_datapoint", "per_row", "shared_across_batch"]


@dataclass(frozen=True)
class SingleSource:
    """A2: one source for every row and position."""


@dataclass(frozen=True)
class BroadcastAcrossBatch:
    """A2: one source per position, shared by all rows."""


@dataclass(frozen=True)
class RepeatAcrossBatch:
    """A2: ``n_sources`` per position, tiled over the rows."""

    n_sources: int


@dataclass(frozen=True)
class PerBatchPerPosition:
    """A2: one source for every row and position."""


@dataclass(frozen=True)
class PerBatch:
    """A2: one source for every row, shared by all positions."""


@dataclass(frozen=True)
class Pool:
    """A9: ``size`` sources for every row. Each step uses one of them at all positions of the row."""

    size: int


Scope = SingleSource | BroadcastAcrossBatch | RepeatAcrossBatch | PerBatchPerPosition | PerBatch | Pool


@dataclass(frozen=True)
class AdamAscent:
    """A5: Adam with bias correction, eps after the root, ascending."""

    schedule: AnySchedule
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class SignAscent:
    """A5: ``lr · sign`` of the gradient, ascending."""

    schedule: AnySchedule


@dataclass(frozen=True)
class SGDAscent:
    """A5: ``lr`` times the gradient, ascending."""

    schedule: AnySchedule


@dataclass(frozen=True)
class MomentumAscent:
    """A5: ``lr`` times a decaying sum of gradients, ascending."""

    schedule: AnySchedule
    momentum: float


Ascent = AdamAscent | SignAscent | SGDAscent | MomentumAscent


@dataclass(frozen=True)
class PersistentAttack:
    """A persistent attack (A2 to A7): sources that live in the train state. ``sigmoid``: raw values are unbounded, and
    sources are sigmoid(raw)."""

    optimizer: Ascent
    scope: Scope
    sigmoid: bool = False
    n_warmup_steps: int = 0
    start_frac: float = 0.0

    def first_step(self, total: int) -> int:
        """Returns the first step at which the term and its updates are on (A6): step / total ≥ start_frac."""
        return first_step(self.start_frac, total)


class Adversary(eqx.Module):
    """The state of one persistent attack that a checkpoint must hold (T5): raw sources, moments, and the count of
    ascents.

    ``mean``: Adam's first moment, or momentum's sum of gradients. ``square``: Adam's second moment. None if the ascent
    keeps none.
    """

    raw: Bundle
    mean: Bundle | None
    square: Bundle | None
    count: Int[Array, ""]


def _bundle(
    sites: Sites, live: tuple[int, ...], key: PRNGKeyArray, use_delta: bool, draw: Callable[[PRNGKeyArray, int], Array]
) -> Bundle:
    """Returns sources for the stacks with a live site. ``draw(key, columns)`` returns ``[*lead, columns]``."""
    chosen = set(live)

    def draw_stack(stack: Stack) -> Sources:
        def draw_site(key: PRNGKeyArray) -> Sources:
            components = draw(jax.random.fold_in(key, 0), stack.C)
            return Sources(components, draw(jax.random.fold_in(key, 1), 1)[..., 0] if use_delta else None)

        return jax.tree.map(stack.lay_out, draw_per_site(draw_site, key, stack.sites))

    return {stack.name: draw_stack(stack) for stack in sites.stacks if chosen & set(stack.sites)}


def initial_sources(
    spec: FreshAttack, key: PRNGKeyArray, sites: Sites, live: tuple[int, ...], leading: tuple[int, ...], use_delta: bool
) -> Bundle:
    """Returns the sources from which a fresh attack starts (A1). Rows of a stack whose sites are not live exist but are
    not used."""
    scopes: dict[str, Scope] = {
        "unique_per_datapoint": PerBatchPerPosition(),
        "per_row": PerBatch(),
        "shared_across_batch": SingleSource(),
    }
    lead = source_shape(scopes[spec.scope], leading)

    def draw(key: PRNGKeyArray, columns: int) -> Array:
        match spec.init:
            case "random":
                return uniform(key, positions(lead), columns)
            case "ones":
                return jnp.ones((*lead, columns))
            case "zeroes":
                return jnp.zeros((*lead, columns))

    return _bundle(sites, live, key, use_delta, draw)


def attack(spec: FreshAttack, error: Callable[[Bundle], Float[Array, ""]], start: Bundle) -> Bundle:
    """Runs a fresh attack (A1): ``source ← clip(source + step_size · sign(∂error/∂source), 0, 1)``, ``n_steps`` times.
    The result is constant."""

    def ascend(_: Int[Array, ""], sources: Bundle) -> Bundle:
        gradient = jax.grad(error)(sources)
        return jax.tree.map(lambda s, g: jnp.clip(s + spec.step_size * jnp.sign(g), 0, 1), sources, gradient)

    return jax.lax.stop_gradient(jax.lax.fori_loop(0, spec.n_steps, ascend, start))


def source_shape(scope: Scope, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the leading shape of a source (A1, A2, A9), for activations with these (global) leading axes."""
    batch, *rest = leading
    match scope:
        case SingleSource():
            return (1,) * len(leading)
        case BroadcastAcrossBatch():
            return (1, *rest)
        case RepeatAcrossBatch(n):
            return (n, *rest)
        case PerBatchPerPosition():
            return leading
        case PerBatch():
            return (batch, *(1 for _ in rest))
        case Pool(size):
            return (size, *source_shape(PerBatch(), leading))


def init_adversary(
    spec: PersistentAttack, key: PRNGKeyArray, sites: Sites, leading: tuple[int, ...], use_delta: bool
) -> Adversary:
    """Draws raw sources from U[0, 1], or from N(0, 1) under the sigmoid (A5); moments are zero."""

    lead = positions(source_shape(spec.scope, leading))

    def draw(key: PRNGKeyArray, columns: int) -> Array:
        u = uniform(key, lead, columns)
        # Half a step of the 2⁻²⁴ grid keeps the quantile finite at u = 0.
        return jax.scipy.special.ndtri(u + 2.0**-25) if spec.sigmoid else u

    raw = _bundle(sites, tuple(range(len(sites))), key, use_delta, draw)
    kept = {AdamAscent: 2, MomentumAscent: 1}.get(type(spec.optimizer), 0)
    mean, square = (jax.tree.map(jnp.zeros_like, raw) if n < kept else None for n in range(2))
    return Adversary(raw, mean, square, jnp.zeros((), jnp.int32))


def kept_adversary(memory: MemoryPolicy, adversary: Adversary) -> Adversary:
    """Returns the adversary as the train state keeps it: with moments in the memory policy's dtype and place."""
    mean, square = store(memory, "sources_moments", (adversary.mean, adversary.square))
    return Adversary(adversary.raw, mean, square, adversary.count)


def fetched_adversary(memory: MemoryPolicy, adversary: Adversary) -> Adversary:
    """Returns the adversary as updates compute with it: with moments on the device, in fp32."""
    mean, square = fetch(memory, "sources_moments", (adversary.mean, adversary.square))
    return Adversary(adversary.raw, mean, square, adversary.count)


def effective(spec: PersistentAttack, raw: Bundle, particle: Int[Array, "B *ones"] | None = None) -> Bundle:
    """Returns the sources in [0, 1] that masks are built from (A5). ``particle``: the source of a pool that each row
    uses (A9)."""
    if isinstance(spec.scope, Pool):
        assert particle is not None
        raw = {name: _of_particle(own, particle) for name, own in raw.items()}
    return jax.tree.map(jax.nn.sigmoid, raw) if spec.sigmoid else raw


def _of_particle(sources: Sources, particle: Int[Array, "B *ones"]) -> Sources:
    def choose(x: Array, n_behind: int) -> Array:
        axis = x.ndim - n_behind - particle.ndim - 1
        behind = (1,) * n_behind
        numbers = jnp.arange(x.shape[axis]).reshape(-1, *(1,) * particle.ndim, *behind)
        # Indexing would scatter the gradient, and rows lie on many devices.
        return jnp.sum(jnp.where(numbers == particle.reshape(*particle.shape, *behind), x, 0), axis=axis)

    delta = None if sources.delta is None else choose(sources.delta, 0)
    return Sources(choose(sources.components, 1), delta)


def ascend(
    spec: PersistentAttack, adversary: Adversary, gradient: Bundle, step: Int[Array, ""], total: int
) -> Adversary:
    """Takes one ascent step (A5), *up* the gradient of the error with respect to the raw sources. The rate is that of
    the training step (A7)."""
    rate = spec.optimizer.schedule(step, total)
    count = adversary.count + 1
    mean, square = adversary.mean, adversary.square
    match spec.optimizer:
        case AdamAscent(_, beta1, beta2, eps):
            # Written by hand because optax's Adam multiplies (1 − β₂) · (g · g), which rounds differently, and because
            # its state differs from what the checkpoints hold.
            mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, mean, gradient)
            square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, square, gradient)
            fix1, fix2 = 1 - beta1**count, 1 - beta2**count
            moved = jax.tree.map(
                lambda s, m, v: s + rate * (m / fix1) / (jnp.sqrt(v / fix2) + eps), adversary.raw, mean, square
            )
        case SignAscent():
            moved = jax.tree.map(lambda s, g: s + rate * jnp.sign(g), adversary.raw, gradient)
        case SGDAscent():
            moved = jax.tree.map(lambda s, g: s + rate * g, adversary.raw, gradient)
        case MomentumAscent(momentum=momentum):
            mean = jax.tree.map(lambda m, g: momentum * m + g, mean, gradient)
            moved = jax.tree.map(lambda s, m: s + rate * m, adversary.raw, mean)
    if not spec.sigmoid:
        moved = jax.tree.map(lambda s: jnp.clip(s, 0, 1), moved)
    return Adversary(moved, mean, square, count)


def warm_up(
    spec: PersistentAttack,
    adversary: Adversary,
    error: Callable[[Bundle, Int[Array, ""]], Float[Array, ""]],
    step: Int[Array, ""],
    total: int,
    written_out: bool = False,
    particle: Int[Array, "B *ones"] | None = None,
) -> Adversary:
    """Takes the ``n_warmup_steps`` ascents of A3. ``error``: a function of the effective sources and the number of the
    ascent.

    ``written_out``: whether the ascents are unrolled, without a loop. ``particle``: as in `effective`.
    """

    def one(number: Int[Array, ""], adversary: Adversary) -> Adversary:
        gradient = jax.grad(lambda raw: error(effective(spec, raw, particle), number))(adversary.raw)
        return ascend(spec, adversary, gradient, step, total)

    if written_out:
        for number in range(spec.n_warmup_steps):
            adversary = one(jnp.asarray(number, jnp.int32), adversary)
        return adversary
    return jax.lax.fori_loop(0, spec.n_warmup_steps, one, adversary)
