"""`pd share`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from param_decomp_lab.cli.options import RunFolder
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole

if TYPE_CHECKING:
    from param_decomp_lab.share.readers import Reader

app = typer.Typer(no_args_is_help=True, help="Export a run for others to open: in other tools' formats, or as pages.")

Out = Annotated[Path, typer.Option(help="Folder to make.", show_default=False)]
Overwrite = Annotated[bool, typer.Option(help="Replace a folder that `pd share` has made.")]
HarvestedRun = Annotated[Path, typer.Argument(help="Run folder, or the folder of one of its harvests.")]
HarvestName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A harvest of the run. Default: the newest.", show_default=False)
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="For neuronpedia: the id of a model that is there. For sae-dashboard the default is the run's name.",
        show_default=False,
    ),
]

NO_MODEL = "Neuronpedia files everything under a model that it has: give its id, --model ID"


class GraphPage(StrEnum):
    circuit_tracer = "circuit-tracer"
    neuronpedia = "neuronpedia"


class BatchForm(StrEnum):
    sae_dashboard = "sae-dashboard"
    neuronpedia = "neuronpedia"
    circuit_tracer = "circuit-tracer"


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
            help="A group of nodes, by their ids in `pd browse`; may be repeated.",
            show_default=False,
        ),
    ] = None,
    clusters: Annotated[
        bool, typer.Option("--clusters", help="Make groups of what `pd cluster` has put together.")
    ] = False,
    page: Annotated[
        GraphPage | None,
        typer.Option(
            "--for",
            help="The page that opens them. Default: circuit-tracer, or neuronpedia with any of its options.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    features_url: Annotated[
        str,
        typer.Option(metavar="URL", help="For neuronpedia: where OUT/features will be hosted.", show_default=False),
    ] = "",
    source_set: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For neuronpedia: the source set into which the components of `pd share components` were uploaded.",
            show_default=False,
        ),
    ] = None,
    creator: Annotated[str, typer.Option(help="Who made the graphs.", show_default=False)] = "",
    overwrite: Overwrite = False,
) -> None:
    """Write attribution graphs for circuit-tracer's page, or for Neuronpedia's.

    OUT gets a file for each graph, `graph-metadata.json` with the list, and in `features/` a file for every component
    of the graphs that the harvest has: examples, and the tokens it raises and lowers. Labels are inside. For
    circuit-tracer, OUT is the data folder of its page.

    Examples:

        pd share graph runs/p-1a2b3c4d --out shared/graphs

        pd share graph runs/p-1a2b3c4d once-upon-a-time-1a2b3c4d --out shared/graphs --creator Ada

        pd share graph runs/p-1a2b3c4d --out shared/graphs --for neuronpedia --model my-llama --source-set pd

        pd share graph runs/p-1a2b3c4d --out shared/graphs --for neuronpedia --model my-llama --features-url
        https://example.org/features

        pd share graph runs/p-1a2b3c4d --out shared/graphs --group
        "vowels=layers.0.mlp.up_proj:3@1,layers.1.mlp.up_proj:7@2"
    """
    from param_decomp_lab.share.graphs import share_graphs

    console = PlainConsole()
    by_hand = dict(_hand_group(text) for text in group or ())
    if by_hand and clusters:
        raise UserError("--group and --clusters: give one of the two")
    reader = _reader(page, model, features_url, source_set)
    made = share_graphs(
        run, graphs or (), out, reader=reader, by_hand=by_hand, clusters=clusters, creator=creator, overwrite=overwrite,
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
    console.print(_next_step(reader, out), soft_wrap=True, highlight=False)


@app.command()
def components(
    run: HarvestedRun,
    out: Out,
    sites: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Sites; may be repeated. Default: all.")
    ] = None,
    form: Annotated[
        BatchForm,
        typer.Option(
            "--for",
            metavar="sae-dashboard|neuronpedia",
            help="neuronpedia: bodies of uploads to its API. sae-dashboard: as SAEDashboard writes them.",
        ),
    ] = BatchForm.sae_dashboard,
    model: Model = None,
    source_set: Annotated[str, typer.Option(help="Name of the source set: letters, digits, hyphens.")] = "pd",
    batch: Annotated[int, typer.Option(min=1, help="Components of a file; an upload takes up to 128.")] = 128,
    compressed: Annotated[bool, typer.Option("--gzip", help="Write `.json.gz`; not for uploads.")] = False,
    harvest: HarvestName = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the components of a harvest as Neuronpedia's batches of features, a source for each site.

    OUT/MODEL/SOURCE gets `batch-0.json`, `batch-1.json`, …, with the components that fire: density, the tokens they
    raise and lower, examples with λ of each token, and labels. For sae-dashboard there is a histogram of λ as well, and
    the labels are in `explanations.json`, with their authors. SOURCE is the site's layer number, which `pd share graph`
    has too, and the source set.

    Examples:

        pd share components runs/p-1a2b3c4d --out shared/components

        pd share components runs/p-1a2b3c4d --out shared/components --sites '*.down_proj' --model smollm2-135m --gzip

        pd share components runs/p-1a2b3c4d --out shared/uploads --for neuronpedia --model my-llama --source-set pd
    """
    from param_decomp_lab.share.components import Upload, share_components
    from param_decomp_lab.share.shared_run import open_shared, usable_name

    console = PlainConsole()
    shared = open_shared(run, harvest)
    if form is BatchForm.circuit_tracer:
        raise UserError("--for circuit-tracer: its page shows the components of graphs alone; use pd share graph")
    as_upload = form is BatchForm.neuronpedia
    if as_upload and model is None:
        raise UserError(NO_MODEL)
    name = model if model is not None else usable_name(shared.folder.name)
    upload = Upload(name, source_set, batch, compressed, "neuronpedia" if as_upload else "sae-dashboard")
    made = share_components(shared, out, upload, tuple(sites or ()), overwrite=overwrite, console=console)
    console.print(
        f"{out}: {made.features:,} components in {made.batches:,} batches of {made.sources:,} "
        f"source{'s'[: made.sources != 1]}, {made.labels:,} of them labelled",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    console.print(
        f"Neuronpedia needs a model {name} of {made.model_layers:,} layers or more, with a source set {source_set}",
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
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="Most examples in each list of a component's page. Default: all.", show_default=False),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an example. Default: all.", show_default=False)
    ] = None,
    harvest: HarvestName = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy pages of `pd browse` into a folder of HTML files, which need no server: open OUT/index.html, or publish OUT.

    The copy has the run's page, its sites, the chosen components, their groups, and graphs. Pages that are not
    copied are not linked. Labels are shown with their authors.

    Examples:

        pd share site runs/p-1a2b3c4d --out shared/site

        pd share site runs/p-1a2b3c4d --out shared/site --components layers.3.mlp.down_proj:1,2,17 --components
        layers.3.mlp.up_proj:5

        pd share site runs/p-1a2b3c4d --out shared/site --graphs once-upon-a-time-1a2b3c4d --most 100 --overwrite

        pd share site runs/p-1a2b3c4d --out shared/small --most 50 --examples 3 --context 20
    """
    from param_decomp_lab.share.shared_run import open_shared
    from param_decomp_lab.share.site import share_site

    console = PlainConsole()
    shared = open_shared(run, harvest)
    made = share_site(
        shared, out, components or (), graphs or (), most, examples, context, overwrite=overwrite, console=console
    )  # fmt: skip
    console.print(
        f"{out}: {made.pages:,} pages with {made.components:,} components, {made.graphs:,} "
        f"graph{'s'[: made.graphs != 1]} and {made.groups:,} group{'s'[: made.groups != 1]}; open index.html",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _reader(page: GraphPage | None, model: str | None, features_url: str, source_set: str | None) -> "Reader":
    """The page that `--for` names, or whose options are there."""
    from param_decomp_lab.share.readers import CircuitTracer, Neuronpedia

    given = [
        option
        for option, value in (
            ("--model", model),
            ("--features-url", features_url or None),
            ("--source-set", source_set),
        )
        if value is not None
    ]
    if page is GraphPage.circuit_tracer and given:
        raise UserError(f"{given[0]} is for Neuronpedia's page: leave it out, or give --for neuronpedia")
    if page is not GraphPage.neuronpedia and not given:
        return CircuitTracer()
    if model is None:
        raise UserError(NO_MODEL)
    return Neuronpedia(model, features_url, source_set or "")


def _next_step(reader: "Reader", out: Path) -> str:
    from param_decomp_lab.share.readers import Neuronpedia

    if not isinstance(reader, Neuronpedia):
        return f"circuit-tracer shows them: circuit-tracer start-server --graph_file_dir {out}"
    said = f"Neuronpedia shows them under its model {reader.model}, which must be there before the upload"
    if reader.source_set:
        return f"{said}; examples come from its source set {reader.source_set}"
    if reader.features_url:
        return f"{said}; examples come from {reader.features_url}, which must allow requests from other sites (CORS)"
    return f"{said}; without --features-url or --source-set it has no examples"


def _hand_group(text: str) -> tuple[str, list[str]]:
    """Name and node ids, from ``NAME=NODE,NODE``."""
    name, equals, members = text.partition("=")
    ids = [member.strip() for member in members.split(",") if member.strip()]
    if not (name.strip() and equals and ids):
        raise UserError(f"--group {text}: should be NAME=NODE,NODE such as vowels=layers.0.mlp.up_proj:3@1")
    return name.strip(), ids
