"""Renders the self-contained page of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING

from param_decomp_lab.compare.agreement import RunAgreement
from param_decomp_lab.compare.charts import front_chart
from param_decomp_lab.compare.differences import differences, in_order, labels, seed_groups, short_names
from param_decomp_lab.compare.fronts import Front, fronts
from param_decomp_lab.compare.records import Record, read_records
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.cards import card
from param_decomp_lab.ui.charts import Chart, Series, line_chart, ramp_colors
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.templates import templates_beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = [f"var(--c{i})" for i in range(8)]
RUNS_SHOWN = 50
"""The most runs of a comparison that a notebook shows."""
LABEL_CHARACTERS = 60
FEW = 14
"""The most runs that are named in the legend of a chart of curves."""


@dataclass(frozen=True)
class Compared:
    """Everything that is shown of some runs. ``labels``: of the runs. ``differences``: the value of every run, by key.
    ``groups``: runs that differ only in their seeds.
    """

    records: list[Record]
    labels: list[str]
    differences: dict[str, list[str]]
    names: dict[str, str]
    groups: list[list[int]]
    fronts: list[Front]
    agreements: list[RunAgreement]

    @property
    def colors(self) -> dict[int, str]:
        """Returns a colour for each run, the same for runs that differ only in their seeds; beyond eight, the colours
        form a ramp.
        """
        n = len(self.groups)
        shades = PALETTE if n <= len(PALETTE) else ramp_colors(n)
        of_groups = {run: shades[g] for g, group in enumerate(self.groups) for run in group}
        return {run: of_groups.get(run, "var(--ink-2)") for run in range(len(self.records))}

    def plot(self, error: str | None = None) -> "Figure":
        """Plots L0 and an error of every run, and the front, as a matplotlib figure. ``error``: one of the names of
        `fronts`; None for the first. Raises UserError if no run has it.
        """
        from param_decomp_lab.metrics.figures import front_of_runs

        found = {front.name: front for front in self.fronts if front.points}
        if not found or (error is not None and error not in found):
            raise UserError(f"error '{error}' should be one of {', '.join(found)}" if found else "no run has an error")
        front = found[next(iter(found)) if error is None else error]
        places = {point.run: (point.l0, point.error) for point in front.points}
        points = [(printable(self.labels[run], LABEL_CHARACTERS), *place) for run, place in places.items()]
        return front_of_runs(points, [places[run] for run in front.front], front.name, front.unit)

    def __repr__(self) -> str:
        errors = ", ".join(front.name for front in self.fronts)
        return printable(f"Compared: {len(self.records)} runs ({', '.join(self.labels[:8])}), {errors} against L0")

    def _repr_html_(self) -> str:
        rows = [
            {
                "label": label, "state": record.status.state, "l0": None if record.l0 is None else record.l0.last,
                "errors": [(record.error(front.name), run in front.front) for front in self.fronts],
            }
            for run, (record, label) in enumerate(zip(self.records, self.labels, strict=True))
        ]  # fmt: skip
        errors = [front.name for front in self.fronts]
        return card("comparison", rows=rows[:RUNS_SHOWN], errors=errors, more=max(0, len(rows) - RUNS_SHOWN))


def compare(*folders: str | Path) -> Compared:
    """Compares the runs in or below ``folders``. A notebook shows them as a table; ``.plot()`` shows their front.

    Reads only small files, not checkpoints. Raises UserError if a folder is missing or has no run.
    """
    return compared(read_records([Path(folder) for folder in folders]))


def compared(records: Sequence[Record]) -> Compared:
    """Compares records, without agreements, which need checkpoints. Runs are ordered by the values that differ, the
    seed last.
    """
    records = in_order(records)
    groups = seed_groups(records)
    different = differences(records)
    names = short_names(list(different), records)
    return Compared(records, labels(records), different, names, groups, fronts(records, groups), [])


def render(found: Compared) -> str:
    """Returns the page as a string."""
    environment = templates_beside(__file__)
    environment.filters.update(number=number)
    seeds = [group for group in found.groups if sum(found.records[run].finished for run in group) > 1]
    parents = [str(Path(record.status.folder).parent) for record in found.records]
    place = commonpath(parents) if len({Path(parent).is_absolute() for parent in parents}) == 1 else "."
    return environment.get_template("comparison.html").render(
        found=found,
        seeds=seeds,
        charts=[front_chart(front, found.labels, found.colors) for front in found.fronts if front.points],
        curves=_curves(found),
        states=_states(found.records),
        place=place,
        paths=[relpath(record.status.folder, place) for record in found.records],
    )


def _states(records: Sequence[Record]) -> str:
    """Says how many runs are in each state."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record.status.state] = counts.get(record.status.state, 0) + 1
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def _curves(found: Compared) -> list[Chart]:
    """Returns charts of L0, every error, and every loss term over training, with one line for each run."""
    titles: dict[str, dict[int, Series]] = {}
    for run, record in enumerate(found.records):
        if (l0 := record.l0) is not None:
            titles.setdefault("L0", {})[run] = l0
    for run, record in enumerate(found.records):
        for name, series in record.errors.items():
            titles.setdefault(name, {})[run] = series
    for run, record in enumerate(found.records):
        for key, series in record.series.items():
            if key.startswith("train/loss/"):
                titles.setdefault(key.removeprefix("train/loss/"), {})[run] = series
    last = max((s.steps[-1] for of_runs in titles.values() for s in of_runs.values()), default=0)
    charts = []
    for title, of_runs in titles.items():
        lines = {found.labels[run]: series for run, series in of_runs.items()}
        colors = [found.colors[run] for run in of_runs]
        drawn = [color for (color, series) in zip(colors, lines.values(), strict=True) if series.finite]
        chart = line_chart(title, lines, drawn or colors, x_max=last + 1, legend=len(lines) <= FEW)
        if chart is not None:
            charts.append(chart)
    return charts
