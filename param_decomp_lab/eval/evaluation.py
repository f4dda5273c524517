"""Evaluation of a run: metrics often, figures less often, always on the same held-out batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray
from matplotlib.figure import Figure

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.method.adversary import PersistentAttack
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.objective import Objective, term_keys
from param_decomp_jax.method.recon import Reconstruction
from param_decomp_jax.method.state import Learned, State
from param_decomp_jax.method.step import Problem, hold_for_reading, keeps_outputs
from param_decomp_jax.sharding.mesh import replace_fields
from param_decomp_jax.sharding.mesh import whole as whole_on
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.features import FeatureTarget
from param_decomp_lab.config import RunConfig, term_names
from param_decomp_lab.config.core_specs import term
from param_decomp_lab.config.loss_schema import Loss
from param_decomp_lab.config.metric_schema import (
    CI_L0,
    CEandKLLosses,
    CIHiddenActsReconLoss,
    CIHistograms,
    CIMeanPerComponent,
    ComponentActivationDensity,
)  # fmt: skip
from param_decomp_lab.config.site_patterns import expert_of, matches_module
from param_decomp_lab.eval.ce_kl import ce_and_kl, ce_kl_metrics
from param_decomp_lab.eval.figures import activation_density, ci_histograms, mean_ci_per_component, save_figure
from param_decomp_lab.eval.persistent import Adversaries, always_on, attack_batch, fresh_adversaries
from param_decomp_lab.eval.statistics import Statistics, batch_statistics, mean_l0, routed_shares
from param_decomp_lab.eval.toy_probe import Probe
from param_decomp_lab.setup.programs import Program
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.warnings import print_warnings


class EvaluationStopped(Exception):
    """The run was asked to stop during an evaluation."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of a configuration, sorted by how they are computed."""

    losses: tuple[tuple[Any, str], ...]
    all: tuple[Any, ...]
    ce_kl: CEandKLLosses | None
    l0: tuple[CI_L0, ...]
    histograms: CIHistograms | None
    means: CIMeanPerComponent | None
    density: ComponentActivationDensity | None

    @classmethod
    def from_config(cls, config: RunConfig) -> "Metrics":
        metrics = () if config.method.eval is None else config.method.eval.metrics

        def first(kind: type) -> Any:
            return next((m for m in metrics if isinstance(m, kind)), None)

        losses = tuple(m for m in metrics if isinstance(m, Loss))
        hidden_acts = [(m, m.type) for m in metrics if isinstance(m, CIHiddenActsReconLoss)]
        return cls(
            all=metrics,
            losses=(*zip(losses, term_names(losses), strict=True), *hidden_acts),
            ce_kl=first(CEandKLLosses),
            l0=tuple(m for m in metrics if isinstance(m, CI_L0)),
            histograms=first(CIHistograms),
            means=first(CIMeanPerComponent),
            density=first(ComponentActivationDensity),
        )


