"""The forms of attention side by side: time on this machine, and memory on GPUs that are not here.

    python experiments/attention_forms.py            # times; memory too where the extra `probe` is installed

Times are of forward and backward in fp32, forms taken in turn, medians (and least) over the rounds.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from param_decomp_aot.compile import compile_for
from param_decomp_aot.topology import target_configs
from param_decomp_jax.nn.attention import attend, blocked, plain
from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_jax.sharding.placement import batch_sharding
from param_decomp_lab.probe.cards import TABLE

Shape = tuple[int, int, int, int, int]
"""Rows, positions, heads, key heads, dimensions of a head."""

TIMED: dict[str, Shape] = {
    "16 × 64, 4 heads of 32 (`demo/transformer`)": (16, 64, 4, 4, 32),
    "2 × 1024, 4 heads of 64": (2, 1024, 4, 4, 64),
}
COMPILED: dict[str, tuple[Shape, bool]] = {
    "Llama-3.1-8B: 1 × 2048, 32 heads of 128, 8 of them keys, causal": ((1, 2048, 32, 8, 128), True),
    "CI transformer: 1 × 2048, 64 heads of 64": ((1, 2048, 64, 64, 64), False),
}


def backward(form: Callable[..., Any], causal: bool) -> Any:
    """Value and gradients of a sum of squares."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(form(q, k, v, causal).astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def times(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by form."""
    B, T, heads, kv_heads, d = shape
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, h, d)), jnp.float32) for h in (heads, kv_heads, kv_heads))
    blocks = {f"blocks of {size}": partial(blocked, block=size) for size in (64, 128, 256, 512) if size <= T}
    attentions: dict[str, Callable[..., Any]] = {"plain": plain, **blocks}
    forms = {name: backward(attention, True) for name, attention in attentions.items()}
    for form in forms.values():
        jax.block_until_ready(form(q, k, v))
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            jax.block_until_ready(form(q, k, v))
            seconds[name].append(time.perf_counter() - start)
    return seconds


def temporaries(shape: Shape, causal: bool, implementation: Any, gpu: str) -> float:
    """MiB per GPU beside arguments and results, of forward and backward in bf16; one row on each of 8 GPUs."""
    B, T, heads, kv_heads, d = shape

    def program(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        shapes = [(8 * B, T, h, d) for h in (heads, kv_heads)]
        q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=batch_sharding(mesh, s)) for s in shapes)
        return backward(partial(attend, implementation=implementation), causal), (q, k, k)

    card = target_configs(TABLE.read_text())[gpu]
    return compile_for(program, MeshShape(fsdp=8), card).memory.temp / 2**20


def main() -> None:
    """Prints both tables, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gpu", default="b200", help="a name in param_decomp_aot/gpus/cards.csv")
    options = parser.parse_args()
    print("| shape | form | median | least | median over plain's |\n|---|---|---|---|---|", flush=True)
    for title, shape in TIMED.items():
        seconds = times(shape, options.rounds)
        for name, of_form in seconds.items():
            median, whole = statistics.median(of_form), statistics.median(seconds["plain"])
            least = min(of_form)
            print(f"| {title} | {name} | {1e3 * median:.2f} ms | {1e3 * least:.2f} ms | {median / whole:.2f} |")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return
    print("\n| shape | plain | blocked | flash |\n|---|---|---|---|", flush=True)
    for title, (shape, causal) in COMPILED.items():
        sizes = [temporaries(shape, causal, form, options.gpu) for form in ("plain", "blocked", "flash")]
        print(f"| {title} | {' | '.join(f'{size:.0f} MiB' for size in sizes)} |", flush=True)


if __name__ == "__main__":
    main()
