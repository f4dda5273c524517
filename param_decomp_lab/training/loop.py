"""The training loop: dispatches steps, saves and evaluates.

The order within step i: save if due, evaluate if due (both on the state after i steps), then training step i. A run
resumed from the checkpoint of step i therefore starts with step i's evaluation and row, and no row is written twice.
"""

import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from param_decomp_jax.method.state import State
from param_decomp_lab.eval.evaluation import EvaluationStopped
from param_decomp_lab.setup import Setup
from param_decomp_lab.setup.programs import steps_program
from param_decomp_lab.tracking.sinks import brief
from param_decomp_lab.training.job import NOTHING, TrainingJob
from param_decomp_lab.training.recorder import Recorder
from param_decomp_lab.training.sinks import Sinks
from param_decomp_lab.ui.progress import StepsBar


class Loop:
    """All remaining steps of a job, from ``first`` on. ``is_saved``: whether the state of ``first`` is on disk."""

    def __init__(self, job: TrainingJob, sinks: Sinks, first: int, is_saved: bool) -> None:
        self._job, self._sinks, self._first, self._is_saved = job, sinks, first, is_saved
        self._save_every = job.config.method.cadence.save_every
        self._at_once = job.config.wrapper.steps_per_dispatch

    def run(self, state: State) -> State:
        """Trains, and returns the state after the last step, which is saved. Raises Preempted, after saving, if asked
        to stop.
        """
        job, total, weights = self._job, self._job.spec.steps, self._job.setup.weights
        dispatch = self._compile(state) if self._first < total else None
        # From here on, time counts as training.
        tokens, devices = prod(job.setup.leading), job.setup.mesh.size
        log_every = job.config.method.cadence.train_log_every
        watch = self._sinks.collapse.step
        self._recorder = Recorder(job.spec, log_every, self._first, tokens, devices, self._write, watch)
        self._bar = StepsBar(job.console, job.config.wrapper.run_name, total, self._first)
        if not self._is_saved:
            job.stop.must_save()
        step = self._first
        with self._bar:
            while True:
                stopping = job.stop()
                if stopping or self._save_due(step):
                    self._save(step, state)
                    # Saving takes long. If asked to stop meanwhile, do not train and save another step.
                    stopping = job.stop() or stopping
                if stopping:
                    raise job.preempted(f"and saved at step {step}")
                self._evaluate(state, step)
                if dispatch is None or step == total:
                    break
                n = self._until_due(step)
                inputs = job.setup.train.inputs(step, n, self._at_once)
                job.stop.must_save()
                state, values = dispatch(state, weights, inputs, np.int32(n))
                self._recorder.add(step, n, values)
                step += n
                self._bar.advance(step)
            self._recorder.flush()
        return state

    def _compile(self, state: State) -> Any:
        job = self._job
        job.stop.may_leave(f"while compiling; {NOTHING}")
        started = time.monotonic()
        dispatch = compile_steps(job.setup, self._at_once)
        job.console.print(f"compiled the step in {time.monotonic() - started:.0f} s")
        self._sinks.check()
        if job.evaluation is not None:
            # Compile now, while stopping loses nothing: compiling cannot be interrupted and may take minutes.
            job.evaluation.compile(state, job.setup.weights)
        return dispatch

    def _until_due(self, step: int) -> int:
        """Returns the number of steps to dispatch: up to the next save or evaluation, at most
        ``steps_per_dispatch``.
        """
        evaluation, total = self._job.evaluation, self._job.spec.steps

        def due(step: int) -> bool:
            return self._save_due(step) or (evaluation is not None and evaluation.due(step, total))

        return next((n for n in range(1, self._at_once) if due(step + n)), self._at_once)

    def _save_due(self, step: int) -> bool:
        periodic = self._save_every is not None and step > 0 and step % self._save_every == 0
        return periodic or step == self._job.spec.steps or self._job.config.wrapper.is_milestone(step)

    def _save(self, step: int, state: State) -> None:
        """Saves the state after ``step`` steps and all rows before it."""
        job = self._job
        job.check_folder()
        job.check_lock()
        self._recorder.flush()
        self._sinks.settle()
        try:
            job.checkpoints.save(step, state, job.config.to_yaml(), job.inputs)
        finally:
            job.check_folder()  # a save may take minutes; what it wrote must be in this folder to count
        job.stop.may_leave(f"at step {step}, which is saved")

    def _evaluate(self, state: State, step: int) -> None:
        job, evaluation = self._job, self._job.evaluation
        if evaluation is None or not evaluation.due(step, job.spec.steps):
            return
        self._recorder.flush()
        try:
            measured = evaluation.fast(state, job.setup.weights, step, job.stop)
            figures = {}
            if evaluation.slow_due(step, job.spec.steps):
                measured = evaluation.slow(state, job.setup.weights, step, measured, job.stop)
                job.check_folder()
                folder = job.folder / "figures" if job.processes.first else None
                figures = evaluation.figures(state, job.setup.weights, step, measured, folder, job.stop)
        except EvaluationStopped:
            self._save(step, state)
            raise job.preempted(f"while evaluating and saved at step {step}") from None
        self._recorder.evaluated(step, measured.row, figures)

    def _write(self, row: dict[str, Any], figures: dict[str, Path]) -> None:
        self._sinks.write(row, figures)
        if "train/loss/total" in row:
            self._bar.show(f"{row['train/perf/tok_per_s']:,.0f} tok/s  {brief(row)}")


def compile_steps(setup: Setup, size: int) -> Any:
    """Compiles the `steps_program` of up to ``size`` steps."""
    return steps_program(setup.outline, size).lower().compile()
