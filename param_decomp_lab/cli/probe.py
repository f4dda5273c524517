"""`pd probe`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Gpu, Nodes, Overrides
from param_decomp_lab.errors import CannotTell
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION
from param_decomp_lab.ui.console import PlainConsole


def probe(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of a run, or recipe of a pretraining.")],
    gpu: Gpu = "b200",
    nodes: Nodes = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: 8, or the GPUs over --nodes.", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of pd.batch_size.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Instead of data.max_seq_len.")] = None,
    overrides: Overrides = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the answer to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw memory over the course of the step: a page, and a PNG beside it.")
    ] = None,
    mem_fraction: Annotated[float, typer.Option(help="Share of the GPU's memory that JAX may take.")] = MEM_FRACTION,
    margin_gib: Annotated[
        float, typer.Option(help="How much of it to leave for workspaces that XLA does not plan.")
    ] = MARGIN_GIB,
    quick: Annotated[bool, typer.Option("--quick", help="Compile the training step alone, at the real size.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep what was compiled, and use it again.")] = True,
) -> None:
    """Say what a run would need of GPUs that are not here, and whether it fits.

    Compiles the run's own programs for the GPUs: making the state, faithfulness warm-up, training step, evaluation,
    saving and restoring a checkpoint. Nothing is allocated. It needs no GPU and no weights, but some minutes, 5 GiB of
    RAM, and JAX's CUDA compiler: `pip install 'param-decomp[probe]'`.

    How long a step takes is predicted from what it computes and moves, at rates that such GPUs reach (docs/probe.md).

    The last line is the verdict. The status is 0 when the run fits, 3 when it does not, another when that is unknown.

    Examples:

        pd probe configs/llama8b_l18-26_9layer_chunkwise.yaml --gpu b200 --nodes 8 --gpus-per-node 8

        pd probe configs/llama8b_l18.yaml --quick --batch 64 --seq 512 --set memory.component_block=8192

        pd probe configs/llama8b_l18.yaml --gpu h100 --set mesh.fsdp=16 --json answer.json --html memory.html

        pd probe configs/ladder/bf16-scan.yaml --gpu a5000 --seq 512
    """
    from param_decomp_lab.probe.cache import cache_folder
    from param_decomp_lab.probe.cards import MemoryPool, find_card
    from param_decomp_lab.probe.command import probe as ask
    from param_decomp_lab.probe.command import write_json
    from param_decomp_lab.probe.pages import write_pages
    from param_decomp_lab.probe.show import show, table_console
    from param_decomp_lab.runs.output_file import check_output_file

    if json_file is not None:
        check_output_file(json_file, "--json")
    console = PlainConsole(stderr=True)
    card = find_card(gpu)
    pool = MemoryPool.from_card(card, mem_fraction, margin_gib)
    folder = cache_folder() if cache else None
    try:
        answer = ask(config, overrides or (), batch, seq, card, nodes, gpus_per_node, pool, folder, console, quick)
    except CannotTell as error:
        if json_file is not None:
            write_json({"verdict": "unknown", "why": str(error)}, json_file)
        raise
    if json_file is not None:
        write_json(answer.as_json(), json_file)
    if html is not None:
        write_pages(answer, html)
    show(answer, table_console())
    raise typer.Exit({"fits": 0, "does_not_fit": 3}[answer.verdict])
