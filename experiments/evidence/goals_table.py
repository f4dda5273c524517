"""Compiles one training step of large decompositions for GPUs, without any: memory, arithmetic, compile time.

    pip install -e '.[probe]'
    python -m experiments.evidence.goals_table                    # every row, one after the other (minutes each)
    python -m experiments.evidence.goals_table --only small       # rows whose names begin with this
    python -m experiments.evidence.goals_table --only lean/27/64x64 --force --buffers 60
    python -m experiments.evidence.goals_table --table            # print existing rows only

Each row is compiled in a process of its own, once for the real card and once for one with unlimited memory. The results
are <out>/<row>.json and <out>/<row>.txt (the buffers at the peak). A row is measured again only after the code of the
core has changed.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Set before JAX is imported, because JAX would otherwise take the memory of a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"


from experiments.benchmarks import mlp_decompositions
from experiments.benchmarks.mlp_decompositions import (
    POLICIES,
    SMALL,
    SMALL_CI,
    MLPs,
    eval_of,
    flops_of,
    init_of,
    problem_of,
    step_of,
)
from param_decomp_aot.buffers import live_at_peak, table
from param_decomp_aot.compile import Estimate, ProgramMemory, estimate
from param_decomp_aot.topology import target_configs
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_lab.probe.cards import TABLE
from param_decomp_lab.probe.measure import dumped
from param_decomp_lab.ui.tables import markdown_table

ROOT = Path(__file__).parents[2]
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One compilation. ``goal_gib``: the most GiB that it should need. ``program``: which program of a run is
    compiled."""

    policy: str
    mesh: MeshShape
    of: MLPs
    goal_gib: float | None = None
    program: Literal["step", "init", "eval"] = "step"

    @property
    def name(self) -> str:
        size = "small" if self.of.model is SMALL else f"{3 * len(self.of.layers)}"
        program = "" if self.program == "step" else f"/{self.program}"
        return f"{self.policy}/{size}/{self.mesh.n_devices}x{self.of.batch}{program}"


MIDDLE, EVERY = range(18, 27), range(32)
NODE, EIGHT_NODES = MeshShape(fsdp=8), MeshShape(fsdp=64)
ROWS = (
    *(Row(policy, NODE, MLPs(16, range(3, 6), 3, 1536, 512, SMALL, SMALL_CI)) for policy in POLICIES),
    Row("lean", EIGHT_NODES, MLPs(64, MIDDLE), goal_gib=18),
    Row("lean", EIGHT_NODES, MLPs(1024, MIDDLE), goal_gib=60),
    Row("lean", NODE, MLPs(8, MIDDLE), goal_gib=100),
    Row("lean", EIGHT_NODES, MLPs(64, EVERY, sites_per_chunk=32), goal_gib=50),
    Row("balanced", EIGHT_NODES, MLPs(64, MIDDLE), goal_gib=30),
    Row("balanced", EIGHT_NODES, MLPs(1024, MIDDLE), goal_gib=110),
    Row("lean", EIGHT_NODES, MLPs(64, MIDDLE), program="init"),
    Row("lean", EIGHT_NODES, MLPs(64, MIDDLE), program="eval"),
)
PROGRAMS = {"step": step_of, "init": init_of, "eval": eval_of}


# ---- one row ----


def measure(row: Row, gpu: str, n_buffers: int) -> tuple[dict[str, Any], str]:
    """Returns what is written about a row: numbers, and the buffers as text."""
    policy = POLICIES[row.policy]
    problem = problem_of(row.of, policy)
    start = time.perf_counter()
    flops, everything_saved = (flops_of(row.of, p) if row.program == "step" else None for p in (policy, PLAIN))
    flops_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as dump:
        program, card = PROGRAMS[row.program], target_configs(TABLE.read_text())[gpu]
        found = estimate(lambda mesh: program(problem, row.of, mesh), row.mesh, card, dump)
        peak = live_at_peak(*dumped(Path(dump)))
    children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    numbers = {
        "row": row.name,
        "gpu": gpu,
        "goal_gib": row.goal_gib,
        **memory_numbers(found),
        "matmul_flops": flops and flops.total,
        "matmul_flops_saved": everything_saved and everything_saved.total,
        "flops_unknown": [unknown for of in (flops, everything_saved) if of for unknown in of.unknown],
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
    """Returns the numbers of a memory plan, per device."""

    def gib(memory: ProgramMemory) -> dict[str, float]:
        return {f"{name}_gib": value / GIB for name, value in dataclasses.asdict(memory).items()}

    return {
        "peak_gib": found.real.memory.peak / GIB,
        "peak_gib_unlimited": found.unlimited.memory.peak / GIB,
        "limit_bound": found.limit_bound,
        "capacity_gib": found.capacity / GIB,
        **gib(found.real.memory),
    }


# ---- the table ----


def code_digest() -> str:
    """Returns a digest of all code that decides what is compiled: the core, the decompositions, and this script."""
    files = sorted((ROOT / "param_decomp_jax").rglob("*.py"))
    return hashlib.sha256(
        b"".join(file.read_bytes() for file in [*files, Path(__file__), Path(mlp_decompositions.__file__)])
    ).hexdigest()[:12]


def commit() -> str:
    """Returns the commit that is checked out, with a + if a tracked file differs from it."""
    described = ["git", "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def results(out: Path) -> list[dict[str, Any]]:
    """Returns what has been measured, in the order of the rows."""
    files = [out / f"{row.name.replace('/', '_')}.json" for row in ROWS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def as_text(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""

    def cells(r: dict[str, Any]) -> Sequence[str]:
        goal = "" if r["goal_gib"] is None else f"{r['goal_gib']:g}"
        unlimited = f"{r['peak_gib_unlimited']:.2f}" + (" (limit-bound)" if r["limit_bound"] else "")
        memory = [f"{r[key]:.2f}" for key in ("temp_gib", "arguments_gib", "host_gib")]
        flops, saved = r["matmul_flops"], r["matmul_flops_saved"]
        arithmetic = (f"{flops:.3g}", f"{flops / saved:.2f}") if flops else ("", "")
        times = f"{r['compile_s']:.0f} s", f"{r['lower_s']:.0f} s"
        return r["row"], goal, f"{r['peak_gib']:.2f}", unlimited, *memory, *arithmetic, *times, r["commit"]

    columns = "row | goal | peak | without limit | temp | arguments | host | FLOPs | × saved | compile | lower | commit"
    return "\n".join(markdown_table(columns, map(cells, rows)))


def main() -> None:
    """Measures the rows that were asked for and are missing, each in a process of its own; then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose names begin with this")
    parser.add_argument("--force", action="store_true", help="measure existing rows again")
    parser.add_argument("--table", action="store_true", help="only print existing rows")
    parser.add_argument("--gpu", default="b200", help="a name in param_decomp_aot/gpus/cards.csv")
    parser.add_argument("--buffers", type=int, default=40, help="lines of the list of buffers")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "goals")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [
        row for row in ROWS if row.name == options.only or (not options.one and row.name.startswith(options.only))
    ]
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
            again = [sys.executable, "-m", "experiments.evidence.goals_table", "--one", "--only", row.name]
            again += ["--gpu", options.gpu, "--buffers", str(options.buffers), "--out", str(options.out)]
            if subprocess.run(again, cwd=ROOT).returncode:
                print(f"{row.name}: failed", file=sys.stderr)
    if not options.one:
        print(as_text(results(options.out)))


def _differs(old: dict[str, Any], code: str, gpu: str) -> bool:
    return (old["code"], old["gpu"]) != (code, gpu)


if __name__ == "__main__":
    main()
