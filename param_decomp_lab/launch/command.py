"""`pd launch`: plans the runs of a configuration and submits them as a job or executes them locally."""

import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from param_decomp_lab.check.data import check_data
from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.code_copy import CODE, Code
from param_decomp_lab.launch.fits import PlannedProbe, all_fit
from param_decomp_lab.launch.job import SlurmJob, check_slurm, script_text, submit
from param_decomp_lab.launch.layout import NO_GPU, JobLayout, choose_layout
from param_decomp_lab.launch.local import commands, free_port, gpus_here, local_layout, run_here
from param_decomp_lab.launch.prepare import add_code, make_run, record_job
from param_decomp_lab.launch.sweep import SweepChoice, choices
from param_decomp_lab.probe.outline import known_target
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.runs.folder import CONFIG_FILE, refuse_taken
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.ui.warnings import print_warnings

NO_CHOICE = SweepChoice()
SCRIPT = "job.sbatch"
DOES_NOT_FIT = 3


@dataclass(frozen=True)
class Launch:
    """Arguments of `pd launch`. ``path``: a wrapper, or the folder of a run to resume. ``sets``, ``sweeps``: as on the
    command line. ``per_node``: GPUs, and tasks, per node."""

    path: Path
    sets: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None
    gpu: str = "b200"
    with_changes: bool = False

    @property
    def on_gpus(self) -> bool:
        return self.gpu.lower() != NO_GPU


@dataclass(frozen=True)
class PlannedRun:
    """A run to launch. ``folder``: absolute path. ``exists``: whether the folder exists, so that the run is resumed."""

    config: RunConfig
    folder: Path
    choice: SweepChoice = NO_CHOICE
    exists: bool = False

    def __str__(self) -> str:
        return f"{self.folder} {self.choice}".rstrip()


