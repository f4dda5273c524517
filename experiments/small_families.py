"""A small GPT-2, Pythia and mixture of experts: pretrained on the demo's text and decomposed, by the files in
`configs/families/`. Prints the table of docs/measurements/families.md.

    python -m experiments.small_families                                # all of it, some 20 minutes on two cores
    python -m experiments.small_families --runs runs/p-1a2b3c4d         # the rows of finished runs
"""

import argparse
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from param_decomp_lab.runs.configuration import component_counts
from param_decomp_lab.runs.ending import ENDING_FILE
from param_decomp_lab.runs.evaluation_rows import kl, l0_names, l0_table
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.runs.series import series_by_key
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.yaml_text import read_mapping

FAMILIES = ("gpt2", "pythia", "moe")
TOKENIZE = ("data", "tokenize", "--stdlib", "--seq-len", "64", "--out", "data/demo")
COLUMNS = (
    "run",
    "sites",
    "target, nats",
    "KL, zero-masked",
    "KL, CI-masked",
    "ratio",
    "largest L0 / C",
    "at",
    "minutes",
)


def pd(*words: str) -> str:
    """Runs a command of `pd`, which shows what it does; returns its output. Ends the script if it fails."""
    print("\n$ pd", *words, flush=True)
    lines = []
    with subprocess.Popen([sys.executable, "-m", "param_decomp_lab", *words], stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if ran.returncode:
        sys.exit(ran.returncode)
    return "".join(lines)


def decompose(family: str) -> Path:
    """Pretrains the target unless it is there, and decomposes it. Gives the run's folder."""
    recipe = f"configs/families/{family}_pretrain.yaml"
    if not Path(str(read_mapping(Path(recipe), "the recipe")["out"]), "summary.json").is_file():
        pd("pretrain", recipe)
    before = set(Path("runs").glob("p-*"))
    pd("train", f"configs/families/{family}.yaml")
    [run] = set(Path("runs").glob("p-*")) - before
    return run


def row(run: Path) -> list[str]:
    """What a finished run came to: its last evaluation, and how long it took with its evaluations and compilation."""
    config = read_mapping(run / "config.yaml", "the configuration")
    series = series_by_key(read_metrics(run))
    l0 = l0_table(series, component_counts(config, l0_names(series)))
    zero, masked = kl(series, "zero_masked"), kl(series, "ci_masked")
    if l0 is None or zero is None or masked is None:
        sys.exit(f"{run} has no evaluation")
    widest = max(l0.sites, key=lambda site: site.share or 0.0)
    first = json.loads((run / "history.jsonl").read_text().splitlines()[0])
    started = datetime.fromisoformat(first["started"]).timestamp()
    ended = read_json(run / ENDING_FILE, "how the run ended", dict)["time"]
    return [
        str(config["wrapper"]["run_name"]),
        str(len(l0.sites)),
        f"{series['eval/ce_kl/ce_target'].last:.2f}",
        f"{zero.last:.3f}",
        f"{masked.last:.4f}",
        f"1/{zero.last / masked.last:.1f}",
        f"{widest.share or 0.0:.2f}",
        f"`{widest.name}`",
        f"{(ended - started) / 60:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="finished runs; nothing is trained")
    given = parser.parse_args()
    if not given.runs and not Path("data/demo/meta.json").is_file():
        pd(*TOKENIZE)
    rows = [row(run) for run in given.runs or map(decompose, given.families)]
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
