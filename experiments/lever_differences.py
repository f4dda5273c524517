"""What the levers that change numbers do to a decomposition: fewer bits of state, other optimisers (levers 12 and 14).

    python -m experiments.lever_differences                 # demo/transformer, 300 steps; minutes on two cores
    python -m experiments.lever_differences my_run.yaml --steps 1000 --page docs/measurements/levers.md

Every setting is a run of `pd train`, from the same seed, in a folder of its own that is thrown away. Reported are the
last evaluation, and how far the total loss after 10 steps is from that of the first setting.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo" / "transformer.yaml"

SETTINGS: dict[str, tuple[str, ...]] = {
    "fp32, AdamW": (),
    "moments of V and U in bf16": ("memory.state_dtypes.components_moments=bfloat16",),
    "moments of the CI function in bf16": ("memory.state_dtypes.ci_moments=bfloat16",),
    "moments of the sources in bf16": ("memory.state_dtypes.sources_moments=bfloat16",),
    "V and U by Lion, a tenth of the rate": ("memory.optimizers.components=lion", "{components_rate}=0.1"),
    "V and U by Adafactor": ("memory.optimizers.components=adafactor",),
    "CI function by Lion, a tenth of the rate": ("memory.optimizers.ci_fn=lion", "{ci_rate}=0.1"),
    "CI function by Adafactor": ("memory.optimizers.ci_fn=adafactor",),
}
RATES = {
    "{components_rate}": "pd.components_optimizer.lr_schedule.start_val",
    "{ci_rate}": "pd.ci_fn_optimizer.lr_schedule.start_val",
}
COLUMNS = ("kl_unmasked", "kl_ci_masked", "kl_stoch_masked")


def train(config: Path, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` of a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"out_dir={folder}", f"pd.steps={steps}", "cadence.train_log_every=10", f"eval.every={steps}"]
        given += [f"eval.slow_every={steps}", "eval.slow_on_first_step=false", "cadence.save_every=null", *overrides]
        command = [sys.executable, "-m", "param_decomp_lab", "train", str(config)]
        command += [word for override in given for word in ("--set", override)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        (metrics,) = Path(folder).glob("p-*/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def scaled(override: str, config: Path) -> str:
    """An override as `pd` takes it; a learning rate is given as a multiple of the configuration's."""
    from param_decomp_lab.config import load_config

    key, _, value = override.partition("=")
    if key not in RATES:
        return override
    pd = load_config(config).method.pd
    optimizer = pd.components_optimizer if "components" in key else pd.ci_fn_optimizer
    return f"{RATES[key]}={optimizer.lr_schedule.start_val * float(value):g}"


def line(name: str, rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    """A row of the table."""

    def at_ten(rows: list[dict[str, Any]]) -> float:
        return next(float(row["train/loss/total"]) for row in rows if row["step"] == 10 and "train/loss/total" in row)

    last = {key: value for row in rows for key, value in row.items() if key.startswith("eval/")}
    zero = last["eval/ce_kl/kl_zero_masked"]
    kls = " | ".join(f"{last[f'eval/ce_kl/{key}'] / zero:.2%}" for key in COLUMNS)
    l0 = sum(value for key, value in last.items() if key.startswith("eval/l0/") and "layers." in key)
    apart = abs(at_ten(rows) / at_ten(first) - 1)
    return f"| {name} | {apart:.1e} | {kls} | {l0:.0f} |"


def main() -> None:
    """One line a setting, as they come; then the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=DEMO, help="a wrapper with CEandKLLosses and CI_L0")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--page", type=Path, help="write the table here as well")
    options = parser.parse_args()
    columns = " | ".join(f"`{c}` / zero" for c in COLUMNS)
    lines = [
        f"| | loss after 10 steps, apart by | {columns} | L0, all sites |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    print("\n".join(lines), flush=True)
    first: list[dict[str, Any]] = []
    for name, overrides in SETTINGS.items():
        rows = train(options.config, options.steps, [scaled(o, options.config) for o in overrides])
        first = first or rows
        lines.append(line(name, rows, first))
        print(lines[-1], flush=True)
    if options.page:
        where = f"{platform.machine()}, Python {platform.python_version()}"
        what = f"`python -m experiments.lever_differences`: `{options.config.name}`, {options.steps} steps, {where}."
        others = "The run's total loss after 10 steps, and its last evaluation. No other lever changes numbers."
        options.page.write_text("\n".join(["# Levers that change numbers", "", what, others, "", *lines, ""]))


if __name__ == "__main__":
    main()
