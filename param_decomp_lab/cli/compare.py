"""`pd compare`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.ui.console import wide_console


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders with runs some levels below.", show_default=False)
    ],
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement", help="Also match the components of runs that differ by their seeds (opens checkpoints)."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("comparison.html"),
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON, with all digits, in place of tables.")] = False,
) -> None:
    """Compare runs: a table here, and a page with fronts, differences, seeds and curves.

    Each run is one point: its KL under several masks against the number of components that fire (L0). Runs that no
    other run beats are marked. Of the configuration, only keys in which the runs differ are shown. Runs that differ
    only by their seeds give error bars. Broken, failed and unfinished runs are listed, but are on no front.

    `--agreement` says whether runs found the same components: the mean cosine of components matched one to one, beside
    that of random directions.

    Examples:

        pd compare runs/sweeps/2026-01-31

        pd compare runs/p-1a2b3c4d runs/p-5e6f7a8b --agreement --out seeds.html

        pd compare runs --json | jq '.fronts'
    """
    from param_decomp_lab.compare.command import as_json, compare_runs, show

    console = wide_console()
    found = compare_runs(
        runs,
        agreement,
        out,
        lambda what: None if json_out else console.print(f"{what} …", highlight=False, soft_wrap=True),
    )
    if json_out:
        print(as_json(found))
        return
    show(found, console)
    console.print(str(out), highlight=False, soft_wrap=True)
