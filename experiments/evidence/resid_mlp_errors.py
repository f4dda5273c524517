"""Explains the identity errors of a ResidMLP: is a single component on for nearly every feature, and has it a task?

    python -m experiments.evidence.resid_mlp_errors runs/p-1a2b3c4d

The expected pattern of `mlp_in` has one component for each feature, on for that feature alone (docs/semantics.md,
section 11). The first layer reads the feature that is on and nothing else. A later layer also reads what the layers
before it have written, and those may write along one direction whatever feature is on. A component that reads this
direction is then on for all features. It is right, and counts as an error for all of them, or for all but one.

The script turns one feature on at a time. For each `mlp_in` it prints the errors (components that are on for a feature
that is not theirs), how many of them the most frequent such component has, and the median change of the output
(Euclidean norm) without it and without the feature's own component. The last two columns are of the target alone: how
much a layer reads of features that are off, as the first two singular values of a matrix [feature on, feature read].
If the first is far larger, there is one common direction. 0 in the first layer.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.metrics.ground_truth import OFF_ABOVE, match_components
from param_decomp_lab.metrics.toy_probe import LEVEL
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import markdown_table


class SiteErrors(NamedTuple):
    """Errors of one `mlp_in`. ``most``: those of the component that has most of them. ``without``, ``without_own``: the
    median change of the output without this component, and without the feature's own.
    """

    errors: int
    most: int
    without: float
    without_own: float


def errors_of(run: Run, site: str, features: Float[np.ndarray, "n n"]) -> SiteErrors:
    """Counts and measures the errors of a site. ``features``: inputs with one feature on each."""
    importances = np.asarray(run.causal_importances(features, site)[site])
    matching = match_components(importances)
    wrong = importances > OFF_ABOVE
    wrong[matching.features, matching.components] = False
    by_component = wrong.sum(axis=0)
    worst = int(by_component.argmax())
    whole = np.asarray(run.output(features))
    C = importances.shape[1]
    masks = np.ones((len(features), C), np.float32)
    masks[matching.features, matching.components] = 0

    def change(masks: Float[np.ndarray, "n C"]) -> float:
        masked = np.asarray(run.output(features, {site: masks}, delta=1.0))
        return float(np.median(np.linalg.norm(masked - whole, axis=-1)))

    without = np.ones_like(masks)
    without[:, worst] = 0
    return SiteErrors(int(by_component.sum()), int(by_component[worst]), change(without), change(masks))


def reads_of_others(run: Run, layer: int) -> Float[np.ndarray, " n"]:
    """Returns the singular values of what a layer of the target reads of the features that are off, the largest first.
    Biases are zero and the activation is ReLU.
    """
    embed = np.asarray(run.weights["embed"], np.float64)
    x = LEVEL * embed
    for i in range(layer):
        w_in, w_out = (np.asarray(run.weights["layers"][kind][i], np.float64) for kind in ("mlp_in", "mlp_out"))
        x = x + np.maximum(x @ w_in, 0) @ w_out
    reads = x @ np.linalg.pinv(embed)
    found = np.linalg.svd(reads - np.diag(np.diag(reads)), compute_uv=False)
    return np.where(found > 1e-9, found, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of a ResidMLP")
    given = parser.parse_args(arguments)
    try:
        print_table(load_run(given.run, devices=1))
    except UserError as problem:
        parser.exit(2, f"{problem}\n")


def print_table(run: Run) -> None:
    """Raises UserError for a run of another target, or of one that cannot be followed by hand."""
    architecture = run.target.architecture
    if not isinstance(architecture, ResidMLPConfig):
        raise UserError(f"{run.folder} decomposes a {architecture.title}; only a ResidMLP has these errors")
    if architecture.activation != "relu" or architecture.in_bias or architecture.out_bias:
        raise UserError(f"{run.folder}: here only a ResidMLP with ReLU and without biases can be followed by hand")
    if architecture.n_features > architecture.d_embed:
        raise UserError(f"{run.folder}: with more features than dimensions a layer cannot read each by itself")
    features = LEVEL * np.eye(architecture.n_features, dtype=np.float32)
    rows = []
    for layer in range(architecture.n_layers):
        site = f"layers.{layer}.mlp_in"
        if site not in run.sites:
            continue
        found, reads = errors_of(run, site, features), reads_of_others(run, layer)
        rows.append([site, found.errors, found.most, *map(number, (found.without, found.without_own, *reads[:2]))])
    print(f"{run.id}, step {run.step}: {architecture.describe()}\n")
    columns = "site | errors | of one component | change without it | without the own | reads of others, 1st | 2nd"
    print("\n".join(markdown_table(columns, rows)))


if __name__ == "__main__":
    main()
