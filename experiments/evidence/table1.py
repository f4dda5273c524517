"""Table 1 on the toy models: trains the targets, decomposes them, and writes docs/measurements/table1.md.

Each run is `pd train` in a process and a run folder of its own. Interrupted runs resume, and finished ones are not
repeated. The figures are kept in a JSON file beside the page, which outlives the run folders. Start it in the
background, and write the table of what is finished at any time:

    python experiments/evidence/table1.py                                  # everything that is sensible on two cores
    python experiments/evidence/table1.py --only tms_5-2 --seeds 0,1,2,3,4
    python experiments/evidence/table1.py --only resid_mlp3 --until 20000  # stop here; a later call continues
    python experiments/evidence/table1.py --table                          # only write the table again
    python experiments/evidence/table1.py --table --evaluate               # evaluate finished runs again, then write it
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from param_decomp_lab.eval.run_evaluation import evaluate_run
from param_decomp_lab.runs.folder import CONFIG_FILE, HISTORY_FILE
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.ui.numbers import duration
from param_decomp_lab.ui.tables import markdown_table

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "toys"
TABLE = ROOT / "docs" / "measurements" / "table1.md"
TITLE = "# Table 1: the toy models\n"
WRITTEN = "Written by `python"
"""The beginning of the figures on the page. What lies between the title and this was written by hand, and stays."""
WANTED = "Wanted: MMCS ≥ 0.998, |ML2R − 1| ≤ 0.02 (40-10+ID: 0.035), identity errors 0; ResidMLP-1's `mlp_out` ≤ 2."
"""The end of the figures on the page. What follows was written by hand, and stays."""


@dataclass(frozen=True)
class Experiment:
    """A configuration under configs/toys, the seeds that are run by default, and what is expected of it.

    ``mmcs``, ``ml2r``: published mean and standard deviation. ``slack``: how far ML2R may be from 1 here. ``expected``:
    the pattern and the number of components (features, or dense columns) at the end, by site. ``tolerance``: the number
    of errors allowed, by site.
    """

    name: str
    title: str
    seeds: tuple[int, ...]
    expected: dict[str, str]
    mmcs: tuple[float, float] | None = None
    ml2r: tuple[float, float] | None = None
    slack: float = 0.02
    tolerance: dict[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        steps: int = yaml.safe_load((ROOT / "configs" / "torch" / f"{self.name}.yaml").read_text())["pd"]["steps"]
        return steps


def _tms(features: int, hidden: int = 0) -> dict[str, str]:
    between = {"hidden_layers.0": f"dense {hidden}"} if hidden else {}
    return {"linear1": f"identity {features}", **between, "linear2": f"identity {features}"}


def _resid(features: int, columns: int, layers: int) -> dict[str, str]:
    return {
        site: pattern
        for i in range(layers)
        for site, pattern in (
            (f"layers.{i}.mlp_in", f"identity {features}"),
            (f"layers.{i}.mlp_out", f"dense {columns}"),
        )
    }


EXPERIMENTS = (
    Experiment("tms_5-2", "TMS 5-2", (0, 1, 2, 3, 4), _tms(5), (1.000, 0.000), (0.993, 0.002)),
    Experiment("tms_5-2-id", "TMS 5-2+ID", (0, 1, 2, 3, 4), _tms(5, 2), (1.000, 0.000), (0.992, 0.010)),
    Experiment("tms_5-2-id_C40", "TMS 5-2+ID, C 40", (0, 1, 2, 3, 4), _tms(5, 2), (1.000, 0.000), (0.992, 0.010)),
    Experiment("tms_5-2_august", "TMS 5-2, August", (0, 1, 2), _tms(5), (1.000, 0.000), (0.993, 0.002)),
    Experiment("tms_5-2-id_august", "TMS 5-2+ID, August", (0, 1, 2), _tms(5, 2), (1.000, 0.000), (0.992, 0.010)),
    Experiment("tms_40-10", "TMS 40-10", (0, 1, 2), _tms(40), (1.000, 0.000), (1.010, 0.007)),
    Experiment("tms_40-10-id", "TMS 40-10+ID", (0, 1, 2), _tms(40, 10), (1.000, 0.000), (1.031, 0.001), slack=0.035),
    Experiment("resid_mlp1", "ResidMLP-1", (0,), _resid(100, 50, 1), tolerance={"layers.0.mlp_out": 2}),
    Experiment("resid_mlp2", "ResidMLP-2", (), _resid(100, 25, 2)),
    Experiment("resid_mlp2_august", "ResidMLP-2, August", (), _resid(100, 25, 2)),
    Experiment("resid_mlp3", "ResidMLP-3", (), _resid(102, 17, 3)),
    Experiment("resid_mlp2_shared", "ResidMLP-2, shared", (), _resid(100, 25, 2)),
    Experiment("resid_mlp3_shared", "ResidMLP-3, shared", (), _resid(102, 17, 3)),
)


@dataclass(frozen=True)
class Result:
    """The current state of one run. ``step``: that of its last evaluation, None before the first one. ``seconds``: wall
    time. ``step_seconds``: the median wall time of a training step, None before the first logged one. ``device``: what
    it ran on last, as JAX names it."""

    seed: int
    step: int | None
    row: dict[str, Any]
    seconds: float
    step_seconds: float | None = None
    device: str = "cpu"

    def error(self, site: str) -> int | None:
        value = self.row.get(f"eval/identity_ci_error/{site}")
        return None if value is None else int(value)


def run_folder(out: Path, name: str, seed: int) -> Path:
    """Returns the folder of a run. Its id is a digest of the arguments, so that the run is found again."""
    return out / name / f"p-{hashlib.sha256(f'{name} {seed}'.encode()).hexdigest()[:8]}"


def run(out: Path, name: str, seed: int, until: int | None) -> None:
    """Runs `pd train`, from the beginning or from the last checkpoint. With ``until``, the run stops after that step
    and is evaluated there."""
    folder = run_folder(out, name, seed)
    clock = folder.with_suffix(".seconds")
    if (folder / CONFIG_FILE).is_file():
        arguments = ["--resume", str(folder)]
    else:
        if folder.exists():
            shutil.rmtree(folder)  # killed before its configuration was written: it holds nothing
        settings = {"out_dir": folder.parent, "run_id": folder.name, "pd.seed": seed}
        sets = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
        arguments = [str(CONFIGS / f"{name}.yaml"), *sets]
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "param_decomp_lab", "train", *arguments], cwd=ROOT)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if until is not None and (last_step(folder) or 0) >= until:
                process.terminate()
                process.wait()
                evaluate(folder)
                return
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        clock.write_text(json.dumps(seconds(folder) + time.monotonic() - start))
    if process.returncode:
        raise SystemExit(f"{name}, seed {seed}: pd train ended with status {process.returncode}")


def evaluate(folder: Path) -> None:
    """Keeps an evaluation of the newest checkpoint beside a run. It takes precedence over the run's own evaluation at
    that step."""
    found = evaluate_run(folder)
    folder.with_suffix(".evaluated").write_text(json.dumps({"step": found.step, **found.row}))


def seconds(folder: Path) -> float:
    clock = folder.with_suffix(".seconds")
    return float(json.loads(clock.read_text())) if clock.exists() else 0.0


def last_step(folder: Path) -> int | None:
    """Returns the step of the newest row; None without one."""
    rows = read_metrics(folder)
    return rows[-1]["step"] if rows else None


def read_result(out: Path, name: str, seed: int) -> Result | None:
    """Returns the result of a run; None for one that was never started."""
    folder = run_folder(out, name, seed)
    if not folder.exists():
        return None
    rows = read_metrics(folder)
    left = folder.with_suffix(".evaluated")
    evaluated = [json.loads(left.read_text())] if left.is_file() else []
    evaluated += [row for row in rows if any(key.startswith("eval/") for key in row)]
    row: dict[str, Any] = max(evaluated, key=lambda row: row["step"], default={})
    times = [row["train/perf/step_time_s"] for row in rows if "train/perf/step_time_s" in row]
    step_seconds = statistics.median(times) if times else None
    return Result(seed, row.get("step"), row, seconds(folder), step_seconds, last_device(folder))


def last_device(folder: Path) -> str:
    history = folder / HISTORY_FILE
    if not history.is_file():
        return Result.device
    last = json.loads(history.read_text().splitlines()[-1])
    return ", ".join(dict.fromkeys(last["devices"]))


def finished(result: Result | None, experiment: Experiment) -> bool:
    return result is not None and result.step == experiment.steps


# --- the figures ---

Results = dict[str, dict[int, Result]]
"""Results by the experiment's name and the seed."""


