"""The log of a pretraining: a line of ``metrics.jsonl`` for each logged step."""

import json
import math
from typing import TextIO

from jax import Array

from param_decomp_lab.errors import NonFiniteLoss

METRICS_FILE = "metrics.jsonl"


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
