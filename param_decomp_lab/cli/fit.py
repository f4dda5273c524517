"""`pd fit`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Config, Gpu, Overrides
from param_decomp_lab.display.console import PlainConsole
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION


def fit(
    config: Config,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there are.", show_default=False)],
    gpu: Gpu = "b200",
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="What may be chosen; may be repeated.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The wrapper to write. Default: beside CONFIG, with the GPUs in its name.")
    ] = None,
    mem_fraction: Annotated[float, typer.Option(help="As in `pd probe`.")] = MEM_FRACTION,
    margin_gib: Annotated[float, typer.Option(help="As in `pd probe`.")] = MARGIN_GIB,
) -> None:
    """Find the best run of a configuration that fits on given GPUs, and write the configuration to start it with.

    What may be chosen: `--vary batch=64..2048` (doubling), `seq=512,2048`, `mesh=1x64x1,2x32x1` (replica x fsdp x
    tensor), `memory=plain,balanced,lean` (presets), or any key of the configuration, such as
    `memory.component_block=4096,8192`. Without it: 1 to 64 rows on each GPU, and the presets.

    Bisects the batch of every combination with `pd probe`, several at a time; what was asked before is in its cache,
    so an interrupted search continues where it was. Best is what takes most tokens in a step, then what is fastest.
    Written are a wrapper, its schema file under `torch/`, and a figure of all that was asked. The status is 3 when
    nothing fits.

    Examples:

        pd fit configs/llama8b_l18-26_9layer_chunkwise_seq2048.yaml --gpus 64

        pd fit configs/llama8b_l18.yaml --gpu h100 --gpus 8 --vary batch=16..128 --vary memory=balanced,lean
    """
    from param_decomp_lab.probe.cards import Pool, card
    from param_decomp_lab.probe.fit import FitRequest
    from param_decomp_lab.probe.fit import fit as search
    from param_decomp_lab.probe.fit import report as tell
    from param_decomp_lab.probe.write_config import refuse_taken

    Pool.from_card(card(gpu), mem_fraction, margin_gib)
    written = out or config.with_name(f"{config.stem}_{gpu}x{gpus}.yaml")
    refuse_taken(written)
    limits = (("--mem-fraction", mem_fraction, MEM_FRACTION), ("--margin-gib", margin_gib, MARGIN_GIB))
    options = [word for name, value, usual in limits if value != usual for word in (name, str(value))]
    question = FitRequest(config, tuple(overrides or ()), gpu, gpus, min(gpus, gpus_per_node), tuple(options))
    found = search(question, vary or (), PlainConsole(stderr=True))
    if not tell(question, found, written, PlainConsole()):
        raise typer.Exit(3)
