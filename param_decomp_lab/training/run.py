"""Training a decomposition (`pd train`): warm up, train, evaluate, save, resume, stop, report.

The order within step i: save if due, evaluate if due (both on the state after i steps), then training step i. A run
resumed from the checkpoint of step i therefore starts with step i's evaluation and row, and no row is written twice.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from param_decomp_jax.ci import ComponentReadout
from param_decomp_jax.method.initial_components import n_batches
from param_decomp_jax.method.state import State
from param_decomp_jax.targets.architecture import Architecture
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.on_resume import allowed_changes
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.eval.evaluation import Evaluation, EvaluationStopped
from param_decomp_lab.eval.examples import find_examples, write_examples
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.processes.stop_signal import LAST_PATIENCE_S, StopSignal
from param_decomp_lab.report import summary_table, write_report
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.data_file import TextOfRun, write_data
from param_decomp_lab.runs.ending import clear_end, record_end
from param_decomp_lab.runs.folder import (
    make_run_folder,
    record_start,
    refuse_taken,
    refuse_unseen,
    resume_command,
    saved_config,
)
from param_decomp_lab.runs.identity import FolderIdentity
from param_decomp_lab.runs.lock import only_job
from param_decomp_lab.runs.metrics_file import METRICS_FILE, read_metrics
from param_decomp_lab.runs.parent import Parent, find_parent, refuse_mismatch, restore_parent
from param_decomp_lab.runs.target_file import read_target, write_target
from param_decomp_lab.runs.unwritable import explain_unwritable
from param_decomp_lab.safe_io.printable import first_few, printable
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.setup import Setup, set_up
from param_decomp_lab.setup.programs import (
    calibration_program,
    init_program,
    initial_components_program,
    learned_shapes,
    no_second_moments_program,
    second_moments_program,
    steps_program,
    warmup_moments_program,
    warmup_program,
)
from param_decomp_lab.tracking.collapse import CollapseWatch
from param_decomp_lab.tracking.sinks import MetricsFile, Terminal, brief
from param_decomp_lab.tracking.wandb_sink import Login, Wandb
from param_decomp_lab.training.inputs import changed_inputs, fingerprint_inputs, not_finite
from param_decomp_lab.training.recorder import Recorder
from param_decomp_lab.ui.warnings import print_warnings

WARMUP_CHUNK = 50
"""Warm-up steps per dispatch. The stop signal is checked between dispatches."""
FINISHING_PATIENCE_S = 30.0
"""Time allowed for writing the report when the run is asked to stop after its last step."""
NOTHING = "nothing was to be saved"


class Preempted(Exception):
    """The run was asked to stop and has saved its state if there was anything to save. Exit status 75."""


def train(config: RunConfig, console: Console, processes: Processes = ALONE, stop: StopSignal | None = None) -> Path:
    """Trains a new run and returns its folder.

    ``processes``: the processes of the run; each of them calls this function with the same configuration. ``stop``: a
    stop signal that is already listening; if None, the run creates one and listens from its first step on.

    Raises UserError, before anything is written, if the configuration cannot be run.
    """
    stop = stop or StopSignal()
    run_id = processes.from_first(config.wrapper.run_id or f"p-{secrets.token_hex(4)}")
    config = config.with_run_id(run_id)
    folder = config.wrapper.out_dir / run_id
    _refuse_different(config, processes)
    with processes.sharing_errors():
        if processes.first:
            refuse_taken(folder)
    login = Login(config) if processes.first else None
    stop.may_leave(f"while loading the target and the data; {NOTHING}")
    with processes.sharing_errors():
        setup = set_up(config, console, processes)
        parent = find_parent(config)
        if parent is not None:
            refuse_mismatch(parent, learned_shapes(setup.problem, setup.mesh))
    with processes.sharing_errors():
        if login is not None:
            login.require()
    with processes.sharing_errors():
        if processes.first:
            make_run_folder(folder, config)
    with processes.sharing_errors():
        refuse_unseen(folder)
    with only_job(folder, console, processes) as check_lock:
        return _Run(config, setup, folder, console, processes, stop, check_lock).run(resumed=False)


def resume(
    folder: Path,
    console: Console,
    config: RunConfig | None = None,
    processes: Processes = ALONE,
    overrides: Sequence[str] = (),
    stop: StopSignal | None = None,
) -> Path:
    """Resumes a run from its newest undamaged checkpoint, under the configuration in its folder; returns the folder.

    ``config`` replaces that configuration from now on, ``overrides`` change single keys of it; neither may change any
    of the run's numbers (`config/on_resume.py`). The number of processes and their devices may differ from before.
    """
    stop = stop or StopSignal()
    with processes.sharing_errors():
        saved = saved_config(folder)
        now = saved.with_overrides(overrides) if config is None else config
        changes = allowed_changes(saved, now, str(folder))
        now = now.with_run_id(saved.wrapper.run_id or folder.name) if changes else saved
    _refuse_different(now, processes)
    login = Login(now) if processes.first else None
    stop.hint = _resume_hint(folder)
    with only_job(folder, console, processes) as check_lock:
        stop.may_leave(f"while loading the target and the data; {NOTHING}")
        with processes.sharing_errors():
            setup = set_up(now, console, processes, _recorded_target(folder))
        with processes.sharing_errors():
            if login is not None:
                login.require()
        return _Run(now, setup, folder, console, processes, stop, check_lock).run(resumed=True)


def _recorded_target(folder: Path) -> Architecture | None:
    """The target's architecture in `target.json`; None without that file, or where it is damaged: resuming writes it
    again."""
    with suppress(UserError):
        return read_target(folder)
    return None


def _resume_hint(folder: Path) -> str:
    return f"resume with `{resume_command(folder)}`"


def _refuse_different(config: RunConfig, processes: Processes) -> None:
    """Raises UserError in all processes if the configuration of one differs from that of process 0."""
    if processes.count == 1:
        return
    first = processes.from_first(config.to_yaml())
    with processes.sharing_errors():
        changes = difference(RunConfig.from_mapping(parse_yaml(first, "process 0"), "process 0"), config)
        if changes:
            lines = "\n  ".join(changes)
            raise UserError(
                f"all processes of a run take the same configuration; this one differs from process 0's:\n  {lines}"
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
        check_lock: Callable[[], None],
    ) -> None:
        self.config, self.setup, self.folder, self.console = config, setup, folder, console
        self.outline = setup.outline
        self.processes, self.check_lock = processes, check_lock
        self.spec = setup.problem.decomposition
        self.stop = stop
        stop.hint = _resume_hint(folder)
        self.evaluation = None if setup.eval is None else Evaluation(config, setup.problem, setup.eval, setup.mesh)
        cadence = config.method.cadence
        self.log_every, self.save_every = cadence.train_log_every, cadence.save_every
        self.at_once = config.wrapper.steps_per_dispatch
        self.is_saved = False
        """Whether the current state is on disk."""
        self.checkpoints = Checkpoints(folder, cadence.keep_last_n_checkpoints, config.wrapper.is_milestone, processes)

    def run(self, resumed: bool) -> Path:
        """Runs all remaining steps and writes the report; returns the run folder."""
        with ExitStack() as stack:
            self.identity = FolderIdentity(self.folder) if self.processes.first else None
            if self.identity is not None:
                stack.callback(self.identity.close)
            stack.enter_context(record_end(self.folder, Preempted, self.processes, self._is_in_place))
            if not self.stop.is_listening:
                stack.enter_context(self.stop.listening())
                stack.enter_context(self.stop.among(self.processes))
            stack.enter_context(jax.set_mesh(self.setup.mesh))
            stack.enter_context(explain_unwritable(self.folder))
            stack.enter_context(self._explain_non_finite())
            self.inputs = fingerprint_inputs(self.setup, self.processes)
            if not resumed:
                self._record_start(0)
            state = self._restored() if resumed else self._starting_state()
            first = int(state.step)
            with self._sinks(first):
                state = self._loop(state, first)
                self._finish(state)
        return self.folder

    @contextmanager
    def _explain_non_finite(self) -> Iterator[None]:
        """A block in which a NonFiniteLoss says so if the cause is the target, and not the rate or the losses."""
        try:
            yield
        except NonFiniteLoss as error:
            bad = not_finite(self.setup.weights, self.setup.mesh)
            if not bad:
                raise
            names = ", ".join(first_few(bad))
            raise NonFiniteLoss(
                f"the target's weights hold NaN or infinities ({names}), so no loss is finite; copy them again"
            ) from error

    def _is_in_place(self) -> bool:
        return self.identity is None or self.identity.is_in_place()

    def _check_folder(self) -> None:
        """Raises Displaced, in process 0, if the run folder is no longer at its path: whatever is written there next
        would make a part of it anew."""
        if self.identity is not None:
            self.identity.check()

    @contextmanager
    def _sinks(self, first: int) -> Iterator[None]:
        """Opens `metrics.jsonl` and wandb at step ``first`` in process 0; closes them at the end of the block."""
        self._check_folder()
        losses = self.config.method.pd.loss_metrics
        self.collapse = CollapseWatch(losses, self.spec.steps, self.log_every, self._warn)
        self.metrics = None
        if self.processes.first:
            self.metrics = MetricsFile(self.folder, first, self.console, self.collapse.row)
        expected = (first - 1) // self.log_every * self.log_every
        if self.metrics is not None and first > 0 and self.metrics.last < expected:
            lost = f"{METRICS_FILE} lacks the rows of steps {self.metrics.last + 1} to {expected}, written before"
            again = f"to get them back, rename {self.checkpoints.path(first)} and resume from an earlier checkpoint"
            self.console.print(Text(f"{lost}; {again}", "yellow"), highlight=False, soft_wrap=True)
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
        """The state of the newest undamaged checkpoint. Renames newer, damaged ones, so that those steps can be saved
        again."""
        self.stop.may_leave(f"while reading a checkpoint; {NOTHING}")
        if self.processes.first:
            self.checkpoints.sweep()
        with self.processes.sharing_errors():
            found = self.checkpoints.restore_newest(self.outline.state, self._refuse_mismatch)
        if found is None:
            self.console.print(f"{self.folder} has no checkpoint yet: starting from the beginning", soft_wrap=True)
            self._record_start(0, difference(saved_config(self.folder), self.config))
            return self._starting_state()
        step, state, damaged = found
        changes = difference(self._checkpoint_config(step), self.config)
        for line in changes:
            text = Text.assemble((f"changed since step {step}:", "yellow"), f" {printable(line, 1000)}")
            self.console.print(text, highlight=False, soft_wrap=True)
        with self.processes.sharing_errors():
            renamed = self.checkpoints.rename_damaged(damaged) if self.processes.first else []
        for name, damage in zip(renamed, damaged.values(), strict=False):
            warning = f"a damaged checkpoint was renamed to {name}, and the one before it is used: {damage}"
            self.console.print(Text(printable(warning), "yellow"), highlight=False, soft_wrap=True)
        self._record_start(step, changes, renamed)
        self.is_saved = True
        self.console.print(f"resuming {self.folder} at step {step} of {self.spec.steps}", soft_wrap=True)
        return state

    def _checkpoint_config(self, step: int) -> RunConfig:
        at = f"the checkpoint of step {step}"
        return RunConfig.from_mapping(parse_yaml(self.checkpoints.configuration(step), at), at)

    def _refuse_mismatch(self, step: int) -> None:
        """Raises UserError if the checkpoint was saved with another configuration, target or data."""
        allowed_changes(self._checkpoint_config(step), self.config, f"{self.folder} (step {step})")
        other = changed_inputs(self.checkpoints.inputs(step), self.inputs)
        if other:
            raise UserError(
                f"{self.folder} (step {step}) was made with another {' and another '.join(other)} than the present "
                "one; to resume, give the run what it was started with (its location may differ)"
            )

    def _record_start(self, step: int, changes: Sequence[str] = (), renamed: Sequence[str] = ()) -> None:
        if self.processes.first:
            self._check_folder()
            clear_end(self.folder)
            record_start(self.folder, self.config, step, changes, renamed)
            write_target(self.folder, self.setup.problem.target.architecture)
            if self.setup.text is not None:
                write_data(self.folder, TextOfRun(self.setup.text.bos))

    def _starting_state(self) -> State:
        """The state before step 0."""
        parent = self.processes.in_turn(self._parent)
        if parent is None:
            return self._calibrate(self._warm_up(self._from_data(self._initial())))
        self.console.print(f"starting from the components and CI function of {parent}", soft_wrap=True)
        if parent.target not in ("", self.inputs["target"]):
            print_warnings(["that run decomposed other weights than this one does"], self.console)
        fresh = self._initial()
        for unlearned in jax.tree.leaves((fresh.components, fresh.ci)):
            unlearned.delete()
        with self.processes.sharing_errors():
            components, ci = restore_parent(parent, learned_shapes(self.setup.problem, self.setup.mesh), self.processes)
        return State(components, ci, fresh.components_moments, fresh.ci_moments, fresh.adversaries, fresh.step)

    def _parent(self) -> Parent | None:
        """The checkpoint that the run starts from. Process 0 records it; later starts use the same one."""
        parent = find_parent(self.config, self.folder)
        if parent is not None:
            refuse_mismatch(parent, learned_shapes(self.setup.problem, self.setup.mesh))
            if self.processes.first:
                parent.write(self.folder)
        return parent

    def _from_data(self, state: State) -> State:
        """The state with components that are weighted singular vectors, if it is to begin with them (T6)."""
        if not self.config.wrapper.begins_with_singular_vectors:
            return state
        for drawn in jax.tree.leaves(state.components):
            drawn.delete()
        where = f"while measuring what the sites give; {NOTHING}"
        self.stop.may_leave(where)
        n = n_batches(self.setup.problem.target.sites, prod(self.setup.leading))
        moments = no_second_moments_program(self.outline).function()
        add = second_moments_program(self.outline).function
        with Terminal(self.console, "second moments", n) as bar:
            for number in range(n):
                if self.stop():
                    raise self._preempted(where)
                moments = add(moments, self.setup.weights, self.setup.train(number))
                bar.advance(number + 1)
        components = initial_components_program(self.outline).function(moments, self.setup.weights)
        return _with_components(state, components)

    def _warm_up(self, state: State) -> State:
        """The state after the faithfulness warm-up (T3), run in dispatches of a few steps each.

        If asked to stop, it exits without saving, since a run cannot be resumed in the middle of the warm-up.
        """
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

    def _calibrate(self, state: State) -> State:
        """The state with the scales of the component readout, if there is one (C8)."""
        if not isinstance(self.spec.ci, ComponentReadout):
            return state
        self.stop.may_leave(f"while reading the batch of step 0; {NOTHING}")
        inputs = self.setup.train.inputs(0, 1, 1)
        ci = calibration_program(self.outline).function(state.components, state.ci, self.setup.weights, inputs)
        return replace(state, ci=ci)

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
                # Compile now, while stopping loses nothing: compiling cannot be interrupted and may take minutes.
                self.evaluation.compile(state, weights)
        tokens, devices = prod(self.setup.leading), self.setup.mesh.size
        self.recorder = Recorder(self.spec, self.log_every, first, tokens, devices, self._write, self.collapse.step)
        if not self.is_saved:
            self.stop.must_save()
        step = first
        with Terminal(self.console, self.config.wrapper.run_name, total, first) as bar:
            self.bar = bar
            while True:
                stopping = self.stop()
                if stopping or self._save_due(step):
                    self._save(step, state)
                    # Saving takes long. If asked to stop meanwhile, do not train and save one more step.
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
        """The number of steps to dispatch: up to the next save or evaluation, at most ``steps_per_dispatch``."""

        def due(step: int) -> bool:
            evaluated = self.evaluation is not None and self.evaluation.due(step, self.spec.steps)
            return self._save_due(step) or evaluated

        return next((n for n in range(1, self.at_once) if due(step + n)), self.at_once)

    def _save_due(self, step: int) -> bool:
        periodic = self.save_every is not None and step > 0 and step % self.save_every == 0
        return periodic or step == self.spec.steps or self.config.wrapper.is_milestone(step)

    def _save(self, step: int, state: State) -> None:
        """Saves the state after ``step`` steps, and every row before it."""
        self._check_folder()
        self.check_lock()
        self.recorder.flush()
        if self.metrics is not None:
            self.metrics.settle()  # resuming from a checkpoint relies on the rows before it
        try:
            self.checkpoints.save(step, state, self.config.to_yaml(), self.inputs)
        finally:
            self._check_folder()  # a save may take minutes; what it wrote must be in this folder to count
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
                self._check_folder()
                folder = self.folder / "figures" if self.processes.first else None
                figures = evaluation.figures(state, self.setup.weights, step, folder, self.stop)
        except EvaluationStopped:
            self._save(step, state)
            raise self._preempted(f"while evaluating and saved at step {step}") from None
        self.recorder.evaluated(step, row, figures)

    def _write(self, row: dict[str, Any], figures: dict[str, Path]) -> None:
        self._check_folder()
        if self.metrics is not None:
            self.metrics.write(row)
        if self.wandb is not None:
            self.wandb.check()
        self.collapse.row(row)
        if "train/loss/total" in row:
            self.bar.show(f"{row['train/perf/tok_per_s']:,.0f} tok/s  {brief(row)}")

    def _warn(self, what: str) -> None:
        print_warnings([what], self.console)

    # --- the end ---

    def _finish(self, state: State) -> None:
        """Writes the examples and the report. The last state is saved: resuming a run stopped here does only this."""
        finishing = "after the last step, which is saved; the report is not written"
        self.stop.may_leave(finishing, FINISHING_PATIENCE_S)
        self._check_folder()
        try:
            self._examples(state)
        except EvaluationStopped:
            raise self._preempted(finishing) from None
        if self.processes.first:
            self._check_folder()
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
                self._check_folder()
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