def launch_job(request: Launch, job: SlurmJob, console: Console, *, probe: bool, anyway: bool, dry: bool) -> int:
    """Submits the runs as one job and returns the exit status.

    ``anyway``: submits regardless of the probe. ``dry``: only prints the batch script.

    Raises UserError, before anything is written, for invalid requests, and CannotTell if the probe fails.
    """
    runs, code = _plan_runs(request, console), _code(request)
    layout = _common_layout(
        [choose_layout(run.config, request.nodes, request.per_node, request.on_gpus) for run in runs]
    )
    script = _script_path(runs)
    text = script_text(job, layout, request.path.stem, [run.folder for run in runs], script)
    if dry:
        print(text)
        return 0
    check_slurm()
    if not _runs_fit(request, runs, layout, console, probe=probe, anyway=anyway):
        return DOES_NOT_FIT

    def submit_script() -> str:
        # Written under another name: an existing run keeps its script until Slurm has accepted the new one.
        new = script.with_name(f"{script.name}.new")
        existed = script.parent.is_dir()
        try:
            script.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            number = submit(new)
        except BaseException as error:
            new.unlink(missing_ok=True)
            if not existed:
                shutil.rmtree(script.parent, ignore_errors=True)
            if isinstance(error, OSError):
                raise UserError(f"{script} cannot be written ({error.strerror})") from error
            raise
        new.replace(script)
        return number

    number = _create_runs(runs, code, request, layout, submit_script)
    jobs = [number] if len(runs) == 1 else [f"{number}_{index}" for index in range(len(runs))]
    for run, one in zip(runs, jobs, strict=True):
        record_job(run.folder, one)
        console.print(f"job {one}: {run}", highlight=False, soft_wrap=True)
    console.print(
        f"{layout}; if preempted, it resumes by itself. Logs are in the run folders (slurm-*.log).\n"
        f"after a failure: sbatch {'--array=INDEX ' if len(runs) > 1 else ''}{shlex.quote(str(script))}\n"
        f"to stop it:      scancel {number}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def launch_here(request: Launch, console: Console, *, dry: bool) -> int:
    """Executes the runs on this machine, one after the other.

    Returns the exit status of the first that failed, 75 after a signal to stop. Raises UserError, before anything is
    written, for invalid requests.
    """
    runs, code = _plan_runs(request, console), _code(request)
    available = gpus_here() if request.on_gpus else 0
    layout = _common_layout([local_layout(run.config, request.nodes, request.per_node, available) for run in runs])
    if dry:
        for run in runs:
            for command in commands(run.folder, layout, free_port()):
                print(shlex.join(command))
        return 0
    _create_runs(runs, code, request, layout, lambda: "here")
    first_bad = 0
    for run in runs:
        console.print(f"{run}: {layout}", highlight=False, soft_wrap=True)
        status = run_here(run.folder, layout)
        if status == STOPPED:
            return status
        first_bad = first_bad or status
    return first_bad


def prepare(request: Launch, console: Console) -> int:
    """Creates the run folder without starting the run; for `slurm/train.sbatch`."""
    runs = _plan_runs(request, console)
    if len(runs) > 1:
        raise UserError("--prepare makes one run's folder; leave out --sweep")
    _create_runs(runs, _code(request), request, None, lambda: "prepared")
    console.print(str(runs[0].folder), soft_wrap=True, highlight=False)
    return 0


# ---- the runs ----


def _plan_runs(request: Launch, console: Console) -> list[PlannedRun]:
    """Returns the runs of the request, validated; creates nothing."""
    if (request.path / CONFIG_FILE).is_file():
        if request.sets or request.sweeps:
            raise UserError(f"{request.path} is a run, whose configuration is fixed; leave out --set and --sweep")
        return [PlannedRun(RunConfig.from_yaml(request.path / CONFIG_FILE), request.path.absolute(), exists=True)]
    found = []
    for choice in choices(request.sweeps, request.sets):
        config = load_config(request.path, [*request.sets, *choice.sets])
        if choice.values and "run_name" not in dict(choice.values):
            named = {"run_name": f"{config.wrapper.run_name} {choice}"}
            config = replace(config, wrapper=config.wrapper.model_copy(update=named))
        run_id = config.wrapper.run_id or f"p-{secrets.token_hex(4)}"
        folder = Path.cwd() / config.wrapper.out_dir / run_id
        refuse_taken(folder)
        if os.pathsep in str(folder):
            raise UserError(
                f"out_dir: {folder} contains {os.pathsep!r}; PYTHONPATH could not name the run's copy of the code"
            )
        found.append(PlannedRun(config.with_run_id(run_id), folder, choice))
    _print_warnings([run.config for run in found], console)
    return found


def _print_warnings(configs: Sequence[RunConfig], console: Console) -> None:
    """Prints warnings of all runs. Raises UserError if a target is unknown or does not fit its configuration."""
    missing = [line for run in map(ResolvedConfig, configs) for line in (*known_target(run).missing, *check_data(run))]
    print_warnings((line for config in configs for line in config.notes), console)
    print_warnings(missing, console, "not on this machine")


def _code(request: Launch) -> Code:
    code = Code.from_checkout()
    if not request.with_changes:
        code.refuse_changes()
    return code


def _common_layout(layouts: Sequence[JobLayout]) -> JobLayout:
    if len(set(layouts)) > 1:
        raise UserError("--sweep: all runs must use the same number of nodes and GPUs; launch other meshes separately")
    return layouts[0]


def _script_path(runs: Sequence[PlannedRun]) -> Path:
    """Returns the path of the batch script: in the run folder, or for a sweep in a separate folder beside the runs."""
    if len(runs) == 1:
        return runs[0].folder / SCRIPT
    name = "s" + runs[0].folder.name.removeprefix("p")
    return runs[0].folder.parent / "sweeps" / name / SCRIPT


def _create_runs(
    runs: Sequence[PlannedRun], code: Code, request: Launch, layout: JobLayout | None, then: Callable[[], str]
) -> str:
    """Creates the run folders and returns ``then()``; removes the new folders if that fails or is interrupted."""
    new: list[Path] = []
    described = {"configuration": str(request.path.absolute()), "place": layout and str(layout)}
    try:
        for run in runs:
            if not run.exists:
                make_run(run.folder, run.config, code, {**described, "swept": dict(run.choice.values)})
                new.append(run.folder)
            elif not (run.folder / CODE).is_dir():
                add_code(run.folder, code)
        return then()
    except BaseException:
        for folder in new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _runs_fit(
    request: Launch, runs: Sequence[PlannedRun], layout: JobLayout, console: Console, *, probe: bool, anyway: bool
) -> bool:
    if not probe or not layout.on_gpus or runs[0].exists:
        return True
    probes = [
        PlannedProbe(request.path, (*request.sets, *run.choice.sets), str(run.choice) or run.config.wrapper.run_name)
        for run in runs
    ]
    return all_fit(probes, layout, request.gpu, console, anyway)
