"""What `pd graph --dataset` prints."""

from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from param_decomp_lab.harvest.files import Averages
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import plain_table

SHOWN = 20


class AveragesBar:
    """A bar over the targets whose incoming edges are computed; call it as `averages.py:Progress`."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        )
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task = self._bar.add_task("reading the harvest's rows", total=1)

    def __enter__(self) -> "AveragesBar":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, site: str) -> None:
        self._bar.update(self._task, description=f"edges into {site}", completed=done, total=total)


def show_averages(console: Console, averages: Averages) -> None:
    """The edges of largest absolute weight, and how much there is."""
    edges, named = averages.table, averages.index.named
    target, source, weight = (edges[name].to_numpy() for name in edges.column_names)
    order = np.argsort(-np.abs(weight), kind="stable")[:SHOWN]
    table = plain_table("Largest edges on average", ("from", "wrap"), ("to", "wrap"), ("weight", "right"))
    for (site, n), (to, m), w in zip(named(source[order]), named(target[order]), weight[order],
                                     strict=True):  # fmt: skip
        table.add_row(f"{site} {n}", f"{to} {m}", number(float(w)))
    if len(order):
        console.print(table)
    console.print(
        f"{len(averages):,} edges into {averages.targets:,} components, over {averages.options.rows:,} rows of the "
        "harvest. Weights are direct effects where the source matters, in units of the target's usual size.",
        highlight=False,
    )
