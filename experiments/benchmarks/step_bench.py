"""Time and memory of whole training steps with random weights, on whatever device is here, by memory policy.

    python -m experiments.benchmarks.step_bench                          # a small shape; on a CPU some minutes
    python -m experiments.benchmarks.step_bench --shape small --policies plain,lean --batches 8 --rounds 20
    python -m experiments.benchmarks.step_bench --shape llama-8b-layer-18 --seq 512 --batches 8,16,32  # 80 GB or more
    python -m experiments.benchmarks.step_bench --fsdp 8 --batches 64    # over 8 devices

Every line is measured in a process of its own, so a policy that does not fit takes nothing else down. Time is the
median of the rounds, of which the first (compilation) is not one. Planned is XLA's own account of the step, temp +
arguments + output - alias; live is what the device reports as its highest use (CPUs report none). MFU counts matrix
products, recomputation included, against the card's dense bf16 rate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.mlp_decompositions import (
    LLAMA_8B,
    POLICIES,
    SMALL,
    SMALL_CI,
    MLPs,
    flops_of,
    problem_of,
    step_of,
)
from param_decomp_jax.ci import GlobalTransformer
from param_decomp_jax.method.state import init_state
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh

ROOT = Path(__file__).parents[2]
GIB = 2**30

SHAPES: dict[str, MLPs] = {
    "small": MLPs(8, range(3, 6), 3, 1536, 128, SMALL, SMALL_CI),
    "llama-8b-layer-18": MLPs(8, range(18, 19), 3, 24576, 512, LLAMA_8B, GlobalTransformer(2048, 4, (8192,), 16)),
}

DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}
"""FLOP/s of one card, by a part of its name (vendor's data sheets, without sparsity)."""


def measure(of: MLPs, policy: str, mesh_shape: MeshShape, rounds: int) -> dict[str, Any]:
    """One line of the table."""
    mesh = make_mesh(mesh_shape)
    problem = problem_of(of, POLICIES[policy])
    with jax.set_mesh(mesh):
        step, (state_shapes, weight_shapes, token_shape) = step_of(problem, of, mesh)
        start = time.perf_counter()
        compiled = step.lower(state_shapes, weight_shapes, token_shape).compile()
        compile_s = time.perf_counter() - start
        state, weights = _random(problem, of, state_shapes, weight_shapes)
        times = []
        for number in range(rounds + 1):
            tokens = jax.device_put(_tokens(of, number), token_shape.sharding)
            start = time.perf_counter()
            state, metrics = compiled(state, weights, tokens)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - start)
    device = jax.devices()[0]
    live = (device.memory_stats() or {}).get("peak_bytes_in_use")
    seconds = statistics.median(times[1:])
    flops, saved = flops_of(of, POLICIES[policy]).total, flops_of(of, PLAIN).total
    rate = next((rate for name, rate in DENSE_BF16.items() if name in device.device_kind), None)
    return {
        "policy": policy,
        "device": f"{mesh_shape.n_devices} x {device.device_kind}, {of.compute_dtype}",
        "batch": of.batch,
        "seq": of.seq,
        "step_s": seconds,
        "tokens_per_s": of.batch * of.seq / seconds,
        "mfu": None if rate is None else flops / seconds / (rate * mesh_shape.n_devices),
        "matmul_flops": flops,
        "matmul_flops_over_saved": flops / saved,
        "planned_gib": planned_bytes(compiled) / GIB,
        "live_gib": None if live is None else live / GIB,
        "compile_s": compile_s,
        "loss": float(metrics["loss/total"]),
    }


def _random(problem: Problem, of: MLPs, state_shapes: Any, weight_shapes: Any) -> tuple[Any, Any]:
    """A fresh state and random weights, made where they lie."""
    places = jax.tree.map(lambda x: x.sharding, (state_shapes, weight_shapes))

    def make() -> tuple[Any, Any]:
        state = init_state(problem.decomposition, problem.target.sites, (of.batch, of.seq))
        return state, random_weights(weight_shapes)

    made: tuple[Any, Any] = jax.jit(make, out_shardings=places)()
    return made


