"""`pd graph`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Devices, RunFolder, Step


def graph(
    run: RunFolder,
    prompt: Annotated[
        str | None,
        typer.Argument(help="A text; for a toy, its active features, such as '3 7=0.5'.", show_default=False),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="Follow this output; may be repeated. Default: the most likely tokens, to 95 % of probability.",
            show_default=False,
        ),
    ] = None,
    position: Annotated[int, typer.Option(help="Position of the output, from 0; -1 is the last token.")] = -1,
    threshold: Annotated[float, typer.Option(help="A component fires where λ is above it.")] = 0.0,
    optimize: Annotated[
        bool,
        typer.Option("--optimize", help="First lower the importances for this prompt as far as its output allows."),
    ] = False,
    loss: Annotated[
        str,
        typer.Option(help="What --optimize keeps: kl (the distribution of the next token), or logit (of --target)."),
    ] = "kl",
    allowed: Annotated[
        float, typer.Option(help="With --optimize: allowed error, as a multiple of that of the run's own importances.")
    ] = 1.0,
    optimize_steps: Annotated[int, typer.Option(min=1, help="Steps of --optimize.")] = 400,
    nodes: Annotated[float, typer.Option(help="Share of the influence that the kept nodes have.")] = 0.8,
    edges: Annotated[float, typer.Option(help="Share of the edges' scores that the kept edges have.")] = 0.98,
    most_nodes: Annotated[int, typer.Option(min=1, help="Largest number of nodes.")] = 2000,
    follow: Annotated[int, typer.Option(min=1, help="Largest number of components to follow back.")] = 2000,
    dataset: Annotated[
        bool, typer.Option("--dataset", help="Average over rows of the run's harvest, in place of following a prompt.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="With --dataset: rows to read.")] = 64,
    largest: Annotated[int, typer.Option(min=1, help="With --dataset: edges to keep for each component.")] = 20,
    least_firings: Annotated[
        int, typer.Option(min=1, help="With --dataset: leave out components that fire less often in the harvest.")
    ] = 10,
    step: Step = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write. Default: a new one in RUN/graphs.", show_default=False)
    ] = None,
    devices: Devices = None,
    moved: Annotated[
        Path | None,
        typer.Option("--weights", help="Folder with the target's weights, if it has moved.", show_default=False),
    ] = None,
) -> None:
    """Follow a prediction back: which components it comes from, at which tokens, and through which other components.

    An edge is a direct effect: what a component adds to an activation or a logit without passing through another
    component. The nodes of largest influence are followed first, and the graph is pruned to those that carry most of
    it. The output reports what was pruned. The graph is written as JSON, which `Graph.load` reads and `pd browse`
    shows.

    The CI function gives importances that serve every text. `--optimize` lowers them for this prompt alone, as long as
    the prediction stays as near to the model's as before, with the other components at random and under attack too.
    The graph then has far fewer nodes.

    `--dataset` averages over text in place of following one prompt: which components lead to which. The averages are
    kept beside the run's harvest, and shown on the pages of components.

    Examples:

        pd graph runs/p-1a2b3c4d "The capital of France is"

        pd graph runs/p-1a2b3c4d "The capital of France is" --target " Paris" --nodes 0.9

        pd graph runs/p-1a2b3c4d "The capital of France is" --optimize

        pd graph runs/p-1a2b3c4d --dataset --rows 256

        pd graph runs/p-5e6f7a8b "3=0.75" --target 3
    """
    from param_decomp_lab.errors import UserError
    from param_decomp_lab.graph.show import ProgressLine, graph_file, show_graph
    from param_decomp_lab.opening import load_run
    from param_decomp_lab.runs.output_file import check_output_file
    from param_decomp_lab.ui.console import PlainConsole

    console = PlainConsole()
    if dataset == (prompt is not None):
        raise UserError("give a prompt, or --dataset for averages over the run's harvest")
    if out is not None:
        if dataset:
            raise UserError("--out: averages are kept beside the harvest")
        check_output_file(out, "--out")
    opened = load_run(run, step, devices=devices, target=moved)
    if dataset:
        from param_decomp_lab.graph.averages import AverageRequest, average_attributions
        from param_decomp_lab.graph.show_averages import AveragesBar, show_averages

        with AveragesBar(PlainConsole(stderr=True)) as bar:
            averages = average_attributions(opened, opened.harvest, AverageRequest(rows, largest, least_firings), bar)
        show_averages(console, averages)
        console.print(str(averages.folder), highlight=False, soft_wrap=True)
        return
    how = {"loss": loss, "allowed": allowed, "steps": optimize_steps} if optimize else False
    with ProgressLine(PlainConsole(stderr=True), follow) as progress:
        found = opened.graph(
            prompt, target or None, position=position, threshold=threshold, nodes_share=nodes, edges_share=edges,
            most_nodes=most_nodes, most_followed=follow, optimize=how, progress=progress,
        )  # fmt: skip
    file = out if out is not None else graph_file(opened.folder, found)
    found.save(file)
    show_graph(console, found)
    console.print(str(file), highlight=False, soft_wrap=True)
