"""Trains variants of the demo's recipe, and compares each with the best baseline, by seed and number of steps.

    pd data tokenize --stdlib --seq-len 64 --out data/bytes
    pd pretrain configs/demo/bytes_pretrain.yaml
    python -m experiments.evidence.demo_variants --steps 3000                       # every variant, three seeds
    python -m experiments.evidence.demo_variants --steps 10000 --only adamw-3e-3 --only muon-9e-3 --seeds 0
    python -m experiments.evidence.demo_variants --table                            # print existing results only

    pd demo                                                                         # its target, of words
    python -m experiments.evidence.demo_variants --words --steps 5000

    pd demo --smollm2                                                               # fetches SmolLM2 and its rows
    python -m experiments.evidence.demo_variants --smollm2 --steps 300 --only faithfulness-1e4-attack-1 --seeds 0

Each run is `pd train configs/demo/bytes.yaml` (``--words``: `configs/demo/decompose.yaml`; ``--smollm2``:
`configs/demo-smollm2.yaml`) with some keys set, followed by `pd eval RUN --baselines --matched --attack 20`. Figures
are kept in a JSON file, one line for each run, and finished runs are not repeated. Start it in the background: on two
cores, 3,000 steps on bytes take two to three minutes, 5,000 on words three to four, and 300 on SmolLM2 six.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from param_decomp_lab.baselines.kept import find_comparison
from param_decomp_lab.ui.tables import markdown_table

ROOT = Path(__file__).parents[2]


def _adamw(rate: float) -> dict[str, str]:
    schedule = f"lr_schedule: {{start_val: {rate}, final_val_frac: 0.05, fn_type: cosine}}"
    return {
        "pd.components_optimizer": f"{{{schedule}, grad_clip_norm: 0.1}}",
        "pd.ci_fn_optimizer": f"{{{schedule}}}",
    }


def _muon(rate: float) -> dict[str, str]:
    return {key: value.replace("{", "{type: muon, ", 1) for key, value in _adamw(rate).items()}


def _loss(number: int, entry: str) -> dict[str, str]:
    return {f"pd.loss_metrics.{number}": entry}


_ASCENT = "optimizer: {type: adam, beta1: 0.5, beta2: 0.99, lr_schedule: 0.02}, n_warmup_steps: 2"
_BYTES: Mapping[str, Mapping[str, str]] = {
    "adamw-1e-3": _adamw(1e-3),
    "adamw-3e-3": _adamw(3e-3),
    "adamw-9e-3": _adamw(9e-3),
    "adamw-27e-3": _adamw(27e-3),
    "muon-3e-3": _muon(3e-3),
    "muon-9e-3": _muon(9e-3),
    "muon-27e-3": _muon(27e-3),
    # The two terms that a merged term replaces: stochastic and persistent, in place of the demo's fresh attack.
    "pair": {
        **_loss(1, "{type: StochasticReconSubsetLoss, coeff: 2.5}"),
        **_loss(2, f"{{type: PersistentPGDReconLoss, coeff: 2.5, scope: {{type: per_batch_per_position}}, {_ASCENT}}}"),
    },
    "merged": {
        **_loss(1, "{type: UnmaskedReconLoss, coeff: 0}"),
        **_loss(
            2,
            "{type: MergedStochasticSubsetPPGDReconLoss, coeff: 5, adv_fraction: 0.5, "
            f"scope: {{type: per_batch_per_position}}, {_ASCENT}}}",
        ),
    },
}
_RATE = {"pd.components_optimizer": _adamw(1e-2)["pd.components_optimizer"]}
_MINIMALITY = (
    "pnorm: 2.0, beta: 0.2, p_anneal_start_frac: 0.0, p_anneal_final_p: 0.4, p_anneal_end_frac: 1.0, eps: 1.0e-6"
)
_ATTACK = "init: random, step_size: 0.5, n_steps: 2, mask_scope: unique_per_datapoint"


def _minimality(coeff: float) -> str:
    return f"{{type: ImportanceMinimalityLoss, coeff: {coeff}, {_MINIMALITY}}}"


def _attack(coeff: float) -> str:
    return f"{{type: PGDReconLoss, coeff: {coeff}, {_ATTACK}}}"


def _faithfulness(coeff: float) -> str:
    return f"{{type: FaithfulnessLoss, coeff: {coeff}}}"


def _smollm2(minimality: float, attack: float, faithfulness: float) -> dict[str, str]:
    """Returns the keys of the rate and the coefficients, which override those of `configs/demo-smollm2.yaml`."""
    return {
        **_RATE,
        **_loss(0, _minimality(minimality)),
        **_loss(2, _attack(attack)),
        **_loss(3, _faithfulness(faithfulness)),
    }


def _words(c: int, minimality: float, attack: float) -> dict[str, str]:
    """Returns the keys in which a variant of the demo's method on words differs. ``c``: components per matrix."""
    return {
        "pd.decomposition_targets.0.C": str(c),
        **_loss(0, _minimality(minimality)),
        **_loss(2, _attack(attack)),
    }


