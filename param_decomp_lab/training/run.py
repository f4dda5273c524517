"""A run from its configuration to its report (`pd train`): warm up, train, evaluate, save, resume, stop in order.

The order within step i: save if due, evaluate if due (both of the state after i steps), then the training step that
makes i + 1 of it. A checkpoint of step i therefore goes on with step i's evaluation and row, and nothing comes twice.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape

from param_decomp_jax.state import State
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_lab.checkpoints.store import Checkpoints
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.on_resume import allowed_changes
from param_decomp_lab.config.yaml_io import parse_yaml
from param_decomp_lab.display.warnings import print_warnings
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.eval.evaluation import Abandoned, Evaluation
from param_decomp_lab.eval.examples import find_examples, write_examples
from param_decomp_lab.metrics.sinks import METRICS_FILE, MetricsFile, Terminal, brief, read_metrics
from param_decomp_lab.metrics.wandb_sink import Login, Wandb
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.processes.stop_signal import LAST_PATIENCE_S, StopSignal
from param_decomp_lab.report import summary_table, write_report
from param_decomp_lab.run_folder.ending import clear_end, record_end
from param_decomp_lab.run_folder.folder import (
    make_run_folder,
    record_start,
    refuse_taken,
    refuse_unseen,
    saved_config,
)
from param_decomp_lab.run_folder.lock import only_job
from param_decomp_lab.run_folder.target_file import write_target
from param_decomp_lab.run_folder.unwritable import explain_unwritable
from param_decomp_lab.setup import Setup, set_up
from param_decomp_lab.setup.parent import Parent, find_parent, refuse_unlike, restore_parent
from param_decomp_lab.setup.programs import (
    init_program,
    learned_shapes,
    steps_program,
    warmup_moments_program,
    warmup_program,
)
from param_decomp_lab.training.inputs import changed_inputs, fingerprints_of_inputs
from param_decomp_lab.training.recorder import Recorder

WARMUP_CHUNK = 50
"""Warm-up steps per dispatch: between two looks at the stop signal."""
FINISHING_PATIENCE_S = 30.0
"""For the report to be written, once a run that is told to stop has come so far."""
NOTHING = "nothing was to be saved"


class Preempted(Exception):
    """The run was told to stop; what could be saved is saved. Exit status 75."""


def train(config: RunConfig, console: Console, processes: Processes = ALONE, stop: StopSignal | None = None) -> Path:
    """A new run; gives its folder. UserError, before anything is written, for what cannot work.

    ``processes``: those that make the run together, each of which calls this with the same configuration. ``stop``: is
    listening already; if None, the run listens by itself, from its first step on.
    """
    stop = stop or StopSignal()
    run_id = processes.from_first(config.wrapper.run_id or f"p-{secrets.token_hex(4)}")
    config = config.with_run_id(run_id)
    folder = config.wrapper.out_dir / run_id
    _refuse_different(config, processes)
    with processes.together():
        if processes.first:
            refuse_taken(folder)
    login = Login(config) if processes.first else None
    stop.may_leave(f"while loading the target and the data; {NOTHING}")
    with processes.together():
        setup = set_up(config, console, processes)
        parent = find_parent(config)
        if parent is not None:
            refuse_unlike(parent, learned_shapes(setup.problem, setup.mesh))
    with processes.together():
        if login is not None:
            login.require()
    with processes.together():
        if processes.first:
            make_run_folder(folder, config)
    with processes.together():
        refuse_unseen(folder)
    with only_job(folder, console, processes) as still_ours:
        return _Run(config, setup, folder, console, processes, stop, still_ours).go(resumed=False)


def resume(
    folder: Path,
    console: Console,
    config: RunConfig | None = None,
    processes: Processes = ALONE,
    overrides: Sequence[str] = (),
    stop: StopSignal | None = None,
) -> Path:
    """Goes on with a run from its last good checkpoint, under the configuration in its folder.

    ``config``: what that is to be from now on, or ``overrides`` of it; neither may change any of the run's numbers
    (`config/on_resume.py`). The number of processes and the devices of each may be others than before.
    """
    stop = stop or StopSignal()
    with processes.together():
        saved = saved_config(folder)
        now = saved.with_overrides(overrides) if config is None else config
        changes = allowed_changes(saved, now, str(folder))
        now = now.with_run_id(saved.wrapper.run_id or folder.name) if changes else saved
    _refuse_different(now, processes)
    login = Login(now) if processes.first else None
    stop.hint = _resume_hint(folder)
    with only_job(folder, console, processes) as still_ours:
        stop.may_leave(f"while loading the target and the data; {NOTHING}")
        with processes.together():
            setup = set_up(now, console, processes)
        with processes.together():
            if login is not None:
                login.require()
        return _Run(now, setup, folder, console, processes, stop, still_ours).go(resumed=True)


def _resume_hint(folder: Path) -> str:
    return f"go on with `pd train --resume {folder}`"


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


class _Run:
    def __init__(
        self,
        config: RunConfig,
        setup: Setup,
        folder: Path,
        console: Console,
        processes: Processes,
        stop: StopSignal,
        still_ours: Callable[[], None],
    ) -> None:
        self.config, self.setup, self.folder, self.console = config, setup, folder, console
        self.outline = setup.outline
        self.processes, self.still_ours = processes, still_ours
        self.spec = setup.problem.decomposition
        self.stop = stop
        stop.hint = _resume_hint(folder)
        self.evaluation = None if setup.eval is None else Evaluation(config, setup.problem, setup.eval, setup.mesh)
        cadence = config.method.cadence
        self.log_every, self.save_every = cadence.train_log_every, cadence.save_every
        self.at_once = config.wrapper.steps_per_dispatch
        self.is_saved = False
        """Whether what there is of the run is on disk."""
        self.checkpoints = Checkpoints(folder, cadence.keep_last_n_checkpoints, config.wrapper.is_milestone, processes)

    def go(self, resumed: bool) -> Path:
        with ExitStack() as stack:
            stack.enter_context(record_end(self.folder, Preempted, self.processes))
            if not self.stop.is_listening:
                stack.enter_context(self.stop.listening())
                stack.enter_context(self.stop.among(self.processes))
            stack.enter_context(jax.set_mesh(self.setup.mesh))
            stack.enter_context(explain_unwritable(self.folder))
            self.inputs = fingerprints_of_inputs(self.setup, self.processes)
            if not resumed:
                self._note_start(0)
            state = self._restored() if resumed else self._starting_state()
            first = int(state.step)
            with self._sinks(first):
                state = self._loop(state, first)
                self._finish(state)
        return self.folder

    @contextmanager
    def _sinks(self, first: int) -> Iterator[None]:
        """Where rows go, opened at step ``first``; in process 0 alone."""
        self.metrics = MetricsFile(self.folder, first, self.console) if self.processes.first else None
        expected = (first - 1) // self.log_every * self.log_every
        if self.metrics is not None and first > 0 and self.metrics.last < expected:
            lost = f"{METRICS_FILE} has no rows of steps {self.metrics.last + 1} to {expected}, which were saved once"
            again = f"to make them again, rename {self.checkpoints.path(first)} and resume from an earlier checkpoint"
            self.console.print(f"[yellow]{escape(f'{lost}; {again}')}[/]", highlight=False, soft_wrap=True)
        self.wandb = Wandb(self.config, self.folder, self.console) if self.processes.first else None
        outcome = "failed"
        try:
            yield
            outcome = "finished"
        except Preempted:
            outcome = "preempted"
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()
            if self.wandb is not None:
                self.wandb.close(outcome)
            self.checkpoints.close()

    # --- the state a run starts from ---

    def _initial(self) -> State:
        self.stop.may_leave(f"while making the state; {NOTHING}")
        state: State = init_program(self.outline).function()
        return state

    def _restored(self) -> State:
        """From the newest checkpoint that is good; the damaged ones after it are put aside, so that the run can save
        those steps again."""
        self.stop.may_leave(f"while reading a checkpoint; {NOTHING}")
        if self.processes.first:
            self.checkpoints.sweep()
        with self.processes.together():
            found = self.checkpoints.restore_newest(self.outline.state, self._refuse_other)
        if found is None:
            self.console.print(f"{self.folder} has no checkpoint yet: starting from the beginning", soft_wrap=True)
            self._note_start(0, difference(saved_config(self.folder), self.config))
            return self._starting_state()
        step, state, damaged = found
        changes = difference(self._made_with(step), self.config)
        for line in changes:
            self.console.print(f"[yellow]changed since step {step}:[/] {escape(line)}", highlight=False, soft_wrap=True)
        with self.processes.together():
            aside = self.checkpoints.put_aside(damaged) if self.processes.first else []
        for name, wrong in zip(aside, damaged.values(), strict=False):
            said = f"a damaged checkpoint is now {name}, and the one before is used: {wrong}"
            self.console.print(f"[yellow]{escape(said)}[/]", highlight=False, soft_wrap=True)
        self._note_start(step, changes, aside)
        self.is_saved = True
        self.console.print(f"resuming {self.folder} at step {step} of {self.spec.steps}", soft_wrap=True)
        return state

    def _made_with(self, step: int) -> RunConfig:
        at = f"the checkpoint of step {step}"
        return RunConfig.from_mapping(parse_yaml(self.checkpoints.configuration(step), at), at)

    def _refuse_other(self, step: int) -> None:
        """UserError when the checkpoint was made with another configuration, target or data than this run has now."""
        allowed_changes(self._made_with(step), self.config, f"{self.folder} (step {step})")
        other = changed_inputs(self.checkpoints.inputs(step), self.inputs)
        if other:
            raise UserError(
                f"{self.folder} (step {step}) was made with another {' and other '.join(other)} than is there now; a "
                "run that goes on needs what it was started with, wherever that lies"
            )

    def _note_start(self, step: int, changes: Sequence[str] = (), aside: Sequence[str] = ()) -> None:
        if self.processes.first:
            clear_end(self.folder)
            record_start(self.folder, self.config, step, changes, aside)
            write_target(self.folder, self.setup.problem.target.architecture)

    def _starting_state(self) -> State:
        """The state before step 0."""
        parent = self.processes.in_turn(self._parent)
        if parent is None:
            return self._warmed_up(self._initial())
        self.console.print(f"beginning with what {parent} has learned", soft_wrap=True, markup=False)
        if parent.target not in ("", self.inputs["target"]):
            print_warnings(["that run decomposes other weights than this one"], self.console)
        fresh = self._initial()
        for unlearned in jax.tree.leaves((fresh.components, fresh.ci)):
            unlearned.delete()
        with self.processes.together():
            components, ci = restore_parent(parent, learned_shapes(self.setup.problem, self.setup.mesh), self.processes)
        return State(components, ci, fresh.components_moments, fresh.ci_moments, fresh.adversaries, fresh.step)

    def _parent(self) -> Parent | None:
        """What the run begins with. Process 0 writes down which it is; all others, and later starts, keep to that."""
        parent = find_parent(self.config, self.folder)
        if parent is not None:
            refuse_unlike(parent, learned_shapes(self.setup.problem, self.setup.mesh))
            if self.processes.first:
                parent.write(self.folder)
        return parent

    def _warmed_up(self, state: State) -> State:
        """T3, in dispatches of a few steps each. Told to stop, it leaves without saving: half a warm-up is no start."""
        total = self.spec.warmup.steps
        if total == 0:
            return state
        self.stop.may_leave("in the faithfulness warm-up; nothing was saved")
        components, loss = state.components, jnp.zeros(())
        moments = warmup_moments_program(self.outline).function(components)
        steps = warmup_program(self.outline).function
        with Terminal(self.console, "faithfulness warm-up", total) as bar:
            for done in range(0, total, WARMUP_CHUNK):
                if self.stop():
                    raise self._preempted("in the faithfulness warm-up; nothing was saved")
                n = min(WARMUP_CHUNK, total - done)
                components, moments, loss = steps(components, moments, self.setup.weights, np.int32(n))
                bar.advance(done + n)
                bar.show(f"faithfulness {float(loss):.3g}")
        if not np.isfinite(float(loss)):
            raise NonFiniteLoss(f"faithfulness is {float(loss)} in the warm-up (lr {self.spec.warmup.lr})")
        return _with_components(state, components)

    # --- the loop ---

    def _loop(self, state: State, first: int) -> State:
        total, weights = self.spec.steps, self.setup.weights
        if first < total:
            self.stop.may_leave(f"while compiling; {NOTHING}")
            started = time.monotonic()
            dispatch = compile_steps(self.setup, self.at_once)
            self.console.print(f"compiled the step in {time.monotonic() - started:.0f} s")
            if self.wandb is not None:
                self.wandb.check()
            if self.evaluation is not None:
                # Now, while nothing is lost by stopping: compiling cannot be interrupted, and may take minutes.
                self.evaluation.compile(state, weights)
        tokens, devices = prod(self.setup.leading), self.setup.mesh.size
        self.recorder = Recorder(self.spec, self.log_every, first, tokens, devices, self._write)
        if not self.is_saved:
            self.stop.must_save()
        step = first
        with Terminal(self.console, self.config.wrapper.run_name, total, first) as bar:
            self.bar = bar
            while True:
                stopping = self.stop()
                if stopping or self._save_due(step):
                    self._save(step, state)
                    # Saving takes long: who was told meanwhile must not take another step, and save that too.
                    stopping = self.stop() or stopping
                if stopping:
                    raise self._preempted(f"and saved at step {step}")
                self._evaluate(state, step)
                if step == total:
                    break
                n = self._until_due(step)
                inputs = self.setup.train.inputs(step, n, self.at_once)
                self.stop.must_save()
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

    def _save(self, step: int, state: State) -> None:
        """The state after ``step`` steps, and every row before it."""
        self.still_ours()
        self.recorder.flush()
        if self.metrics is not None:
            self.metrics.settle()  # a checkpoint stands for every row before it
        self.checkpoints.save(step, state, self.config.to_yaml(), self.inputs)
        self.stop.may_leave(f"at step {step}, which is saved")

    def _preempted(self, where: str) -> Preempted:
        self.stop.may_leave(where, LAST_PATIENCE_S)
        return Preempted(f"stopped {where}; {self.stop.hint}")

    def _evaluate(self, state: State, step: int) -> None:
        evaluation = self.evaluation
        if evaluation is None or not evaluation.due(step, self.spec.steps):
            return
        self.recorder.flush()
        try:
            row = evaluation.fast(state, self.setup.weights, step, self.stop)
            figures = {}
            if evaluation.slow_due(step, self.spec.steps):
                folder = self.folder / "figures" if self.processes.first else None
                figures = evaluation.figures(state, self.setup.weights, step, folder, self.stop)
        except Abandoned:
            self._save(step, state)
            raise self._preempted(f"while evaluating and saved at step {step}") from None
        self.recorder.evaluated(step, row, figures)

    def _write(self, row: dict[str, Any], figures: dict[str, Path]) -> None:
        if self.metrics is not None:
            self.metrics.write(row)
        if self.wandb is not None:
            self.wandb.check()
        if "train/loss/total" in row:
            self.bar.show(f"{row['train/perf/tok_per_s']:,.0f} tok/s  {brief(row)}")

    # --- the end ---

    def _finish(self, state: State) -> None:
        """The last state is saved: who is told to stop here leaves the rest to a resumption, which does only that."""
        finishing = "after the last step, which is saved; the report is not written"
        self.stop.may_leave(finishing, FINISHING_PATIENCE_S)
        try:
            self._examples(state)
        except Abandoned:
            raise self._preempted(finishing) from None
        if self.processes.first:
            self._report()
            self.stop.may_leave("after the report was written; wandb may lack some of it", LAST_PATIENCE_S)

    def _examples(self, state: State) -> None:
        problem, weights, evaluation = self.setup.problem, self.setup.weights, self.evaluation
        if evaluation is None or self.setup.eval is None:
            return
        text, batches = self.setup.text, evaluation.batches(self.stop)
        statistics = evaluation.statistics(state, weights, self.stop)
        if text is None and isinstance(problem.target, Decoder):
            self.console.print("no tokenizer beside the data or the target: the report has no text examples")
        elif text is not None:
            examples = find_examples(problem, state, weights, batches, statistics, self.setup.mesh)
            if self.processes.first:
                write_examples(self.folder, problem, examples, statistics, text)

    def _report(self) -> None:
        problem = self.setup.problem
        report = write_report(self.folder)
        sites = {site.name: site.C for site in problem.target.sites.all}
        self.console.print(*summary_table(read_metrics(self.folder), sites))
        self.console.print(f"run folder {self.folder}\nreport     {report}", soft_wrap=True)


def compile_steps(setup: Setup, size: int) -> Any:
    """The compiled `steps_program` of up to ``size`` steps."""
    return steps_program(setup.outline, size).lower().compile()


def _with_components(state: State, components: Any) -> State:
    return State(components, state.ci, state.components_moments, state.ci_moments, state.adversaries, state.step)
