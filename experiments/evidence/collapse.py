"""Reproduces a late collapse of the importances on a toy: L_p with a tiny eps, with a larger one, and smooth L0.

    python -m experiments.evidence.collapse                   # three runs of 80,000 steps; minutes on two cores
    python -m experiments.evidence.collapse --only lp --seeds 0,2
    python -m experiments.evidence.collapse --growth runs/*   # how far gradients have grown in existing runs

TMS 5-2 with small batches, a large, constant rate, and p annealed to 0.4: everything that makes a collapse likely. The
runs differ only in the penalty; finished ones are not repeated. Prints a table and draws a figure with L0, the error
with CI masks, errors of the pattern, and the tail of the CI gradients, of which `pd train` warns.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures.style import BLUE, INK, QUIET, VERMILION, style_axes
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.tracking.collapse import CI_GRADIENTS, TAIL_LIMIT, GradientTail, Growth, Tail, growths
from param_decomp_lab.ui.tables import markdown_table

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "images" / "collapse.png"
CONFIG = "configs/toys/tms_5-2.yaml"
STEPS = 80_000
EVERY = 2_500
"""The number of steps between evaluations."""
RATE = {"lr_schedule": {"start_val": 5.0e-2}}
LP: dict[str, Any] = {
    "type": "ImportanceMinimalityLoss", "coeff": 3.0e-3, "pnorm": 1.0, "beta": 0,
    "p_anneal_start_frac": 0.0, "p_anneal_end_frac": 0.5, "p_anneal_final_p": 0.4,
}  # fmt: skip
PENALTIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lp": ("L_p, eps 1e-12", {**LP, "eps": 1.0e-12}),
    "eps": ("L_p, eps 1e-6", {**LP, "eps": 1.0e-6}),
    "smooth": (
        "smooth L0, with the frequency term",
        {
            "type": "ImportanceMinimalityLoss", "coeff": 3.0e-3, "pnorm": 1.0, "beta": 0, "penalty": "smooth_l0",
            "gamma": {"start_val": 1.0, "fn_type": "linear", "final_val_frac": 0.1},
            "frequency": {"coeff": 1.0e-3, "reference_token_count": 256},
        },
    ),
}  # fmt: skip
COLORS = {"lp": VERMILION, "eps": QUIET, "smooth": BLUE}


@dataclass(frozen=True)
class Run:
    """What one run shows. By step of the evaluations: the mean L0 of the sites, the CI-masked error, the errors of the
    pattern. ``tails``: those from the third window on."""

    name: str
    seed: int
    evaluated: dict[int, tuple[float, float, int]]
    tails: tuple[Tail, ...]

    @property
    def warned(self) -> int | None:
        """The step at which `pd train` warns."""
        return next((tail.last for tail in self.tails if tail.is_large), None)

    @property
    def lost(self) -> int | None:
        """The first evaluation from which the pattern has 5 errors or more until the end."""
        steps = sorted(self.evaluated)
        bad = [all(self.evaluated[later][2] >= 5 for later in steps[n:]) for n in range(len(steps))]
        return next((step for step, is_bad in zip(steps, bad, strict=True) if is_bad), None)


def run(name: str, seed: int, out: Path) -> Run:
    """Trains a run, or the part of it that is missing."""
    run_id = f"p-{list(PENALTIES).index(name):04x}{seed:04x}"
    folder = out / run_id
    if not (folder / "report.html").is_file():
        terms = [
            PENALTIES[name][1],
            {"type": "StochasticReconLoss", "coeff": 1.0},
            {"type": "StochasticReconLayerwiseLoss", "coeff": 1.0},
        ]
        settings: dict[str, Any] = {
            "pd.steps": STEPS, "pd.batch_size": 256, "pd.seed": seed, "pd.loss_metrics": terms,
            "pd.components_optimizer": RATE, "pd.ci_fn_optimizer": RATE, "steps_per_dispatch": 500,
            "cadence.train_log_every": 1, "cadence.save_every": STEPS // 8, "eval.every": EVERY,
            "eval.slow_every": STEPS, "out_dir": str(out), "run_id": run_id, "run_name": f"collapse-{name}",
        }  # fmt: skip
        given = [argument for key, value in settings.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
        started = [CONFIG, *given] if not folder.exists() else ["--resume", str(folder)]
        command = [sys.executable, "-m", "param_decomp_lab", "train", *started]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    rows = read_metrics(folder)
    watch = GradientTail(STEPS)
    tails = tuple(filter(None, (watch.add(row["step"], row[CI_GRADIENTS]) for row in rows if CI_GRADIENTS in row)))
    evaluated = dict(_evaluation(row) for row in rows if "eval/loss/CIMaskedReconLoss" in row)
    return Run(name, seed, evaluated, tails)


def _evaluation(row: dict[str, Any]) -> tuple[int, tuple[float, float, int]]:
    def sums(prefix: str) -> list[float]:
        return [value for key, value in row.items() if key.startswith(prefix)]

    l0, errors = sums("eval/l0/"), sums("eval/identity_ci_error/")
    return row["step"], (float(np.mean(l0)), row["eval/loss/CIMaskedReconLoss"], int(sum(errors)))


def largest_growth(rows: list[dict[str, Any]]) -> Growth | None:
    """Returns the largest growth of the gradients; None for a run with too few rows."""
    logged = [(row["step"], row[CI_GRADIENTS]) for row in rows if CI_GRADIENTS in row]
    return max(growths(logged), key=lambda growth: growth.factor, default=None)


def growth_table(folders: list[Path]) -> str:
    """Returns a table with a line for every run folder, the largest growth first."""
    lines = []
    for folder in folders:
        growth = largest_growth(read_metrics(folder)) if (folder / CONFIG_FILE).is_file() else None
        if growth is not None:
            lines.append((growth.factor, f"{growth.factor:6.1f} at step {growth.step:9,}  {folder}"))
    return "\n".join(text for _, text in sorted(lines, reverse=True))


def figure(runs: list[Run]) -> Figure:
    """Draws four panels over the steps, with a line for each run."""
    drawn = Figure(figsize=(9, 6.6), facecolor="white")
    panels = drawn.subplots(4, 1, sharex=True, gridspec_kw={"hspace": 0.18})
    titles = ("mean L0 of a site", "squared error, CI masks", "errors of the pattern",
              "95th percentile over median of the CI gradients")  # fmt: skip
    for panel, title in zip(panels, titles, strict=True):
        style_axes(panel, 8.0)
        panel.set_title(title, fontsize=8.5, color=INK, loc="left", pad=3)
    for of in runs:
        steps = sorted(of.evaluated)
        line: dict[str, Any] = {"color": COLORS[of.name], "linewidth": 1.4}
        for number in range(3):
            values = [of.evaluated[step][number] for step in steps]
            panels[number].plot(steps[1:], values[1:], label=PENALTIES[of.name][0], **line)
        panels[3].plot([tail.last for tail in of.tails], [tail.ratio for tail in of.tails], **line)
        if of.warned is not None:
            for panel in panels:
                panel.axvline(of.warned, color=COLORS[of.name], linewidth=0.8, linestyle=":")
    panels[3].axhline(TAIL_LIMIT, color=QUIET, linewidth=0.8, linestyle="--")
    panels[3].set_xlabel("step", fontsize=8.0, color=QUIET)
    panels[0].legend(fontsize=8, frameon=False, loc="upper left")
    return drawn


def table(runs: list[Run]) -> str:
    """Returns the table in Markdown."""

    def cells(of: Run) -> Sequence[object]:
        found = (of.evaluated[step] for step in (STEPS // 2, STEPS))
        half, last = (f"{l0:.3f}, {error:.2g}, {pattern}" for l0, error, pattern in found)
        between = "–"
        if of.warned is not None and of.lost is not None:
            between = f"{100 * (of.lost - of.warned) / STEPS:.0f} % of the steps"
        warned, lost = (f"{step:,}" if step is not None else "–" for step in (of.warned, of.lost))
        return PENALTIES[of.name][0], of.seed, half, last, warned, lost, between

    columns = "penalty | seed | half-way: L0, error, pattern | at the end | warning, step | lost from | in between"
    return "\n".join(markdown_table(columns, map(cells, runs)))


def main() -> None:
    """Trains what is missing, prints the table, and draws the figure if it has every penalty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PENALTIES), help=f"of {', '.join(PENALTIES)}")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "runs" / "collapse")
    parser.add_argument("--growth", type=Path, nargs="+", metavar="RUN", help="only print the growth in these runs")
    options = parser.parse_args()
    if options.growth:
        print(growth_table(options.growth))
        return
    names, seeds = options.only.split(","), [int(seed) for seed in options.seeds.split(",")]
    if not PENALTIES.keys() >= set(names):
        parser.error(f"--only {options.only}: the penalties are {', '.join(PENALTIES)}")
    runs = [run(name, seed, options.out_dir.resolve()) for name in names for seed in seeds]
    print(table(runs))
    if set(names) == PENALTIES.keys():
        figure([of for of in runs if of.seed == seeds[0]]).savefig(FIGURE, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
