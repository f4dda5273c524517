"""The training step of toys with scalar MLPs as CI functions, here and in plain PyTorch, in turn on the same cores.

    pip install torch==2.13.0                                # not among this project's requirements
    python -m experiments.benchmarks.torch_step                         # TMS 5-2, the same with an identity, ResidMLP-1
    python -m experiments.benchmarks.torch_step configs/toys/tms_5-2.yaml --rounds 20 --steps 50
    python -m experiments.benchmarks.torch_step --out docs/measurements/scalar_mlp.md
    taskset -c 0 python -m experiments.benchmarks.torch_step            # on one core

Before anything is timed, both sides compute the losses and gradients of one step of the configuration with the same
parameters, batch and mask sources; where they differ by more than rounding, the program ends there. Then each side is a
process of its own that takes steps when it is its turn, while the others wait. Ours is the program that `pd train`
compiles, with as many steps a dispatch as the wrapper says; the other is `torch_decomposition.py`, not compiled, on as
many threads as there are cores. A third process measures in each round how fast the machine takes exponentials and
multiply-adds, which gives a bound for the step (`scalar_mlp_bound.py`). The first round is not counted.

The target's weights are random, so nothing has to be trained first: no number of operations depends on them.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.scalar_mlp_bound import Counts, Rates, counts, rate_measurement
from experiments.benchmarks.turns import Message, Worker, say
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.inspection import loss_and_gradients, step_draws, unstack_sites
from param_decomp_jax.method.state import init_state
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, is_shape
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_lab.config import load_config
from param_decomp_lab.config.method_schema import ToyFile
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.outline import outline_on
from param_decomp_lab.setup.base import build_mesh
from param_decomp_lab.setup.known_target import KnownTarget, find_target
from param_decomp_lab.setup.programs import init_program, steps_program
from param_decomp_lab.setup.resolved import ResolvedConfig

ROOT = Path(__file__).parents[2]
TOYS = [ROOT / "configs" / "toys" / f"{name}.yaml" for name in ("tms_5-2", "tms_5-2-id", "resid_mlp1")]
TOLERANCE = 1e-4
"""Of the two sides' total losses, relative, and of each gradient, as ‖a − b‖ / ‖a‖."""

Turn = Callable[[int], Message]
"""Takes so many steps."""


# ---- what both sides compute ----


@dataclass(frozen=True)
class Toy:
    """A configuration's target, and what its features are drawn by."""

    resolved: ResolvedConfig
    target: KnownTarget
    features: SparseFeatures

    @property
    def problem(self) -> Problem:
        return self.target.problem


def toy(path: Path) -> Toy:
    """UserError for a configuration that the other side does not cover."""
    from experiments.benchmarks.torch_decomposition import unsupported

    resolved = ResolvedConfig(load_config(path))
    method, target = resolved.config.method, find_target(resolved)
    if not isinstance(method, ToyFile) or not isinstance(target, KnownTarget):
        raise UserError(f"{path}: is not the configuration of a toy whose sizes are known here")
    missing = ", ".join(unsupported(target.problem))
    if missing:
        raise UserError(f"{path}: experiments/benchmarks/torch_decomposition.py does not have {missing}")
    inputs, data = target.architecture.inputs, method.data
    assert isinstance(inputs, FeatureInputs)
    drawn = SparseFeatures(inputs.n_features, data.feature_probability, inputs.low, data.data_generation_type)
    return Toy(resolved, target, drawn)


def random_weights(architecture: Architecture) -> Any:
    """fp32, in the structure of the target's weights; about as large as trained ones."""
    rng = np.random.default_rng(0)

    def array(shape: tuple[int, ...]) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)

    return jax.tree.map(array, architecture.weight_shapes(), is_leaf=is_shape)


