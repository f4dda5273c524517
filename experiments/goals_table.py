"""What one training step of large decompositions needs on GPUs, compiled with none: memory, arithmetic, compile time.

    pip install -e '.[aot]'
    python experiments/goals_table.py                    # every row, one after the other (minutes each)
    python experiments/goals_table.py --only small       # rows whose name begins so
    python experiments/goals_table.py --only lean/27/64x64 --force --buffers 60
    python experiments/goals_table.py --table            # print what is there

A row is compiled in a process of its own, for the card as it is and for one with memory without end, and kept as
<out>/<row>.json and <out>/<row>.txt (the buffers at the peak). A row is not measured again while the code of the core
is what it was.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before JAX is imported: with a GPU at hand it would take its memory.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from param_decomp_jax.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.aot.buffers import live_at_peak, table
from param_decomp_jax.aot.compile import Estimate, Memory, estimate
from param_decomp_jax.aot.flops import Flops, matmul_flops
from param_decomp_jax.aot.topology import target_configs
from param_decomp_jax.ci import GlobalTransformer
from param_decomp_jax.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.masks import Stochastic
from param_decomp_jax.memory import BALANCED, LEAN, PLAIN, PUBLISHED, MemoryPolicy
from param_decomp_jax.mesh import MeshShape, whole
from param_decomp_jax.optim import AdamW
from param_decomp_jax.placement import batch_sharding, shardings, state_shardings
from param_decomp_jax.recon import AllSites, Chunks, Reconstruction
from param_decomp_jax.routing import Everywhere, UniformKSubset
from param_decomp_jax.schedules import Anneal, Schedule
from param_decomp_jax.state import Decomposition, init_state
from param_decomp_jax.step import Problem, training_step
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.llama import Llama, LlamaConfig, RopeScaling, matrices, module_name, weight_shapes

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "param_decomp_jax" / "aot" / "gpus" / "cards.csv"
GIB = 2**30

LLAMA_8B = LlamaConfig(
    128256, 4096, 32, 32, 8, 128, 14336, rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)
)
LARGE_CI = GlobalTransformer(d_model=4096, n_blocks=4, mlp_hidden=(16384,), n_heads=64)
SMALL, SMALL_CI = LlamaConfig(4096, 512, 8, 8, 2, 64, 1024), GlobalTransformer(512, 2, (2048,), 8)

POLICIES: Mapping[str, MemoryPolicy] = {
    "plain": PLAIN,
    "balanced": BALANCED,
    "lean": LEAN,
    "published": PUBLISHED,
}


@dataclass(frozen=True)
class Row:
    """One compile. ``batch``: global. ``layers``: those whose three MLP matrices are sites. ``goal_gib``: at most."""

    policy: str
    mesh: MeshShape
    batch: int
    layers: range
    sites_per_chunk: int = 9
    C: int = 49152
    seq: int = 2048
    model: LlamaConfig = LLAMA_8B
    ci: GlobalTransformer = LARGE_CI
    goal_gib: float | None = None

    @property
    def name(self) -> str:
        size = "small" if self.model is SMALL else f"{3 * len(self.layers)}"
        return f"{self.policy}/{size}/{self.mesh.n_devices}x{self.batch}"


MIDDLE, EVERY = range(18, 27), range(32)
NODE, EIGHT_NODES = MeshShape(fsdp=8), MeshShape(fsdp=64)
ROWS = (
    *(
        Row(policy, NODE, 16, range(3, 6), 3, 1536, 512, SMALL, SMALL_CI)
        for policy in ("plain", "balanced", "lean", "published")
    ),
    Row("lean", EIGHT_NODES, 64, MIDDLE, goal_gib=18),
    Row("lean", EIGHT_NODES, 1024, MIDDLE, goal_gib=60),
    Row("lean", NODE, 8, MIDDLE, goal_gib=100),
    Row("lean", EIGHT_NODES, 64, EVERY, sites_per_chunk=32, goal_gib=50),
    Row("balanced", EIGHT_NODES, 64, MIDDLE, goal_gib=30),
    Row("balanced", EIGHT_NODES, 1024, MIDDLE, goal_gib=110),
)


def problem_of(row: Row, policy: MemoryPolicy) -> Problem:
    """Chunks of stochastic masks and a persistent adversary, bf16: the decomposition that the goals are set for."""
    chosen = {
        module_name(layer, kind): row.C for layer in row.layers for kind in ("gate_proj", "up_proj", "down_proj")
    }  # fmt: skip
    attack = PersistentAttack(AdamAscent(Schedule(0.01), 0.5, 0.99), BroadcastAcrossBatch(), n_warmup_steps=2)
    terms = (
        Faithfulness("FaithfulnessLoss", 1e5),
        ImportanceMinimality("ImportanceMinimalityLoss", 5e-6, Lp(Anneal(2.0, 2.0), 1e-12), beta=0.2),
        Reconstruction(
            "ChunkwiseSubsetReconLoss", 1.5, Chunks(row.sites_per_chunk), UniformKSubset(), Stochastic()
        ),
        Reconstruction("PersistentPGDReconLoss", 0.5, AllSites(), Everywhere(), attack),
    )  # fmt: skip
    decomposition = Decomposition(
        seed=0,
        steps=100_000,
        batch_size=row.batch,
        squashing="leaky_hard",
        use_delta=True,
        ci=row.ci,
        terms=terms,
        components_optimizer=AdamW(Schedule(1e-4), clip_norm=0.01),
        ci_optimizer=AdamW(Schedule(5e-5)),
        compute_dtype="bfloat16",
        memory=policy,
    )
    return Problem(decomposition, Llama(row.model, choose_sites(matrices(row.model), chosen), policy, jnp.bfloat16))


def weights_of(model: LlamaConfig) -> Any:
    """Shapes of the frozen weights, in bf16."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        weight_shapes(model),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def placed(shapes: Any, places: Any) -> Any:
    """Shapes with shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def step_of(problem: Problem, row: Row, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step and its arguments, abstract, placed on the mesh as a run places them."""
    spec, sites = problem.decomposition, problem.target.sites
    state = jax.eval_shape(lambda: init_state(spec, sites, (row.batch, row.seq)))
    places = state_shardings(mesh, spec, state)
    state = placed(state, places)
    weights = weights_of(row.model)
    weights = placed(weights, shardings(mesh, problem.target.weight_axes(weights), weights))
    tokens = jax.ShapeDtypeStruct((row.batch, row.seq), jnp.int32)
    tokens = placed(tokens, batch_sharding(mesh, tokens.shape))
    step = jax.jit(
        partial(training_step, problem),
        donate_argnums=(0,) if spec.memory.donate else (),
        out_shardings=(places, whole(mesh)),
    )
    return step, (state, weights, tokens)


