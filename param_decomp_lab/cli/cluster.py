"""`pd cluster`."""

from pathlib import Path
from typing import Annotated

import typer


def cluster(
    run: Annotated[Path, typer.Argument(help="Run folder, or the folder of one of its harvests.")],
    harvest: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A harvest of the run. Default: the newest.", show_default=False),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(help="Cost in bits of a member where its group is active. A larger cost gives smaller groups."),
    ] = 1.0,
    seeds: Annotated[int, typer.Option(help="How many groupings to make and compare.")] = 3,
    min_density: Annotated[
        float,
        typer.Option(
            help="Leave out components that fire at a smaller share of the sampled positions; each stays alone."
        ),
    ] = 1e-4,
    draw: Annotated[
        float, typer.Option(help="Mean rank of the pairs that later seeds merge; 0: always the best pair.")
    ] = 10.0,
) -> None:
    """Find the groups of components that act together, of one site or of many.

    Components are merged as long as that shortens the description of what is active at the positions that a harvest
    has sampled. A component fires above the threshold of the harvest; for another threshold, harvest with --threshold.
    The groups and all merges are kept in the harvest's folder. With several seeds, the cheapest grouping is kept, and
    how far the others agree with it.

    `pd browse` shows them, and `load_run(RUN).groups` reads them.

    Examples:

        pd cluster runs/p-1a2b3c4d

        pd cluster runs/p-1a2b3c4d --alpha 0.25 --min-density 0.001 --seeds 5

        pd cluster runs/p-1a2b3c4d --harvest step-20000-1a2b3c4d --draw 3
    """
    from param_decomp_lab.cluster.cluster import cluster as find
    from param_decomp_lab.cluster.request import ClusterRequest
    from param_decomp_lab.cluster.tables import print_groups
    from param_decomp_lab.harvest.files import chosen_harvest
    from param_decomp_lab.ui.console import PlainConsole

    console = PlainConsole()
    request = ClusterRequest(alpha, seeds, min_density, draw)
    groups = find(chosen_harvest(run, harvest), request, console)
    print_groups(groups, console)
    console.print(str(groups.folder), highlight=False, soft_wrap=True)
