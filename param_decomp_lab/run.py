"""A run from its configuration to its report (`pd train`): warm up, train, evaluate, save, resume, stop in order.

The order within step i: save if due, evaluate if due (both of the state after i steps), then the training step that
makes i + 1 of it. A checkpoint of step i therefore goes on with step i's evaluation and row, and nothing comes twice.
"""

import json
import os
import platform
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from param_decomp_jax.placement import batch_sharding, sharding, state_shardings
from param_decomp_jax.state import State, init_state
from param_decomp_jax.step import Problem, training_step, warmup_step, warmup_transformation
from param_decomp_lab.build import Built, build
from param_decomp_lab.checkpoints import Checkpoints
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.yaml_io import parse_yaml
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.eval.evaluation import Abandoned, Evaluation
from param_decomp_lab.eval.examples import write_examples
from param_decomp_lab.report import summary_table, write_report
from param_decomp_lab.sinks import MetricsFile, Terminal, Wandb, brief, read_metrics

CONFIG_FILE = "config.yaml"
WARMUP_CHUNK = 50
"""Warm-up steps per dispatch: between two looks at the stop signal."""


class Preempted(Exception):
    """The run was told to stop; what could be saved is saved. Exit status 75."""


class StopSignal:
    """Set by SIGTERM or by the first Ctrl-C; the second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(config: RunConfig, console: Console) -> Path:
    """A new run; gives its folder. UserError, before anything is written, for what cannot work."""
    run_id = config.wrapper.run_id or f"p-{secrets.token_hex(4)}"
    config = config.with_run_id(run_id)
    folder = config.wrapper.out_dir / run_id
    if folder.exists():
        raise UserError(
            f"{folder} is there already; continue it with `pd train --resume {folder}` or take another run_id"
        )
    built = build(config)
    _make_folder(folder, config)
    return _Run(config, built, folder, console).go(resumed=False)


def resume(folder: Path, console: Console, config: RunConfig | None = None) -> Path:
    """Goes on with a run from its last checkpoint. ``config``: must be what the run was made with."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
    saved = RunConfig.from_yaml(path)
    if config is not None:
        _refuse_change(folder, saved, config)
    return _Run(saved, build(saved), folder, console).go(resumed=True)


def _refuse_change(folder: Path, saved: RunConfig, now: RunConfig) -> None:
    changes = difference(saved, now)
    if changes:
        lines = "\n  ".join(changes)
        raise UserError(f"{folder} was made with another configuration; a resumed run must not change it:\n  {lines}")


def _make_folder(folder: Path, config: RunConfig) -> None:
    try:
        (folder / "figures").mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(config.to_yaml())
        (folder / "environment.json").write_text(json.dumps(_environment(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"out_dir: cannot write the run folder {folder}: {error.strerror or error}") from error


def _environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "command": sys.argv,
        "git_commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: version(name) for name in ("param-decomp", "jax", "equinox", "optax", "orbax-checkpoint", "numpy")
        },
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "cpu_count": os.cpu_count(),
    }


