"""`pd launch`: from a configuration to runs, submitted as a job or made here."""

import secrets
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from param_decomp_lab.check.data import check_data
from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.display.notes import print_notes
from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.code_copy import CODE, Code
from param_decomp_lab.launch.fits import Question, all_fit
from param_decomp_lab.launch.job import Job, check_slurm, script_text, submit
from param_decomp_lab.launch.local import commands, free_port, gpus_here, local_place, run_here
from param_decomp_lab.launch.place import NO_GPU, Place, find_place
from param_decomp_lab.launch.prepare import add_code, make_run, note_job
from param_decomp_lab.launch.sweep import Choice, choices
from param_decomp_lab.probe.outline import known_target
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.run_folder.folder import CONFIG_FILE, refuse_taken

NOTHING = Choice()
SCRIPT = "job.sbatch"
DOES_NOT_FIT = 3


@dataclass(frozen=True)
class Launch:
    """What is to be launched. ``path``: a wrapper, or the folder of a run to go on with. ``sets``, ``sweeps``: as on
    the command line. ``per_node``: GPUs, and tasks."""

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
class Run:
    """``folder``: absolute; there already if ``made``."""

    config: RunConfig
    folder: Path
    choice: Choice = NOTHING
    made: bool = False

    def __str__(self) -> str:
        return f"{self.folder} {self.choice}".rstrip()


