"""Are the attribution graphs of toys right? Tests them where it is known what the network computes.

    python -m experiments.evidence.graph_truth RUN [RUN …]

Sets one feature to 0.75 and follows its own output back. At each site with a component for each feature, the output
should come from that feature's component (matched by `ground_truth`), and from no other with more than 5 % of the
influence on components of these sites. A site with fewer components in use than features, such as the second matrix of
a ResidMLP, may have any. Prints a table as Markdown.
"""

import argparse
from pathlib import Path

import numpy as np

from param_decomp_jax.targets.architecture import FeatureInputs
from param_decomp_lab import load_run
from param_decomp_lab.metrics.ground_truth import match_components
from param_decomp_lab.opening import Run

VALUE = 0.75
SMALL = 0.05
USED = 0.5
"""A component is in use if its importance is above this for some feature."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    print("| run | features | right | largest share of another component | share of its own, least | rests, most |")
    print("|---|---|---|---|---|---|")
    for folder in parser.parse_args().runs:
        run = load_run(folder, devices=1)
        others, owns, rests = judge(run)
        right = sum(other <= SMALL for other in others)
        cells = (run.name, len(others), right, *(f"{x:.3f}" for x in (max(others), min(owns), max(rests))))
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def judge(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Returns three numbers for each feature: the largest share of another component at a site with one component per
    feature, the least share of its own component at such sites, and the influence that ends in residual errors."""
    reads = run.architecture.inputs
    assert isinstance(reads, FeatureInputs)
    importances = run.causal_importances(VALUE * np.eye(reads.n_features, dtype=np.float32))
    own: dict[str, dict[int, int]] = {}
    for site, values in importances.items():
        matrix = np.asarray(values)
        if (matrix.max(axis=0) > USED).sum() >= reads.n_features:
            matching = match_components(matrix)
            own[site] = dict(zip(matching.features.tolist(), matching.components.tolist(), strict=True))
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for feature in range(reads.n_features):
        graph = run.graph(f"{feature}={VALUE}", target=feature, nodes_share=1.0, edges_share=1.0, unfollowed=0.0)
        shares: dict[str, dict[int, float]] = {site: {} for site in own}
        for node in graph.components:
            if node.site in own:
                shares[node.site][node.number] = node.influence
        total = sum(sum(of_site.values()) for of_site in shares.values()) or 1.0
        mine = [
            shares[site].get(own[site].get(feature, -1), 0.0) / max(sum(shares[site].values()), 1e-12) for site in own
        ]
        other = [
            value / total
            for site in own
            for number, value in shares[site].items()
            if number != own[site].get(feature, -1)
        ]
        for column, value in zip(found, (max(other, default=0.0), min(mine), graph.shares.rests), strict=True):
            column.append(value)
    return found


if __name__ == "__main__":
    main()