def update_results(kept: Path, out: Path) -> Results:
    """Merges what the file ``kept`` holds (it need not exist) and what the run folders under ``out`` add, and writes it
    back.

    For a run that is in both, the result with more steps counts; with equal steps, the folder's.
    """
    found: Results = {experiment.name: {} for experiment in EXPERIMENTS}
    if kept.is_file():
        for name, results in json.loads(kept.read_text()).items():
            found[name] = {result["seed"]: Result(**result) for result in results}
    for name, results in found.items():
        for seed in range(100):
            here, before = read_result(out, name, seed), results.get(seed)
            if here is not None and (before is None or (here.step or 0) >= (before.step or 0)):
                judged = ("eval/tms/", "eval/identity_ci_error/")
                row = {key: value for key, value in here.row.items() if key.startswith(judged)}
                results[seed] = dataclasses.replace(here, row=row)
    text = {name: [dataclasses.asdict(results[seed]) for seed in sorted(results)] for name, results in found.items()}
    kept.write_text(json.dumps(text, indent=1) + "\n")
    return found


# --- the table ---


def figures(found: Results) -> str:
    """Returns the page from `WRITTEN` to `WANTED`, for everything that has been run."""
    toys = [(e, [result for _, result in sorted(found[e.name].items())]) for e in EXPERIMENTS]
    tms = "| seeds | MMCS | published | ML2R | published | errors by site | time"
    every = "| seed | step | MMCS | ML2R | expected, errors | as wanted | time | of a step"
    lines = [
        f"{WRITTEN} experiments/evidence/table1.py`: the targets of `configs/toys/targets`, decomposed as "
        "`configs/toys` says, one run per seed.",
        f"Machine: {os.cpu_count()} x {platform.machine()} cores, Python {platform.python_version()}, on CPU unless a "
        "GPU is named. Times are wall time of the whole command (compilation, evaluations and figures included; the "
        "target's training only where it was missing), with whatever else the machine was doing; of a step, the median "
        "of those logged.",
        "",
        "## TMS",
        "",
        "MMCS and ML2R (docs/semantics.md, section 11) compare each feature's row of `linear1` with the best "
        "component's; 1 is perfect. Errors are entries of the causal importance matrix that are not as expected.",
        "",
        *markdown_table(tms, (_summary(*toy) for toy in toys if toy[0].mmcs is not None)),
        "",
        "## Every run",
        "",
        *markdown_table(every, (_cells(experiment, result) for experiment, results in toys for result in results)),
        "",
        WANTED,
    ]
    return "\n".join(lines)


