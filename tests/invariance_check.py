"""The same run on one device and on many, in one process and in several: how far the numbers are apart (D3, D4).

    python -m tests.invariance_check                       # fp32 and float64; a few minutes on two cores
    python -m tests.invariance_check --policy lean --steps 20
    python -m tests.invariance_check --page docs/measurements/invariance.md

A small Llama with random weights is decomposed for some steps, every setting in processes of its own on simulated CPU
devices, each process with its own rows of the batch. Metrics are compared at every step, elementwise; the last state
array by array as ‖a − b‖ / ‖a‖.
"""

import argparse
import os
import platform
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
STEPS = 10
SMALL_BLOCKS: dict[str, Any] = {"component_block": 8, "vocabulary_block": 64}


@dataclass(frozen=True)
class Setting:
    """``mesh``: replica, fsdp, tensor over all processes' devices."""

    mesh: tuple[int, int, int]
    processes: int = 1

    @property
    def devices(self) -> int:
        return self.mesh[0] * self.mesh[1] * self.mesh[2]

    @property
    def name(self) -> str:
        shape = " × ".join(map(str, self.mesh))
        return f"{shape}, {self.processes} process{'es' if self.processes > 1 else ''}"


ALONE = Setting((1, 1, 1))
SETTINGS = (
    Setting((1, 2, 1)),
    Setting((1, 4, 1)),
    Setting((1, 8, 1)),
    Setting((2, 4, 1)),
    Setting((1, 4, 2)),
    Setting((2, 2, 2)),
    Setting((1, 2, 1), processes=2),
    Setting((1, 4, 1), processes=2),
    Setting((1, 4, 1), processes=4),
)


# ---- one process of one setting ----


def child(setting: Setting, number: int, coordinator: str, policy: str, exact: bool, steps: int, out: Path) -> None:
    """Runs the steps; process 0 writes every metric and the last state."""
    import jax

    jax.config.update("jax_enable_x64", exact)
    if setting.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, setting.processes, number)
    import jax.numpy as jnp

    from param_decomp_jax.method.state import init_state
    from param_decomp_jax.method.state_sharding import state_shardings
    from param_decomp_jax.method.step import training_step
    from param_decomp_jax.sharding.mesh import MeshShape, make_mesh, sharding, whole
    from param_decomp_jax.sharding.placement import from_process_rows, process_batch_rows, shardings

    problem, leading = _problem(policy, exact)
    spec, target = problem.decomposition, problem.target
    mesh = make_mesh(MeshShape(*setting.mesh))
    with jax.set_mesh(mesh):

        def init() -> Any:
            # Parameters start in fp32 whatever is computed in.
            widened = lambda x: x.astype(jnp.float64) if exact and x.dtype == jnp.float32 else x  # noqa: E731
            return jax.tree.map(widened, init_state(spec, target.sites, leading))

        shapes = jax.eval_shape(init)
        places = state_shardings(mesh, spec, shapes)
        state = jax.jit(init, out_shardings=places)()
        of_weights = _weights(exact)
        weight_places = shardings(mesh, target.weight_axes(of_weights), of_weights)
        weights = jax.tree.map(
            lambda x, place: jax.make_array_from_callback(x.shape, place, lambda index: x[index]),
            of_weights,
            weight_places,
        )
        step = jax.jit(partial(training_step, problem), out_shardings=(places, whole(mesh)), donate_argnums=0)
        lo, hi = process_batch_rows(mesh, leading[0])
        rows = []
        for n in range(steps):
            tokens = np.random.default_rng(n).integers(0, 40, leading).astype(np.int32)
            batch = from_process_rows(tokens[lo:hi], sharding(mesh, leading, ("batch",)), 0, lo, leading[0])
            state, metrics = step(state, weights, batch)
            rows.append(metrics)
        last = jax.jit(lambda x: jax.tree.map(jnp.asarray, x), out_shardings=whole(mesh))(state)
        found = {f"metric {name}": np.array([float(row[name]) for row in rows]) for name in rows[0]}
        for path, x in jax.tree_util.tree_leaves_with_path(last):
            found[f"state {jax.tree_util.keystr(path)}"] = np.asarray(x)
    if number == 0:
        np.savez(out, allow_pickle=True, **found)