class _Run:
    def __init__(self, config: RunConfig, built: Built, folder: Path, console: Console) -> None:
        self.config, self.built, self.folder, self.console = config, built, folder, console
        self.spec = built.problem.decomposition
        self.stop = StopSignal()
        self.evaluation = None if built.eval is None else Evaluation(config, built.problem, built.eval)
        cadence = config.torch.cadence
        self.log_every, self.save_every = cadence.train_log_every, cadence.save_every
        self.checkpoints = Checkpoints(folder, cadence.keep_last_n_checkpoints, config.wrapper.is_milestone)

    def go(self, resumed: bool) -> Path:
        with self.stop.listening():
            state = self._restored() if resumed else self._warmed_up(self._initial())
            first = int(state.step)
            self.metrics = MetricsFile(self.folder, first)
            self.wandb = Wandb(self.config, self.folder, self.console)
            failed = True
            try:
                state = self._loop(state, first)
                self._finish(state)
                failed = False
            finally:
                self.metrics.close()
                self.wandb.close(failed)
                self.checkpoints.close()
        return self.folder

    # --- the state a run starts from ---

    def _template(self) -> State:
        """Shapes and shardings of the state, without building it."""
        shapes = jax.eval_shape(partial(init_state, self.spec, self.built.problem.target.sites, self.built.leading))
        placed = state_shardings(self.built.mesh, self.spec, shapes)
        template: State = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed)
        return template

    def _initial(self) -> State:
        init = partial(init_state, self.spec, self.built.problem.target.sites, self.built.leading)
        state: State = jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, self._template()))()
        return state

    def _restored(self) -> State:
        steps = self.checkpoints.steps()
        if not steps:
            self.console.print(f"{self.folder} has no checkpoint yet: starting from the beginning")
            return self._warmed_up(self._initial())
        at = f"the checkpoint of step {steps[-1]}"
        made_with = RunConfig.from_mapping(parse_yaml(self.checkpoints.configuration(steps[-1]), at), at)
        _refuse_change(self.folder, made_with, self.config)
        self.console.print(f"resuming {self.folder} at step {steps[-1]} of {self.spec.steps}")
        return self.checkpoints.restore(steps[-1], self._template())

    def _warmed_up(self, state: State) -> State:
        """T3, in dispatches of a few steps each. Told to stop, it leaves without saving: half a warm-up is no start."""
        total = self.spec.warmup.steps
        if total == 0:
            return state
        components, loss = state.components, jnp.zeros(())
        # All placed alike from the first dispatch on: else the second one is another program to compile.
        whole = sharding(self.built.mesh)
        moments = jax.jit(warmup_transformation(self.built.problem).init, out_shardings=whole)(components)
        steps = jax.jit(partial(_warmup_steps, self.built.problem), donate_argnums=(0, 1), out_shardings=whole)
        with Terminal(self.console, "faithfulness warm-up", total) as bar:
            for done in range(0, total, WARMUP_CHUNK):
                if self.stop():
                    raise Preempted("stopped in the faithfulness warm-up; nothing was saved")
                n = min(WARMUP_CHUNK, total - done)
                components, moments, loss = steps(components, moments, self.built.weights, n)
                bar.advance(done + n)
                bar.show(f"faithfulness {float(loss):.3g}")
        if not np.isfinite(float(loss)):
            raise NonFiniteLoss(f"faithfulness is {float(loss)} in the warm-up (lr {self.spec.warmup.lr})")
        return _with_components(state, components)

    # --- the loop ---

    def _loop(self, state: State, first: int) -> State:
        total, weights = self.spec.steps, self.built.weights
        if first < total:
            started = time.monotonic()
            step_fn, names = compile_step(self.built, state)
            self.console.print(f"compiled the step in {time.monotonic() - started:.0f} s")
            self.recorder = Recorder(self, names, first)
        else:
            self.recorder = Recorder(self, [], first)
        with Terminal(self.console, self.config.wrapper.run_name, total, first) as bar:
            self.bar = bar
            for step in range(first, total + 1):
                # Asked once: a signal that comes while this is saved stops the next step, which is then saved too.
                stopping = self.stop()
                if stopping or self._save_due(step):
                    self.recorder.flush()
                    self.checkpoints.save(step, state, self.config.to_yaml())
                if stopping:
                    raise Preempted(f"stopped and saved at step {step}; go on with `pd train --resume {self.folder}`")
                self._evaluate(state, step)
                if step < total:
                    state, values = step_fn(state, weights, self.built.train(step))
                    self.recorder.add(step, values)
                    bar.advance(step + 1)
            self.recorder.flush()
        return state

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
                figures = evaluation.figures(state, self.built.weights, step, self.folder / "figures", self.stop)
        except Abandoned:
            self.checkpoints.save(step, state, self.config.to_yaml())
            where = f"stopped while evaluating and saved at step {step}"
            raise Preempted(f"{where}; go on with `pd train --resume {self.folder}`") from None
        self.recorder.evaluated(step, row, figures)

    # --- the end ---

    def _finish(self, state: State) -> None:
        problem, weights, evaluation = self.built.problem, self.built.weights, self.evaluation
        if evaluation is not None and self.built.eval is not None and self.config.torch.eval is not None:
            statistics = evaluation.statistics(state, weights, lambda: False)
            n, text = self.config.torch.eval.n_steps, self.built.text
            if text is None:
                self.console.print("no tokenizer beside the data or the target: the report has no text examples")
            else:
                write_examples(self.folder, problem, state, weights, self.built.eval, n, statistics, text)
        report = write_report(self.folder)
        sites = {site.name: site.C for site in problem.target.sites.all}
        self.console.print(*summary_table(read_metrics(self.folder), sites))
        self.console.print(f"run folder {self.folder}\nreport     {report}", soft_wrap=True)