_WORDS: Mapping[str, Mapping[str, str]] = {
    "demo": {},
    "C-256": _words(256, 1.9e-2, 2.2),
    "C-256-attack-2.6": _words(256, 1.8e-2, 2.6),
    "C-256-attack-2.6-adamw": {**_words(256, 1.8e-2, 2.6), **_adamw(9e-3)},
    "C-256-attack-2.4-adamw": {**_words(256, 2e-2, 2.4), **_adamw(9e-3)},
    "C-256-attack-2.2-adamw": {**_words(256, 2.1e-2, 2.2), **_adamw(9e-3)},
}
_SMOLLM2: Mapping[str, Mapping[str, str]] = {
    "rate-1e-2": _smollm2(2e-2, 2.0, 1e5),
    "C-2304": {**_smollm2(2e-2, 2.0, 1e5), "pd.decomposition_targets.0.C": "2304"},
    "faithfulness-1e3": _smollm2(2e-2, 2.0, 1e3),
    "faithfulness-1e4-attack-1": _smollm2(1e-2, 1.0, 1e4),
    "faithfulness-1e4-attack-1.5": _smollm2(1.2e-2, 1.5, 1e4),
    "faithfulness-3e3-attack-1.5": _smollm2(1.2e-2, 1.5, 3e3),  # the demo
    "faithfulness-1e4-stochastic-8": {
        **_smollm2(1e-2, 1.5, 1e4),
        **_loss(1, "{type: StochasticReconLoss, coeff: 8}"),
    },
    # Some of the three matrices are masked, different ones at each position, so that one can improve while the others
    # are bad.
    "subset": {
        **_RATE,
        "pd.loss_metrics": f"[{_minimality(5e-3)}, {{type: StochasticReconSubsetLoss, coeff: 4}}, {_attack(1.0)}, "
        f"{_faithfulness(1e4)}, {{type: CIMaskedReconLoss, coeff: 1}}, {{type: CIMaskedReconSubsetLoss, coeff: 3}}]",
    },
}


@dataclass(frozen=True)
class Demo:
    """A configuration and its variants, each with the keys that differ. ``measured``: the options of `pd eval`."""

    name: str
    config: Path
    variants: Mapping[str, Mapping[str, str]]
    measured: tuple[str, ...]

    @property
    def kept(self) -> Path:
        return ROOT / "docs" / "measurements" / f"{self.name}_variants.jsonl"


WORDS = Demo("words", ROOT / "configs/demo/decompose.yaml", _WORDS, ("--batches", "2", "--batch-size", "8"))
BYTES = Demo("demo", ROOT / "configs/demo/bytes.yaml", _BYTES, ("--batches", "2", "--batch-size", "8"))
SMOLLM2 = Demo("smollm2", ROOT / "configs/demo-smollm2.yaml", _SMOLLM2, ("--batches", "2", "--batch-size", "2"))


