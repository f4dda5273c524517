"""Clusters made-up firings at the size of a whole model, and counts how many of the planted groups are found.

    python -m experiments.benchmarks.cluster_scale                      # 100,000 components, 2e6 positions, three seeds
    python -m experiments.benchmarks.cluster_scale --components 5000 --positions 2e5

Planted groups have 1 to 20 members; small ones are more frequent. Each has a density, log-uniform from 1e-4 to 4e-3.
A member misses a share of its group's positions (--noise), and fires at as many others. The first seed merges the best
pair each time; the others draw pairs. Prints the times, the peak resident memory of this process, and for every seed
the adjusted Rand index between the groups found and those planted.
"""

import argparse
import resource
import time

import numpy as np

from param_decomp_lab.cluster.activity import Activity
from param_decomp_lab.cluster.agreement import agreement
from param_decomp_lab.cluster.merging import Merger
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.harvest.files.groups import labels_at

LARGEST = 20
DENSITIES = (1e-4, 4e-3)


def made_up(n: int, n_positions: int, noise: float, seed: int) -> tuple[Activity, np.ndarray]:
    """Returns the activity of ``n`` components, in random order, and the number of each one's group."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, LARGEST + 1)
    sizes = rng.choice(np.arange(1, LARGEST + 1), n, p=weight / weight.sum())
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), n) + 1]
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)[:n])
    least, most = DENSITIES
    density = least * (most / least) ** rng.random(len(sizes))
    columns: list[np.ndarray] = [np.zeros(0, np.int32)] * n
    members = np.argsort(truth, kind="stable")
    for group, mine in enumerate(np.split(members, np.searchsorted(truth[members], np.arange(1, len(sizes))))):
        together = rng.integers(0, n_positions, max(1, rng.binomial(n_positions, density[group])), np.int32)
        for component in mine.tolist():
            fires = together[rng.random(len(together)) >= noise]
            alone = rng.integers(0, n_positions, rng.binomial(len(together), noise), np.int32)
            columns[component] = np.unique(np.concatenate([together[:1], fires, alone]))
    ends = np.concatenate([[0], np.cumsum([len(column) for column in columns])])
    return Activity(ends, np.concatenate(columns), n_positions), truth


def resident() -> float:
    """Returns the largest resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--components", type=float, default=1e5)
    parser.add_argument("--positions", type=float, default=2e6)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    n, n_positions = int(given.components), int(given.positions)
    activity, truth = made_up(n, n_positions, given.noise, 0)
    print(f"components              {n:,} in {len(set(truth.tolist())):,} groups")
    print(f"positions               {n_positions:,}")
    print(
        f"firings                 {len(activity.positions):,}, {len(activity.positions) / n_positions:.0f} a position"
    )
    print(f"resident after making   {resident():.2f} GiB", flush=True)
    began = time.monotonic()
    merger = Merger(activity, given.alpha)
    pairs = merger.find_pairs()
    print(f"pairs near each other   {len(pairs.own):,}: {time.monotonic() - began:.0f} s", flush=True)
    for seed in range(given.seeds):
        started = time.monotonic()
        draw = ClusterRequest().draw if seed else 0.0
        history = merger.merge(pairs, seed, draw)
        labels = labels_at(history.first, history.second, n, len(history.first))
        found = agreement(labels, truth)
        print(
            f"seed {seed}: {labels.max() + 1:,} groups, adjusted Rand {found.adjusted_rand:.4f}, "
            f"{time.monotonic() - started:.0f} s, cost lower by {-history.change.sum():.1f} bits a position",
            flush=True,
        )
    print(f"all of it               {(time.monotonic() - began) / 60:.1f} min")
    print(f"largest resident        {resident():.2f} GiB")


if __name__ == "__main__":
    main()
