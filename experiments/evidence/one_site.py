"""What does each matrix cost when it alone is masked? Compares a decomposition with baselines, site by site.

    python -m experiments.evidence.one_site RUN --rows 4 --k 1,2,4,8,32

The first table has KLs on held-out rows. In each column the sites of one name are masked, and all others are whole; in
the last column, every site is masked. λ has its own L0; baselines have the k parts of largest activation at each site
and position (B2). If the error with one site masked is near that with all masked, no other site limits the
decomposition. If a baseline needs many parts at a single site, that matrix's work is spread over many directions, and
no choice of few parts comes close.

The second table says how often components are on: how many are on at more than half of the positions, and how many
others ever are.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from param_decomp_jax.analysis.attribution import for_attribution
from param_decomp_jax.analysis.baselines import Masks, activations, largest, masked_passes
from param_decomp_jax.analysis.importances import lower_importances
from param_decomp_jax.decomposition.components import Components, with_views
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_lab import load_run
from param_decomp_lab.baselines.command import other_batches
from param_decomp_lab.baselines.measure import Measurement
from param_decomp_lab.baselines.parts import Baseline
from param_decomp_lab.baselines.result import OWN
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.eval.run_evaluation import evaluation_batches
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.numbers import number, percent
from param_decomp_lab.ui.tables import markdown_table

BASELINES: tuple[Baseline, ...] = ("neurons", "weighted singular vectors")
OFTEN = 0.5


class Row(NamedTuple):
    """One line of the first table. ``errors``: with the sites of one name masked, name by name, and with all sites
    masked."""

    label: str
    l0: float
    errors: list[float]


def masked_errors(problem: Problem, parts: Components, weights: Weights, inputs: Array, masks: Masks) -> Array:
    """Returns the KL, as a mean over positions, with each of the masks of `alone`. The clean pass runs once."""
    passes = masked_passes(problem, parts, weights, inputs)
    return jnp.stack([passes.error(given) for given in alone(masks)])


def alone(masks: Masks) -> Iterator[Masks]:
    """Yields, name by name, masks that are all on except at the sites of that name; then the given masks."""
    whole = jax.tree.map(jnp.ones_like, masks)
    for name, own in masks.items():
        yield {**whole, name: own}
    yield masks


def measure(run: Run, batch: Array, others: Sequence[Array], ks: Sequence[int]) -> tuple[list[Row], Masks]:
    """Returns the rows of the first table, and λ by stack. ``others``: batches by which baselines are weighted."""
    problem = for_attribution(run.problem)
    baselines = Measurement(run, [batch], others, (1,), 0, True, "activation")

    def row(label: str, parts: Components, masks: Masks, l0: float) -> Row:
        found = jitted(masked_errors)(problem, parts, run.weights, batch, masks)
        return Row(label, l0, [float(x) for x in found])

    with jax.set_mesh(run.mesh):
        importances = jitted(lower_importances)(problem, run.learned, run.weights, batch)
        own = with_views(run.learned.components, problem.target.sites)
        l0 = np.mean([np.count_nonzero(np.asarray(m) > 0, axis=-1).mean() for m in importances.values()])
        rows = [row(f"{OWN}, λ as masks", own, importances, float(l0))]
        for kind in BASELINES:
            parts = baselines.parts(kind)
            sizes = jax.tree.map(jnp.abs, jitted(activations)(problem, parts, run.weights, batch))
            rows += [row(kind, parts, largest(sizes, k), k) for k in ks]
    return rows, importances


def frequencies(importances: Masks) -> Iterator[list[str]]:
    """Yields the rows of the second table."""
    for name, masks in importances.items():
        on = np.asarray(masks) > 0
        share = on.mean(axis=tuple(range(1, on.ndim - 1)))  # by layer and component
        often = share > OFTEN
        rest = on.sum() / (on.size // on.shape[-1]) - share[often].sum() / len(share)
        yield [name, str(int(often.sum())), percent(float(share[often].mean())) if often.any() else "–",
               str(int(((share > 0) & ~often).sum())), number(float(rest))]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=4, help="held-out rows, in one batch")
    parser.add_argument("--k", default="1,2,4,8,32", help="numbers of parts of a baseline, comma-separated")
    given = parser.parse_args(arguments)
    try:
        ks = sorted({int(k) for k in given.k.split(",")})
        if given.rows < 1 or ks[0] < 1:
            raise ValueError
    except ValueError:
        parser.error("--rows and --k should be numbers of at least 1")
    try:
        run = load_run(given.run, devices=1)
        request = EvaluationRequest(batches=1, batch_size=given.rows)
        source, data = evaluation_batches(run, evaluation_config(run.config, request, str(given.run)), request)
        rows, importances = measure(run, source(0), other_batches(run, source, 1, given.rows), ks)
    except UserError as problem:
        parser.exit(2, f"{problem}\n")
    print(f"{given.rows} rows of {data}\n")
    cells = ((row.label, number(row.l0), *map(number, row.errors)) for row in rows)
    print("\n".join(markdown_table(f"parts | L0 or k | {' | '.join(importances)} | all", cells)))
    print()
    head = "sites | on at more than half of the positions | of positions, on average | others ever on | their L0"
    print("\n".join(markdown_table(head, frequencies(importances))))


if __name__ == "__main__":
    main()