def _problem(policy: str, exact: bool) -> tuple[Any, tuple[int, int]]:
    import jax.numpy as jnp

    from experiments.benchmarks.mlp_decompositions import POLICIES, MLPs, problem_of
    from param_decomp_jax.ci import GlobalTransformer
    from param_decomp_jax.targets.transformer import Transformer

    of = MLPs(
        batch=16,
        layers=range(1, 3),
        sites_per_chunk=3,
        C=64,
        seq=16,
        model=_model(),
        ci=GlobalTransformer(16, 2, (32,), 2),
        compute_dtype="float64" if exact else "float32",
    )
    memory = POLICIES[policy]
    if policy != "plain":
        memory = replace(memory, **SMALL_BLOCKS)
    problem = problem_of(of, memory)
    assert isinstance(problem.target, Transformer)
    dtype = jnp.float64 if exact else jnp.float32
    return replace(problem, target=replace(problem.target, compute_dtype=dtype)), (of.batch, of.seq)


def _model() -> Any:
    from param_decomp_jax.targets.llama import LlamaConfig

    return LlamaConfig(vocab_size=40, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=64)


def _weights(exact: bool) -> Any:
    import jax

    rng = np.random.default_rng(0)

    def leaf(path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
        x = np.ones(shape) if "norm" in path[-1].key else rng.normal(size=shape) / shape[-2] ** 0.5
        return x.astype(np.float64 if exact else np.float32)

    return jax.tree_util.tree_map_with_path(leaf, _model().weight_shapes(), is_leaf=lambda x: isinstance(x, tuple))


# ---- all settings ----


def run(setting: Setting, policy: str, exact: bool, steps: int, folder: Path) -> dict[str, np.ndarray]:
    """What process 0 of the setting wrote."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    out = folder / "found.npz"
    count = setting.devices // setting.processes
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "NPROC": "16",  # a wider pool: collectives of many simulated devices on few cores would wait for each other
    }
    command = [sys.executable, "-m", "tests.invariance_check", "--child", ",".join(map(str, setting.mesh))]
    command += ["--processes", str(setting.processes), "--coordinator", coordinator, "--policy", policy]
    command += ["--steps", str(steps), "--out", str(out), *(["--exact"] if exact else [])]
    processes = [
        subprocess.Popen([*command, "--number", str(n)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        for n in range(setting.processes)
    ]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode:
            for other in processes:
                other.kill()
            raise SystemExit(f"{setting.name} failed:\n{errors.decode()[-3000:]}")
    with np.load(out) as found:
        return dict(found)


def differences(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[float, float]:
    """Largest relative difference of a metric at a step, and of an array of the last state (D4)."""
    assert one.keys() == other.keys()

    def of_metric(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-30)))

    def of_array(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))

    metrics = [of_metric(x, other[name]) for name, x in one.items() if name.startswith("metric ")]
    arrays = [of_array(x, other[name]) for name, x in one.items() if name.startswith("state ")]
    return max(metrics), max(arrays)


def table(policy: str, steps: int) -> str:
    """The page, in Markdown; says on the way what it is at."""
    found: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        for exact in (False, True):
            print(f"{'float64' if exact else 'fp32'}: {ALONE.name} …", file=sys.stderr, flush=True)
            alone = run(ALONE, policy, exact, steps, Path(folder))
            for setting in SETTINGS:
                print(f"{'float64' if exact else 'fp32'}: {setting.name} …", file=sys.stderr, flush=True)
                found[setting] += differences(alone, run(setting, policy, exact, steps, Path(folder)))
    single, double = (max(x for apart in found.values() for x in apart[part]) for part in (slice(2), slice(2, None)))
    lines = [
        "# One device or many, one process or several",
        "",
        "**A run gives the same numbers on one device and on eight, in one process and in four, up to the rounding of",
        f"sums: within {single:.1e} in fp32 and {double:.1e} in float64.**",
        "",
        f"`python -m tests.invariance_check --policy {policy} --steps {steps}` on {os.cpu_count()} "
        f"{platform.machine()} cores, simulated CPU devices.",
        f"The largest relative difference, over {steps} steps, from the same run on one device: of a metric at any "
        "step, and of an array of the last state (‖a − b‖ / ‖a‖). Wanted: 1e-5 in fp32, 1e-9 in float64.",
        "",
        "| replica × fsdp × tensor | metrics, fp32 | state, fp32 | metrics, float64 | state, float64 |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {s.name} | {' | '.join(f'{x:.1e}' for x in apart)} |" for s, apart in found.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs every setting and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="lean", choices=["plain", "balanced", "lean", "published"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--page", type=Path, help="write the table here as well")
    for name in ("--child", "--coordinator", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--number", "--processes"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        replica, fsdp, tensor = (int(n) for n in o.child.split(","))
        setting = Setting((replica, fsdp, tensor), o.processes)
        child(setting, o.number, o.coordinator, o.policy, o.exact, o.steps, Path(o.out))
        return
    page = table(o.policy, o.steps)
    print(page)
    if o.page is not None:
        o.page.write_text(page)


if __name__ == "__main__":
    main()
