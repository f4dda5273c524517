"""`pd claim`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Devices, RunFolder, Step, TargetFolder


def claim(
    run: RunFolder,
    components: Annotated[
        list[str],
        typer.Argument(metavar="COMPONENT", help="SITE:NUMBER, or group:NUMBER of `pd cluster`.", show_default=False),
    ],
    after: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT",
            help="The text in front of the token; may be repeated. Anything may come before it, and it may be split "
            "into tokens in any way.",
            show_default=False,
        ),
    ],
    token: Annotated[
        str, typer.Option(metavar="TOKEN", help="The token that comes next, such as ' by'.", show_default=False)
    ],
    scale: Annotated[
        list[float] | None,
        typer.Option(help="Multiply the components by this; may be repeated. 0 takes them out.", show_default="0"),
    ] = None,
    controls: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="As controls, draw N times as many other components of the same sites that fire after the text.",
        ),
    ] = 0,
    exceptions: Annotated[
        bool,
        typer.Option(
            "--exceptions", help="List places after the text at which the token does not fall, 1,000 at most."
        ),
    ] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows to read, from the first on. Default: up to 4,096.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of token data to test on. Default: the rows that the run holds out for its evaluation.",
            show_default=False,
        ),
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON, with all digits, in place of a table.")] = False,
    step: Step = None,
    devices: Devices = None,
    target: TargetFolder = None,
) -> None:
    """Test a claim on held-out text: after TEXT, these components speak for TOKEN.

    Each component is taken out alone, then all of them together, at every token, in the otherwise intact network. The
    Markdown table has the token's mean probability with and without them, the share of the places at which it falls,
    and the mean change of its log-probability, in nats, with a 95 % interval over rows (bootstrap): after the text, and
    elsewhere.

    A change that may be rounding does not count as a fall. The line below the table says how large it may be: twice
    what changing the masks of these sites by one unit in the last place does.

    A control takes out as many other components of the same sites, drawn in proportion to how often they fire at the
    places after the text; its line is a mean over the draws.

    `--exceptions` is about all components together, at the first `--scale`; with one above 1, it lists the places at
    which the token does not rise.

    Examples:

        pd claim runs/p-1a2b3c4d layers.2.mlp.down_proj:18 --after " rais" --token ed

        pd claim runs/p-1a2b3c4d layers.2.mlp.down_proj:18 layers.3.mlp.down_proj:3 --after " rais" --token ed
        --controls 5 --exceptions

        pd claim runs/p-1a2b3c4d layers.2.mlp.down_proj:44 --after ed --after own --token " by" --scale 0 --scale 2

        pd claim runs/p-1a2b3c4d layers.2.mlp.down_proj:18 --after " rais" --token es --rows 128 --json

        pd claim runs/p-1a2b3c4d layers.2.mlp.down_proj:18 --after " rais" --token ed --data data/other/eval
    """
    from param_decomp_lab.opening import load_run
    from param_decomp_lab.opening.claim import ClaimRequest, measure_claim
    from param_decomp_lab.ui.console import PlainConsole
    from param_decomp_lab.ui.progress import progress

    opened = load_run(run, step, devices=devices, target=target)
    request = ClaimRequest(components, after, token, scale or (0.0,), controls, rows, data=data)
    with progress(PlainConsole(stderr=True)) as report:
        found = measure_claim(opened, request, report)
    if json_out:
        print(found.as_json())
        return
    console = PlainConsole()
    for line in found.markdown():
        console.print(line, highlight=False, soft_wrap=True)
    console.print("")
    for line in found.notes():
        console.print(line, highlight=False, soft_wrap=True)
    if not exceptions:
        return
    moves = "rise" if request.scales[0] > 1 else "fall"
    n, places = found.n_exceptions, found.lines[0].here.places
    listed = f", the first {len(found.exceptions):,}" if len(found.exceptions) < n else ""
    console.print(
        f"\n{n:,} of {places:,} places at which it does not {moves}{listed}{':' if n else ''}", highlight=False
    )
    for place in found.exceptions:
        where = f"row {place.row}, token {place.position}"
        console.print(f"{where}: {place.before:.3f} → {place.after:.3f}  {place.text}", highlight=False, soft_wrap=True)
