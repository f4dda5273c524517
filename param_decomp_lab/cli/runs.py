"""`pd runs`."""

from pathlib import Path
from typing import Annotated

import typer


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to search, some levels deep. Default: runs.", show_default=False),
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print them as JSON, with all digits.")] = False,
) -> None:
    """List runs, newest first: state, step, speed and main metrics. Reads no arrays.

    States: `waiting` (not yet started), `training`, `stopped` (can be resumed), `finished`, `imported`
    (`pd import` made it), `failed`, and `broken` for a folder that is not a complete run, with the reason.

    Examples:

        pd runs

        pd runs runs/sweep-1 /scratch/me/runs

        pd runs --json | jq '.[] | select(.state == "failed") | .folder'
    """
    from param_decomp_lab.runs.listing import find_runs, show_runs

    found = find_runs(folders or [Path("runs")])
    show_runs(found, as_json=json_out)