def _summary(experiment: Experiment, results: Sequence[Result]) -> Sequence[str]:
    done = [result for result in results if finished(result, experiment)]
    mmcs, ml2r = (_mean([result.row[f"eval/tms/{key}"] for result in done]) for key in ("mmcs", "ml2r"))
    published = _published(experiment.mmcs), _published(experiment.ml2r)
    errors = ", ".join(f"{site} {_errors(done, site)}" for site in experiment.expected) if done else ""
    return experiment.title, str(len(done)), mmcs, published[0], ml2r, published[1], errors, _times(done)


def _cells(experiment: Experiment, result: Result) -> Sequence[str]:
    complete = finished(result, experiment)
    step = "none yet" if result.step is None else f"{result.step:,}" + ("" if complete else f" of {experiment.steps:,}")
    similarity = [result.row.get(f"eval/tms/{key}") for key in ("mmcs", "ml2r")]
    cells = [experiment.title, str(result.seed), step]
    cells += ["" if value is None else f"{value:.4f}" for value in similarity]
    cells.append(", ".join(f"{site}: {what}, {result.error(site)}" for site, what in experiment.expected.items()))
    cells += [("yes" if as_wanted(experiment, result) else "**no**") if complete else "", duration(result.seconds)]
    step_time = "" if result.step_seconds is None else f"{1000 * result.step_seconds:.1f} ms"
    return [*cells, ", ".join(filter(None, (step_time, "" if result.device == Result.device else result.device)))]