def launch_job(told: Launch, job: Job, console: Console, *, probe: bool, anyway: bool, dry: bool) -> int:
    """Submits the runs as one job, and gives the exit status. ``anyway``: whatever the probe says. ``dry``: prints the
    batch script instead, and writes nothing.

    UserError, before anything is written, for what cannot work; CannotTell where the probe gets no answer.
    """
    runs, code = _runs(told, console), _code(told)
    place = _same([find_place(run.config, told.nodes, told.per_node, told.on_gpus) for run in runs])
    script = _script_place(runs)
    text = script_text(job, place, told.path.stem, [run.folder for run in runs], script)
    if dry:
        print(text)
        return 0
    check_slurm()
    if not _fit(told, runs, place, console, probe=probe, anyway=anyway):
        return DOES_NOT_FIT

    def submitted() -> str:
        # Under another name: a run that is there keeps its script until Slurm has taken the new one.
        new = script.with_name(f"{script.name}.new")
        had = script.parent.is_dir()
        try:
            script.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            number = submit(new)
        except BaseException as error:
            new.unlink(missing_ok=True)
            if not had:
                shutil.rmtree(script.parent, ignore_errors=True)
            if isinstance(error, OSError):
                raise UserError(f"{script} cannot be written ({error.strerror})") from error
            raise
        new.replace(script)
        return number

    number = _made(runs, code, told, place, submitted)
    jobs = [number] if len(runs) == 1 else [f"{number}_{index}" for index in range(len(runs))]
    for run, one in zip(runs, jobs, strict=True):
        note_job(run.folder, one)
        console.print(f"job {one}: {escape(str(run))}", highlight=False, soft_wrap=True)
    console.print(
        f"{place}; preempted, it goes on by itself. Logs are in the run folders (slurm-*.log).\n"
        f"after a failure: sbatch {'--array=INDEX ' if len(runs) > 1 else ''}{script}\n"
        f"to stop it:      scancel {number}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def launch_here(told: Launch, console: Console, *, dry: bool) -> int:
    """Makes the runs on this machine, one after the other; the status of the first that failed, 75 when told to stop.

    UserError, before anything is written, for what cannot work.
    """
    runs, code = _runs(told, console), _code(told)
    there = gpus_here() if told.on_gpus else 0
    place = _same([local_place(run.config, told.nodes, told.per_node, there) for run in runs])
    if dry:
        for run in runs:
            for command in commands(run.folder, place, free_port()):
                print(shlex.join(command))
        return 0
    _made(runs, code, told, place, lambda: "here")
    first_bad = 0
    for run in runs:
        console.print(f"{escape(str(run))}: {place}", highlight=False, soft_wrap=True)
        status = run_here(run.folder, place)
        if status == STOPPED:
            return status
        first_bad = first_bad or status
    return first_bad


def prepare(told: Launch, console: Console) -> int:
    """Makes the run's folder and stops there; for `slurm/train.sbatch`."""
    runs = _runs(told, console)
    if len(runs) > 1:
        raise UserError("--prepare makes one run's folder; leave out --sweep")
    _made(runs, _code(told), told, None, lambda: "prepared")
    console.print(str(runs[0].folder), soft_wrap=True, highlight=False)
    return 0


# ---- the runs ----


def _runs(told: Launch, console: Console) -> list[Run]:
    """All of them, valid; nothing is made."""
    if (told.path / CONFIG_FILE).is_file():
        if told.sets or told.sweeps:
            raise UserError(f"{told.path} is a run, which keeps its configuration; leave out --set and --sweep")
        return [Run(RunConfig.from_yaml(told.path / CONFIG_FILE), told.path.absolute(), made=True)]
    found = []
    for choice in choices(told.sweeps, told.sets):
        config = load_config(told.path, [*told.sets, *choice.sets])
        if choice.values and "run_name" not in dict(choice.values):
            named = {"run_name": f"{config.wrapper.run_name} {choice}"}
            config = replace(config, wrapper=config.wrapper.model_copy(update=named))
        run_id = config.wrapper.run_id or f"p-{secrets.token_hex(4)}"
        folder = Path.cwd() / config.wrapper.out_dir / run_id
        refuse_taken(folder)
        found.append(Run(config.with_run_id(run_id), folder, choice))
    _notes([run.config for run in found], console)
    return found


def _notes(configs: Sequence[RunConfig], console: Console) -> None:
    """What people should know, once; UserError where a target does not fit its configuration, or is not known."""
    missing = [line for config in configs for line in (*known_target(config).missing, *check_data(config))]
    print_notes((line for config in configs for line in config.notes), console)
    print_notes(missing, console, "not on this machine")


def _code(told: Launch) -> Code:
    code = Code.of_checkout()
    if not told.with_changes:
        code.refuse_changes()
    return code


def _same(places: Sequence[Place]) -> Place:
    if len(set(places)) > 1:
        raise UserError("--sweep: all runs of a sweep take as many nodes and GPUs; launch meshes of other sizes apart")
    return places[0]


def _script_place(runs: Sequence[Run]) -> Path:
    """In the run's folder; that of a sweep beside the runs, in a folder of its own."""
    if len(runs) == 1:
        return runs[0].folder / SCRIPT
    name = "s" + runs[0].folder.name.removeprefix("p")
    return runs[0].folder.parent / "sweeps" / name / SCRIPT


def _made(runs: Sequence[Run], code: Code, told: Launch, place: Place | None, then: Callable[[], str]) -> str:
    """Makes the folders, and gives what ``then`` does; where that fails or is interrupted, nothing new stays."""
    new: list[Path] = []
    described = {"configuration": str(told.path.absolute()), "place": place and str(place)}
    try:
        for run in runs:
            if not run.made:
                make_run(run.folder, run.config, code, {**described, "swept": dict(run.choice.values)})
                new.append(run.folder)
            elif not (run.folder / CODE).is_dir():
                add_code(run.folder, code)
        return then()
    except BaseException:
        for folder in new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _fit(told: Launch, runs: Sequence[Run], place: Place, console: Console, *, probe: bool, anyway: bool) -> bool:
    if not probe or not place.on_gpus or runs[0].made:
        return True
    questions = [
        Question(told.path, (*told.sets, *run.choice.sets), str(run.choice) or run.config.wrapper.run_name)
        for run in runs
    ]
    return all_fit(questions, place, told.gpu, console, anyway)