class Evaluation:
    """Evaluates states of a run on the same held-out batches every time.

    ``batches``: gives a batch on the mesh by its number. Every process must call every method, and gets the same
    numbers.
    """

    def __init__(self, config: RunConfig, problem: Problem, batches: Callable[[int], Array], mesh: Mesh) -> None:
        assert config.method.eval is not None
        # What is fetched must be whole on every device: the other processes' devices cannot be read from here.
        self._whole = whole = whole_on(mesh)
        self._settings, self._metrics, self._batches = config.method.eval, Metrics.from_config(config), batches
        pd = config.method.pd
        terms = tuple(term(loss, name, pd) for loss, name in self._metrics.losses)
        self._persistent = tuple(always_on(t) for t in terms if _is_persistent(t))
        others = tuple(t for t in terms if not _is_persistent(t))
        self._problem = Problem(replace(problem.decomposition, terms=others), problem.target)
        target = problem.target
        self._probe = Probe(problem, target, self._metrics.all, mesh) if isinstance(target, FeatureTarget) else None
        self._sampling = Stochastic(pd.sampling)
        self._fast = jax.jit(self._fast_batch, out_shardings=(None, whole))
        threshold = 0.0 if self._metrics.density is None else self._metrics.density.ci_alive_threshold

        def statistics(learned: Learned, weights: Weights, inputs: Array) -> Any:
            learned = hold_for_reading(problem, learned)
            return batch_statistics(read_batch(problem, learned, weights, inputs), threshold)

        self._statistics = jax.jit(statistics, out_shardings=whole)

    def _fast_batch(
        self, state: State, weights: Weights, inputs: Array, key: PRNGKeyArray, adversaries: Adversaries
    ) -> tuple[Adversaries, dict[str, Any]]:
        problem, metrics = self._problem, self._metrics
        spec = problem.decomposition
        learned = hold_for_reading(problem, state.learned)
        batch = read_batch(problem, learned, weights, inputs, outputs=keeps_outputs(problem))
        losses_key, ce_kl_key = jax.random.split(key)
        objective = Objective(spec, state.step, term_keys(spec, losses_key))
        _, losses = objective.total_loss(batch, {})
        adversaries, errors = attack_batch(self._persistent, adversaries, batch, state, spec.steps, losses_key)
        measured: dict[str, Any] = {"losses": losses | {f"loss/{name}": error for name, error in errors.items()}}
        if metrics.ce_kl is not None:
            target, threshold = problem.target, metrics.ce_kl.rounding_threshold
            assert isinstance(target, Decoder), "cross-entropy is of a language model"
            measured["ce_kl"] = ce_and_kl(target, batch, ce_kl_key, self._sampling, threshold)
        thresholds = [l0.ci_alive_threshold for l0 in metrics.l0]
        measured["l0"] = mean_l0(batch, thresholds)
        measured["routed"] = routed_shares(batch) if metrics.l0 else {}
        return adversaries, measured

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

    def fast(self, state: State, weights: Weights, step: int, stop: Callable[[], bool]) -> dict[str, float]:
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
        if "ce_kl" in means:
            row |= ce_kl_metrics({k: float(v) for k, v in means["ce_kl"].items()})
        for l0, by_stack in zip(self._metrics.l0, means["l0"], strict=True):
            by_site = {k: float(v) for k, v in self._problem.target.sites.unstack(by_stack).items()}
            prefix = f"eval/l0/{l0.ci_alive_threshold}_"
            row |= {prefix + name: value for name, value in by_site.items()}
            for group, patterns in (l0.groups or {}).items():
                members = [v for name, v in by_site.items() if any(matches_module(p, name) for p in patterns)]
                row[prefix + group] = float(sum(members))
        sites = self._problem.target.sites
        for site, (stack, place) in zip(sites.all, sites.stack_rows, strict=True):
            if stack.name in means["routed"]:
                row[f"eval/routed/{expert_of(site.name)}"] = float(means["routed"][stack.name][place])
        return row if self._probe is None else row | self._probe.numbers(partial_state, weights)

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
        limit = None if self._metrics.histograms is None else self._metrics.histograms.n_batches_accum
        batches = [jax.device_get(self._statistics(state.learned, weights, inputs)) for inputs in self.batches(stop)]
        return Statistics.over(self._problem.target.sites, batches, limit)

    def figures(
        self, state: State, weights: Weights, step: int, folder: Path | None, stop: Callable[[], bool]
    ) -> dict[str, Path]:
        """Draws the configured figures into ``folder``; returns their paths by `slow_eval/figures/<name>`.

        ``folder``: None if another process writes the figures and this one only takes part in the computation. A figure
        that cannot be written is reported and skipped, so that the run does not fail.
        """
        drawn = self._statistics_figures(state, weights, stop)
        if self._probe is not None:
            drawn |= self._probe.figures(without_training_state(state), weights)
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

    def _statistics_figures(self, state: State, weights: Weights, stop: Callable[[], bool]) -> dict[str, Figure]:
        metrics = self._metrics
        if metrics.histograms is None and metrics.means is None and metrics.density is None:
            return {}
        s = self.statistics(state, weights, stop).pooled()
        n_bins = next(iter(s.counts.values())).shape[0]
        drawn: dict[str, Figure] = {}
        if metrics.histograms is not None:
            drawn["ci_histograms"] = ci_histograms(s.counts, np.linspace(0, 1, n_bins + 1))
        if metrics.means is not None:
            drawn["mean_ci_per_component"] = mean_ci_per_component(s.means)
        if metrics.density is not None:
            drawn["activation_density"] = activation_density(s.densities)
        return drawn


def _is_persistent(term: Any) -> TypeGuard[Reconstruction]:
    return isinstance(term, Reconstruction) and isinstance(term.sources, PersistentAttack)


def without_training_state(state: State) -> State:
    """The state without persistent sources and moments, which no evaluation reads."""
    evaluated: State = replace_fields(state, adversaries={}, components_moments=None, ci_moments=None)
    return evaluated
