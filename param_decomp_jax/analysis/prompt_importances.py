"""Importances optimised for one row of inputs, at every component and position (section 16): as few as its output
needs.

The CI function must serve every text. For one prompt, its importances are a starting point. From there they are lowered
as far as the output stays as close to the clean one as it was, with inactive components random and under attack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.method.adversary import FreshAttack, attack, initial_sources
from param_decomp_jax.method.clean_pass import CleanPass
from param_decomp_jax.method.losses import Lp, SmoothL0, penalty_of
from param_decomp_jax.method.masked import Stream
from param_decomp_jax.method.masks import Bundle, GivenSources, Sources, Stochastic, interpolate
from param_decomp_jax.method.recon import draw_stochastic, run_masked
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem, hold_for_reading
from param_decomp_jax.targets.base import Weights

READINGS = ("ci", "random", "attack")
"""The sources that turn λ into masks: none, random ones, those of an attack."""

LEAST_LOG_PRICE = -3.0

Importances = dict[str, Float[Array, "*layers_lead C"]]
"""λ by stack, for every component at every position; for experts, ``layers`` is two axes."""


@dataclass(frozen=True)
class Measure:
    """What an output should preserve (O2). ``row``: the position that counts; None for all. ``outputs``: the logits to
    preserve; None for everything that the target's loss compares."""

    row: int | None
    outputs: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Descent:
    """How importances are lowered (O3, O4). ``penalty``: ψ of L2, annealed over ``steps``. ``ascent``: how far a source
    of the attack moves per step. ``price_rate``: how fast the weight of a reading follows its error."""

    measure: Measure
    penalty: Lp | SmoothL0
    steps: int
    learning_rate: float
    ascent: float
    price_rate: float


@dataclass(frozen=True)
class ReadingTest:
    """How errors are judged (O2): by the mean over ``draws`` random draws, and by the worst of attacks from ``starts``
    starts."""

    draws: int
    starts: int
    attack: FreshAttack


_RANDOM = FreshAttack("random", 0.0, 0, "unique_per_datapoint")


class Lowered(eqx.Module):
    """The state of a descent: λ, Adam's moments, the attack's sources, and the logarithm of each reading's weight."""

    importances: Importances
    moments: optax.OptState
    sources: Bundle
    log_prices: Float[Array, " readings"]
    step: Int[Array, ""]


def start_lowering(problem: Problem, importances: Importances, leading: tuple[int, ...], descent: Descent) -> Lowered:
    """Returns the state of a descent that starts from these importances."""
    sources = _random_sources(problem, leading, jax.random.key(0))
    moments = _adam(descent).init(importances)
    return Lowered(importances, moments, sources, jnp.zeros(len(READINGS)), jnp.zeros((), jnp.int32))


def lower(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    allowed: Float[Array, " readings"],
    at_start: Float[Array, ""],
    state: Lowered,
    descent: Descent,
    n_steps: int,
) -> Lowered:
    """Takes ``n_steps`` steps of the descent (O3, O4).

    ``allowed``: the error aimed at for each reading. ``at_start``: `penalty_total` of the importances at the start.
    """
    errors = PromptErrors(problem, learned, weights, inputs, descent.measure)
    key = jax.random.key(1)

    def one(_: Int[Array, ""], state: Lowered) -> Lowered:
        drawn = errors.draw(jax.random.fold_in(key, state.step))
        of_free = jax.grad(lowering_loss, argnums=(2, 3), has_aux=True)
        (of_importances, of_sources), found = of_free(
            errors, descent, state.importances, state.sources, drawn, state.log_prices, allowed, at_start, state.step
        )
        updates, moments = _adam(descent).update(of_importances, state.moments)
        importances = jax.tree.map(lambda x, u: jnp.clip(x + u, 0, 1), state.importances, updates)
        sources = jax.tree.map(lambda s, g: jnp.clip(s + descent.ascent * jnp.sign(g), 0, 1), state.sources, of_sources)
        excess = jnp.clip(found / allowed - 1, -1, 1)
        # Bounded below, so that a reading whose error was small for long counts again as soon as its error grows.
        log_prices = jnp.maximum(state.log_prices + descent.price_rate * excess, LEAST_LOG_PRICE)
        return Lowered(importances, moments, sources, log_prices, state.step + 1)

    return jax.lax.fori_loop(0, n_steps, one, state)


def lowering_loss(
    errors: "PromptErrors",
    descent: Descent,
    importances: Importances,
    sources: Bundle,
    drawn: Bundle,
    log_prices: Float[Array, " readings"],
    allowed: Float[Array, " readings"],
    at_start: Float[Array, ""],
    step: Int[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, " readings"]]:
    """Returns the loss that a step descends in λ and ascends in the attack's ``sources`` (O3), and the error of each
    reading.

    ``drawn``: sources of reading ``random``.
    """
    found = errors.of([_masks(importances, s) for s in (None, drawn, sources)])
    penalty = penalty_total(descent, importances, step) / at_start
    return penalty + jnp.sum(jnp.exp(log_prices) * found / allowed), found


