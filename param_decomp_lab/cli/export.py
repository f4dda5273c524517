"""`pd export`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from param_decomp_lab.cli.options import RunFolder, Step
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    step: Step = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that this command made.")] = False,
    edit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE:NUMBER",
            help="Write the target with this component scaled; may be repeated.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[float, typer.Option(help="With --edit: what the components are multiplied by.")] = 0.0,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="With --edit: show what comes next, before and after; may be repeated.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --edit: held-out rows on which to measure the KL.")] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --edit: float32 or bfloat16. Default: the target's.", show_default=False),
    ] = None,
) -> None:
    """Write what a run learned as safetensors: V and U of every site, and the causal importance function.

    With them come `description.json` (sites, shapes, versions, the whole configuration) and a README that says how to
    read it all with NumPy and safetensors alone. Beyond 4 GB there are several files with an index. The arrays go from
    file to file in pieces, so a machine with little memory will do.

    With --edit it writes the target itself instead, in the layout of Hugging Face, with some components removed (or
    multiplied by --scale), and says how far that moves its predictions on held-out text.

    Examples:

        pd export runs/p-1a2b3c4d --out exported/my-llama

        pd export runs/p-1a2b3c4d --step 20000 --out exported/my-llama-20000 --overwrite

        pd export runs/p-1a2b3c4d --out edited --edit layers.3.mlp.down_proj:17 --prompt "Once upon a time"
    """
    if edit:
        _edit(run, out, step, tuple(edit), scale, tuple(prompt or ()), rows, dtype, overwrite)
        return
    if prompt or dtype is not None or scale != 0.0:
        raise UserError("--prompt, --scale and --dtype go with --edit")
    from param_decomp_lab.export import export_run

    slots = export_run(run, out, step, overwrite=overwrite)
    files = len({slot.file for slot in slots.values()})
    PlainConsole().print(
        f"{out}: {len(slots)} tensors in {files} file{'s'[: files > 1]}; README.md says how to read them",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _edit(
    run: Path,
    out: Path,
    step: int | None,
    components: tuple[str, ...],
    scale: float,
    prompts: tuple[str, ...],
    rows: int,
    dtype: str | None,
    overwrite: bool,
) -> None:
    from param_decomp_lab.export.edit import EDIT_FILE, edit_table, export_edited
    from param_decomp_lab.folders import refuse_existing
    from param_decomp_lab.opening import load_run
    from param_decomp_lab.ui.numbers import number
    from param_decomp_lab.weights.dtypes import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} should be one of {', '.join(DTYPES)}")
    refuse_existing(out, marker=EDIT_FILE, overwrite=overwrite)
    opened = load_run(run, step)
    kind: Any = dtype
    edit = export_edited(
        opened, components, scale, out, dtype=kind, rows=rows, prompts=prompts, overwrite=overwrite
    )  # fmt: skip
    console = PlainConsole()
    for table in edit_table(edit):
        console.print(table)
    n = sum(map(len, edit.components.values()))
    moved = "" if edit.kl is None else f"; KL from the original {number(edit.kl)} nats on {edit.rows} held-out rows"
    console.print(f"{out}: {n} component{'s'[: n > 1]} times {scale:g}{moved}", soft_wrap=True, highlight=False)