def flops_of(row: Row, policy: MemoryPolicy) -> Flops:
    """Of the whole step. Traced with no mesh in sight: the same arithmetic, as far as it is not in a `shard_map`."""
    problem = problem_of(row, policy)
    shapes = jax.eval_shape(lambda: init_state(problem.decomposition, problem.target.sites, (row.batch, row.seq)))
    weights = weights_of(row.model)
    tokens = jax.ShapeDtypeStruct((row.batch, row.seq), jnp.int32)
    return matmul_flops(jax.make_jaxpr(partial(training_step, problem))(shapes, weights, tokens))


# ---- one row ----


def measure(row: Row, gpu: str, n_buffers: int) -> tuple[dict[str, Any], str]:
    """What is written of a row: numbers, and the buffers as text."""
    policy = POLICIES[row.policy]
    problem = problem_of(row, policy)
    start = time.perf_counter()
    flops, everything_saved = flops_of(row, policy), flops_of(row, PLAIN)
    flops_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as dump:
        found = estimate(
            lambda mesh: step_of(problem, row, mesh), row.mesh, target_configs(CARDS.read_text())[gpu], dump
        )
        peak = live_at_peak(*(_dumped(Path(dump), ending) for ending in ("-buffer-assignment", "-live-range", "")))
    children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    numbers = {
        "row": row.name,
        "gpu": gpu,
        "goal_gib": row.goal_gib,
        **memory_numbers(found),
        "matmul_flops": flops.total,
        "matmul_flops_saved": everything_saved.total,
        "flops_unknown": [*flops.unknown, *everything_saved.unknown],
        "flops_s": flops_s,
        "lower_s": found.real.lower_s,
        "compile_s": found.real.compile_s,
        "compile_unlimited_s": found.unlimited.compile_s,
        "cpu_s": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
        "max_rss_gib": own.ru_maxrss / 2**20,
        "peak_explained": peak.explained,
    }
    return numbers, table(peak, n_buffers)


