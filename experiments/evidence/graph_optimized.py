"""How many components does a prediction need? Compares graphs with importances optimised for a prompt, and the run's.

    python -m experiments.evidence.graph_optimized RUN                        # 10 prompts of 30 tokens
    python -m experiments.evidence.graph_optimized RUN --prompts 5 --allowed 2

Each prompt is the beginning of a row of the run's held-out data. Counts the components that fire and the nodes of the
graph, with the run's own importances and with those that `pd graph --optimize` finds. For both, measures the KL from
the model's next token with the other components at λ, at random (mean of 8 draws) and under attack (the worst of eight
attacks of 20 steps). Prints a table as Markdown, with the time and the peak resident memory.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from experiments.evidence.graph_ablation import held_out
from param_decomp_lab import load_run
from param_decomp_lab.graph import Graph
from param_decomp_lab.opening import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=30, help="tokens of a prompt")
    parser.add_argument("--allowed", type=float, default=1.0, help="allowed errors, as a multiple of the run's own")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = load_run(given.run, devices=1)
    print("| prompt ends with | components that fire | in the graph | KL at λ | at random | under attack | alone | s |")
    print("|---|---|---|---|---|---|---|---|")
    fire, alone, times, holds = [], [], [], 0
    for prompt in held_out(run, given.prompts, given.tokens, given.seed):
        own = run.graph(prompt.tolist())
        start = time.perf_counter()
        graph = run.graph(prompt.tolist(), optimize={"allowed": given.allowed, "steps": given.steps})
        times.append(time.perf_counter() - start)
        found = graph.optimized
        assert found is not None
        fire.append(found.after / max(found.before, 1))
        alone.append((kl_of_nodes_alone(run, own), kl_of_nodes_alone(run, graph)))
        before, after = found.errors_before, found.errors_after
        holds += after.ci <= before.ci and after.attack <= before.attack
        end = "".join(graph.tokens[-5:]).replace("|", "\\|").replace("\n", "↵")
        pairs = [(before.ci, after.ci), (before.random, after.random), (before.attack, after.attack), alone[-1]]
        print(
            f"| `{end}` | {found.before:,} → {found.after:,} | {len(own.components):,} → "
            f"{len(graph.components):,} | "
            + " | ".join(f"{a:.3g} → {b:.3g}" for a, b in pairs)
            + f" | {times[-1]:.0f} |",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    first, typical = times[0], statistics.median(times)
    alone_before, alone_after = (statistics.median(pair[k] for pair in alone) for k in (0, 1))
    print(
        f"\nMedians: {statistics.median(fire):.1%} of the components still fire; with those of the graph alone, the KL "
        f"is {alone_before:.3g} → {alone_after:.3g}. In {holds} of {len(fire)} prompts the KL is no larger than "
        "before, at λ and under attack, with draws and attacks that were not used to choose. A graph takes "
        f"{typical:.0f} s (median; the first, which compiles, {first:.0f} s); {peak:.2f} GiB at most."
    )


def kl_of_nodes_alone(run: Run, graph: Graph) -> float:
    """Returns the KL of the next token with the components of a graph at their importances and all others off."""
    masks = {name: np.zeros((len(graph.tokens), site.C), np.float32) for name, site in run.sites.items()}
    for node in graph.components:
        masks[node.site][node.position, node.number] = node.importance
    ids = list(graph.token_ids)
    log_p, log_q = (jax.nn.log_softmax(run.logits(ids, m)[-1]) for m in (None, masks))
    return float((np.exp(log_p) * (log_p - log_q)).sum())


if __name__ == "__main__":
    main()
