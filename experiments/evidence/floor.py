"""How far is a trained CI function from importances optimised for one batch, with equally many components on?

    python -m experiments.evidence.floor RUN --rows 8 --steps 200 --attack 20
    python -m experiments.evidence.floor RUN --rows 8 --steps 200 --attack 20 --against-attack

Measures five choices of parts on one batch of held-out rows, all at the L0 of the run's λ. The parts that are off are
left out, masked at random, and masked by an attack:

- λ as masks: what the CI function gives from activations alone;
- the same components, with importances optimised for this batch, starting from λ and from the choice by gradient: what
  a better CI function could reach;
- the best baseline, with parts chosen by activation, as in `pd eval --baselines`;
- weighted singular vectors with importances optimised in the same way: whether the components are better parts.

Importances are free numbers in [0, 1], one for each part, position and site. For three quarters of the steps, Adam
lowers three terms: the error with the importances as masks, the error with the rest at random, each relative to its
value at the start, and importance minimality with the run's own penalty (O3), weighted so that as many parts stay above
0.1 as λ has on. Then exactly that many of the largest are kept, and only the errors move them, so every L0 is the same.
The optimisation starts from λ, and from the choice by gradient (B2); for baselines, only from the latter. Only choices
optimised ``--against-attack``, with persistent sources as a third reading, withstand an attack.

Optimised importances know the clean output, which λ cannot. The difference in error is therefore an upper bound on what
is lost in the CI function. Components and singular vectors are compared on equal terms.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.attribution import for_attribution
from param_decomp_jax.analysis.baselines import Masks, by_gradient, largest, masked_passes
from param_decomp_jax.analysis.importances import lower_importances
from param_decomp_jax.analysis.prompt_importances import LEAST_LOG_PRICE, Descent, Measure, penalty_total
from param_decomp_jax.decomposition.components import Components, with_views
from param_decomp_jax.method.masks import interpolate
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_lab import load_run
from param_decomp_lab.baselines.command import other_batches
from param_decomp_lab.baselines.matching import mixed, shares
from param_decomp_lab.baselines.measure import STEP_SIZE, Measurement
from param_decomp_lab.baselines.parts import BASELINES, Baseline
from param_decomp_lab.baselines.result import LAMBDA, OWN, BaselinePoint
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.eval.run_evaluation import evaluation_batches
from param_decomp_lab.graph.optimize import penalty_for_descent
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import markdown_table

WEIGHTED: Baseline = "weighted singular vectors"
FROM_LAMBDA, FROM_GRADIENT = "optimised from λ", "optimised from the choice by gradient"
COUNTED = 0.1
"""While they are optimised, importances above this count as on: Adam leaves many just above 0 (O5)."""
LEAST = 1e-3
"""The least value of an importance that is kept: it stays on, so that the L0 does not change."""
PENALISED = 0.75
"""The share of the steps in which importance minimality counts."""
PRICE_RATE = 0.1
"""How fast the weight of importance minimality follows the number of parts that are on."""
LEAST_ERROR = 1e-9
"""Errors below this are replaced by it as divisors."""


class Moving(NamedTuple):
    """The state of a descent: importances, Adam's moments, the attack's sources, and the logarithm of minimality's
    weight."""

    masks: Masks
    moments: optax.OptState
    sources: Masks
    log_weight: Float[Array, ""]


def descend(
    problem: Problem,
    descent: Descent,
    n_steps: int,
    penalised: bool,
    against_attack: bool,
    parts: Components,
    weights: Weights,
    inputs: Array,
    start: Masks,
    wanted: Float[Array, ""],
) -> Masks:
    """Returns the importances after ``n_steps`` steps.

    ``penalised``: whether importance minimality counts, so that ``wanted`` of them stay on. Otherwise those that are on
    at the start stay on, and all others stay off.
    """
    passes = masked_passes(problem, parts, weights, inputs)
    rate = descent.learning_rate
    # The last steps are for settling, because their random draws differ.
    adam = optax.adam(rate if penalised else optax.linear_schedule(rate, 0, n_steps), b2=0.99)
    on = jax.tree.map(lambda m: m > 0, start)
    at_start = penalty_total(descent, start, jnp.zeros((), jnp.int32))

    def draw(key: Array) -> Masks:
        keys = jax.random.split(key, len(start))
        return {name: jax.random.uniform(k, m.shape) for k, (name, m) in zip(keys, start.items(), strict=True)}

    def errors(masks: Masks, sources: Masks, drawn: Masks) -> Float[Array, " readings"]:
        readings = [masks, jax.tree.map(interpolate, masks, drawn)]
        if against_attack:
            readings.append(jax.tree.map(interpolate, masks, sources))
        return jnp.stack([passes.error(m) for m in readings])

    sources = draw(jax.random.key(2))
    scale = jnp.maximum(errors(start, sources, sources), LEAST_ERROR)

    def loss(masks: Masks, sources: Masks, drawn: Masks, log_weight: Array, step: Array) -> Array:
        total = jnp.sum(errors(masks, sources, drawn) / scale)
        if penalised:
            total += jnp.exp(log_weight) * penalty_total(descent, masks, step) / at_start
        return total

    def one(step: Int[Array, ""], state: Moving) -> Moving:
        drawn = draw(jax.random.fold_in(jax.random.key(1), step))
        of_masks, of_sources = jax.grad(loss, argnums=(0, 1))(state.masks, state.sources, drawn, state.log_weight, step)
        updates, moments = adam.update(of_masks, state.moments)
        moved = jax.tree.map(jnp.add, state.masks, updates)
        if penalised:
            masks = jax.tree.map(lambda x: jnp.clip(x, 0, 1), moved)
        else:
            masks = jax.tree.map(lambda x, kept: jnp.where(kept, jnp.clip(x, LEAST, 1), 0), moved, on)
        sources = jax.tree.map(lambda s, g: jnp.clip(s + descent.ascent * jnp.sign(g), 0, 1), state.sources, of_sources)
        count = jnp.sum(jnp.stack([jnp.sum(m > COUNTED) for m in masks.values()]))
        log_weight = state.log_weight + descent.price_rate * jnp.clip(count / wanted - 1, -1, 1)
        return Moving(masks, moments, sources, jnp.maximum(log_weight, LEAST_LOG_PRICE))

    begin = Moving(start, adam.init(start), sources, jnp.zeros(()))
    return jax.lax.fori_loop(0, n_steps, one, begin).masks


def keep_largest(masks: Masks, n: int, start: Masks) -> Masks:
    """Keeps the n largest of all, wherever they are, at `LEAST` or more; the others become 0. If fewer than n are above
    0, those that were largest at the ``start`` make up the number."""
    flat, before = (np.concatenate([np.asarray(m).ravel() for m in of.values()]) for of in (masks, start))
    kept = np.zeros(len(flat), bool)
    kept[np.lexsort((-before, -flat))[:n]] = True
    ends = np.cumsum([m.size for m in masks.values()])[:-1]
    return {
        name: jnp.where(jnp.asarray(own.reshape(m.shape)), jnp.maximum(m, LEAST), 0)
        for (name, m), own in zip(masks.items(), np.split(kept, ends), strict=True)
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    parts: str
    chosen: str
    point: BaselinePoint


class Floor:
    """Everything that is measured on one batch of a run. ``length``: the number of steps of the attack."""

    def __init__(
        self, run: Run, batch: Array, others: Sequence[Array], steps: int, rate: float, length: int, against: bool
    ) -> None:
        self._run, self._batch, self._against = run, batch, against
        self._problem = for_attribution(run.problem)
        self._work = Measurement(run, [batch], others, (length,), 0, True, "activation")
        n_penalised = int(PENALISED * steps)
        self._steps = (n_penalised, steps - n_penalised)
        penalty = penalty_for_descent(self._problem)
        self._descent = Descent(Measure(None), penalty, max(n_penalised, 1), rate, STEP_SIZE, PRICE_RATE)

    def rows(self) -> list[Row]:
        run, given = self._run, (self._problem, self._run.learned, self._run.weights, self._batch)
        own = next(iter(self._work.own()))
        if own.l0 == 0:
            raise UserError(f"{run.folder}: λ is 0 everywhere on these rows, so there is no L0 to compare at")
        with jax.set_mesh(run.mesh):
            importances = jitted(lower_importances)(*given)
            components = with_views(run.learned.components, self._problem.target.sites)
        baselines = {}
        for kind in BASELINES:
            points = {p.number: p for p in self._work.of_baseline(kind, own.l0)}
            baselines[kind] = mixed(points, own.l0)
        best = min(baselines.values(), key=lambda p: p.error)
        n = int(sum(np.count_nonzero(np.asarray(x) > 0) for x in importances.values()))
        weighted = self._work.parts(WEIGHTED)
        return [
            Row(OWN, LAMBDA, own),
            Row(OWN, FROM_LAMBDA, self._optimised(components, importances, n)),
            Row(OWN, FROM_GRADIENT, self._optimised(components, self._by_gradient(components, own.l0), n)),
            Row(best.parts, "by activation", best),
            Row(WEIGHTED, FROM_GRADIENT, self._optimised(weighted, self._by_gradient(weighted, own.l0), n)),
        ]

    def _by_gradient(self, parts: Components, l0: float) -> Masks:
        """Chooses ⌈L0⌉ parts by gradient (B2)."""
        k = max(shares(l0))
        with jax.set_mesh(self._run.mesh):
            return largest(jitted(by_gradient)(self._problem, parts, self._run.weights, self._batch, k), k)

    def _optimised(self, parts: Components, start: Masks, n: int) -> BaselinePoint:
        """Optimises importances, ``n`` of which stay above 0 over all sites and positions, and measures them."""
        masks, wanted = start, jnp.asarray(float(n))
        for n_steps, penalised in zip(self._steps, (True, False), strict=True):
            given = (parts, self._run.weights, self._batch, masks, wanted)
            with jax.set_mesh(self._run.mesh):
                masks = jitted(descend, (0, 1, 2, 3, 4))(
                    self._problem, self._descent, n_steps, penalised, self._against, *given
                )
            masks = keep_largest(masks, n, start)
        return self._work.point(parts, [masks], OWN, LAMBDA, 0.0, attacked=True)


def measure(folder: Path, n_rows: int, steps: int, rate: float, length: int, against: bool) -> tuple[list[Row], str]:
    """Returns the table's lines for a run, and what they were measured on. Raises UserError."""
    for option, value, least in (("--rows", n_rows, 1), ("--steps", steps, 4), ("--attack", length, 1)):
        if value < least:
            raise UserError(f"{option} {value}: should be at least {least}")
    if not 0 < rate < float("inf"):
        raise UserError(f"--learning-rate {rate}: should be above 0")
    run = load_run(folder, devices=1)
    request = EvaluationRequest(batches=1, batch_size=n_rows)
    config = evaluation_config(run.config, request, f"{folder}: the evaluation")
    source, data = evaluation_batches(run, config, request)
    batch = source(0)
    rows = Floor(run, batch, other_batches(run, source, 1, n_rows), steps, rate, length, against).rows()
    positions = int(np.prod(run.target.activation_axes(batch.shape)))
    return rows, f"{positions:,} positions from {data}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="held-out rows, in one batch (of a toy: draws)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--attack", type=int, default=20, help="steps of the attack")
    parser.add_argument("--against-attack", action="store_true", help="optimise against an attack as well")
    given = parser.parse_args(arguments)
    try:
        rows, data = measure(
            given.run, given.rows, given.steps, given.learning_rate, given.attack, given.against_attack
        )
    except UserError as error:
        parser.exit(2, f"{error}\n")
    print(f"{data}, {given.steps} steps, attack of {given.attack}\n")
    cells = (
        (row.parts, row.chosen, *map(number, (p.l0, p.error, p.random, p.attacked[-1])))
        for row in rows
        for p in [row.point]
    )
    print("\n".join(markdown_table("parts | importances | L0 | KL | random | attack", cells)))
    own, same, again, _, weighted = (row.point for row in rows)
    floor = min(same, again, key=lambda p: p.error)
    print(
        f"\nλ has {number(own.error / floor.error)} times the error of importances optimised for the batch, "
        f"{number(own.random / floor.random)} times at random. With importances optimised, the components have "
        f"{number(floor.error / weighted.error)} times the error of {WEIGHTED}, "
        f"{number(floor.random / weighted.random)} times at random."
    )


if __name__ == "__main__":
    main()