def penalty_total(descent: Descent, importances: Importances, step: Int[Array, ""]) -> Float[Array, ""]:
    """``Σ ψ(λ)`` over all components and positions, at a step of the descent.

    It has no gradient where λ is 0, so only the errors decide whether a component comes back.
    """
    of_stacks = []
    for x in importances.values():
        free = jnp.where(x > 0, x, jax.lax.stop_gradient(x))
        of_stacks.append(jnp.sum(penalty_of(descent.penalty, free, step, descent.steps)))
    return jnp.sum(jnp.stack(of_stacks))


def reading_errors(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    importances: Importances,
    key: Array,
    measure: Measure,
    test: ReadingTest,
) -> Float[Array, " readings"]:
    """Returns the error of each reading of these importances (O2)."""
    errors = PromptErrors(problem, learned, weights, inputs, measure)
    for_draws, for_attacks = jax.random.split(key)
    drawn = jax.lax.map(
        lambda number: errors.of([_masks(importances, errors.draw(jax.random.fold_in(for_draws, number)))])[0],
        jnp.arange(test.draws),
    )

    def attacked(number: Array) -> Array:
        start = _random_sources(problem, errors.clean_pass.leading, jax.random.fold_in(for_attacks, number))
        found = attack(test.attack, lambda sources: errors.of([_masks(importances, sources)])[0], start)
        return errors.of([_masks(importances, found)])[0]

    attacks = jax.vmap(attacked)(jnp.arange(test.starts))
    return jnp.stack([errors.of([_masks(importances, None)])[0], jnp.mean(drawn), jnp.max(attacks)])


class PromptErrors:
    """Errors of masked forwards of one row of inputs against its clean pass (O2)."""

    def __init__(
        self,
        problem: Problem,
        learned: Learned,
        weights: Weights,
        inputs: Array,
        measure: Measure,
    ) -> None:
        self._problem, self._measure, self._weights = problem, measure, weights
        batch = read_batch(problem, hold_for_reading(problem, learned), weights, inputs)
        self.clean_pass: CleanPass = batch.clean_pass
        # λ counts as 0 here, so that sources are the masks themselves.
        self._batch = batch.with_squash(jnp.zeros_like)
        self._live = tuple(range(len(problem.target.sites)))

    def draw(self, key: Array) -> Bundle:
        """Draws the sources of the reading ``random``."""
        sites, use_delta = self._problem.target.sites, self._problem.decomposition.use_delta
        return draw_stochastic(Stochastic(), key, sites, self._live, self.clean_pass.at, use_delta)

    def of(self, maskings: Sequence[Bundle]) -> Float[Array, " maskings"]:
        """Returns the error of O2 for each masking."""
        streams = [Stream(self._live, GivenSources(masks, self.clean_pass.batch)) for masks in maskings]
        forwards = run_masked(self._batch, streams).forwards
        clean, *masked = (self._at_row(f.output) for f in (self.clean_pass.forward, *forwards))
        if self._measure.outputs is None:
            target = self._problem.target
            found: Array = target.errors(self._weights, target.reference(self._weights, clean), masked)
            return found
        wanted = self._kept(clean)
        return jnp.stack([jnp.mean((self._kept(x) - wanted) ** 2) for x in masked])

    def _at_row(self, output: Float[Array, "B *n d"]) -> Float[Array, "B *m d"]:
        row = self._measure.row
        return output if row is None else output[:, row : row + 1]

    def _kept(self, output: Float[Array, "B *n d"]) -> Float[Array, "B *n outputs"]:
        """Returns E3 of the outputs to preserve."""
        predictions = self._problem.target.predictions(self._weights, output)
        if self._measure.row is not None:
            predictions = predictions - jnp.mean(predictions, axis=-1, keepdims=True)
        return predictions[..., jnp.asarray(self._measure.outputs)]


def _masks(importances: Importances, sources: Bundle | None) -> Bundle:
    """Returns the masks of M1. Without sources, masks are λ and the delta is off."""
    if sources is None:
        return {name: Sources(x, None) for name, x in importances.items()}
    return {name: Sources(interpolate(x, sources[name].components), sources[name].delta)
            for name, x in importances.items()}  # fmt: skip


def _random_sources(problem: Problem, leading: tuple[int, ...], key: Array) -> Bundle:
    """Draws the sources from which an attack starts."""
    sites = problem.target.sites
    live = tuple(range(len(sites)))
    return initial_sources(_RANDOM, key, sites, live, leading, problem.decomposition.use_delta)


def _adam(descent: Descent) -> optax.GradientTransformation:
    return optax.adam(descent.learning_rate, b2=0.99)
