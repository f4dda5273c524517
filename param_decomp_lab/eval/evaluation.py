"""Evaluation of a run: metrics often, figures less often, always on the same held-out batches."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray
from matplotlib.figure import Figure

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.objective import Objective, term_keys
from param_decomp_jax.method.recon import Reconstruction, attack_of
from param_decomp_jax.method.state import Learned, State
from param_decomp_jax.method.step import Problem, hold_for_reading, keeps_outputs
from param_decomp_jax.sharding.mesh import replace_fields
from param_decomp_jax.sharding.mesh import whole as whole_on
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.features import FeatureTarget
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import measured_terms
from param_decomp_lab.eval.persistent import Adversaries, always_on, attack_batch, fresh_adversaries
from param_decomp_lab.metrics import METRICS, Metric
from param_decomp_lab.metrics.batch import Batch
from param_decomp_lab.metrics.figures import save_figure
from param_decomp_lab.metrics.snapshot import Snapshot
from param_decomp_lab.metrics.statistics import Statistics, batch_statistics
from param_decomp_lab.metrics.toy_probe import Probe, Probed
from param_decomp_lab.setup.programs import Program
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.warnings import print_warnings

Setting = TypeVar("Setting", int, float)


class EvaluationStopped(Exception):
    """The run was asked to stop during an evaluation."""


class Measured(NamedTuple):
    """An evaluation's numbers by key, and the means over its batches of what each metric measured."""

    row: dict[str, float]
    means: list[Any]