def as_wanted(experiment: Experiment, result: Result) -> bool:
    """Returns whether a finished run is what this project promises."""
    if experiment.mmcs is not None:
        mmcs, ml2r = result.row["eval/tms/mmcs"], result.row["eval/tms/ml2r"]
        if mmcs < 0.998 or abs(ml2r - 1) > experiment.slack:
            return False
    judged = [s for s, what in experiment.expected.items() if what.startswith("identity") or s in experiment.tolerance]
    return all((result.error(site) or 0) <= experiment.tolerance.get(site, 0) for site in judged)


def _published(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"{value[0]:.3f} ± {value[1]:.3f}"


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _errors(results: Sequence[Result], site: str) -> str:
    found = sorted({result.error(site) or 0 for result in results})
    return str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}"


def _times(results: Sequence[Result]) -> str:
    return duration(statistics.median(result.seconds for result in results)) if results else ""


def write_page(page: Path, out: Path) -> None:
    above, below = f"{TITLE}\n", "\n"
    if page.is_file():
        kept = page.read_text()
        above, below = kept.partition(WRITTEN)[0], kept.partition(WANTED)[2]
    page.write_text(above + figures(update_results(page.with_suffix(".json"), out)) + below)


def main() -> None:
    names = [experiment.name for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument(
        "--seeds",
        help="comma-separated; default: five of the 5-2 models, three of the 40-10 ones, one of ResidMLP-1; of the "
        "larger ResidMLPs, which run with --only alone, seed 0",
    )
    parser.add_argument("--until", type=int, help="stop each run after this step and save it")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "table1")
    parser.add_argument("--page", type=Path, default=TABLE, help="the page to write, with a JSON file beside it")
    parser.add_argument("--table", action="store_true", help="write the page from what has been run, and run nothing")
    parser.add_argument("--evaluate", action="store_true", help="evaluate finished runs again, by the rules of today")
    arguments = parser.parse_args()
    chosen = names if arguments.only is None else arguments.only.split(",")
    unknown = set(chosen) - set(names)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from {', '.join(names)}")
    for experiment in EXPERIMENTS:
        if experiment.name not in chosen or arguments.table:
            continue
        seeds = experiment.seeds if arguments.seeds is None else [int(seed) for seed in arguments.seeds.split(",")]
        for seed in seeds or ([0] if arguments.only else []):
            result = read_result(arguments.out, experiment.name, seed)
            reached = 0 if result is None or result.step is None else result.step
            if finished(result, experiment) or (arguments.until is not None and reached >= arguments.until):
                continue
            run(arguments.out, experiment.name, seed, arguments.until)
            write_page(arguments.page, arguments.out)
    if arguments.evaluate:
        for experiment in EXPERIMENTS:
            for seed in range(100):
                if experiment.name in chosen and finished(
                    read_result(arguments.out, experiment.name, seed), experiment
                ):
                    evaluate(run_folder(arguments.out, experiment.name, seed))
    write_page(arguments.page, arguments.out)
    print(f"written: {arguments.page}")


if __name__ == "__main__":
    main()
