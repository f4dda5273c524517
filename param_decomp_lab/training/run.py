"""Trains a decomposition (`pd train`): starts or resumes a run, and ends it with the report."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax
from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.on_resume import allowed_changes
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.processes.stop_signal import StopSignal
from param_decomp_lab.runs.ending import record_end
from param_decomp_lab.runs.folder import make_run_folder, refuse_taken, refuse_unseen, saved_config
from param_decomp_lab.runs.imported import read_imported
from param_decomp_lab.runs.lock import only_job
from param_decomp_lab.runs.parent import find_parent, refuse_mismatch
from param_decomp_lab.runs.target_file import read_target
from param_decomp_lab.runs.unwritable import explain_unwritable
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.setup import ResolvedConfig, Setup, set_up
from param_decomp_lab.setup.programs import learned_shapes
from param_decomp_lab.tracking.wandb_sink import Login
from param_decomp_lab.training.finish import finish
from param_decomp_lab.training.inputs import not_finite
from param_decomp_lab.training.job import NOTHING, Preempted, TrainingJob, resume_hint
from param_decomp_lab.training.loop import Loop
from param_decomp_lab.training.sinks import Sinks
from param_decomp_lab.training.start import starting_state

__all__ = ["Preempted", "resume", "train"]


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
        setup = set_up(ResolvedConfig(config), console, processes)
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
        return _run(TrainingJob(config, setup, folder, console, processes, stop, check_lock), resumed=False)


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
        _refuse_imported(folder)
        now = saved.with_overrides(overrides) if config is None else config
        changes = allowed_changes(saved, now, str(folder))
        now = now.with_run_id(saved.wrapper.run_id or folder.name) if changes else saved
    _refuse_different(now, processes)
    login = Login(now) if processes.first else None
    stop.hint = resume_hint(folder)
    with only_job(folder, console, processes) as check_lock:
        stop.may_leave(f"while loading the target and the data; {NOTHING}")
        with processes.sharing_errors():
            setup = set_up(ResolvedConfig(now), console, processes, _recorded_target(folder))
        with processes.sharing_errors():
            if login is not None:
                login.require()
        return _run(TrainingJob(now, setup, folder, console, processes, stop, check_lock), resumed=True)


def _refuse_imported(folder: Path) -> None:
    """Raises UserError for a run that has only its learned parameters."""
    imported = read_imported(folder)
    if imported is not None:
        raise UserError(
            f"{folder} was {imported}, without the state of the optimizers, so it cannot be resumed; to go on from it, "
            f"begin a new run with init_from: {folder}"
        )


def _recorded_target(folder: Path) -> Architecture | None:
    """The target's architecture in `target.json`; None if the file is missing or damaged, since resuming writes it
    again.
    """
    with suppress(UserError):
        return read_target(folder)
    return None


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


def _run(job: TrainingJob, resumed: bool) -> Path:
    """Runs all remaining steps and writes the report; returns the run folder."""
    with ExitStack() as stack:
        stack.callback(job.close)
        stack.enter_context(record_end(job.folder, Preempted, job.processes, job.is_in_place))
        if not job.stop.is_listening:
            stack.enter_context(job.stop.listening())
            stack.enter_context(job.stop.among(job.processes))
        stack.enter_context(jax.set_mesh(job.setup.mesh))
        stack.enter_context(explain_unwritable(job.folder))
        stack.enter_context(_explain_non_finite(job.setup))
        job.fingerprint_inputs()
        state, is_saved = starting_state(job, resumed)
        first = int(state.step)
        with Sinks(job, first) as sinks:
            state = Loop(job, sinks, first, is_saved).run(state)
            finish(job, state)
    return job.folder


@contextmanager
def _explain_non_finite(setup: Setup) -> Iterator[None]:
    """A block in which the message of a NonFiniteLoss says so if the target's weights are the cause, and not the
    learning rate or the losses.
    """
    try:
        yield
    except NonFiniteLoss as error:
        bad = not_finite(setup.weights, setup.mesh)
        if not bad:
            raise
        names = ", ".join(first_few(bad))
        raise NonFiniteLoss(
            f"the target's weights hold NaN or infinities ({names}), so no loss is finite; copy them again"
        ) from error
