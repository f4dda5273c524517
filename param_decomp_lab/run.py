"""A run from its configuration to its report (`pd train`): warm up, train, evaluate, save, resume, stop in order.

The order within step i: save if due, evaluate if due (both of the state after i steps), then the training step that
makes i + 1 of it. A checkpoint of step i therefore goes on with step i's evaluation and row, and nothing comes twice.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from param_decomp_jax.program import metric_names
from param_decomp_jax.state import State
from param_decomp_jax.targets.llama import Llama
from param_decomp_lab.build import Built, build
from param_decomp_lab.checkpoints import Checkpoints
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.yaml_io import parse_yaml
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.eval.evaluation import Abandoned, Evaluation
from param_decomp_lab.eval.examples import find_examples, write_examples
from param_decomp_lab.processes import ALONE, Processes
from param_decomp_lab.programs import (
    init_program,
    state_shapes,
    steps_program,
    warmup_moments_program,
    warmup_program,
)
from param_decomp_lab.recorder import Recorder
from param_decomp_lab.report import summary_table, write_report
from param_decomp_lab.run_folder import CONFIG_FILE, make_run_folder, refuse_taken, refuse_unseen
from param_decomp_lab.sinks import MetricsFile, Terminal, Wandb, brief, read_metrics
from param_decomp_lab.stop_signal import StopSignal

WARMUP_CHUNK = 50
"""Warm-up steps per dispatch: between two looks at the stop signal."""


class Preempted(Exception):
    """The run was told to stop; what could be saved is saved. Exit status 75."""


def train(config: RunConfig, console: Console, processes: Processes = ALONE) -> Path:
    """A new run; gives its folder. UserError, before anything is written, for what cannot work.

    ``processes``: those that make the run together, each of which calls this with the same configuration.
    """
    run_id = processes.from_first(config.wrapper.run_id or f"p-{secrets.token_hex(4)}")
    config = config.with_run_id(run_id)
    folder = config.wrapper.out_dir / run_id
    _refuse_different(config, processes)
    with processes.together():
        if processes.first:
            refuse_taken(folder)
    with processes.together():
        built = build(config, console, processes)
    with processes.together():
        if processes.first:
            make_run_folder(folder, config)
    with processes.together():
        refuse_unseen(folder)
    return _Run(config, built, folder, console, processes).go(resumed=False)


def resume(folder: Path, console: Console, config: RunConfig | None = None, processes: Processes = ALONE) -> Path:
    """Goes on with a run from its last checkpoint. ``config``: must be what the run was made with.

    The number of processes and the devices of each may be others than those that the run was started with.
    """
    with processes.together():
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
        saved = RunConfig.from_yaml(path)
        if config is not None:
            _refuse_change(folder, saved, config)
    _refuse_different(saved, processes)
    with processes.together():
        built = build(saved, console, processes)
    return _Run(saved, built, folder, console, processes).go(resumed=True)


def _refuse_different(config: RunConfig, processes: Processes) -> None:
    """UserError, in all processes, when one was given another configuration than the first."""
    if processes.count == 1:
        return
    first = processes.from_first(config.to_yaml())
    with processes.together():
        changes = difference(RunConfig.from_mapping(parse_yaml(first, "process 0"), "process 0"), config)
        if changes:
            lines = "\n  ".join(changes)
            raise UserError(
                f"all processes of a run take the same configuration; this differs from process 0's:\n  {lines}"
            )


def _refuse_change(folder: Path, saved: RunConfig, now: RunConfig) -> None:
    changes = difference(saved, now)
    if changes:
        lines = "\n  ".join(changes)
        raise UserError(f"{folder} was made with another configuration; a resumed run must not change it:\n  {lines}")


class _Run:
    def __init__(self, config: RunConfig, built: Built, folder: Path, console: Console, processes: Processes) -> None:
        self.config, self.built, self.folder, self.console = config, built, folder, console
        self.outline = built.outline
        self.processes = processes
        self.spec = built.problem.decomposition
        self.stop = StopSignal(processes)
        self.evaluation = None if built.eval is None else Evaluation(config, built.problem, built.eval, built.mesh)
        cadence = config.torch.cadence
        self.log_every, self.save_every = cadence.train_log_every, cadence.save_every
        self.at_once = config.wrapper.steps_per_dispatch
        self.checkpoints = Checkpoints(folder, cadence.keep_last_n_checkpoints, config.wrapper.is_milestone)

    def go(self, resumed: bool) -> Path:
        with self.stop.listening(), jax.set_mesh(self.built.mesh):
            state = self._restored() if resumed else self._warmed_up(self._initial())
            first = int(state.step)
            with self._sinks(first):
                state = self._loop(state, first)
                self._finish(state)
        return self.folder

    @contextmanager
    def _sinks(self, first: int) -> Iterator[None]:
        """Where rows go, opened at step ``first``; in process 0 alone."""
        self.metrics = MetricsFile(self.folder, first) if self.processes.first else None
        self.wandb = Wandb(self.config, self.folder, self.console) if self.processes.first else None
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.metrics is not None:
                self.metrics.close()
            if self.wandb is not None:
                self.wandb.close(failed)
            self.checkpoints.close()

    # --- the state a run starts from ---

    def _initial(self) -> State:
        state: State = init_program(self.outline).function()
        return state

    def _restored(self) -> State:
        steps = self.checkpoints.steps()
        if not steps:
            self.console.print(f"{self.folder} has no checkpoint yet: starting from the beginning", soft_wrap=True)
            return self._warmed_up(self._initial())
        at = f"the checkpoint of step {steps[-1]}"
        made_with = RunConfig.from_mapping(parse_yaml(self.checkpoints.configuration(steps[-1]), at), at)
        _refuse_change(self.folder, made_with, self.config)
        self.console.print(f"resuming {self.folder} at step {steps[-1]} of {self.spec.steps}", soft_wrap=True)
        return self.checkpoints.restore(steps[-1], state_shapes(self.outline))

    def _warmed_up(self, state: State) -> State:
        """T3, in dispatches of a few steps each. Told to stop, it leaves without saving: half a warm-up is no start."""
        total = self.spec.warmup.steps
        if total == 0:
            return state
        components, loss = state.components, jnp.zeros(())
        moments = warmup_moments_program(self.outline).function(components)
        steps = warmup_program(self.outline).function
        with Terminal(self.console, "faithfulness warm-up", total) as bar:
            for done in range(0, total, WARMUP_CHUNK):
                if self.stop():
                    raise Preempted("stopped in the faithfulness warm-up; nothing was saved")
                n = min(WARMUP_CHUNK, total - done)
                components, moments, loss = steps(components, moments, self.built.weights, np.int32(n))
                bar.advance(done + n)
                bar.show(f"faithfulness {float(loss):.3g}")
        if not np.isfinite(float(loss)):
            raise NonFiniteLoss(f"faithfulness is {float(loss)} in the warm-up (lr {self.spec.warmup.lr})")
        return _with_components(state, components)

    # --- the loop ---

    def _loop(self, state: State, first: int) -> State:
        total, weights = self.spec.steps, self.built.weights
        names: list[str] = []
        if first < total:
            started = time.monotonic()
            dispatch, names = compile_steps(self.built, self.at_once)
            self.console.print(f"compiled the step in {time.monotonic() - started:.0f} s")
        tokens, devices = prod(self.built.leading), self.built.mesh.size
        self.recorder = Recorder(self.spec, self.log_every, names, first, tokens, devices, self._write)
        step = first
        with Terminal(self.console, self.config.wrapper.run_name, total, first) as bar:
            self.bar = bar
            while True:
                # Asked once: a signal that comes while this is saved stops the next step, which is then saved too.
                stopping = self.stop()
                if stopping or self._save_due(step):
                    self.recorder.flush()
                    self.checkpoints.save(step, state, self.config.to_yaml())
                if stopping:
                    raise Preempted(f"stopped and saved at step {step}; go on with `pd train --resume {self.folder}`")
                self._evaluate(state, step)
                if step == total:
                    break
                n = self._until_due(step)
                inputs = self.built.train.inputs(step, n, self.at_once)
                state, values = dispatch(state, weights, inputs, np.int32(n))
                self.recorder.add(step, n, values)
                step += n
                bar.advance(step)
            self.recorder.flush()
        return state

    def _until_due(self, step: int) -> int:
        """Steps to start at once: until the next save or evaluation, and no more than configured."""

        def due(step: int) -> bool:
            evaluated = self.evaluation is not None and self.evaluation.due(step, self.spec.steps)
            return self._save_due(step) or evaluated

        return next((n for n in range(1, self.at_once) if due(step + n)), self.at_once)

    def _save_due(self, step: int) -> bool:
        periodic = self.save_every is not None and step > 0 and step % self.save_every == 0
        return periodic or step == self.spec.steps or self.config.wrapper.is_milestone(step)

    def _evaluate(self, state: State, step: int) -> None:
        evaluation = self.evaluation
        if evaluation is None or not evaluation.due(step, self.spec.steps):
            return
        self.recorder.flush()
        try:
            row = evaluation.fast(state, self.built.weights, step, self.stop)
            figures = {}
            if evaluation.slow_due(step, self.spec.steps):
                folder = self.folder / "figures" if self.processes.first else None
                figures = evaluation.figures(state, self.built.weights, step, folder, self.stop)
        except Abandoned:
            self.checkpoints.save(step, state, self.config.to_yaml())
            where = f"stopped while evaluating and saved at step {step}"
            raise Preempted(f"{where}; go on with `pd train --resume {self.folder}`") from None
        self.recorder.evaluated(step, row, figures)

    def _write(self, row: dict[str, Any], figures: dict[str, Path]) -> None:
        if self.metrics is not None:
            self.metrics.write(row)
        if self.wandb is not None:
            self.wandb.write(row, figures)
        if "train/loss/total" in row:
            self.bar.show(f"{row['train/perf/tok_per_s']:,.0f} tok/s  {brief(row)}")

    # --- the end ---

    def _finish(self, state: State) -> None:
        problem, weights, evaluation = self.built.problem, self.built.weights, self.evaluation
        if evaluation is not None and self.built.eval is not None and self.config.torch.eval is not None:
            statistics = evaluation.statistics(state, weights, lambda: False)
            n, text = self.config.torch.eval.n_steps, self.built.text
            if text is None and isinstance(problem.target, Llama):
                self.console.print("no tokenizer beside the data or the target: the report has no text examples")
            elif text is not None:
                examples = find_examples(problem, state, weights, self.built.eval, n, statistics, self.built.mesh)
                if self.processes.first:
                    write_examples(self.folder, problem, examples, statistics, text)
        if self.processes.first:
            self._report()

    def _report(self) -> None:
        problem = self.built.problem
        report = write_report(self.folder)
        sites = {site.name: site.C for site in problem.target.sites.all}
        self.console.print(*summary_table(read_metrics(self.folder), sites))
        self.console.print(f"run folder {self.folder}\nreport     {report}", soft_wrap=True)


def compile_steps(built: Built, size: int) -> tuple[Any, list[str]]:
    """The compiled, donated program ``(state, weights, inputs, n) -> (state, rows of metrics)``, and their names.

    It takes up to ``size`` steps; ``inputs`` are those of ``built.train``.
    """
    outline = built.outline
    names = metric_names(outline.problem, state_shapes(outline), outline.weights, outline.train.batch())
    return steps_program(outline, size).lower().compile(), names


def _with_components(state: State, components: Any) -> State:
    return State(components, state.ci, state.components_moments, state.ci_moments, state.adversaries, state.step)
