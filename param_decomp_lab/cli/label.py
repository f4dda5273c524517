"""`pd label`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from param_decomp_lab.cli.options import Step

DEFAULT_ADDRESS = "https://api.openai.com/v1"


def label(
    run: Annotated[Path, typer.Argument(help="Run folder, or that of one of its harvests.")],
    model: Annotated[str, typer.Option(help="The model to ask, as its server knows it.", show_default=False)],
    price_in: Annotated[
        float,
        typer.Option(min=0, help="Dollars per million tokens of prompts; 0 if it costs nothing.", show_default=False),
    ],
    price_out: Annotated[float, typer.Option(min=0, help="Dollars per million tokens of answers.", show_default=False)],
    base_url: Annotated[
        str, typer.Option(help="Address of a server that speaks OpenAI's wire format.")
    ] = DEFAULT_ADDRESS,
    key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the server's key.")
    ] = "OPENAI_API_KEY",
    max_cost: Annotated[
        float, typer.Option(min=0, help="Most dollars to spend on this run, earlier commands included.")
    ] = 1.0,
    sites: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Sites; may be repeated. Default: all.")
    ] = None,
    min_density: Annotated[float, typer.Option(help="Leave out components of a smaller density.")] = 0.0,
    max_density: Annotated[
        float, typer.Option(help="Leave out components of a larger density; 0.5 leaves out those that always fire.")
    ] = 1.0,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of components, labelled ones included.", show_default=False),
    ] = None,
    by: Annotated[
        Literal["density", "importance"],
        typer.Option(help="Begin with components of largest density, or of largest mean λ."),
    ] = "density",
    replace: Annotated[
        Literal["none", "models", "all"], typer.Option(help="Labels to replace: none, those of models, or all.")
    ] = "none",
    score: Annotated[bool, typer.Option("--score", help="Judge labels instead of giving them.")] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="detection, fuzzing or intruder; may be repeated. Default: all.", show_default=False),
    ] = None,
    texts: Annotated[
        int, typer.Option(min=2, max=200, help="Texts of each class to judge, for each component and score.")
    ] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the choice of texts to judge.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Requests in flight at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer; models that think first need more.")] = 400,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Default: the server's.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds to wait for an answer.")] = 120.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Repeat questions that got no usable answer.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print one prompt and the cost of all; ask nothing.")
    ] = False,
    step: Step = None,
) -> None:
    """Have a language model say what components do, or judge how well such labels fit.

    The model reads texts in which the component fires, its numbers and its tokens, all from the run's newest harvest.
    Labels appear in `pd browse`, with the model as their author. Labelled components are skipped; a person's label
    stays unless --replace all. This needs the package `openai` (`pip install 'param-decomp[label]'`) and a key in the
    environment.

    With --score, a model judges labels by using them: to tell positions at which the component fires from others
    (detection), and right marks from wrong ones (fuzzing). A third score needs no label: which of five texts does not
    belong (intruder)?

    Every request is written down with its answer and cost. Rerun the same command to resume after a stop (Ctrl-C,
    SIGTERM: status 75) or a kill: nothing is asked twice, and never more than --max-cost is spent.

    Examples:

        pd label runs/p-1a2b3c4d --model gpt-5-mini --price-in 0.25 --price-out 2 --limit 200 --dry-run

        pd label runs/p-1a2b3c4d --model gpt-5-mini --price-in 0.25 --price-out 2 --max-tokens 2000 --max-cost 3

        OPENAI_API_KEY=none pd label runs/p-1a2b3c4d --base-url http://localhost:8000/v1 --model my-model --price-in 0
        --price-out 0 --sites '*.down_proj'

        pd label runs/p-1a2b3c4d --score --model gpt-5-mini --price-in 0.25 --price-out 2 --texts 20 --max-cost 6
    """
    from param_decomp_lab.label.choose import Selection
    from param_decomp_lab.label.command import label as give_labels
    from param_decomp_lab.label.endpoint import Endpoint, read_key
    from param_decomp_lab.label.estimate import dry_run as estimate
    from param_decomp_lab.label.money import Prices
    from param_decomp_lab.label.place import find_run
    from param_decomp_lab.label.score_command import ScoreRequest, kinds_named
    from param_decomp_lab.label.score_command import score as give_scores
    from param_decomp_lab.label.session import Request
    from param_decomp_lab.processes.stop_signal import STOPPED, StopSignal
    from param_decomp_lab.ui.console import PlainConsole

    console = PlainConsole()
    prices = Prices(price_in, price_out)
    key = "" if dry_run else read_key(key_env)
    endpoint = Endpoint(base_url, model, prices, max_tokens, timeout, temperature, key)
    selection = Selection(tuple(sites or ()), min_density, max_density, limit, by)
    request = Request(selection, max_cost, parallel, replace, retry_failed)
    wanted = ScoreRequest(kinds_named(kind or ()), texts, seed) if score else None
    labelled = find_run(run, step)
    if dry_run:
        estimate(labelled, endpoint, request, wanted, console)
        return
    with StopSignal().listening() as stop:
        stop.must_save()
        if wanted is None:
            ended = give_labels(labelled, endpoint, request, console, stop)
        else:
            ended = give_scores(labelled, endpoint, request, wanted, console, stop)
    if ended == "stopped":
        console.print("stopped; run the same command again to continue", highlight=False)
        raise typer.Exit(STOPPED)
    if ended == "cap":
        raise typer.Exit(1)
