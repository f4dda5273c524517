"""For all tests: several simulated devices, and every shape annotation of the core checked."""

import os

# Before jax starts its backend. NPROC: threads of the CPU client, enough for 8 devices to meet in a collective.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxtyping import install_import_hook

install_import_hook("param_decomp_jax", "beartype.beartype")
