"""How many components does a prediction need? Graphs of importances optimised for their prompt, beside the run's own.

    python -m experiments.graph_optimized RUN                        # 10 prompts of 30 tokens
    python -m experiments.graph_optimized RUN --prompts 5 --allowed 2

For each prompt, the beginning of a row of the run's held-out data: components that fire and nodes of the graph, with
the run's own importances and with those that `pd graph --optimize` finds; and of both the KL from the model's next
token, with the other components at λ, at random (mean of 8 draws) and under attack (the worst of four attacks of 20
steps). Prints a table as Markdown, with the time and the largest resident memory.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path

from experiments.graph_ablation import held_out
from param_decomp_lab import load_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=30, help="of a prompt")
    parser.add_argument("--allowed", type=float, default=1.0, help="errors, as multiples of those of the run's own")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = load_run(given.run, devices=1)
    print("| prompt ends with | fire | nodes | KL at λ | at random | under attack | s |")
    print("|---|---|---|---|---|---|---|")
    fire, nodes, times, holds = [], [], [], 0
    for prompt in held_out(run, given.prompts, given.tokens, given.seed):
        own = run.graph(prompt.tolist())
        start = time.perf_counter()
        graph = run.graph(prompt.tolist(), optimize={"allowed": given.allowed, "steps": given.steps})
        times.append(time.perf_counter() - start)
        found = graph.optimized
        assert found is not None
        fire.append(found.after / found.before)
        nodes.append(len(graph.nodes) / len(own.nodes))
        before, after = found.errors_before, found.errors_after
        holds += after.ci <= before.ci and after.attack <= before.attack
        end = "".join(graph.tokens[-5:]).replace("|", "\\|").replace("\n", "↵")
        pairs = [(before.ci, after.ci), (before.random, after.random), (before.attack, after.attack)]
        print(
            f"| `{end}` | {found.before:,} → {found.after:,} | {len(own.nodes):,} → {len(graph.nodes):,} | "
            + " | ".join(f"{a:.3g} → {b:.3g}" for a, b in pairs)
            + f" | {times[-1]:.0f} |",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    first, typical = times[0], statistics.median(times)
    print(
        f"\nMedians: {statistics.median(fire):.1%} of the components still fire, and the graph has "
        f"{statistics.median(nodes):.1%} of the nodes. In {holds} of {len(fire)} prompts the KL is no larger than "
        f"before, at λ and under attack, with draws and attacks that were not used to choose. A graph takes "
        f"{typical:.0f} s (median; the first, which compiles, {first:.0f} s); {peak:.2f} GiB at most."
    )


if __name__ == "__main__":
    main()
