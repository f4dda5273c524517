"""`pd wandb`."""

import typer

from param_decomp_lab.cli.options import RunFolder
from param_decomp_lab.ui.console import PlainConsole


def send(run: RunFolder) -> None:
    """Send the missing rows of a run to wandb, if the run could not reach it or was killed before all was sent.

    Project, id and group are those of the run; rows that wandb already has are not sent again. Do not use it on a run
    that is still training, which sends its rows itself. The status is 1 when wandb cannot be reached.

    Examples:

        pd wandb runs/p-1a2b3c4d

        WANDB_BASE_URL=https://wandb.example.org pd wandb runs/p-1a2b3c4d
    """
    from param_decomp_lab.tracking.wandb_sink import send_to_wandb

    if not send_to_wandb(run, PlainConsole()):
        raise typer.Exit(1)