def random_weights(shapes: Any) -> Any:
    """Arrays of these shapes and dtypes that keep activations finite: norms of ones, small matrices."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
        jnp.ones(x.shape, x.dtype) if len(x.shape) == 1 else 0.02 * jax.random.normal(key, x.shape, x.dtype)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def planned_bytes(compiled: Any) -> int:
    """Of one device, as XLA accounts for it: temp + arguments + output - alias."""
    plan = compiled.memory_analysis()
    total: int = (
        plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    )
    return total


def _tokens(of: MLPs, number: int) -> jax.Array:
    return jax.random.randint(jax.random.key(number), (of.batch, of.seq), 0, of.model.vocab_size, jnp.int32)


def as_text(lines: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    rows = [
        *dict.fromkeys(x["device"] + "\n" for x in lines if "device" in x),
        "| policy | batch | seq | step | tokens/s | MFU | FLOPs × saved | planned | live | compile |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in lines:
        if "failed" in x:
            rows.append(f"| {x['policy']} | {x['batch']} | {x['seq']} | {x['failed']} | | | | | | |")
            continue
        mfu = "–" if x["mfu"] is None else f"{x['mfu']:.1%}"
        live = "–" if x["live_gib"] is None else f"{x['live_gib']:.2f} GiB"
        rows.append(
            f"| {x['policy']} | {x['batch']} | {x['seq']} | {x['step_s']:.3f} s | {x['tokens_per_s']:,.0f} | {mfu} |"
            f" {x['matmul_flops_over_saved']:.2f} | {x['planned_gib']:.2f} GiB | {live} | {x['compile_s']:.0f} s |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measures every policy with every batch size, each in a process of its own; then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--policies", default="plain,balanced,lean", help="comma-separated")
    parser.add_argument("--batches", default="", help="global batch sizes, comma-separated")
    parser.add_argument("--seq", type=int, help="tokens of a row")
    parser.add_argument("--fsdp", type=int, default=1, help="devices that split batch and state")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = replace(SHAPES[options.shape], seq=options.seq or SHAPES[options.shape].seq)
    policies = options.policies.split(",")
    unknown = set(policies) - set(POLICIES)
    if unknown:
        parser.error(f"--policies: {', '.join(sorted(unknown))} unknown; choose from {', '.join(POLICIES)}")
    batches = [int(size) for size in options.batches.split(",")] if options.batches else [shape.batch]
    if options.one:
        # CPUs have no bf16 products: they would be counted as time of the policy.
        on_cpu = jax.default_backend() == "cpu"
        of = replace(shape, batch=batches[0], compute_dtype="float32" if on_cpu else "bfloat16")
        line = measure(of, policies[0], MeshShape(fsdp=options.fsdp), options.rounds)
        print(json.dumps(line))
        return
    lines = [_in_a_process(options, shape, policy, batch) for batch in batches for policy in policies]
    print(as_text(lines))
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


def _in_a_process(options: Any, shape: MLPs, policy: str, batch: int) -> dict[str, Any]:
    print(f"{policy}, batch {batch} …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "experiments.benchmarks.step_bench", "--one", "--shape", options.shape]
    command += ["--policies", policy, "--batches", str(batch), "--seq", str(shape.seq)]
    command += ["--fsdp", str(options.fsdp), "--rounds", str(options.rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        out_of_memory = "RESOURCE_EXHAUSTED" in done.stderr or "out of memory" in done.stderr.lower()
        if not out_of_memory:
            print(done.stderr[-2000:], file=sys.stderr)
        return {
            "policy": policy,
            "batch": batch,
            "seq": shape.seq,
            "failed": "out of memory" if out_of_memory else "failed",
        }
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


if __name__ == "__main__":
    main()
