"""For all tests: several simulated devices, quick compilation, and every shape annotation of the core checked."""

import os

# Before jax starts its backend. The last three flags: compilation dominates, and tiny programs need no optimising
# (a training step compiles in 5 s of CPU time instead of 20). NPROC: threads of the CPU client, enough for 8 devices
# to meet in a collective.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("param_decomp_jax", "beartype.beartype")