@dataclass(frozen=True)
class Result:
    """One run. ``kl``, ``random``, ``attack``: divided by those of the best baseline at the run's L0. ``minutes``:
    those of training."""

    variant: str
    steps: int
    seed: int
    l0: float
    kl: float
    random: float
    attack: float
    minutes: float


def results(kept: Path) -> list[Result]:
    lines = kept.read_text().splitlines() if kept.is_file() else []
    return [Result(**json.loads(line)) for line in lines]


def run(demo: Demo, out: Path, variant: str, steps: int, seed: int) -> Result:
    """Trains and measures a run, and then deletes its folder."""
    name = f"{demo.name}-{variant}-{steps}-{seed}"
    folder_name = f"p-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    settings = {
        "out_dir": str(out),
        "run_id": folder_name,
        "run_name": name,
        "pd.seed": str(seed),
        "pd.steps": str(steps),
        "cadence.save_every": "null",
        "eval.every": str(steps),
        "eval.slow_every": str(steps),
        **demo.variants[variant],
    }
    shutil.rmtree(out / folder_name, ignore_errors=True)
    start = time.monotonic()
    sets = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    _pd("train", str(demo.config), *sets)
    minutes = (time.monotonic() - start) / 60
    folder = out / folder_name
    _pd("eval", str(folder), "--baselines", "--matched", "--attack", "20", *demo.measured)
    kept = find_comparison(folder, steps)
    assert kept is not None
    shutil.rmtree(folder)
    own = kept.comparison.own
    over = kept.comparison.over_best(own)
    return Result(variant, steps, seed, own.l0, over["error"], over["random"], over["attack"], minutes)


def _pd(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "param_decomp_lab", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"pd {arguments[0]} ended with status {done.returncode}")


def table(demo: Demo, found: list[Result]) -> str:
    """Returns a table of means over seeds, with the smallest and the largest value if there are several."""

    def figure(values: list[float]) -> str:
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        return f"{statistics.mean(values):.3f}{spread}"

    def rows() -> Iterator[list[str]]:
        for steps in sorted({r.steps for r in found}):
            for variant in demo.variants:
                own = [r for r in found if (r.variant, r.steps) == (variant, steps)]
                if own:
                    columns = ([getattr(r, key) for r in own] for key in ("l0", "kl", "random", "attack"))
                    yield [f"{steps:,}", variant, str(len(own)), *map(figure, columns)]

    return "\n".join(markdown_table("steps | variant | seeds | L0 | KL | random | attack, 20 steps", rows()))


def main() -> None:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--words", action="store_true", help="the demo itself, instead of its method on a model of bytes"
    )
    which.add_argument("--smollm2", action="store_true", help="the MLP of SmolLM2's layer 28")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="may be repeated")
    parser.add_argument("--out", type=Path, help="folder for the runs (default: runs/NAME_variants)")
    parser.add_argument("--kept", type=Path, help="file of results (default: docs/measurements/NAME_variants.jsonl)")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table")
    options = parser.parse_args()
    demo = SMOLLM2 if options.smollm2 else WORDS if options.words else BYTES
    unknown = [variant for variant in options.only or () if variant not in demo.variants]
    if unknown:
        parser.error(f"--only {unknown[0]}: not among {', '.join(demo.variants)}")
    kept = options.kept or demo.kept
    out = options.out or ROOT / "runs" / f"{demo.name}_variants"
    if not options.table:
        out.mkdir(parents=True, exist_ok=True)
        for seed in map(int, options.seeds.split(",")):
            for variant in options.only or demo.variants:
                done = {(r.variant, r.steps, r.seed) for r in results(kept)}
                if (variant, options.steps, seed) not in done:
                    result = run(demo, out, variant, options.steps, seed)
                    with kept.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    print(table(demo, results(kept)))


if __name__ == "__main__":
    main()
