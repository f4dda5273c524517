"""Finds where the most important components of each site are most active, and writes this as text (`examples.json`)."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.importances import chosen_logits, squash_existing
from param_decomp_jax.ci import squashings
from param_decomp_jax.method.state import Learned, State
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import whole
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.metrics.statistics import Statistics
from param_decomp_lab.runs.folder import EXAMPLES_FILE

MOST_OF_A_SITE = 16
MOST = 4096
"""The most components with examples, at a site and at all sites together: more would fill the device's memory and the
report.
"""


class ChosenExamples(NamedTuple):
    """The chosen components of each site, and their logits on the evaluation's rows."""

    chosen: dict[str, Int[np.ndarray, "n"]]
    tokens: Int[np.ndarray, "rows T"]
    logits: dict[str, Float[np.ndarray, "rows T n"]]


def n_shown(n_sites: int) -> int:
    """Returns the number of components of a site that have examples."""
    return max(1, min(MOST_OF_A_SITE, MOST // n_sites))


def find_examples(
    problem: Problem,
    state: State,
    weights: Weights,
    batches: Iterable[Array],
    statistics: Statistics,
    mesh: Mesh,
) -> ChosenExamples:
    """Computes the logits of the few components of largest mean λ of each site. Every process of a run takes part."""
    sites = problem.target.sites
    n_components = n_shown(len(sites.all))
    chosen = {name: np.argsort(-mean, kind="stable")[:n_components] for name, mean in statistics.means.items()}
    by_stack = {s.name: s.lay_out(np.stack([chosen[sites.all[n].name] for n in s.sites])) for s in sites.stacks}

    def of_batch(learned: Learned, weights: Weights, inputs: Array) -> tuple[Array, dict[str, Array]]:
        return inputs, chosen_logits(problem, learned, weights, inputs, by_stack)

    jitted = jax.jit(of_batch, out_shardings=whole(mesh))  # whole, so that it can be fetched
    per_batch = [jax.device_get(jitted(state.learned, weights, inputs)) for inputs in batches]
    tokens = np.concatenate([tokens for tokens, _ in per_batch])
    per_site = [sites.unstack(logits) for _, logits in per_batch]
    return ChosenExamples(chosen, tokens, {s.name: np.concatenate([x[s.name] for x in per_site]) for s in sites.all})


def write_examples(
    run_folder: Path,
    problem: Problem,
    examples: ChosenExamples,
    statistics: Statistics,
    text: TokenText,
    n_examples: int = 6,
    around: int = 24,
) -> Path:
    """Writes, for each chosen component, the positions of its largest logits with their context.

    Positions are ranked by logits because many have λ = 1, of which the first ones would always be chosen. At most one
    position per row of data is shown, with ``around`` tokens on each side.
    """
    sites, rows = problem.target.sites, examples.tokens
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
        values = np.asarray(squash_existing(lower, jnp.asarray(logits)))
        order = [int(row) for row in np.argsort(-logits.max(axis=1), kind="stable")[:n_examples]]
        shown = [row for row in order if values[row].max() > 0]
        return {"component": number, "mean_ci": mean, "examples": [example(logits, values, row) for row in shown]}

    document = {}
    for site in sites.all:
        logits, means, chosen = examples.logits[site.name], statistics.means[site.name], examples.chosen[site.name]
        document[site.name] = {
            "C": site.C,
            "components": [component(logits[..., slot], int(c), float(means[c])) for slot, c in enumerate(chosen)],
        }
    path = run_folder / EXAMPLES_FILE
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps({"sites": document}, ensure_ascii=False))
    os.replace(written, path)
    return path
