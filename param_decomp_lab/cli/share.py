"""`pd share`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import RunFolder
from param_decomp_lab.display.console import PlainConsole
from param_decomp_lab.errors import UserError

app = typer.Typer(no_args_is_help=True, help="What others can open of a run: in other tools' formats, or as pages.")

Out = Annotated[Path, typer.Option(help="Folder to make.", show_default=False)]
Overwrite = Annotated[bool, typer.Option(help="Replace a folder that `pd share` has made.")]
HarvestedRun = Annotated[Path, typer.Argument(help="Run folder, or the folder of one of its harvests.")]
HarvestName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A harvest of the run. Default: the newest.", show_default=False)
]


@app.command()
def graph(
    run: RunFolder,
    graphs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GRAPH]...",
            help="Names of graphs in RUN/graphs, or files. Default: all in RUN/graphs.",
            show_default=False,
        ),
    ] = None,
    *,
    out: Out,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NODE,NODE,…",
            help="A group of nodes, by their ids in `pd browse`; may be repeated. Default: those of `pd cluster`.",
            show_default=False,
        ),
    ] = None,
    creator: Annotated[str, typer.Option(help="Who made the graphs.", show_default=False)] = "",
    features_url: Annotated[
        str, typer.Option(metavar="URL", help="Where OUT/features will be hosted.", show_default=False)
    ] = "",
    overwrite: Overwrite = False,
) -> None:
    """Write attribution graphs in the format of circuit-tracer, which Neuronpedia's graph page reads as well.

    OUT gets a file for each graph, `graph-metadata.json` with the list, and in `features/` a file for every component
    of the graphs that the harvest has: examples, and the tokens it raises and lowers. Labels are inside.

    Examples:

        pd share graph runs/p-1a2b3c4d --out shared/graphs

        pd share graph runs/p-1a2b3c4d once-upon-a-time-1a2b3c4d --out shared/graphs --creator Ada

        pd share graph runs/p-1a2b3c4d --out shared/graphs --group
        "vowels=layers.0.mlp.up_proj:3@1,layers.1.mlp.up_proj:7@2"
    """
    from param_decomp_lab.share.graphs import share_graphs

    console = PlainConsole()
    by_hand = dict(_hand_group(text) for text in group or ())
    made = share_graphs(
        run, graphs or (), out, by_hand=by_hand, creator=creator, features_url=features_url, overwrite=overwrite,
        console=console,
    )  # fmt: skip
    for step in made.without_harvest:
        console.print(
            f"no harvest of step {step}: its graphs have no feature files; make one with "
            f"`pd harvest {run} --step {step}`",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    console.print(
        f"{out}: {made.graphs:,} graph{'s'[: made.graphs != 1]} with {made.nodes:,} nodes and {made.links:,} links, "
        f"{made.feature_files:,} feature files",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


@app.command()
def components(
    run: HarvestedRun,
    out: Out,
    sites: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Sites; may be repeated. Default: all.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Neuronpedia's id of the model. Default: the run's name.", show_default=False)
    ] = None,
    source_set: Annotated[str, typer.Option(help="Ends the names of the source sets.")] = "pd",
    batch: Annotated[int, typer.Option(min=1, help="Components of a file.")] = 128,
    compressed: Annotated[bool, typer.Option("--gzip", help="Write `.json.gz`.")] = False,
    harvest: HarvestName = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the components of a harvest as Neuronpedia's batches of features, a source for each site.

    OUT/MODEL/SOURCE gets `batch-0.json`, `batch-1.json`, …, with the components that fire: density, a histogram of λ,
    the tokens they raise and lower, examples with λ of each token, and labels with their authors.

    Examples:

        pd share components runs/p-1a2b3c4d --out shared/components

        pd share components runs/p-1a2b3c4d --out shared/components --sites '*.down_proj' --model smollm2-135m --gzip
    """
    from param_decomp_lab.share.dashboards import Upload, share_components
    from param_decomp_lab.share.shared_run import open_shared, usable_name

    console = PlainConsole()
    shared = open_shared(run, harvest)
    upload = Upload(model if model is not None else usable_name(shared.folder.name), source_set, batch, compressed)
    made = share_components(shared, out, upload, tuple(sites or ()), overwrite=overwrite, console=console)
    console.print(
        f"{out}: {made.features:,} components in {made.batches:,} batches of {made.sources:,} "
        f"source{'s'[: made.sources != 1]}, {made.labels:,} of them labelled",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


@app.command()
def site(
    run: HarvestedRun,
    out: Out,
    components: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE:1,2,3",
            help="Components; may be repeated. Default: those of the graphs, then those of largest mean λ.",
            show_default=False,
        ),
    ] = None,
    graphs: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A graph in RUN/graphs; may be repeated. Default: all.", show_default=False),
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Components of the default choice.")] = 300,
    harvest: HarvestName = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy pages of `pd browse` into a folder of HTML files, which need no server: open OUT/index.html, or publish OUT.

    The copy has the run's page, its sites, the chosen components, their groups, and graphs. What is not in it is not
    linked. Labels are shown with their authors.

    Examples:

        pd share site runs/p-1a2b3c4d --out shared/site

        pd share site runs/p-1a2b3c4d --out shared/site --components layers.3.mlp.down_proj:1,2,17 --components
        layers.3.mlp.up_proj:5

        pd share site runs/p-1a2b3c4d --out shared/site --graphs once-upon-a-time-1a2b3c4d --most 100 --overwrite
    """
    from param_decomp_lab.share.shared_run import open_shared
    from param_decomp_lab.share.site import share_site

    console = PlainConsole()
    shared = open_shared(run, harvest)
    made = share_site(
        shared, out, components or (), graphs or (), most, overwrite=overwrite, console=console
    )  # fmt: skip
    console.print(
        f"{out}: {made.pages:,} pages with {made.components:,} components, {made.graphs:,} "
        f"graph{'s'[: made.graphs != 1]} and {made.groups:,} group{'s'[: made.groups != 1]}; open index.html",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _hand_group(text: str) -> tuple[str, list[str]]:
    """Name and node ids, from ``NAME=NODE,NODE``."""
    name, equals, members = text.partition("=")
    ids = [member.strip() for member in members.split(",") if member.strip()]
    if not (name.strip() and equals and ids):
        raise UserError(f"--group {text}: should be NAME=NODE,NODE such as vowels=layers.0.mlp.up_proj:3@1")
    return name.strip(), ids
