"""`pd train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from param_decomp_lab.cli.options import Coordinator, Overrides, ProcessCount, ProcessNumber
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole

if TYPE_CHECKING:
    from param_decomp_lab.processes.group import Processes
    from param_decomp_lab.processes.stop_signal import StopSignal


def train(
    config: Annotated[Path | None, typer.Argument(help="Wrapper YAML of the run.", show_default=False)] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to resume.", show_default=False)] = None,
    overrides: Overrides = None,
    coordinator: Coordinator = None,
    processes: ProcessCount = None,
    process_id: ProcessNumber = None,
) -> None:
    """Decompose a network, or resume a run that was stopped.

    A run resumes from its newest good checkpoint, with its own configuration. `--set` may then change only keys that
    affect no result, such as the mesh.

    A run can be spread over several processes, on one machine or many: start the same command for each of them. Under
    `srun` they find each other; otherwise pass the last three options to each.

    Examples:

        pd train configs/demo/decompose.yaml

        pd train configs/demo/decompose.yaml --set pd.steps=200 --set out_dir=/tmp/runs

        pd train --resume runs/p-1a2b3c4d

        pd train --resume runs/p-1a2b3c4d --set mesh.fsdp=2

        pd train configs/demo/decompose.yaml --set init_from=runs/p-1a2b3c4d@7500

        srun --ntasks=8 pd train configs/demo/transformer.yaml --set mesh.fsdp=8

        pd train configs/demo/decompose.yaml --set mesh.fsdp=2 --coordinator node01:29400 --processes 2 --process-id 0
    """
    from param_decomp_lab.processes.stop_signal import STOPPED, StopSignal

    if config is None and resume is None:
        raise UserError("pass a configuration (`pd train CONFIG`) or a run to resume (`pd train --resume RUN`)")
    # Before what takes seconds to import: from now on a process that is told to stop exits with a status that says so.
    with StopSignal().listening() as stop:
        from param_decomp_lab.processes.joining import joined
        from param_decomp_lab.training import run

        with joined(coordinator, processes, process_id) as all_processes:
            console = PlainConsole(quiet=not all_processes.first)
            try:
                with stop.among(all_processes):
                    _train(config, resume, overrides or (), console, all_processes, stop)
            except run.Preempted as stopped:
                console.print(str(stopped), soft_wrap=True)
            else:
                return
    raise typer.Exit(STOPPED)


def _train(
    config: Path | None,
    resume: Path | None,
    overrides: Sequence[str],
    console: Console,
    processes: "Processes",
    stop: "StopSignal",
) -> None:
    from param_decomp_lab.setup.checked_config import load_checked
    from param_decomp_lab.training import run
    from param_decomp_lab.ui.warnings import print_warnings

    with processes.sharing_errors():
        loaded = None if config is None else load_checked(config, overrides)
    if loaded is not None:
        print_warnings(loaded.notes, console)
    if resume is not None:
        run.resume(resume, console, loaded, processes, () if loaded is not None else overrides, stop)
    elif loaded is not None:
        run.train(loaded, console, processes, stop)