def named(sites: Sites, components: Mapping[str, Any], heads: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parameters or gradients of the core, under the names that they have in PyTorch's ``state_dict``."""
    from experiments.benchmarks.torch_decomposition import key

    arrays: dict[str, Any] = {}
    for site, factors in unstack_sites(sites, components).items():
        arrays |= {f"components.{key(site)}.V": factors.V, f"components.{key(site)}.U": factors.U}
    for site, mlp in unstack_sites(sites, heads).items():
        for n, layer in enumerate(mlp):
            arrays |= {f"ci.{key(site)}.weights.{n}": layer.W, f"ci.{key(site)}.biases.{n}": layer.b}
    return {name: np.asarray(array) for name, array in arrays.items()}


def disagreement(path: Path, rows: int | None = None) -> Message:
    """How far one step of the two sides is apart, with the same parameters, batch and sources.

    ``losses``: the largest relative difference of a term or of the total. ``gradients``: the largest ‖a − b‖ / ‖a‖
    of an array. ``rows``: of the batch, if not the configuration's.
    """
    from experiments.benchmarks import torch_decomposition as other

    of = toy(path)
    problem, sites = of.problem, of.problem.target.sites
    rows = rows or problem.decomposition.batch_size
    weights = random_weights(of.target.architecture)
    features = of.features.batch(jax.random.key(1), 0, rows)
    draws = jax.jit(step_draws, static_argnums=(0, 1, 2))(problem, 0, (rows,))
    rng = np.random.default_rng(2)
    # Biases are 0 at first: moved, so that leaving one out would show.
    state = jax.jit(partial(init_state, problem.decomposition, sites, (rows,)))()
    moved = jax.tree.map(
        lambda x: x + np.asarray(0.1 * rng.normal(size=x.shape), x.dtype), (state.components, state.ci)
    )
    state = replace(state, components=moved[0], ci=moved[1])
    losses, gradients = jax.jit(partial(loss_and_gradients, problem))(state, weights, features, draws)

    model = other.ScalarMLPDecomposition(problem, other.target_of(problem, other.tensors(weights)))
    model.load_state_dict(other.tensors(named(sites, state.components, state.ci.heads)))

    def sources(drawn: Any) -> dict[str, other.Sources]:
        return {
            site: other.Sources(other.tensors(own.components), other.tensors(own.delta))
            for site, own in unstack_sites(sites, drawn).items()
        }

    given = {term: [sources(forward.sources) for forward in forwards] for term, forwards in draws.items()}
    terms = model.losses(other.tensors(features), given)
    total = model.total(terms)
    total.backward()
    their_losses = {"loss/total": total.item(), **{f"loss/{name}": loss.item() for name, loss in terms.items()}}
    their_gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return {
        "losses": _largest_difference(losses, their_losses),
        "gradients": _largest_difference(named(sites, gradients.components, gradients.ci.heads), their_gradients),
    }


def _largest_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return float(np.max([np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(ours[name]) for name in ours]))


# ---- the processes ----


def ours(path: Path) -> Turn:
    """The trainer's own program of several steps, on the configuration's mesh."""
    of = toy(path)
    mesh, at_once = build_mesh(of.resolved.mesh), of.resolved.config.wrapper.steps_per_dispatch
    outline = outline_on(of.resolved, of.target, mesh)
    with jax.set_mesh(mesh):
        state = init_program(outline).function()
        dispatch = steps_program(outline, at_once).lower().compile()
    weights = jax.device_put(
        random_weights(of.target.architecture), jax.tree.map(lambda x: x.sharding, outline.weights)
    )

    def turn(steps: int) -> Message:
        nonlocal state
        start = time.perf_counter()
        for first in range(0, steps, at_once):
            n = min(at_once, steps - first)
            state, rows = dispatch(state, weights, (), np.int32(n))
        jax.block_until_ready(rows)
        seconds = time.perf_counter() - start
        return {"step_s": seconds / steps, "loss": float(rows.values[n - 1, rows.names.index("loss/total")])}

    return turn


def theirs(path: Path) -> Turn:
    """Plain PyTorch."""
    import torch

    from experiments.benchmarks import torch_decomposition as other

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    of = toy(path)
    target = other.target_of(of.problem, other.tensors(random_weights(of.target.architecture)))
    training = other.Training(other.ScalarMLPDecomposition(of.problem, target), of.features)

    def turn(steps: int) -> Message:
        start = time.perf_counter()
        for _ in range(steps):
            loss = training.step()
        return {"step_s": (time.perf_counter() - start) / steps, "loss": float(loss)}

    return turn


def rates(path: Path) -> Turn:
    """No steps: what the machine can do."""
    measured = rate_measurement()
    return lambda steps: vars(measured())


def agreement(path: Path) -> Turn:
    """No steps: what `disagreement` says."""
    return lambda steps: disagreement(path)


WORKERS: dict[str, Callable[[Path], Turn]] = {"ours": ours, "torch": theirs, "rates": rates, "agreement": agreement}


def start(role: str, path: Path) -> Worker:
    """A process of its own, which compiles and then waits for its turns."""
    return Worker([sys.executable, "-m", "experiments.benchmarks.torch_step", "--worker", role, str(path)])


def work(role: str, path: Path) -> None:
    """What a worker does: for every number that it is given, a turn of so many steps."""
    turn = WORKERS[role](path)
    say({})
    for line in sys.stdin:
        say(turn(int(line)))


# ---- the measurement ----


@dataclass(frozen=True)
class Figures:
    """Of one configuration. ``ours``, ``torch``: seconds of a step, by round; ``losses``: of the last step of each."""

    name: str
    rows: int
    steps: int
    disagreement: Message
    ours: Sequence[float]
    torch: Sequence[float]
    losses: tuple[float, float]
    counts: Counts
    rates: Rates

    @property
    def ratios(self) -> list[float]:
        return [torch / ours for ours, torch in zip(self.ours, self.torch, strict=True)]

    @property
    def bound(self) -> float:
        """Seconds of the counted arithmetic. A sum: exponentials and products take the same units of a core."""
        at = self.rates
        return self.counts.exponentials / at.exponentials + self.counts.multiply_adds / at.multiply_adds


def measure(path: Path, rounds: int, steps: int | None) -> Figures:
    """UserError where the sides do not compute the same."""
    of = toy(path)
    steps = steps or of.resolved.config.wrapper.steps_per_dispatch
    check = start("agreement", path)
    apart = check.turn(1)
    check.end()
    if not all(difference <= TOLERANCE for difference in apart.values()):
        raise UserError(f"{path}: the two sides do not compute the same: relative differences are {apart}")
    workers = [start(role, path) for role in ("ours", "torch", "rates")]
    by_round = [[worker.turn(steps) for worker in workers] for _ in range(rounds + 1)][1:]
    for worker in workers:
        worker.end()
    ours, torch, rates = zip(*by_round, strict=True)
    reached = {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}
    return Figures(
        name=path.stem,
        rows=of.problem.decomposition.batch_size,
        steps=steps,
        disagreement=apart,
        ours=[turn["step_s"] for turn in ours],
        torch=[turn["step_s"] for turn in torch],
        losses=(ours[-1]["loss"], torch[-1]["loss"]),
        counts=counts(of.problem),
        rates=Rates(**reached),
    )


def tables(figures: Sequence[Figures]) -> str:
    """In Markdown."""
    lines = [
        "| configuration | batch | steps a round | PyTorch | param-decomp | PyTorch over param-decomp | of the rounds |"
        " loss at the end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in figures:
        ours, torch, ratio = map(statistics.median, (f.ours, f.torch, f.ratios))
        lines.append(
            f"| `{f.name}` | {f.rows:,} | {f.steps} | {1e3 * torch:.1f} ms | {1e3 * ours:.2f} ms | {ratio:.2f} |"
            f" {min(f.ratios):.2f} to {max(f.ratios):.2f} | {f.losses[1]:.4g}, {f.losses[0]:.4g} |"
        )
    lines += [
        "",
        "| configuration | exponentials | a second | multiply-adds (of CI) | a second | bound | step over bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in figures:
        lines.append(
            f"| `{f.name}` | {f.counts.exponentials / 1e6:.2f} M | {f.rates.exponentials / 1e9:.2f} G |"
            f" {f.counts.multiply_adds / 1e6:,.1f} M ({f.counts.ci_multiply_adds / 1e6:.1f} M) |"
            f" {f.rates.multiply_adds / 1e9:.1f} G | {1e3 * f.bound:.2f} ms |"
            f" {statistics.median(f.ours) / f.bound:.2f} |"
        )
    lines += [
        "",
        "| configuration | losses, largest relative difference | gradients, largest ‖a − b‖ / ‖a‖ of an array |",
        "|---|---|---|",
    ]
    lines += [f"| `{f.name}` | {f.disagreement['losses']:.1e} | {f.disagreement['gradients']:.1e} |" for f in figures]
    return "\n".join(lines)


def page(command: str, figures: Sequence[Figures], rounds: int) -> str:
    """`tables` with what they mean, and where they were made."""
    return f"""# Toys with scalar MLPs, here and in plain PyTorch

`{command}`

{machine()}.
Both sides take steps in turn on the same cores, each in a process of its own, {rounds} rounds after one that is not
counted. Times are medians of the rounds; "of the rounds" is the least and the largest ratio of one.

PyTorch is `experiments/benchmarks/torch_decomposition.py`: the method as one writes it there (einsum, autograd,
`torch.optim.AdamW`, nothing compiled), with as many threads as there are cores. param-decomp is the program that
`pd train` runs. Both draw the batch and the sources of the masks, and start from random components; the losses at the
end, PyTorch's first, are those of different draws.

The bound is the least arithmetic of a step at this machine's best rates in fp32, which are medians of the same rounds:
one exponential for each hidden activation of the CI functions, forward and backward together, and the multiply-adds of
all matrix products, forward and backward, with nothing computed twice (`experiments/benchmarks/scalar_mlp_bound.py`).
Of the multiply-adds those of the CI functions are in brackets.

Before the times, both sides computed the losses and gradients of one step of the full batch with the same parameters,
batch and sources: the last table.

{tables(figures)}
"""


def machine() -> str:
    """Cores and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return (
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores ({model}), Python {platform.python_version()}, "
        f"JAX {version('jax')} and PyTorch {version('torch')} on CPU, fp32"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every configuration, prints the tables, and writes the page if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="*", help="wrappers, as for pd train (default: the three toys)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="a round, of each side (default: the wrapper's steps_per_dispatch)")
    parser.add_argument("--out", type=Path, help="page to write the tables to")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        sys.exit("this compares with PyTorch, which is not installed here: pip install 'torch>=2.4'")
    paths = [path.resolve() for path in options.configs] or TOYS
    try:
        if options.worker:
            work(options.worker, *paths)
            return
        figures = [measure(path, options.rounds, options.steps) for path in paths]
    except UserError as error:
        sys.exit(str(error))
    print(tables(figures))
    if options.out is not None:
        command = shlex.join(["python", "-m", "experiments.benchmarks.torch_step", *(arguments or sys.argv[1:])])
        options.out.write_text(page(command, figures, options.rounds))


if __name__ == "__main__":
    main()