def memory_numbers(found: Estimate) -> dict[str, Any]:
    """Per device."""

    def gib(memory: Memory) -> dict[str, float]:
        return {f"{name}_gib": value / GIB for name, value in dataclasses.asdict(memory).items()}

    return {
        "peak_gib": found.real.memory.peak / GIB,
        "peak_gib_unlimited": found.unlimited.memory.peak / GIB,
        "limit_bound": found.limit_bound,
        "capacity_gib": found.capacity / GIB,
        **gib(found.real.memory),
    }


def _dumped(folder: Path, ending: str) -> str:
    """The largest, should the step have been more than one program."""
    files = sorted(folder.glob(f"*gpu_after_optimizations{ending}.txt"), key=lambda path: path.stat().st_size)
    return files[-1].read_text()


# ---- the table ----


def code_digest() -> str:
    """Of everything that decides what is compiled: the core and this script."""
    files = sorted((ROOT / "param_decomp_jax").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in [*files, Path(__file__)])).hexdigest()[:12]


def commit() -> str:
    """The commit that is checked out, with a + if a tracked file differs from it."""
    described = ["git", "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def results(out: Path) -> list[dict[str, Any]]:
    """What has been measured, in the order of the rows."""
    files = [out / f"{row.name.replace('/', '_')}.json" for row in ROWS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    lines = [
        "| row | goal | peak | without limit | temp | arguments | host | FLOPs | × saved | compile | lower | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        goal = "" if r["goal_gib"] is None else f"{r['goal_gib']:g}"
        unlimited = f"{r['peak_gib_unlimited']:.2f}" + (" (limit-bound)" if r["limit_bound"] else "")
        memory = " | ".join(f"{r[key]:.2f}" for key in ("temp_gib", "arguments_gib", "host_gib"))
        ratio = r["matmul_flops"] / r["matmul_flops_saved"]
        lines.append(
            f"| {r['row']} | {goal} | {r['peak_gib']:.2f} | {unlimited} | {memory} | {r['matmul_flops']:.3g} |"
            f" {ratio:.2f} | {r['compile_s']:.0f} s | {r['lower_s']:.0f} s | {r['commit']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures what is asked for and not there yet, each row in a process of its own; then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name begins so")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--gpu", default="b200", help="a name in param_decomp_jax/aot/gpus/cards.csv")
    parser.add_argument("--buffers", type=int, default=40, help="lines of the list of buffers")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "goals")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [row for row in ROWS if row.name.startswith(options.only)]
    options.out.mkdir(parents=True, exist_ok=True)
    code = code_digest()
    for row in [] if options.table else chosen:
        file = options.out / f"{row.name.replace('/', '_')}.json"
        if options.one:
            numbers, buffers = measure(row, options.gpu, options.buffers)
            file.with_suffix(".txt").write_text(buffers + "\n")
            file.write_text(json.dumps({**numbers, "code": code, "commit": commit()}, indent=1) + "\n")
        elif row.policy not in POLICIES:
            print(f"{row.name}: there is no policy {row.policy!r} in this script yet", file=sys.stderr)
        elif options.force or not file.exists() or _differs(json.loads(file.read_text()), code, options.gpu):
            print(f"{row.name} …", file=sys.stderr, flush=True)
            again = [sys.executable, __file__, "--one", "--only", row.name, "--gpu", options.gpu]
            again += ["--buffers", str(options.buffers), "--out", str(options.out)]
            if subprocess.run(again).returncode:
                print(f"{row.name}: failed", file=sys.stderr)
    if not options.one:
        print(as_text(results(options.out)))


def _differs(old: dict[str, Any], code: str, gpu: str) -> bool:
    return (old["code"], old["gpu"]) != (code, gpu)


if __name__ == "__main__":
    main()
