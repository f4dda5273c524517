"""Evaluates a run on the same held-out batches every time: metrics often, figures and `slow` metrics less often."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray
from matplotlib.figure import Figure

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.losses import Term
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.objective import Objective, term_keys
from param_decomp_jax.method.recon import Reconstruction, attack_of
from param_decomp_jax.method.state import Learned, State
from param_decomp_jax.method.step import Problem, compared_points, hold_for_reading, keeps_outputs
from param_decomp_jax.sharding.mesh import replace_fields
from param_decomp_jax.sharding.mesh import whole as whole_on
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.features import FeatureTarget
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import measured_terms
from param_decomp_lab.config.method_schema import EvalConfig
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.eval.persistent import Adversaries, always_on, attack_batch, fresh_adversaries
from param_decomp_lab.metrics import METRICS, Metric
from param_decomp_lab.metrics.batch import Batch
from param_decomp_lab.metrics.figures import save_figure
from param_decomp_lab.metrics.importance_rows import ImportanceRows, RowReader
from param_decomp_lab.metrics.rows_shown import RowsShown
from param_decomp_lab.metrics.snapshot import Snapshot
from param_decomp_lab.metrics.statistics import Statistics, batch_statistics
from param_decomp_lab.metrics.toy_probe import Probe, Probed
from param_decomp_lab.setup.programs import Program
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.warnings import print_warnings

Setting = TypeVar("Setting", int, float, RowsShown)


class EvaluationStopped(Exception):
    """The run was asked to stop during an evaluation."""


class Measurements(NamedTuple):
    """An evaluation's numbers by key, and the means over its batches of what each metric measured."""

    row: dict[str, float]
    means: list[Any]


def evaluation_programs(settings: EvalConfig) -> tuple[str, ...]:
    """The names of the programs of an evaluation (`Evaluation.programs`), in the order in which they run."""
    slow = any(metric.slow for metric in settings.metrics)
    rows = any(isinstance(metric, Metric) and metric.rows_shown is not None for metric in settings.metrics)
    return "evaluation", *["slow evaluation"] * slow, "figures", *["rows of figures"] * rows


