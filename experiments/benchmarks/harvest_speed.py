"""Compares the speed of a harvest with that of the clean pass and CI function alone, side by side in one process.

    python -m experiments.benchmarks.harvest_speed RUN   # the first 2e5 positions of a harvest of 1e6, 5 rounds
    python -m experiments.benchmarks.harvest_speed RUN --positions 2e4 --rounds 3

A round runs the same blocks three times: the clean pass and the CI function alone (λ of every site is computed, but
not read), the devices' part of a harvest, and the whole harvest with its last save. Prints tokens per second, and the
ratios to the first.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from param_decomp_jax.sharding.placement import batch_sharding, from_host
from param_decomp_lab import load_run
from param_decomp_lab.harvest.harvest import Harvester
from param_decomp_lab.harvest.plan import HarvestRequest, Source, make_plan
from param_decomp_lab.harvest.share import Share
from param_decomp_lab.harvest.state import HarvestState
from param_decomp_lab.runs.forward import importances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=float, default=1e6, help="positions of the whole harvest")
    parser.add_argument("--positions", type=float, default=2e5, help="positions of it to run")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    run = load_run(given.run, devices=1)
    source = Source(run, HarvestRequest(tokens=given.tokens))
    whole = make_plan(run, HarvestRequest(tokens=given.tokens), source)
    blocks = max(1, round(given.positions / (whole.block_rows * whole.length)))
    plan = replace(whole, rows=min(whole.rows, blocks * whole.block_rows))
    names = tuple(run.sites)
    alone = jax.jit(partial(importances, run.problem), static_argnums=(3, 4))

    def clean_and_ci(block: int) -> Any:
        x = source.block(plan, block)
        placed = from_host(x, batch_sharding(run.mesh, x.shape))
        return alone(run.learned, run.weights, placed, names, "lower")

    def through(start: Callable[[int], Any]) -> float:
        """Returns the seconds for all blocks, with one block started ahead, as in a harvest."""
        began, ahead = time.perf_counter(), None
        with jax.set_mesh(run.mesh):
            for block in range(plan.n_blocks):
                started = start(block)
                jax.block_until_ready(ahead)
                ahead = started
            jax.block_until_ready(ahead)
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:

        def harvester(name: str) -> tuple[Harvester, HarvestState]:
            place = Path(folder) / name
            place.mkdir()
            state = HarvestState(place, [site.C for site in plan.sites], plan.examples, plan.around)
            return Harvester(run, plan, source, state), state

        first, _ = harvester("first")
        rounds: list[list[float]] = []
        l0 = 0.0
        for number in range(given.rounds + 1):
            seconds = [through(clean_and_ci), through(lambda block: first._start([block])[2])]
            another, state = harvester(f"round-{number}")
            another._program = first._program
            began = time.perf_counter()
            another.run(Share(), Path(folder) / "nowhere", lambda done: None, lambda: False)
            seconds.append(time.perf_counter() - began)
            l0 = sum(site.totals.firings.sum() for site in state.sites) / plan.n_positions
            if number:  # the first compiles
                rounds.append([plan.n_positions / s for s in seconds])
                print("  ".join(f"{speed:10,.0f}" for speed in rounds[-1]), flush=True)
    columns = list(zip(*rounds, strict=True))
    ratios = [statistics.median(b / a for a, b in zip(columns[0], column, strict=True)) for column in columns]
    print(f"{'clean + CI':>10}  {'devices':>10}  {'harvest':>10}   tokens a second")
    print("  ".join(f"{statistics.median(column):10,.0f}" for column in columns) + "   medians")
    print("  ".join(f"{ratio:10.2f}" for ratio in ratios) + "   median of the ratios to the first")
    print(f"{plan.n_positions:,} positions, {sum(s.C for s in plan.sites):,} components, L0 of all sites {l0:.1f}")


if __name__ == "__main__":
    main()
