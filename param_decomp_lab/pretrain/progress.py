"""What a pretraining says while it runs: a bar on the console, and one line of ``metrics.jsonl`` per logged step."""

import json
import math
from typing import TextIO

from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from param_decomp_lab.errors import NonFiniteLoss

METRICS_FILE = "metrics.jsonl"


def progress_bar(console: Console, *fields: str) -> Progress:
    """A bar over steps, with a text for each of ``fields``."""
    texts = (TextColumn("{task.fields[" + name + "]}") for name in fields)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *texts,
        TimeRemainingColumn(),
        console=console,
    )


def write_metrics(log: TextIO, metrics: dict[str, float]) -> None:
    """One line, at once."""
    log.write(json.dumps(metrics) + "\n")
    log.flush()


def finite(step: int, loss: Array) -> float:
    """``loss`` as a number. Raises NonFiniteLoss if it is none (N3)."""
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the loss is {value} at step {step}; a smaller optimizer.lr or a clip_norm usually cures it"
        )
    return value
