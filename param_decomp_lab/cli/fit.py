"""`pd fit`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Config, Gpu, Overrides
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION
from param_decomp_lab.probe.search import Goal
from param_decomp_lab.ui.console import PlainConsole


def fit(
    config: Config,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there are.", show_default=False)],
    gpu: Gpu = "b200",
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    goal: Annotated[
        Goal, typer.Option("--for", help="The fastest step of the configuration's batch, or the largest batch.")
    ] = "speed",
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="What may be chosen; may be repeated.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The wrapper to write. Default: beside CONFIG, with the GPUs in its name.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="With --for speed: try nothing new after this many minutes.", show_default=False),
    ] = None,
    mem_fraction: Annotated[float, typer.Option(help="As in `pd probe`.")] = MEM_FRACTION,
    margin_gib: Annotated[float, typer.Option(help="As in `pd probe`.")] = MARGIN_GIB,
) -> None:
    """Find the fastest or the largest run of a configuration that fits on given GPUs, and write the configuration to
    start it with.

    `--for speed` (the default) finds the layout with the shortest predicted step for the configuration's batch: the
    mesh, what is held, what is saved, blocks and micro-batches (docs/probe.md).
    `--vary` restricts or extends that: `mesh=1x64x1,8x8x1` (replica x fsdp x tensor), `memory=balanced,lean` (presets
    as they are), or any key of the configuration. What `--set` gives is not changed.

    `--for batch` finds the largest batch that fits, by bisection, for every combination of `--vary batch=64..2048`
    (doubling), `seq=512,2048`, meshes, presets and other keys. The best takes the most tokens in a step; among equals,
    it is the fastest. Without `--vary`: 1 to 64 rows on each GPU, and the presets.

    Several runs are probed at a time, as by `pd probe`. Its cache keeps the answers, so an interrupted search continues
    where it was. The command writes a wrapper, its schema file under `torch/`, and a figure of all runs it probed. The
    status is 3 when nothing fits.

    Examples:

        pd fit configs/llama8b_l18-26_9layer_chunkwise.yaml --gpus 64

        pd fit configs/llama8b_l18-26_9layer_chunkwise_seq2048.yaml --gpus 64 --for batch

        pd fit configs/llama8b_l18.yaml --gpu h100 --gpus 8 --for batch --vary batch=16..128 --vary memory=balanced,lean
    """
    from param_decomp_lab.config.write import refuse_taken
    from param_decomp_lab.probe.cards import MemoryPool, find_card
    from param_decomp_lab.probe.fit import FitRequest
    from param_decomp_lab.probe.fit import fit as search
    from param_decomp_lab.probe.fit import report as tell

    if minutes is not None and goal == "batch":
        raise UserError("--minutes: only a search --for speed can be cut short")
    MemoryPool.from_card(find_card(gpu), mem_fraction, margin_gib)
    written = out or config.with_name(f"{config.stem}_{Path(gpu).stem}x{gpus}.yaml")
    refuse_taken(written, "pd fit")
    limits = (("--mem-fraction", mem_fraction, MEM_FRACTION), ("--margin-gib", margin_gib, MARGIN_GIB))
    options = [word for name, value, usual in limits if value != usual for word in (name, str(value))]
    question = FitRequest(
        path=config,
        overrides=tuple(overrides or ()),
        gpu=gpu,
        n_gpus=gpus,
        per_node=min(gpus, gpus_per_node),
        options=tuple(options),
        goal=goal,
        minutes=float("inf") if minutes is None else minutes,
    )
    found = search(question, vary or (), PlainConsole(stderr=True))
    if not tell(question, found, written, PlainConsole()):
        raise typer.Exit(3)