class Recorder:
    """Holds the metrics of dispatched steps on the device and fetches them late, in one go (one host sync per log).

    Every step's losses are looked at (N3), those of log steps are written.
    """

    def __init__(self, run: _Run, names: list[str], first: int) -> None:
        self._run, self._names = run, names
        self._pending: list[tuple[int, Any]] = []
        self._row: dict[str, Any] = {}
        self._figures: dict[str, Path] = {}
        self._clock, self._counted = time.monotonic(), first
        persistent = run.spec.persistent.items()
        self._first_step = {name: attack.first_step(run.spec.steps) for name, (_, attack) in persistent}

    def add(self, step: int, values: Any) -> None:
        """Metrics of a dispatched step. A log step is written when the step after it is under way."""
        if any(self._logged(s) for s, _ in self._pending):
            self.flush()
        self._pending.append((step, values))

    def evaluated(self, step: int, row: dict[str, float], figures: dict[str, Path]) -> None:
        """An evaluation's numbers; they share the row of the training step with the same number."""
        self._row, self._figures = {"step": step, **row}, figures
        if not self._logged(step):
            self._write()
        # Time spent on evaluation is not training time.
        self._clock, self._counted = time.monotonic(), step

    def _logged(self, step: int) -> bool:
        """Whether the training step's metrics are written: every so many steps, and the last one."""
        total = self._run.spec.steps
        return step < total and (step % self._run.log_every == 0 or step == total - 1)

    def flush(self) -> None:
        if not self._pending:
            return
        steps = [step for step, _ in self._pending]
        rows = np.stack(jax.device_get([values for _, values in self._pending]))
        self._pending.clear()
        for step, values in zip(steps, rows, strict=True):
            self._check(step, values)
            if self._logged(step):
                self._row |= {"step": step, **self._named(step, values), **self._performance(steps[-1])}
                self._write()

    def _named(self, step: int, values: np.ndarray) -> dict[str, float]:
        """Without the terms of adversaries that are not on yet (A6): what is not computed is not logged."""
        off = {f"loss/{name}" for name, first in self._first_step.items() if step < first}
        return {f"train/{n}": float(v) for n, v in zip(self._names, values, strict=True) if n not in off}

    def _check(self, step: int, values: np.ndarray) -> None:
        bad = [n for n, v in zip(self._names, values, strict=True) if not np.isfinite(v)]
        if bad:
            # The total is the sum of the terms: name it only if nothing else explains it.
            causes = [n for n in bad if n.startswith("loss/") and n != "loss/total"] or bad
            values_of = {n: float(v) for n, v in zip(self._names, values, strict=True)}
            terms = ", ".join(f"{n.removeprefix('loss/')} = {values_of[n]}" for n in causes)
            raise NonFiniteLoss(f"not finite at step {step}: {terms}")

    def _performance(self, newest: int) -> dict[str, float]:
        now, done = time.monotonic(), newest + 1
        seconds = (now - self._clock) / max(1, done - self._counted)
        self._clock, self._counted = now, done
        rows, length = self._run.built.leading
        per_second = rows * length / max(seconds, 1e-9)
        return {
            "train/perf/step_time_s": seconds,
            "train/perf/tok_per_s": per_second,
            "train/perf/tok_per_s_per_gpu": per_second / self._run.built.mesh.size,
            "train/mem/peak_gb_per_rank": _peak_bytes() / 1e9,
        }

    def _write(self) -> None:
        self._run.metrics.write(self._row)
        self._run.wandb.write(self._row, self._figures)
        if any(key.startswith("train/") for key in self._row):
            self._run.bar.show(f"{self._row['train/perf/tok_per_s']:,.0f} tok/s  {brief(self._row)}")
        self._row, self._figures = {}, {}


def compile_step(built: Built, state: State) -> tuple[Any, list[str]]:
    """The compiled, donated step ``(state, weights, inputs) -> (state, metrics as a vector)``, and their names."""
    problem: Problem = built.problem
    names: list[str] = []

    def step(state: State, weights: Any, inputs: Any) -> tuple[State, Any]:
        state, metrics = training_step(problem, state, weights, inputs)
        names[:] = sorted(metrics)
        return state, jnp.stack([metrics[name] for name in names])

    outputs = (jax.tree.map(lambda x: x.sharding, state), sharding(built.mesh))
    donated = (0,) if problem.decomposition.memory.donate else ()
    jitted = jax.jit(step, donate_argnums=donated, out_shardings=outputs)
    inputs = jax.ShapeDtypeStruct(built.leading, jnp.int32, sharding=batch_sharding(built.mesh))
    return jitted.lower(state, built.weights, inputs).compile(), names


def _warmup_steps(problem: Problem, components: Any, moments: Any, weights: Any, n: Any) -> tuple[Any, Any, Any]:
    def one(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        return warmup_step(problem, carry[0], carry[1], weights)

    return jax.lax.fori_loop(0, n, one, (components, moments, jnp.zeros(())))


def _with_components(state: State, components: Any) -> State:
    return State(components, state.ci, state.components_moments, state.ci_moments, state.adversaries, state.step)


def _peak_bytes() -> float:
    """Peak device memory where the device tells, else (CPU) the process's peak resident size."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return float(statistics["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
