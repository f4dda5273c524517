"""What `pd graph` prints, and where it writes."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.progress import TextColumn, TimeElapsedColumn

from param_decomp_lab.graph.graph import FOLDER, Graph, Node, Optimized
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.schema.site_names import short_sites
from param_decomp_lab.ui.numbers import number, percent
from param_decomp_lab.ui.tables import plain_table

SHOWN = 20
"""Components that are printed."""
WIDEST = 34
"""Longest id that is not wrapped, in characters: with it the table has room in 80 columns."""


class ProgressLine:
    """A line that tells how far a graph is."""

    def __init__(self, console: Console, most: int) -> None:
        self._most = most
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = ProgressBar(*columns, console=console, transient=True)
        self._task = self._bar.add_task("reading the prompt")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def followed(self, components: int, left: float) -> None:
        ends = f"{percent(left)} of influence ends in others"
        self._say(f"followed {components:,} components (at most {self._most:,}); {ends}")

    def optimized(self, steps: int, of: int, firing: int) -> None:
        self._say(f"step {steps:,} of {of:,} of lowering importances; {firing:,} components fire")

    def _say(self, text: str) -> None:
        self._bar.update(self._task, description=text)


def graph_file(run_folder: Path, graph: Graph) -> Path:
    """Where a run's folder keeps a graph: under a name that follows from what it is about and how it was made."""
    about = graph.to_json() | {"nodes": None, "edges": None}
    about.pop("rests", None)
    about["outputs"] = [node.id for node in graph.outputs]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", graph.prompt.lower())[:40].strip("-") or "prompt"
    return run_folder / FOLDER / f"{words}-{digest}.json"


def show_graph(console: Console, graph: Graph) -> None:
    """Outputs, the components of largest influence, and what the graph covers."""
    outputs = plain_table("Outputs", ("output", "left"), ("probability", "right"), ("logit less mean", "right"))
    for node in graph.outputs:
        likely = percent(node.probability) if graph.token_ids else "–"
        outputs.add_row(f"'{graph.output_names[node.number]}'", likely, number(node.value))
    console.print(outputs)
    table = plain_table(
        "Components of largest influence",
        ("component", "wrap"), ("token", "wrap"), ("influence", "right"), ("λ", "right"), ("a", "right"),
        ("most to", "wrap"),
    )  # fmt: skip
    # An id in one piece can be copied. A long one takes more lines, as does every one on a narrow terminal, which would
    # cut it.
    short_ids = all(len(node.id) <= WIDEST for node in graph.components[:SHOWN])
    table.columns[0].no_wrap = short_ids and console.width >= 80
    short = short_sites(sorted({node.site for node in graph.components}))
    led_to: set[str] = set()
    for node in graph.components[:SHOWN]:
        leads = graph.out_of(node)
        led_to |= {leads[0][0].site} & {*short} if leads else set()
        table.add_row(
            node.id,
            _token(graph, node),
            percent(node.influence),
            number(node.importance),
            number(node.value),
            _brief(graph, leads[0][0], short) if leads else "",
        )
    console.print(table)
    if led_to:
        named = ", ".join(f"{short[site]} is {site}" for site in sorted(led_to))
        console.print(printable(f"Most to: the target of the largest edge; {named}."), highlight=False, markup=False)
    if graph.optimized is not None:
        _show_optimized(console, graph.optimized)
    shares = graph.shares
    n_components = len(graph.components)
    console.print(
        f"{graph.firing:,} components fire; {graph.followed:,} were followed back. The graph keeps {n_components:,} "
        f"of them, {len(graph.nodes):,} nodes in all, with {percent(shares.influence)} of influence, and "
        f"{len(graph.edges):,} edges, {percent(shares.edges)} of those between them.",
        highlight=False,
    )
    console.print(
        f"Influence ends in embeddings {percent(shares.embeddings)}, residual errors {percent(shares.rests)} (deltas "
        f"{percent(shares.deltas)}), biases {percent(shares.biases)}, components not followed "
        f"{percent(shares.not_followed)}. Replacement score {percent(graph.replacement_score)}, completeness score "
        f"{percent(graph.completeness_score)}.",
        highlight=False,
    )


def _show_optimized(console: Console, found: Optimized) -> None:
    what = "KL of the next token" if found.loss == "kl" else "squared change of the logits"
    table = plain_table(
        f"Optimised for this prompt: {what}, others at λ, at random, under attack",
        ("importances", "left"), ("fire", "right"), ("at λ", "right"), ("random", "right"), ("attack", "right"),
    )  # fmt: skip
    for name, firing, errors in (
        ("the run's", found.before, found.errors_before),
        ("optimised", found.after, found.errors_after),
    ):
        table.add_row(name, f"{firing:,}", number(errors.ci), number(errors.random), number(errors.attack))
    console.print(table)
    if found.step == 0:
        console.print("Nothing smaller stood all three: these are the run's own importances.")


def _token(graph: Graph, node: Node) -> str:
    """The token at a node's position."""
    return f"'{graph.tokens[node.position]}'" if 0 <= node.position < len(graph.tokens) else ""


def _brief(graph: Graph, node: Node, short: Mapping[str, str]) -> str:
    if node.kind == "output":
        return f"'{graph.output_names[node.number]}'"
    return f"{short.get(node.site, node.site)}:{node.number}@{node.position}"
