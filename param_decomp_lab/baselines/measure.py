"""Measures the error of a run and of its baselines by the number of parts that are on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from param_decomp_jax.analysis.attribution import for_attribution
from param_decomp_jax.analysis.baselines import (
    MaskedErrors,
    Masks,
    activations,
    by_gradient,
    cross_entropy,
    largest,
    masked_errors,
    mean_l0,
    second_moments,
)
from param_decomp_jax.analysis.dictionaries import Dictionary
from param_decomp_jax.analysis.importances import importance_logits
from param_decomp_jax.ci import squashings
from param_decomp_jax.decomposition.components import Components, Factors, with_views
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_lab.baselines.matching import shares
from param_decomp_lab.baselines.parts import BASELINES, Baseline, Choice, parts_of
from param_decomp_lab.baselines.replacements import fit_dictionaries, names_of, replacement
from param_decomp_lab.baselines.result import (
    LAMBDA,
    LARGEST,
    ON_OFF,
    OWN,
    WITH_K_ON,
    BaselinePoint,
    Comparison,
    Replacement,
)
from param_decomp_lab.baselines.saelens import DictionaryFolder
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run

THRESHOLDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
STEP_SIZE = 0.1

Progress = Callable[[str], None]
"""Receives a text that says what is being measured."""


def compare(
    run: Run,
    batches: Sequence[Array],
    others: Sequence[Array],
    lengths: tuple[int, ...] = (20, 40, 80, 160, 320),
    seed: int = 0,
    progress: Progress = lambda what: None,
    matched_only: bool = False,
    dictionaries: Sequence[DictionaryFolder] = (),
    choice: Choice = "activation",
) -> Comparison:
    """Measures a run and its baselines on some batches.

    ``others``: batches for the second moments that weight singular vectors, not among those on which they are measured.
    ``matched_only``: measure only at the run's own L0. ``dictionaries``: SAEs and transcoders to include. ``choice``:
    how parts are chosen (B2). Raises UserError, before anything is computed, for a run whose sites are experts'
    matrices or an embedding, which have no baselines here, and for dictionaries that do not fit its target.
    """
    fitted = fit_dictionaries(run, dictionaries)
    stacks = run.target.sites.stacks
    for stack in stacks:
        if stack.experts is not None or stack.lookup:
            what = "an embedding" if stack.lookup else "experts' matrices"
            raise UserError(f"--baselines: {stack.name} is {what}, for which there are no baselines")
    work = Measurement(run, batches, others, lengths, seed, matched_only, choice)
    points = []
    progress("the decomposition")
    points += list(work.own())
    l0 = points[0].l0
    for kind in BASELINES:
        progress(kind)
        points += list(work.of_baseline(kind, l0))
    replacements = []
    for name, folder, dictionary in zip(names_of(dictionaries), dictionaries, fitted, strict=True):
        progress(name)
        replacements.append(work.of_dictionary(name, folder, dictionary, l0))
    of_text = run.is_language_model
    positions = sum(int(np.prod(run.target.activation_axes(batch.shape))) for batch in batches)
    sites = len(run.sites)
    return Comparison(run.id, run.step, of_text, positions, lengths, tuple(points), sites, tuple(replacements), choice)


class Measurement:
    """Points of a run and of its baselines on some batches; the arguments are those of `compare`."""

    def __init__(
        self,
        run: Run,
        batches: Sequence[Array],
        others: Sequence[Array],
        lengths: tuple[int, ...],
        seed: int,
        matched_only: bool,
        choice: Choice,
    ) -> None:
        self._run, self._batches, self._lengths, self._seed = run, batches, lengths, seed
        self._matched_only, self._choice = matched_only, choice
        self._others = others
        self._problem = for_attribution(run.problem)
        self._sites = self._problem.target.sites
        with jax.set_mesh(run.mesh):
            clean = [jitted(cross_entropy)(self._problem, run.weights, batch) for batch in batches]
        self._clean = float(np.mean([float(x) for x in clean]))

    def own(self) -> Iterator[BaselinePoint]:
        """Yields the decomposition's points (B3), first the one with λ as masks."""
        run = self._run
        with jax.set_mesh(run.mesh):
            logits = [jitted(_logits)(self._problem, run.learned, run.weights, batch) for batch in self._batches]
            parts = with_views(run.learned.components, self._sites)
        lower, _ = squashings(self._problem.decomposition.squashing)
        importances = [{name: lower(z) for name, z in of_batch.items()} for of_batch in logits]
        own = self.point(parts, importances, OWN, LAMBDA, 0.0, attacked=True)
        yield own
        for threshold in THRESHOLDS[:1] if self._matched_only else THRESHOLDS:
            masks = [{n: (x > threshold).astype(jnp.float32) for n, x in of_batch.items()} for of_batch in importances]
            yield self.point(parts, masks, OWN, ON_OFF, threshold, attacked=threshold == 0)
        if self._choice == "gradient":
            yield from self._chosen(parts, OWN, own.l0)
            return
        for k in self._ladder(parts):
            masks = [largest(_firing(z, x), k) for z, x in zip(logits, importances, strict=True)]
            yield self.point(parts, masks, OWN, LARGEST, k, attacked=False)

    def of_baseline(self, kind: Baseline, l0: float) -> Iterator[BaselinePoint]:
        """Yields the points of a baseline. ``l0``: the decomposition's."""
        yield from self._chosen(self.parts(kind), kind, l0)

    def _chosen(self, parts: Components, name: str, l0: float) -> Iterator[BaselinePoint]:
        """Yields the points with k parts on (B2), for every requested k. Those that are mixed into the point at ``l0``
        are attacked.
        """
        matched = shares(l0)
        numbers = sorted({*self._ladder(parts), *matched})
        values = [self.values(parts, batch, numbers[-1]) for batch in self._batches]
        for k in numbers:
            masks = [largest(of_batch, k) for of_batch in values]
            yield self.point(parts, masks, name, WITH_K_ON[self._choice], k, attacked=k in matched)

    def values(self, parts: Components, batch: Array, most: int) -> Masks:
        """Returns the values by which up to ``most`` parts are chosen (B2)."""
        given = (self._problem, parts, self._run.weights, batch)
        with jax.set_mesh(self._run.mesh):
            if self._choice == "gradient":
                values: Masks = jitted(by_gradient)(*given, most)
                return values
            return {name: jnp.abs(a) for name, a in jitted(activations)(*given).items()}

    def of_dictionary(self, name: str, folder: DictionaryFolder, dictionary: Dictionary, l0: float) -> Replacement:
        return replacement(
            self._run, self._problem, self._batches, name, folder, dictionary, self._clean, l0, self._matched_only
        )

    @cached_property
    def _moments(self) -> dict[str, np.ndarray]:
        """Returns the second moments of the inputs of sites, by stack."""
        run, total = self._run, None
        for batch in self._others:
            with jax.set_mesh(run.mesh):
                found = jitted(second_moments)(self._problem, run.weights, batch)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return {name: np.asarray(x) / len(self._others) for name, x in (total or {}).items()}

    def _ladder(self, parts: Components) -> list[int]:
        if self._matched_only:
            return []
        most = max(own.U.shape[1] for own in parts.values())
        return [k for k in (2**n for n in range(16)) if k <= most]

    def parts(self, kind: Baseline) -> Components:
        """Returns the parts of a baseline (B1), by stack."""
        run = self._run
        with jax.set_mesh(run.mesh):
            weights = jax.device_get(self._problem.target.site_weights(run.weights))
        made = {}
        for number, stack in enumerate(self._sites.stacks):
            rng = np.random.default_rng([self._seed, number])
            layers = [
                parts_of(kind, stack.kind, W, second, rng)
                for W, second in zip(weights[stack.name], self._moments[stack.name], strict=True)
            ]
            V, U = (jnp.asarray(np.stack(x).astype(np.float32)) for x in zip(*layers, strict=True))
            made[stack.name] = Factors(V, U)
        return made

    def point(
        self, parts: Components, masks: Sequence[Masks], name: str, chosen: str, number: float, attacked: bool
    ) -> BaselinePoint:
        """Measures one way of choosing parts. ``masks``: one for each batch."""
        run, found, l0 = self._run, [], []
        lengths = self._lengths if attacked else ()
        for n, (batch, own) in enumerate(zip(self._batches, masks, strict=True)):
            key = jax.random.fold_in(jax.random.key(self._seed), n)
            with jax.set_mesh(run.mesh):
                errors: MaskedErrors = jitted(masked_errors, (0, 6, 7))(
                    self._problem, parts, run.weights, batch, own, key, lengths, STEP_SIZE
                )
                l0.append(float(jitted(mean_l0, ())(own)))
            found.append(jax.device_get(errors))
        mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *found)
        lost = float(mean.cross_entropy) - self._clean if run.is_language_model else None
        return BaselinePoint(
            name, chosen, number, float(np.mean(l0)), float(mean.error), lost, float(mean.random),
            tuple(mean.attacked.tolist()),
        )  # fmt: skip


def _firing(logits: Mapping[str, Array], importances: Mapping[str, Array]) -> Masks:
    """Returns the logits of firing components, shifted so that all are above 0; 0 for all others."""
    return {name: jnp.where(importances[name] > 0, z - jnp.min(z) + 1, 0) for name, z in logits.items()}


def _logits(problem: Problem, learned: Learned, weights: Any, inputs: Array) -> dict[str, Array]:
    return importance_logits(problem, learned, weights, inputs)
