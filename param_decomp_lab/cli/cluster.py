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
        float, typer.Option(help="Bits that a member costs where its group is active: more of them, smaller groups.")
    ] = 1.0,
    seeds: Annotated[int, typer.Option(help="Groupings to make and compare.")] = 3,
    min_density: Annotated[
        float, typer.Option(help="Keep components apart that fire at a smaller share of the sampled positions.")
    ] = 1e-4,
    draw: Annotated[
        float, typer.Option(help="Mean rank of the pairs that seeds after the first draw; 0: the best pair each time.")
    ] = 10.0,
) -> None:
    """Find the groups of components that act together, of one site or of many.

    Reads the positions at which a harvest has kept all that fires, and merges components as long as that makes the list
    of what is active shorter. A component fires above the threshold of the harvest: for another one, harvest with
    --threshold. Groups are kept in the harvest's folder, with all merges; of several seeds the grouping of least cost,
    and how far the others agree with it.

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
