"""`pd launch`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Nodes, Overrides
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole


def launch(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of the run, or the folder of a run to resume.")],
    nodes: Nodes = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of a node, with a task for each. Default: 8, or what the mesh leaves."),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="The card, for the probe: b200, h200, h100, …; none: simulate GPUs on CPUs.")
    ] = "b200",
    partition: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    qos: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    time: Annotated[
        str, typer.Option(help="Time limit of one job. At the limit the run saves, stops, and is requeued.")
    ] = "24:00:00",
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores for each task.")] = 12,
    shared: Annotated[bool, typer.Option("--shared", help="Let other jobs use the rest of the nodes.")] = False,
    notice: Annotated[
        int, typer.Option(min=1, help="Seconds before the time limit at which the run begins to save.")
    ] = 300,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any other option of sbatch; may be repeated.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="A run for each value; with several keys, for each combination."),
    ] = None,
    with_changes: Annotated[
        bool, typer.Option("--with-changes", help="Include uncommitted changes of the code, as a patch.")
    ] = False,
    probe: Annotated[bool, typer.Option(help="Check first whether it fits, as `pd probe` does.")] = True,
    anyway: Annotated[bool, typer.Option("--anyway", help="Submit even what does not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and write nothing.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run it here instead, as processes.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only make the run's folder (for slurm/train.sbatch).")
    ] = False,
) -> None:
    """Submit a run to Slurm: one task per GPU, resumed by itself after preemption and after the time limit.

    First `pd probe` checks whether the run fits, from its cache where possible; a run that does not fit is not
    submitted. Then the run's folder is made, with the configuration and a copy of the committed code, so that neither a
    later edit nor a requeue changes them. A sweep becomes one array of jobs, each with a run folder.

    The status is 3 when the run does not fit. With `--local` it is the run's own: 75 when it was stopped.

    Examples:

        pd launch configs/llama8b_l18-26_9layer_chunkwise.yaml --nodes 8 --gpus-per-node 8 --partition gpu

        pd launch configs/llama8b_l18.yaml --gpus-per-node 8 --gpu h100 --time 12:00:00 --dry-run --set pd.batch_size=32

        pd launch configs/toys/tms_5-2.yaml --gpus-per-node 1 --shared --sweep pd.seed=0,1,2 --sweep pd.steps=5000,10000

        pd launch configs/demo/transformer.yaml --local --gpus-per-node 2 --set mesh.fsdp=4

        pd launch runs/p-1a2b3c4d --nodes 4
    """
    import jax

    from param_decomp_lab.launch.command import Launch, launch_here, launch_job
    from param_decomp_lab.launch.command import prepare as prepare_run
    from param_decomp_lab.launch.job import SlurmJob, parse_more
    from param_decomp_lab.launch.layout import NO_GPU
    from param_decomp_lab.probe.cards import find_card

    jax.config.update("jax_platforms", "cpu")  # only shapes are computed: leave a GPU to those who train
    if gpu.lower() != NO_GPU:
        find_card(gpu)
    if prepare and (local or dry_run):
        raise UserError("--prepare makes a run's folder and nothing else; leave out --local and --dry-run")
    told = Launch(config, tuple(overrides or ()), tuple(sweep or ()), nodes, gpus_per_node, gpu, with_changes)
    console = PlainConsole(stderr=dry_run)
    if prepare:
        status = prepare_run(told, console)
    elif local:
        status = launch_here(told, console, dry=dry_run)
    else:
        job = SlurmJob(time, partition, account, qos, cpus_per_task, shared, notice, parse_more(sbatch or ()))
        status = launch_job(told, job, console, probe=probe, anyway=anyway, dry=dry_run)
    if status:
        raise typer.Exit(status)
