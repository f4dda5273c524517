"""Continues a text with an opened run's target or its components."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int32

from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.inputs import Inputs, read_inputs
from param_decomp_lab.runs.masks import Delta, Masks


def extended(
    tokens: Sequence[int], n: int, longest: int | None, next_token: Callable[[list[int]], int]
) -> tuple[int, ...]:
    """Returns up to ``n`` tokens that follow ``tokens``, each chosen by ``next_token`` from all before it; fewer if
    rows would exceed ``longest`` tokens.
    """
    row = list(tokens)
    for _ in range(n):
        if longest is not None and len(row) >= longest:
            break
        row.append(next_token(row))
    return tuple(row[len(tokens) :])


def generate(
    run: Any, prompt: Inputs, n: int, masks: Masks | None, delta: Delta, temperature: float, seed: int
) -> Int32[np.ndarray, " n"]:
    """The token ids of `OpenedRun.generate`."""
    if not run.is_language_model:
        raise UserError("a toy has no text to continue")
    if n < 0 or not temperature >= 0 or not np.isfinite(temperature):
        raise UserError("generate: n and temperature should be at least 0")
    row = read_inputs(run, prompt)
    if row.ndim != 1:
        raise UserError(f"generate: takes one row of tokens, not {list(row.shape)}")
    longest, rng = run.longest_row, np.random.default_rng(seed)
    # A token does not depend on later ones, so rows padded to the full length all run in one program. Importances may
    # depend on the whole row, so with them each length needs its own program.
    padded = len(row) + n if longest is None else min(len(row) + n, longest)
    padded = 0 if _needs_importances(masks) else padded

    def next_token(tokens: list[int]) -> int:
        inputs = np.asarray(tokens + [0] * (padded - len(tokens)), np.int32)
        return _chosen(np.asarray(run.logits(inputs, masks, delta))[len(tokens) - 1], temperature, rng)

    return np.asarray(extended(row.tolist(), n, longest, next_token), np.int32)


def _needs_importances(masks: Masks | None) -> bool:
    return isinstance(masks, str) or any(isinstance(mask, str) for mask in (masks or {}).values())


def _chosen(logits: Float[np.ndarray, " vocabulary"], temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))
