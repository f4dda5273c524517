"""How fast a run goes whose wandb cannot be reached, beside one without wandb.

    python -m experiments.benchmarks.wandb_speed
    python -m experiments.benchmarks.wandb_speed --rounds 60 --page docs/measurements/wandb.md

wandb is pointed at a closed port. Two runs of a tiny random Llama on the CPU, alike but for that, take turns: while
one goes on, the other is stopped (SIGSTOP) with all the processes that belong to it, so that both meet the same load. A
row of metrics is written for every step; what a turn has made is counted in them. Before that, either is started some
times alone, one after the other, and the time to its first row taken.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "demo" / "transformer.yaml"
CLOSED = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "online"}
SIDES = {"without wandb": {"WANDB_MODE": "disabled"}, "closed port": CLOSED}
SETTINGS = (
    "wandb={project: closed}",
    "pd.steps=1000000",
    "pd.decomposition_targets=[{module_pattern: model.layers.1.mlp.*_proj, C: 8}]",
    "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}",
    "data.max_seq_len=16",
    "pd.faithfulness_warmup_steps=0",
    "eval=null",
    "cadence={train_log_every: 1}",
    "milestones=[]",
)
START_S = 900.0


def family(pid: int) -> list[int]:
    """A process and all that it has started, whatever their sessions."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children") if children.exists() else ():
        with suppress(OSError):
            found += [one for child in task.read_text().split() for one in family(int(child))]
    return found


def make_inputs(folder: Path) -> None:
    """`target`, a random Llama, and `data`, a little text as bytes."""
    import jax

    from param_decomp_jax.targets.llama import LlamaConfig
    from param_decomp_lab.data.tokenize import tokenize_files
    from param_decomp_lab.pretrain.models import random_weights
    from param_decomp_lab.weights.target_folder import save_target

    architecture = LlamaConfig(256, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=24, tied=True)
    save_target(folder / "target", architecture, random_weights(jax.random.key(0), architecture, 0.2, ()))
    (folder / "text").mkdir()
    for n in range(20):
        (folder / "text" / f"{n}.txt").write_text("".join(f"{n} times {m} makes {n * m}.\n" for m in range(50)))
    tokenize_files([folder / "text"], folder / "data", seq_len=16, eval_fraction=0.2)


class Side:
    """A run. ``inputs``: what `make_inputs` made. ``number``: of its folder."""

    def __init__(self, inputs: Path, runs: Path, number: int, more: dict[str, str]) -> None:
        self.metrics = runs / f"p-{number:08x}" / "metrics.jsonl"
        sets = (
            f"out_dir={runs}",
            f"run_id=p-{number:08x}",
            f"target={{folder: {inputs / 'target'}}}",
            f"data={{train: {inputs / 'data' / 'train'}, eval: {inputs / 'data' / 'eval'}}}",
            *SETTINGS,
        )
        command = [sys.executable, "-m", "param_decomp_lab", "train", str(CONFIG)]
        command += [word for one in sets for word in ("--set", one)]
        self._output = (runs / f"output-{number}").open("w+")
        self.started = time.monotonic()
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(inputs / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self._popen = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **compiled, **more}, stdout=self._output, stderr=subprocess.STDOUT
        )

    @property
    def rows(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def wait_for(self, rows: int) -> float:
        """Seconds from the start to that many rows."""
        while self.rows < rows:
            assert self._popen.poll() is None, Path(self._output.name).read_text()
            assert time.monotonic() - self.started < START_S
            time.sleep(0.01)
        return time.monotonic() - self.started

    def send(self, number: signal.Signals) -> None:
        for pid in family(self._popen.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        for pid in reversed(family(self._popen.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()
        self._output.close()


@contextmanager
def running(inputs: Path, runs: Path, number: int, side: str) -> Iterator[Side]:
    made = Side(inputs, runs, number, SIDES[side])
    try:
        yield made
    finally:
        made.end()


def starts(inputs: Path, runs: Path, times: int) -> dict[str, list[float]]:
    """Seconds to the first row, of each side in turn; the first start compiles, and is not counted."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    number = 100
    for turn in range(times + 1):
        for side in SIDES if turn else list(SIDES)[:1]:
            number += 1
            with running(inputs, runs, number, side) as run:
                seconds = run.wait_for(1)
            if turn:
                found[side].append(seconds)
    return found


def turns(inputs: Path, runs: Path, rounds: int, seconds: float) -> list[tuple[float, float]]:
    """Steps per second of both sides, round by round; which one goes first alternates."""
    found = []
    with ExitStack() as stack:
        sides = [stack.enter_context(running(inputs, runs, number, side)) for number, side in enumerate(SIDES, 1)]
        for side in sides:
            side.wait_for(50)
        for side in sides:
            side.send(signal.SIGSTOP)
        for number in range(rounds):
            speeds = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                speeds[which] = _turn(sides[which], seconds)
            found.append((speeds[0], speeds[1]))
        for side in sides:
            side.send(signal.SIGCONT)
    return found


def _turn(side: Side, seconds: float) -> float:
    side.send(signal.SIGCONT)
    before, began = side.rows, time.monotonic()
    time.sleep(seconds)
    made, took = side.rows - before, time.monotonic() - began
    side.send(signal.SIGSTOP)
    return made / took


PAGE = """# wandb that cannot be reached

`{command}`, on {machine}.

| | without wandb | closed port | ratio |
|---|---|---|---|
| steps per second | {speeds[0]:.1f} | {speeds[1]:.1f} | {ratio:.3f} ({low:.2f} to {high:.2f}) |
| seconds from the command to the first row | {begun[0]:.1f} | {begun[1]:.1f} | {begin_ratio:.3f} |

Steps per second: medians of {rounds} turns of {seconds:g} s; the ratio is the median of the pairs, with what lies
between 10 % and 90 % of them. Wanted: within 5 %. The start: medians of {starts}.

The two runs are of a tiny random Llama, alike but for `WANDB_MODE=disabled` and `WANDB_BASE_URL=http://127.0.0.1:9`.
They take turns on the same machine, the one whose turn it is not being stopped with all its processes. Steps are short
and a row is written for each, so that anything that held up a step would show.
"""


def main(arguments: Sequence[str] | None = None) -> float:
    """Prints both medians and the ratio, writes the page where one is asked for; gives the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--page", type=Path, help="write the result here, as Markdown")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        inputs, runs = Path(folder) / "inputs", Path(folder) / "runs"
        make_inputs(inputs)
        runs.mkdir()
        begun = [statistics.median(times) for times in starts(inputs, runs, options.starts).values()]
        pairs = turns(inputs, runs, options.rounds, options.seconds)
    ratios = sorted(closed / without for without, closed in pairs)
    found: dict[str, Any] = {
        "speeds": [statistics.median(speeds) for speeds in zip(*pairs, strict=True)],
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "begun": begun,
        "begin_ratio": begun[1] / begun[0],
    }
    print(found)
    if options.page is not None:
        options.page.write_text(PAGE.format(**found, **_how(options)))
    return float(found["ratio"])


def _how(options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import wandb

    versions = f"Python {platform.python_version()}, JAX {jax.__version__}, wandb {wandb.__version__}"
    given = f"--rounds {options.rounds} --seconds {options.seconds:g}"
    return {
        "command": f"python -m experiments.benchmarks.wandb_speed {given}",
        "machine": f"{os.cpu_count()} cores ({platform.machine()}, not quiet), {versions}",
        "rounds": options.rounds,
        "seconds": options.seconds,
        "starts": options.starts,
    }


if __name__ == "__main__":
    main()
