"""`pd profile`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Config, Coordinator, Overrides, ProcessCount, ProcessNumber
from param_decomp_lab.ui.console import PlainConsole


def profile(
    config: Config,
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Steps to run before, without a trace.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the trace. Default: `<out_dir>/profiles/<time>`.")
    ] = None,
    overrides: Overrides = None,
    coordinator: Coordinator = None,
    processes: ProcessCount = None,
    process_id: ProcessNumber = None,
) -> None:
    """Trace a few steps of a run, and say where their time goes, by part of the step.

    The steps are those of the run's own program, on its own data. No run folder is made. The end of the output says how
    to open the trace in xprof and in Perfetto. Several processes are started as for `pd train`; process 0 is traced.

    Examples:

        pd profile configs/demo/decompose.yaml

        pd profile configs/demo/decompose.yaml --steps 20 --warmup 5 --out /tmp/trace --set memory.preset=lean

        srun --ntasks=8 pd profile configs/llama8b_l18.yaml
    """
    from param_decomp_lab.config import load_config
    from param_decomp_lab.processes.joining import joined
    from param_decomp_lab.profile import profile as profile_run

    with joined(coordinator, processes, process_id) as all_processes:
        with all_processes.sharing_errors():
            loaded = load_config(config, overrides or ())
        profile_run(loaded, PlainConsole(quiet=not all_processes.first), steps, warmup, out, all_processes)
