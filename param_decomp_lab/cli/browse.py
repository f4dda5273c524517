"""`pd browse`."""

from pathlib import Path
from typing import Annotated

import typer


def browse(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, folders of runs, or harvests. Default: this folder."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: 8720, or the next free one.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the address in a browser.")] = False,
) -> None:
    """Show the components of harvested runs in a browser.

    Every site has a list and a map of its components. Every component has a page: where it fires, on which tokens, with
    which others, and what the network predicts there. A text box shows what fires in a text of yours. Two runs of the
    same target can be put side by side, with their components matched.

    Your labels are kept beside the harvests, and graphs that you keep with the run's; nothing else is written there.
    Only this machine can see the pages, unless --host says otherwise. For a run on a remote machine:
    ssh -L 8720:localhost:8720 MACHINE, and open http://localhost:8720 here.

    Examples:

        pd browse

        pd browse runs/p-1a2b3c4d --open

        pd browse runs/p-1a2b3c4d runs/p-5e6f7a8b

        pd browse runs /scratch/me/runs --port 9000
    """
    from param_decomp_lab.browse.listen import listen

    listen(folders or [Path(".")], host, port, open_browser)
