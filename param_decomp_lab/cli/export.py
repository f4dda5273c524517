"""`pd export`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import RunFolder, Step
from param_decomp_lab.display.console import PlainConsole


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    step: Step = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that this command made.")] = False,
) -> None:
    """Write what a run learned as safetensors: V and U of every site, and the causal importance function.

    With them come `description.json` (sites, shapes, versions, the whole configuration) and a README that says how to
    read it all with NumPy and safetensors alone. Beyond 4 GB there are several files with an index. The arrays go from
    file to file, piece by piece, so a machine with little memory will do.

    Examples:

        pd export runs/p-1a2b3c4d --out exported/my-llama

        pd export runs/p-1a2b3c4d --step 20000 --out exported/my-llama-20000 --overwrite
    """
    from param_decomp_lab.export import export_run

    slots = export_run(run, out, step, overwrite=overwrite)
    files = len({slot.file for slot in slots.values()})
    PlainConsole().print(
        f"{out}: {len(slots)} tensors in {files} file{'s'[: files > 1]}; README.md says how to read them",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