class Evaluation:
    """Evaluates states of a run on the same held-out batches every time.

    ``batches``: gives a batch on the mesh by its number. Every process must call every method, and gets the same
    numbers.
    """

    def __init__(self, config: RunConfig, problem: Problem, batches: Callable[[int], Array], mesh: Mesh) -> None:
        assert config.method.eval is not None
        # What is fetched must be whole on every device: the other processes' devices cannot be read from here.
        self._whole = whole = whole_on(mesh)
        self._settings, self._batches = config.method.eval, batches
        pd, configured = config.method.pd, config.method.eval.metrics
        metrics = [metric for metric in configured if isinstance(metric, Metric)]
        by_kind = [[m for m in metrics if type(m) is kind] for kind in METRICS.values()]
        self._kinds = [alike for alike in by_kind if alike]
        self._metrics = [metric for alike in self._kinds for metric in alike]
        # Those of losses come first: a term draws by its place among all.
        measured = zip(configured, measured_terms(configured, config), strict=True)
        terms = [term for _, term in sorted(measured, key=lambda pair: isinstance(pair[0], Metric)) if term is not None]
        self._persistent = tuple(always_on(t) for t in terms if _is_persistent(t))
        others = tuple(t for t in terms if not _is_persistent(t))
        self._problem = Problem(replace(problem.decomposition, terms=others), problem.target)
        target = problem.target
        self._probe = Probe(problem, target, mesh) if isinstance(target, FeatureTarget) else None
        self._sampling = Stochastic(pd.sampling)
        self._fast = jax.jit(self._fast_batch, out_shardings=(None, whole))
        threshold = _shared(m.density_threshold for m in self._metrics) or 0.0

        def statistics(learned: Learned, weights: Weights, inputs: Array) -> Any:
            learned = hold_for_reading(problem, learned)
            return batch_statistics(read_batch(problem, learned, weights, inputs), threshold)

        self._statistics = jax.jit(statistics, out_shardings=whole)

    def _fast_batch(
        self, state: State, weights: Weights, inputs: Array, key: PRNGKeyArray, adversaries: Adversaries
    ) -> tuple[Adversaries, dict[str, Any]]:
        problem = self._problem
        spec = problem.decomposition
        learned = hold_for_reading(problem, state.learned)
        read = read_batch(problem, learned, weights, inputs, outputs=keeps_outputs(problem))
        losses_key, metrics_key = jax.random.split(key)
        objective = Objective(spec, state.step, term_keys(spec, losses_key))
        _, (losses, _) = objective.total_loss(read, {})
        adversaries, errors = attack_batch(self._persistent, adversaries, read, state, spec.steps, losses_key)
        batch = Batch(read.clean_pass, read.components, read.reader, self._sampling, metrics_key)
        return adversaries, {
            "losses": losses | {f"loss/{name}": error for name, error in errors.items()},
            "kinds": [alike[0].measure_all(alike, batch) for alike in self._kinds],
        }

    def _start(self, key: PRNGKeyArray, inputs: Array) -> Adversaries:
        if not self._persistent:
            return {}
        return jax.jit(partial(self._initial_adversaries, key, inputs), out_shardings=self._whole)()

    def _initial_adversaries(self, key: PRNGKeyArray, inputs: Array | jax.ShapeDtypeStruct) -> Adversaries:
        """The adversaries at the start of an evaluation, for batches like ``inputs``."""
        sites, use_delta = self._problem.target.sites, self._problem.decomposition.use_delta
        leading = self._problem.target.activation_axes(inputs.shape)
        return fresh_adversaries(self._persistent, key, sites, leading, use_delta)

    def programs(self, state: State, weights: Any, inputs: jax.ShapeDtypeStruct) -> dict[str, Program]:
        """The programs of an evaluation, by name; arguments are shapes with shardings."""
        key = jax.eval_shape(lambda: self._problem.decomposition.key("eval"))
        start = jax.eval_shape(self._initial_adversaries, key, inputs)
        adversaries = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._whole), start)
        seen = without_training_state(state)
        return {
            "evaluation": Program(self._fast, (seen, weights, inputs, key, adversaries)),
            "figures": Program(self._statistics, (state.learned, weights, inputs)),
        }

    def due(self, step: int, total: int) -> bool:
        return step % self._settings.every == 0 or step == total

    def slow_due(self, step: int, total: int) -> bool:
        if step == 0:
            return self._settings.slow_on_first_step
        return step % self._settings.slow_every == 0 or step == total

    def fast(self, state: State, weights: Weights, step: int, stop: Callable[[], bool]) -> Measured:
        """`eval/*` metrics of the state after ``step`` steps, as means over the batches.

        Raises EvaluationStopped if ``stop`` returns True.
        """
        # The arrays a jitted function closes over would be constants of its program: hand the rest over as arguments.
        key = jax.random.fold_in(self._problem.decomposition.key("eval"), step)
        start_key = jax.random.fold_in(key, self._settings.n_steps)  # the numbers below are the batches'
        partial_state = without_training_state(state)
        per_batch = []
        adversaries: Adversaries | None = None
        for number, inputs in enumerate(self.batches(stop)):
            adversaries = self._start(start_key, inputs) if adversaries is None else adversaries
            batch_key = jax.random.fold_in(key, number)
            adversaries, measured = self._fast(partial_state, weights, inputs, batch_key, adversaries)
            per_batch.append(jax.device_get(measured))
        means = jax.tree.map(lambda *values: np.mean(values, axis=0), *per_batch)
        row = {f"eval/{k}": float(v) for k, v in means["losses"].items() if k != "loss/total"}
        snapshot = self._snapshot(partial_state, weights, stop)
        of_metrics = [mean for own in means["kinds"] for mean in own]
        for metric, mean in zip(self._metrics, of_metrics, strict=True):
            row |= metric.row(mean, snapshot)
        return Measured(row if self._probe is None else row | snapshot.probed.tms_numbers, of_metrics)

    def _snapshot(self, state: State, weights: Weights, stop: Callable[[], bool]) -> Snapshot:
        def site_notes(snapshot: Snapshot) -> dict[str, str]:
            return {site: note for metric in self._metrics for site, note in metric.site_notes(snapshot).items()}

        probed = None if self._probe is None else Probed(self._probe, without_training_state(state), weights)
        statistics = partial(self.statistics, state, weights, stop)
        return Snapshot(self._problem.target.sites, probed, statistics, site_notes)

    def compile(self, state: State, weights: Weights) -> None:
        """Compiles the programs that `fast`, `statistics` and `figures` call; JAX caches them."""
        key, inputs = self._problem.decomposition.key("eval"), self._batches(0)
        adversaries = self._start(key, inputs)
        self._fast.lower(without_training_state(state), weights, inputs, key, adversaries).compile()
        self._statistics.lower(state.learned, weights, inputs).compile()

    def batches(self, stop: Callable[[], bool]) -> Iterator[Array]:
        """The batches of an evaluation. Checks ``stop`` before each; raises EvaluationStopped."""
        for number in range(self._settings.n_steps):
            if stop():
                raise EvaluationStopped
            yield self._batches(number)

    def statistics(self, state: State, weights: Weights, stop: Callable[[], bool]) -> Statistics:
        """Histograms, means and densities of λ per site over the evaluation's batches."""
        limit = _shared(m.histogram_batches for m in self._metrics)
        batches = [jax.device_get(self._statistics(state.learned, weights, inputs)) for inputs in self.batches(stop)]
        return Statistics.over(self._problem.target.sites, batches, limit)

    def figures(
        self,
        state: State,
        weights: Weights,
        step: int,
        measured: Measured,
        folder: Path | None,
        stop: Callable[[], bool],
    ) -> dict[str, Path]:
        """Draws the configured figures into ``folder``; returns their paths by `slow_eval/figures/<name>`.

        ``measured``: what `fast` found of this state. ``folder``: None if another process writes the figures and this
        one only takes part in the computation. A figure that cannot be written is reported and skipped, so that the run
        does not fail.
        """
        snapshot = self._snapshot(state, weights, stop)
        drawn: dict[str, Figure] = {}
        for metric, means in zip(self._metrics, measured.means, strict=True):
            drawn |= metric.figures(means, snapshot)
        paths: dict[str, Path] = {}
        if folder is None:
            return paths
        for name, figure in drawn.items():
            file = folder / f"{name}_{step}.png"
            try:
                save_figure(figure, file)
            except OSError as error:
                print_warnings([f"{file} cannot be written: {error.strerror or error}"], PlainConsole(stderr=True))
            else:
                paths[f"slow_eval/figures/{name}"] = file
        return paths


def _shared(settings: Iterable[Setting | None]) -> Setting | None:
    """A setting of the statistics, which are computed once for all metrics; None if no metric gives it."""
    given = {setting for setting in settings if setting is not None}
    assert len(given) <= 1, f"metrics give different settings for the same statistics: {given}"
    return next(iter(given), None)


def _is_persistent(term: Any) -> TypeGuard[Reconstruction]:
    return isinstance(term, Reconstruction) and attack_of(term) is not None


def without_training_state(state: State) -> State:
    """The state without persistent sources and moments, which no evaluation reads."""
    evaluated: State = replace_fields(state, adversaries={}, components_moments=None, ci_moments=None)
    return evaluated
