"""Importances of one prompt, lowered as far as its output allows (section 16): from them come graphs with few nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from param_decomp_jax.analysis.attribution import for_attribution
from param_decomp_jax.analysis.prompt_importances import (
    Descent,
    Importances,
    Measure,
    ReadingTest,
    lower,
    penalty_total,
    reading_errors,
    start_lowering,
)
from param_decomp_jax.decomposition.schedules import Anneal
from param_decomp_jax.method.adversary import FreshAttack
from param_decomp_jax.method.inspection import stack_sites, unstack_sites
from param_decomp_jax.method.losses import ImportanceMinimality, Lp, SmoothL0
from param_decomp_jax.method.step import Problem
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Optimized, ReadingErrors
from param_decomp_lab.runs.opened import OpenedRun

Loss = Literal["kl", "logit"]
Progress = Callable[[int, int, int], None]
"""Told the steps done, the number of steps, and how many components fire in the best importances so far."""

EVERY = 40
"""Steps between two looks at whether what has been reached holds."""
CUTOFFS = (0.02, 0.1, 0.3)
"""A candidate has 0 for what lies at or below one of these: the descent leaves much just above 0."""
LEAST_KL = 1e-3
"""Nats that are always allowed: below, readings differ by rounding and draws."""
DEFAULT_PENALTY = Lp(Anneal(1.0, 1.0), 0.0)
LEAST_EPS = 0.01
FIRST, SECOND = 0, 1
"""Two sets of draws and attacks: candidates are found by the first; one is chosen and reported by the second."""
MARGIN = 0.9
"""The share of what is allowed that is aimed at: errors differ by draws and attacks."""


@dataclass(frozen=True)
class OptimizeRequest:
    """How importances are optimised. ``loss``: ``kl`` keeps the distribution of the next token (of a toy, all outputs),
    ``logit`` the outputs that the graph follows. ``allowed``: errors of the result are at most this many times those of
    the run's own importances (O4). ``attack_steps``, ``attack_step_size``: A1, of the attack that it must
    stand. ``samples``: draws of the reading ``random``."""

    loss: Loss = "kl"
    allowed: float = 1.0
    steps: int = 400
    learning_rate: float = 0.02
    attack_steps: int = 20
    attack_step_size: float = 0.1
    attack_starts: int = 8
    draws: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in ("kl", "logit"):
            raise UserError(f"optimise: '{self.loss}' should be kl or logit")
        for name in ("allowed", "learning_rate", "attack_step_size"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name}: {getattr(self, name)} should be above 0")
        for name in ("steps", "attack_steps", "attack_starts", "draws"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} should be at least 1")


class Result(NamedTuple):
    """``importances``: by site, at every position."""

    importances: dict[str, Float[np.ndarray, "rows C"]]
    found: Optimized


def optimize(
    opened: OpenedRun,
    inputs: Array,
    own: Mapping[str, Float[np.ndarray, "rows C"]],
    row: int | None,
    outputs: tuple[int, ...],
    threshold: float,
    request: OptimizeRequest,
    progress: Progress | None = None,
) -> Result:
    """The fewest importances found whose output at ``row`` is as near to the clean one as that of the run's ``own``.

    ``inputs``: as of `Incoming`. ``row``: a position; None for a toy. What lies after it is 0 from the start.
    If nothing smaller stands the readings, twice, the result has the run's own (O5).
    """
    problem = for_attribution(opened.problem)
    sites = problem.target.sites
    leading = (1,) if row is None else tuple(inputs.shape)
    start = {name: x.astype(np.float32).copy() for name, x in own.items()}
    if row is not None:
        for x in start.values():
            x[row + 1 :] = 0
    of_stacks: Importances = stack_sites(sites, {name: x.reshape(*leading, -1) for name, x in start.items()})
    measure = Measure(row, outputs if request.loss == "logit" else None)
    descent = Descent(
        measure, penalty_for_descent(problem), request.steps, request.learning_rate, request.attack_step_size, 0.05
    )
    judge = _Judge(opened, problem, inputs, measure, request)
    least = LEAST_KL if row is not None and request.loss == "kl" else 1e-12
    allowed = np.maximum(request.allowed * judge.errors(of_stacks, FIRST), least)
    n_before = fewest = _count(of_stacks, threshold)
    stood: list[tuple[Importances, int, int]] = []
    with jax.set_mesh(opened.mesh):
        at_start = penalty_total(descent, of_stacks, jnp.zeros((), jnp.int32))
        state = start_lowering(problem, of_stacks, leading, descent)
    for done in range(0, request.steps, EVERY):
        n = min(EVERY, request.steps - done)
        with jax.set_mesh(opened.mesh):
            state = jitted(lower, (0, 7, 8))(
                problem, opened.learned, opened.weights, inputs, jnp.asarray(allowed), at_start, state, descent, n
            )
        for cutoff in sorted(CUTOFFS, reverse=True):
            candidate = jax.tree.map(lambda x, cutoff=cutoff: jnp.where(x > cutoff, x, 0), state.importances)
            count = _count(candidate, threshold)
            if count < fewest and (judge.errors(candidate, FIRST) <= MARGIN * allowed).all():
                fewest = count
                stood.append((candidate, count, done + n))
                break
        if progress is not None:
            progress(done + n, request.steps, fewest)
    # Among so many candidates one may stand the first attacks because these were weak. What is reported holds.
    before = judge.errors(of_stacks, SECOND)
    best, fewest, steps_of_best, after = of_stacks, n_before, 0, before
    for candidate, count, step in reversed(stood):
        errors = judge.errors(candidate, SECOND)
        if (errors <= np.maximum(request.allowed * before, least)).all():
            best, fewest, steps_of_best, after = candidate, count, step, errors
            break
    figures = [ReadingErrors(*map(float, errors)) for errors in (before, after)]
    found = Optimized(request.loss, request.steps, steps_of_best, n_before, fewest, *figures)
    by_site = {name: np.asarray(x).reshape(-1, x.shape[-1]) for name, x in unstack_sites(sites, best).items()}
    return Result({site.name: by_site[site.name] for site in sites.all}, found)


class _Judge:
    """Errors of the readings of some importances, always with the same draws for the same number."""

    def __init__(
        self, opened: OpenedRun, problem: Problem, inputs: Array, measure: Measure, request: OptimizeRequest
    ) -> None:
        self._opened, self._problem, self._inputs = opened, problem, inputs
        self._measure, self._request = measure, request

    def errors(self, importances: Importances, number: int) -> Float[np.ndarray, " readings"]:
        request, opened = self._request, self._opened
        key = jax.random.fold_in(jax.random.key(request.seed), number)
        attack = FreshAttack("random", request.attack_step_size, request.attack_steps, "unique_per_datapoint")
        test = ReadingTest(request.draws, request.attack_starts, attack)
        with jax.set_mesh(opened.mesh):
            found = jitted(reading_errors, (0, 6, 7))(
                self._problem, opened.learned, opened.weights, self._inputs, importances, key, self._measure, test
            )
        return np.asarray(found)


def _count(importances: Importances, threshold: float) -> int:
    return int(sum(np.count_nonzero(np.asarray(x) > threshold) for x in importances.values()))


def penalty_for_descent(problem: Problem) -> Lp | SmoothL0:
    """The run's own, annealed over the descent as over training; its slope at 0 bounded, for Adam would remember it."""
    terms = [term for term in problem.decomposition.terms if isinstance(term, ImportanceMinimality)]
    own = terms[0].penalty if terms else DEFAULT_PENALTY
    return replace(own, eps=max(own.eps, LEAST_EPS)) if isinstance(own, Lp) else own
