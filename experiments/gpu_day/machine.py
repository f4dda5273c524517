"""What the figures are measured on, and with what."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from param_decomp_lab.probe.compiler import installed

GIB = 2**30
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "equinox", "optax", "numpy")


def machine(toy: bool) -> dict[str, Any]:
    """``toy``: products and copies of sizes for a CPU."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "packages": {name: found for name in PACKAGES if (found := installed(name)) is not None},
        "rates": measure_rates(64, 1 << 20) if toy else measure_rates(),
    }


def measure_rates(size: int = 8192, copied: int = 4 * GIB) -> dict[str, Any]:
    """FLOP/s of bf16 products of two square matrices of normal numbers; bytes/s, read and written, of a copy."""

    def median_s(work: Callable[[], Any], times: int) -> float:
        jax.block_until_ready([work() for _ in range(3)])
        found = []
        for _ in range(7):
            started = time.perf_counter()
            for _ in range(times):
                result = work()
            jax.block_until_ready(result)
            found.append((time.perf_counter() - started) / times)
        return statistics.median(found)

    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    product = jax.jit(lambda x, y: x @ y)
    long = jax.random.normal(jax.random.key(2), (copied // 4,), jnp.float32)
    more = jax.jit(lambda x: x + 1)
    of_product = median_s(lambda: product(a, b), 10)
    of_copy = median_s(lambda: more(long), 2)
    return {
        "size": size,
        "matmul_s": of_product,
        "matmul_flops_per_s": 2 * size**3 / of_product,
        "copy_bytes_per_s": 2 * copied / of_copy,
    }
