"""Where the most important components of each site are most active, as text (`examples.json`)."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from param_decomp_jax.ci import squashings
from param_decomp_jax.state import State
from param_decomp_jax.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.eval.importance import Statistics, importance_logits

EXAMPLES_FILE = "examples.json"


def write_examples(
    run_folder: Path,
    problem: Problem,
    state: State,
    weights: Weights,
    batches: Callable[[int], Array],
    n_batches: int,
    statistics: Statistics,
    text: TokenText,
    n_components: int = 16,
    n_examples: int = 6,
    around: int = 24,
) -> Path:
    """For each site its ``n_components`` of largest mean λ, each with the positions of its largest logit in context.

    Logits and not λ decide: many positions have λ = 1, and the first of them would stand for all. At most one position
    per row of data; ``around`` tokens are shown on each side.
    """
    sites = problem.target.sites
    chosen = {name: np.argsort(-mean)[:n_components] for name, mean in statistics.means.items()}
    by_stack = {s.name: np.stack([chosen[sites.all[n].name] for n in s.sites]) for s in sites.stacks}

    @jax.jit
    def of_batch(components: Any, ci: Any, weights: Weights, inputs: Array) -> dict[str, Array]:
        logits = importance_logits(problem, components, ci, weights, inputs)
        pick = partial(jnp.take, axis=-1)
        return {name: jax.vmap(pick)(x, jnp.asarray(by_stack[name])) for name, x in logits.items()}

    tokens, active = [], []
    for number in range(n_batches):
        inputs = batches(number)
        tokens.append(np.asarray(inputs))
        active.append(
            {k: list(v) for k, v in jax.device_get(of_batch(state.components, state.ci, weights, inputs)).items()}
        )
    rows = np.concatenate(tokens)
    per_site = [sites.unstack(batch) for batch in active]

    lower, _ = squashings(problem.decomposition.squashing)

    def example(logits: np.ndarray, values: np.ndarray, row: int) -> dict[str, Any]:
        peak = int(logits[row].argmax())
        first, stop = max(0, peak - around), min(rows.shape[1], peak + around + 1)
        return {
            "tokens": text.tokens(rows[row, first:stop].tolist()),
            "ci": [round(float(v), 4) for v in values[row, first:stop]],
            "peak": peak - first,
            "row": row,
        }

    def component(logits: np.ndarray, number: int, mean: float) -> dict[str, Any]:
        values = np.asarray(lower(jnp.asarray(logits)))
        order = [int(row) for row in np.argsort(-logits.max(axis=1), kind="stable")[:n_examples]]
        shown = [row for row in order if values[row].max() > 0]
        return {"component": number, "mean_ci": mean, "examples": [example(logits, values, row) for row in shown]}

    document = {}
    for site in sites.all:
        logits = np.concatenate([batch[site.name] for batch in per_site])  # [rows, T, chosen]
        means = statistics.means[site.name]
        document[site.name] = {
            "C": site.C,
            "components": [
                component(logits[..., slot], int(c), float(means[c])) for slot, c in enumerate(chosen[site.name])
            ],
        }
    path = run_folder / EXAMPLES_FILE
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps({"sites": document}, ensure_ascii=False))
    os.replace(written, path)
    return path
