"""Does a graph find what a prediction depends on? Takes out its most influential components, and random ones.

    python -m experiments.evidence.graph_ablation RUN                         # 20 prompts of 30 tokens
    python -m experiments.evidence.graph_ablation RUN --prompts 5 --nodes 10

Each prompt is the beginning of a row of the run's held-out data. Makes the graph of the most likely next token, then
measures its logit (less the mean of all logits) without the ten components of largest influence, each at its own
position, and without ten random ones that fire at the same positions, drawn five times. All others are at their
importances. Prints a table as Markdown, with the time and the nodes of each graph and the peak resident memory.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path

import numpy as np

from param_decomp_lab import load_run
from param_decomp_lab.graph.graph import Graph
from param_decomp_lab.opening import Run

DRAWS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=30, help="tokens of a prompt")
    parser.add_argument("--nodes", type=int, default=10, help="components to take out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = load_run(given.run, devices=1)
    prompts = held_out(run, given.prompts, given.tokens, given.seed)
    print(f"| prompt ends with | token | graph, s | nodes | top {given.nodes} | random {given.nodes} |")
    print("|---|---|---|---|---|---|")
    tops, others, times = [], [], []
    for number, prompt in enumerate(prompts):
        output = int(np.asarray(run.logits(prompt))[-1].argmax())
        start = time.perf_counter()
        graph = run.graph(prompt.tolist(), target=output)
        times.append(time.perf_counter() - start)
        best = [node.id for node in graph.components[: given.nodes]]
        moved = change(run, prompt, best, output)
        rng = np.random.default_rng([given.seed, number])
        drawn = [change(run, prompt, alike(run, prompt, graph, given.nodes, rng), output) for _ in range(DRAWS)]
        tops.append(moved)
        others.append(statistics.mean(drawn))
        end = "".join(graph.tokens[-5:]).replace("|", "\\|")
        print(
            f"| `{end}` | `{graph.output_names[output]}` | {times[-1]:.1f} | {len(graph.nodes):,} | {moved:+.2f} | "
            f"{others[-1]:+.2f} |",
            flush=True,
        )
    larger = sum(abs(a) > abs(b) for a, b in zip(tops, others, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    top, other = (statistics.mean(map(abs, moved)) for moved in (tops, others))
    print(
        f"\nThe top {given.nodes} move the logit more than random ones in {larger} of {len(tops)} prompts: {top:.2f} "
        f"beside {other:.2f} on average. A graph takes {statistics.median(times):.1f} s (median; the first, which "
        f"compiles, {times[0]:.1f} s); {peak:.2f} GiB at most."
    )


def held_out(run: Run, n: int, tokens: int, seed: int) -> list[np.ndarray]:
    """Returns the beginnings of random rows that the run did not train on."""
    rows = run.resolved.held_out_rows
    chosen = np.random.default_rng(seed).permutation(len(rows))[:n]
    return [rows.rows(np.asarray([row]))[0, :tokens] for row in chosen]


def change(run: Run, prompt: np.ndarray, selection: list[str], output: int) -> float:
    """Returns the change of the output's logit when these components are taken out."""
    return run.intervene(prompt, selection, readings=("ci",)).readings["ci"].change(output)


def alike(run: Run, prompt: np.ndarray, graph: Graph, n: int, rng: np.random.Generator) -> list[str]:
    """Draws as many random components that fire at the same positions as the graph's most influential ones."""
    importances = run.causal_importances(prompt)
    chosen: list[str] = []
    for node in graph.components[:n]:
        firing = [
            f"{site}:{number}@{node.position}"
            for site, values in importances.items()
            for number in np.flatnonzero(np.asarray(values)[node.position] > graph.threshold)
        ]
        others = [one for one in firing if one not in chosen]
        chosen.append(others[rng.integers(len(others))])
    return chosen


if __name__ == "__main__":
    main()
