"""Are the groups of a toy run its features? Tests clustering where the truth is known: on a TMS or a ResidMLP.

    python experiments/evidence/table1.py --only tms_5-2 --seeds 0,1,2 --out runs/toys
    python -m experiments.evidence.cluster_toys runs/toys/tms_5-2/p-*
    python -m experiments.evidence.cluster_toys --make runs/toys/resid_mlp --seeds 0,1,2

`--make` first decomposes a ResidMLP with weights set by hand, in which every neuron reads one of ten features and adds
it. In a trained ResidMLP, features share neurons, and no component of `mlp_out` belongs to one feature. Each run is
harvested, unless it has been, and clustered. The truth comes from a probe with one feature on at a time: a component
serves the features for which its λ is above 0.1. Prints, for each run, how many features have all components that serve
only them in one group that serves nothing else.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from param_decomp_jax.targets.architecture import FeatureInputs
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_lab import load_run
from param_decomp_lab.cluster.cluster import cluster
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.harvest.files import Groups, Harvest
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.plan import HarvestRequest
from param_decomp_lab.metrics.ground_truth import OFF_ABOVE
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.tables import plain_table
from param_decomp_lab.weights.target_folder import save_target

PROBE = 0.75
ROOT = Path(__file__).parents[2]
FEATURES, WIDTH = 10, 100
SETTINGS = (
    "pd.decomposition_targets=[{module_pattern: layers.*.mlp_in, C: 20}, {module_pattern: layers.*.mlp_out, C: 20}]",
    "pd.steps=6000", "pd.batch_size=512", "data.feature_probability=0.05",
    "pd.loss_metrics=[{type: ImportanceMinimalityLoss, coeff: 3.0e-4, pnorm: 1.0, beta: 0},"
    " {type: StochasticReconLoss, coeff: 1.0}, {type: StochasticReconLayerwiseLoss, coeff: 1.0}]",
    "eval.every=6000", "eval.slow_every=6000", "eval.metrics=[{type: CI_L0, groups: null}]",
)  # fmt: skip


def make_run(out: Path, seed: int) -> Path:
    """Makes the decomposition of the hand-made ResidMLP, unless it exists."""
    folder, target = out / f"p-{seed:08x}", out / "target"
    if not (folder / "ended.json").is_file():
        rng = np.random.default_rng(0)
        embed = rng.standard_normal((FEATURES, WIDTH))
        embed /= np.linalg.norm(embed, axis=1, keepdims=True)
        layers = {"mlp_in": np.linalg.pinv(embed)[None], "mlp_out": embed[None]}
        layers = {name: matrix.astype(np.float32) for name, matrix in layers.items()}
        if not target.exists():
            architecture = ResidMLPConfig(FEATURES, WIDTH, FEATURES, 1)
            save_target(target, architecture, {"embed": embed.astype(np.float32), "layers": layers})
        settings = (*SETTINGS, f"target={{folder: {target}}}", f"out_dir={out}", f"run_id={folder.name}")
        sets = [argument for one in (*settings, f"pd.seed={seed}") for argument in ("--set", one)]
        config = ROOT / "configs" / "toys" / "resid_mlp1.yaml"
        subprocess.run([sys.executable, "-m", "param_decomp_lab", "train", str(config), *sets], cwd=ROOT, check=True)
    return folder


def features_served(run: Run) -> dict[str, np.ndarray]:
    """Returns, for each site, whether each component serves each feature, [features, C]."""
    reads = run.architecture.inputs
    assert isinstance(reads, FeatureInputs), "the truth is known only for a toy"
    importances = run.causal_importances(PROBE * np.eye(reads.n_features, dtype=np.float32))
    return {site: np.asarray(values) > OFF_ABOVE for site, values in importances.items()}


def judge(groups: Groups, served: dict[str, np.ndarray]) -> dict[str, int]:
    """Returns three counts. ``features``: features that any component serves. ``whole``: those for which all components
    that serve only that feature are in one group, which serves nothing else. ``shared``: components that serve several
    features and so belong to none."""
    features_of: dict[tuple[str, int], set[int]] = {}
    for site, matrix in served.items():
        for feature, component in zip(*(axis.tolist() for axis in np.nonzero(matrix)), strict=True):
            features_of.setdefault((site, component), set()).add(feature)
    own = {component: next(iter(features)) for component, features in features_of.items() if len(features) == 1}
    in_groups = [{own[member] for member in groups.members(g) if member in own} for g in range(len(groups))]
    whole = 0
    for feature in sorted(set(own.values())):
        where = {groups.group_of(*component) for component, mine in own.items() if mine == feature}
        group = where.pop()
        whole += not where and group is not None and in_groups[group] == {feature}
    return {
        "features": len(set().union(*features_of.values())) if features_of else 0,
        "whole": whole,
        "shared": len(features_of) - len(own),
        "groups": len(groups),
        "components": len(groups.components),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--make", type=Path, metavar="OUT")
    parser.add_argument("--seeds", default="0,1,2", help="seeds of the runs that --make trains")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--threshold", type=float, default=0.0)
    parser.add_argument("--inputs", type=float, default=2e5)
    given = parser.parse_args()
    table = plain_table(
        "Groups of toy runs", ("run", "left"), ("step", "right"), ("clustering seed", "right"), ("components", "right"),
        ("groups", "right"), ("features", "right"), ("each a group", "right"), ("components of several", "right"),
    )  # fmt: skip
    made_here = [make_run(given.make.resolve(), int(seed)) for seed in given.seeds.split(",")] if given.make else []
    for folder in [*given.runs, *made_here]:
        run = load_run(folder, devices=1)
        made = harvest(run, HarvestRequest(tokens=given.inputs, threshold=given.threshold))
        assert made is not None
        served = features_served(run)
        for seed, draw in enumerate((0.0, 10.0, 3.0)):
            request = ClusterRequest(given.alpha, 1 + (seed > 0), draw=draw)
            found = judge(cluster(Harvest(made), request), served)
            names = ("components", "groups", "features", "whole", "shared")
            table.add_row(folder.name, f"{run.step:,}", f"{seed}", *(f"{found[name]:,}" for name in names))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
