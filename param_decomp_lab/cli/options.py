"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="Wrapper YAML of a run.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one key, e.g. `--set pd.steps=100`; may be repeated."),
]
Step = Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest.", show_default=False)]
Devices = Annotated[
    int | None,
    typer.Option(min=1, help="Devices to split over. Default: one, if it is large enough.", show_default=False),
]
TargetFolder = Annotated[
    Path | None, typer.Option(help="Folder with the target's weights, if it has moved.", show_default=False)
]

# ---- several processes ----

Coordinator = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Address at which process 0 of several listens.", show_default=False),
]
ProcessCount = Annotated[
    int | None, typer.Option(min=1, help="Number of processes; 1 even in a Slurm job.", show_default=False)
]
ProcessNumber = Annotated[int | None, typer.Option(min=0, help="Number of this process, from 0.", show_default=False)]

# ---- GPUs that are not here ----

Gpu = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE.csv",
        help="b200, gb200, b300, h200, h100, a100_80, a6000, a5000, l40s, rtx5090, rtx4090, or a file that describes "
        "another card.",
    ),
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Default: as many as the mesh takes.")]
