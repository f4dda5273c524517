"""How long `pd check` and `pd runs` take with two versions of the code, in turn on the same machine.

    git worktree add ../before REF && python -m experiments.benchmarks.start_times --before ../before

`pd check` reads the configuration of TMS 5-2, `pd runs` a folder of 200 runs, each with a metrics file of 1,000 rows.
The first round, which fills the caches, is not counted.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "lab" / "old_run" / "toy" / "p-00000002"


def make_runs(folder: Path, runs: int, rows: int) -> None:
    """``runs`` copies of a small finished run, its rows of metrics repeated up to ``rows`` of them."""
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    metrics = "".join(json.dumps({**lines[n % len(lines)], "step": n}) + "\n" for n in range(rows))
    for number in range(runs):
        run = folder / f"p-{number:08x}"
        shutil.copytree(RUN, run)
        (run / "metrics.jsonl").write_text(metrics)


def seconds(code: Path, words: list[str]) -> float:
    """Of one process with the code of ``code``."""
    environment = {**os.environ, "PYTHONPATH": str(code)}
    command = [sys.executable, "-c", "from param_decomp_lab.cli import main; main()", *words]
    start = time.perf_counter()
    subprocess.run(command, cwd=code, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Prints the medians of both sides and of the ratios of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout that the first side's code is taken from")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1000, help="of metrics in each run")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="param-decomp-") as name:
        make_runs(Path(name), options.runs, options.rows)
        for words in (["check", str(ROOT / "configs" / "toys" / "tms_5-2.yaml")], ["runs", name]):
            sides = (options.before.resolve(), ROOT)
            pairs = [[seconds(code, words) for code in sides] for _ in range(options.rounds + 1)][1:]
            before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratios = sorted(second / first for first, second in pairs)
            low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
            print(f"pd {words[0]:6} {before:.2f} s before, {after:.2f} s after, of {len(pairs)} pairs", end="; ")
            print(f"second over first: median {statistics.median(ratios):.3f}, {low:.2f} to {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