class Evaluation:
    """Evaluates states of a run on the same held-out batches every time.

    ``batches``: gives a batch on the mesh by its number. ``text``: returns the tokenizer, called if a figure shows
    tokens. Every process must call every method, and gets the same numbers.
    """

    def __init__(
        self,
        config: RunConfig,
        problem: Problem,
        batches: Callable[[int], Array],
        mesh: Mesh,
        text: Callable[[], TokenText | None] = lambda: None,
    ) -> None:
        assert config.method.eval is not None
        # Results must be whole on every device, because a process cannot read the devices of others.
        self._whole = whole = whole_on(mesh)
        self._settings, self._batches, self._text = config.method.eval, batches, text
        pd, configured = config.method.pd, config.method.eval.metrics
        metrics = [metric for metric in configured if isinstance(metric, Metric)]
        self._kinds, self._slow_kinds = (_by_kind([m for m in metrics if m.slow == slow]) for slow in (False, True))
        self._metrics = [metric for alike in (*self._kinds, *self._slow_kinds) for metric in alike]
        # Terms of losses come first, because a term's draws depend on its place among all. Slow ones come last.
        measured = list(zip(configured, measured_terms(configured, config), strict=True))
        measured.sort(key=lambda pair: isinstance(pair[0], Metric))
        terms = [term for metric, term in measured if term is not None and not metric.slow]
        self._persistent = tuple(always_on(t) for t in terms if _is_persistent(t))
        others = tuple(t for t in terms if not _is_persistent(t))
        slow = tuple(term for metric, term in measured if term is not None and metric.slow)
        self._problem, self._slow_problem = (with_terms(problem, own) for own in (others, slow))
        self._numbered = with_terms(problem, (*others, *slow)).decomposition
        target = problem.target
        self._probe = Probe(problem, target, mesh) if isinstance(target, FeatureTarget) else None
        self._sampling = Stochastic(pd.sampling)
        self._fast = jax.jit(self._fast_batch, out_shardings=(None, whole))
        threshold = _shared(m.density_threshold for m in self._metrics) or 0.0

        def statistics(learned: Learned, weights: Weights, inputs: Array) -> Any:
            learned = hold_for_reading(problem, learned)
            return batch_statistics(read_batch(problem, learned, weights, inputs), threshold)

        self._statistics = jax.jit(statistics, out_shardings=whole)
        self._slow = jax.jit(self._slow_batch, out_shardings=whole) if slow or self._slow_kinds else None
        rows_shown = _shared(m.rows_shown for m in self._metrics)
        self._rows = None if rows_shown is None else RowReader(problem, rows_shown, mesh)

    def _fast_batch(
        self, state: State, weights: Weights, inputs: Array, key: PRNGKeyArray, adversaries: Adversaries
    ) -> tuple[Adversaries, dict[str, Any]]:
        problem = self._problem
        spec = problem.decomposition
        learned = hold_for_reading(problem, state.learned)
        points = compared_points(problem, self._persistent)
        read = read_batch(problem, learned, weights, inputs, keeps_outputs(problem), points)
        losses_key, metrics_key = jax.random.split(key)
        losses = self._losses(problem, read, state, losses_key)
        adversaries, errors = attack_batch(self._persistent, adversaries, read, state, spec.steps, losses_key)
        return adversaries, {
            "losses": losses | {f"loss/{name}": error for name, error in errors.items()},
            "kinds": self._measure(self._kinds, read, metrics_key),
        }

    def _slow_batch(self, state: State, weights: Weights, inputs: Array, key: PRNGKeyArray) -> dict[str, Any]:
        """Like `_fast_batch`, for slow metrics."""
        problem = self._slow_problem
        learned = hold_for_reading(problem, state.learned)
        read = read_batch(problem, learned, weights, inputs, keeps_outputs(problem), compared_points(problem))
        losses_key, metrics_key = jax.random.split(key)
        return {
            "losses": self._losses(problem, read, state, losses_key),
            "kinds": self._measure(self._slow_kinds, read, metrics_key),
        }

    def _losses(self, problem: Problem, read: DecomposedBatch, state: State, key: PRNGKeyArray) -> dict[str, Array]:
        """Returns the terms of ``problem``, by key of a row. ``key``: the random key of all terms of the evaluation."""
        objective = Objective(problem.decomposition, state.step, term_keys(self._numbered, key))
        return objective.total_loss(read, {})[1][0]

    def _measure(self, kinds: list[list[Metric]], read: DecomposedBatch, key: PRNGKeyArray) -> list[Any]:
        batch = Batch(read.clean_pass, read.components, read.reader, self._sampling, key)
        return [alike[0].measure_all(alike, batch) for alike in kinds]

    def _start(self, key: PRNGKeyArray, inputs: Array) -> Adversaries:
        if not self._persistent:
            return {}
        return jax.jit(partial(self._initial_adversaries, key, inputs), out_shardings=self._whole)()

    def _initial_adversaries(self, key: PRNGKeyArray, inputs: Array | jax.ShapeDtypeStruct) -> Adversaries:
        """Returns the adversaries at the start of an evaluation, for batches like ``inputs``."""
        sites, use_delta = self._problem.target.sites, self._problem.decomposition.use_delta
        leading = self._problem.target.activation_axes(inputs.shape)
        return fresh_adversaries(self._persistent, key, sites, leading, use_delta)

    def programs(self, state: State, weights: Any, inputs: jax.ShapeDtypeStruct) -> dict[str, Program]:
        """Returns the programs of an evaluation, by name; arguments are shapes with shardings."""
        key = jax.eval_shape(lambda: self._problem.decomposition.key("eval"))
        start = jax.eval_shape(self._initial_adversaries, key, inputs)
        adversaries = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._whole), start)
        seen = without_training_state(state)
        found = {
            "evaluation": Program(self._fast, (seen, weights, inputs, key, adversaries)),
            "figures": Program(self._statistics, (state.learned, weights, inputs)),
        }
        if self._slow is not None:
            found["slow evaluation"] = Program(self._slow, (seen, weights, inputs, key))
        if self._rows is not None:
            found["rows of figures"] = Program(
                self._rows.program, (state.learned, weights, inputs, self._rows.shapes())
            )
        return found

    def due(self, step: int, total: int) -> bool:
        return step % self._settings.every == 0 or step == total

    def slow_due(self, step: int, total: int) -> bool:
        if step == 0:
            return self._settings.slow_on_first_step
        return step % self._settings.slow_every == 0 or step == total

    def fast(self, state: State, weights: Weights, step: int, stop: Callable[[], bool]) -> Measurements:
        """Returns the `eval/*` metrics of the state after ``step`` steps, as means over the batches.

        Raises EvaluationStopped if ``stop`` returns True.
        """
        # Arrays that a jitted function closes over would become constants of its program, so they are passed as
        # arguments.
        key = jax.random.fold_in(self._problem.decomposition.key("eval"), step)
        start_key = jax.random.fold_in(key, self._settings.n_steps)  # smaller numbers belong to the batches
        partial_state = without_training_state(state)
        per_batch = []
        adversaries: Adversaries | None = None
        for number, inputs in enumerate(self.batches(stop)):
            adversaries = self._start(start_key, inputs) if adversaries is None else adversaries
            batch_key = jax.random.fold_in(key, number)
            adversaries, measured = self._fast(partial_state, weights, inputs, batch_key, adversaries)
            per_batch.append(jax.device_get(measured))
        snapshot = self._snapshot(partial_state, weights, stop)
        measured = _means(per_batch, self._kinds, snapshot)
        return measured if self._probe is None else measured._replace(row=measured.row | snapshot.probed.tms_numbers)

    def slow(
        self, state: State, weights: Weights, step: int, measured: Measurements, stop: Callable[[], bool]
    ) -> Measurements:
        """Returns ``measured``, the results of `fast` for this state, together with what is measured at the interval of
        figures.

        Raises EvaluationStopped if ``stop`` returns True.
        """
        if self._slow is None:
            return measured
        key = jax.random.fold_in(self._problem.decomposition.key("eval"), step)
        seen = without_training_state(state)
        per_batch = [
            jax.device_get(self._slow(seen, weights, inputs, jax.random.fold_in(key, number)))
            for number, inputs in enumerate(self.batches(stop))
        ]
        found = _means(per_batch, self._slow_kinds, self._snapshot(seen, weights, stop))
        return Measurements(measured.row | found.row, [*measured.means, *found.means])

    def _snapshot(self, state: State, weights: Weights, stop: Callable[[], bool]) -> Snapshot:
        def site_notes(snapshot: Snapshot) -> dict[str, str]:
            return {site: note for metric in self._metrics for site, note in metric.site_notes(snapshot).items()}

        probed = None if self._probe is None else Probed(self._probe, without_training_state(state), weights)
        statistics = partial(self.statistics, state, weights, stop)

        def read_rows(rows: RowReader, statistics: Statistics) -> ImportanceRows:
            return rows.read(state.learned, weights, self._batches(0), statistics.means)

        def name_tokens(tokens: Int[np.ndarray, "rows T"]) -> list[list[str]] | None:
            text = self._text()
            return None if text is None else [text.tokens(row) for row in tokens.tolist()]

        reads = None if self._rows is None else partial(read_rows, self._rows)
        return Snapshot(self._problem.target.sites, probed, statistics, site_notes, reads, name_tokens)

    def compile(self, state: State, weights: Weights) -> None:
        """Compiles the programs that `fast`, `slow`, `statistics` and `figures` call; JAX caches them."""
        key, inputs = self._problem.decomposition.key("eval"), self._batches(0)
        adversaries = self._start(key, inputs)
        self._fast.lower(without_training_state(state), weights, inputs, key, adversaries).compile()
        self._statistics.lower(state.learned, weights, inputs).compile()
        if self._slow is not None:
            self._slow.lower(without_training_state(state), weights, inputs, key).compile()
        if self._rows is not None:
            self._rows.compile(state.learned, weights, inputs)

    def batches(self, stop: Callable[[], bool]) -> Iterator[Array]:
        """Yields the batches of an evaluation. Checks ``stop`` before each; raises EvaluationStopped."""
        for number in range(self._settings.n_steps):
            if stop():
                raise EvaluationStopped
            yield self._batches(number)

    def statistics(self, state: State, weights: Weights, stop: Callable[[], bool]) -> Statistics:
        """Returns histograms, means and densities of λ for each site over the evaluation's batches."""
        limit = _shared(m.histogram_batches for m in self._metrics)
        batches = [jax.device_get(self._statistics(state.learned, weights, inputs)) for inputs in self.batches(stop)]
        return Statistics.over(self._problem.target.sites, batches, limit)

    def figures(
        self,
        state: State,
        weights: Weights,
        step: int,
        measured: Measurements,
        folder: Path | None,
        stop: Callable[[], bool],
    ) -> dict[str, Path]:
        """Draws the configured figures into ``folder``; returns their paths by `slow_eval/figures/<name>`.

        ``measured``: the results of `fast` and `slow` for this state. ``folder``: None if another process writes the
        figures and this one only takes part in the computation. A figure that cannot be written is reported and
        skipped, so that the run does not fail.
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


def with_terms(problem: Problem, terms: tuple[Term, ...]) -> Problem:
    """Returns the same decomposition with other terms."""
    return Problem(replace(problem.decomposition, terms=terms), problem.target)


def _by_kind(metrics: Sequence[Metric]) -> list[list[Metric]]:
    """Returns the metrics by type, in the order of `METRICS`."""
    by_kind = [[metric for metric in metrics if type(metric) is kind] for kind in METRICS.values()]
    return [alike for alike in by_kind if alike]


def _means(per_batch: list[dict[str, Any]], kinds: list[list[Metric]], snapshot: Snapshot) -> Measurements:
    """Averages what was measured for each batch."""
    means = jax.tree.map(lambda *values: np.mean(values, axis=0), *per_batch)
    row = {f"eval/{k}": float(v) for k, v in means["losses"].items() if k != "loss/total"}
    of_metrics = [mean for own in means["kinds"] for mean in own]
    for metric, mean in zip((metric for alike in kinds for metric in alike), of_metrics, strict=True):
        row |= metric.row(mean, snapshot)
    return Measurements(row, of_metrics)


def _shared(settings: Iterable[Setting | None]) -> Setting | None:
    """Returns a setting of the statistics, which are computed once for all metrics; None if no metric gives it."""
    given = {setting for setting in settings if setting is not None}
    assert len(given) <= 1, f"metrics give different settings for the same statistics: {given}"
    return next(iter(given), None)


def _is_persistent(term: Any) -> TypeGuard[Reconstruction]:
    return isinstance(term, Reconstruction) and attack_of(term) is not None


def without_training_state(state: State) -> State:
    """Returns the state without persistent sources and moments, which no evaluation reads."""
    evaluated: State = replace_fields(state, adversaries={}, components_moments=None, ci_moments=None)
    return evaluated
