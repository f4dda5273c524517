"""Other machines, as far as their roundings go: settings under which XLA's CPU backend adds and multiplies in another
order, or without fused multiply-adds, and programs whose last bits are moved at random.

`make test-machines` runs the fast tests under each of them. A test that one of them breaks rests on a choice that a
rounding decides, and fails on somebody's machine.

    python -m tests.machines       # their names
    python -m tests.machines 17    # the name of one of them, by turns: CI gives the number of commits
"""

import os
import sys
from typing import NamedTuple


class Machine(NamedTuple):
    """``flags``: of XLA, after those of all tests. ``threads``: among which one product or sum is split. ``noise``: a
    seed of `rounding_noise.py`; 0 for none."""

    flags: tuple[str, ...] = ()
    threads: int = 16
    noise: int = 0


DEFAULT = "default"
MACHINES = {
    DEFAULT: Machine(),
    # Neither 256-bit vectors nor fused multiply-adds: every product is rounded before it is added.
    "sse4_2": Machine(("--xla_cpu_max_isa=SSE4_2",)),
    "avx2": Machine(("--xla_cpu_max_isa=AVX2",)),
    "avx512": Machine(("--xla_cpu_max_isa=AVX512", "--xla_cpu_prefer_vector_width=512")),
    "one_thread": Machine(threads=1),
    "two_threads": Machine(threads=2),
    # LLVM contracts and vectorises loops, as in users' runs.
    "optimised": Machine(("--xla_backend_optimization_level=1", "--xla_llvm_disable_expensive_passes=false")),
    # Products and sums by Eigen, not by the library that picks its kernels by the processor.
    "eigen": Machine(("--xla_cpu_experimental_ynn_fusion_type=",)),
    "noise_1": Machine(noise=1),
    "noise_2": Machine(noise=2),
    "noise_3": Machine(noise=3),
}
"""By name, for the environment's ``PD_TEST_MACHINE``."""


def chosen() -> Machine:
    """The machine that the environment names; the default one without a name."""
    name = os.environ.get("PD_TEST_MACHINE") or DEFAULT
    if name not in MACHINES:
        raise SystemExit(f"PD_TEST_MACHINE: {name} is not one of {', '.join(MACHINES)}")
    return MACHINES[name]


if __name__ == "__main__":
    others = [name for name in MACHINES if name != DEFAULT]
    print(" ".join(others) if len(sys.argv) < 2 else others[int(sys.argv[1]) % len(others)])
