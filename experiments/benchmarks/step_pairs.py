"""Times the training step of one run in two ways, alternating on one machine: memory policies, or versions of the code.

    python -m experiments.benchmarks.step_pairs configs/demo/transformer.yaml --against memory.preset=lean
    git worktree add ../before main
    python -m experiments.benchmarks.step_pairs configs/demo/transformer.yaml --before ../before

Each side is a process of its own. It compiles the trainer's own step once, then takes steps in turn with the other
side, which waits meanwhile. Both sides so meet the same load, and medians of pairs can be compared even on a busy
machine. The first round does not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
Message = dict[str, float]


class Worker:
    """A process that prints a line of JSON when it is ready, and another for every line that it is given.

    ``ready``: the first line. Ends this program if the process ends by itself.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._heard()

    def turn(self) -> Message:
        """Sends a line to the process, and returns its answer."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._heard()

    def end(self) -> None:
        self._process.communicate()

    def _heard(self) -> Message:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a worker has ended; what it said is above")
        message: Message = json.loads(line)
        return message


def say(message: Message) -> None:
    """Prints a worker's message."""
    print(json.dumps(message), flush=True)


def work(config: Path, overrides: list[str], steps: int) -> None:
    """Compiles; then, for every line it is given, takes ``steps`` steps and prints how long one took."""
    import jax
    import numpy as np
    from rich.console import Console

    from param_decomp_jax.method.state import init_state
    from param_decomp_jax.method.state_sharding import state_shardings
    from param_decomp_lab.config import load_config
    from param_decomp_lab.setup import set_up
    from param_decomp_lab.setup.resolved import ResolvedConfig
    from param_decomp_lab.training.loop import compile_steps

    setup = set_up(ResolvedConfig(load_config(config, overrides)), Console(stderr=True))
    spec, sites = setup.problem.decomposition, setup.problem.target.sites
    with jax.set_mesh(setup.mesh):
        init = partial(init_state, spec, sites, setup.leading)
        state = jax.jit(init, out_shardings=state_shardings(setup.mesh, spec, jax.eval_shape(init)))()
        start = time.perf_counter()
        step = compile_steps(setup, 1)
        say({"compile_s": time.perf_counter() - start})
        number = 0
        for _ in sys.stdin:
            start = time.perf_counter()
            for _ in range(steps):
                state, rows = step(state, setup.weights, setup.train.inputs(number, 1, 1), np.int32(1))
                number += 1
            jax.block_until_ready(rows)
            say({"step_s": (time.perf_counter() - start) / steps, "loss": float(jax.tree.leaves(rows)[0][0].sum())})


def start(checkout: Path, config: Path, overrides: list[str], steps: int) -> Worker:
    """Starts a worker of ``checkout``, and returns it once it has compiled. It runs that checkout's own copy of this
    file, which must have the same options and messages. (Until November 2026 the file was in `experiments/` itself.)"""
    script = next((checkout.resolve() / "experiments").rglob(Path(__file__).name))
    command = [sys.executable, str(script), "--worker", str(config), "--steps", str(steps)]
    command += [f"--set={override}" for override in overrides]
    worker = Worker(command, {**os.environ, "PYTHONPATH": str(checkout)})
    print(f"{checkout} {' '.join(overrides)}: compiled in {worker.ready['compile_s']:.0f} s", file=sys.stderr)
    return worker


def main() -> None:
    """Prints a line for each side, and the median of the ratios of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a wrapper, as for pd train")
    parser.add_argument("--set", action="append", default=[], help="key of both sides, as for pd train")
    parser.add_argument("--against", action="append", default=[], help="key of the second side only")
    parser.add_argument("--before", type=Path, help="checkout with the first side's code")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.config, options.set, options.steps)
        return
    sides = {"first": (options.before or ROOT, options.set), "second": (ROOT, [*options.set, *options.against])}
    workers = [start(code, options.config.resolve(), given, options.steps) for code, given in sides.values()]
    rounds = [[worker.turn()["step_s"] for worker in workers] for _ in range(options.rounds + 1)][1:]
    for worker in workers:
        worker.end()
    for name, times, (code, given) in zip(sides, zip(*rounds, strict=True), sides.values(), strict=True):
        what = " ".join([code.resolve().name, *given])
        print(f"{name:6} {1e3 * statistics.median(times):8.2f} ms (least {1e3 * min(times):.2f})  {what}")
    ratios = sorted(second / first for first, second in rounds)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    print(f"second over first, of {len(ratios)} pairs: median {statistics.median(ratios):.3f}, {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
