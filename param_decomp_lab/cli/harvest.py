"""`pd harvest`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import ProcessCount, ProcessNumber, RunFolder, Step, TargetFolder


def harvest(
    run: RunFolder,
    tokens: Annotated[float, typer.Option(help="Positions to read, such as 10e6; for a toy, inputs.")] = 1e6,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of token data. Default: what the run was trained on.", show_default=False),
    ] = None,
    sites: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Sites; may be repeated. Default: all.")
    ] = None,
    step: Step = None,
    threshold: Annotated[float, typer.Option(help="A component fires where λ is above it.")] = 0.0,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples of each kind for each component. Default: 12; 6 from 262,144 components on.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of rows and samples.")] = 0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices of this process. Default: all.", show_default=False)
    ] = None,
    target: TargetFolder = None,
    processes: ProcessCount = None,
    process_id: ProcessNumber = None,
) -> None:
    """Collect what every component of a run does on much text: where it fires, with which tokens, with which others.

    The harvest goes into RUN/harvests, and is there whole or not at all. Rerun the same command to resume after a stop
    (Ctrl-C, SIGTERM: status 75) or a kill. Several processes share the work through the folder: start each with
    --processes N --process-id I, or all with `srun`. Their number may change between two starts.

    `pd browse` shows it, and `load_run(RUN).harvest` reads it.

    Examples:

        pd harvest runs/p-1a2b3c4d

        pd harvest runs/p-1a2b3c4d --tokens 10e6 --sites '*.down_proj' --threshold 0.1

        srun --ntasks 8 --gpus-per-task 1 pd harvest runs/p-1a2b3c4d --tokens 100e6
    """
    from param_decomp_lab.harvest.harvest import harvest as collect
    from param_decomp_lab.harvest.plan import HarvestRequest
    from param_decomp_lab.harvest.share import find_share
    from param_decomp_lab.opening import load_run
    from param_decomp_lab.processes.stop_signal import STOPPED, StopSignal
    from param_decomp_lab.ui.console import PlainConsole

    console = PlainConsole()
    share = find_share(processes, process_id)
    request = HarvestRequest(tokens, data, None if sites is None else tuple(sites), threshold, examples, seed)
    with StopSignal().listening() as stop:
        opened = load_run(run, step, devices=devices if devices is not None else share.n_devices, target=target)
        stop.must_save()
        found = collect(opened, request, share, console, stop)
    if stop.requested and found is None:
        console.print("stopped and saved; run the same command again to continue", highlight=False)
        raise typer.Exit(STOPPED)
    if found is not None:
        console.print(str(found), highlight=False, soft_wrap=True)
