"""Descriptions of GPUs that are not present, and abstract devices of a cluster of them, for which programs are
compiled."""

import csv
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

UNLIMITED = 1000 * 2**30
"""Bytes of memory at which XLA meets no limit (see `compile.py:Estimate`)."""

_MEMORY = re.compile(r"(?<=device_memory_size: )\d+")

# These lines are common to all cards since Ampere. JAX 0.10.2 is built for CUDA 13.0 with cuDNN 9.10.
_DESCRIPTION = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_address_bits: 64
  ecc_enabled: true
  pcie_bandwidth: 68719476736
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  name: "{description}"
  platform_version: "Compute Capability {compute_capability}{suffix}"
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  threads_per_core_limit: {threads_per_core_limit}
  shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  l2_cache_size: {l2_cache_size}
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {memory_bandwidth_Bps}
  device_memory_size: {device_memory_bytes}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{description}"
"""


def target_configs(table: str) -> dict[str, str]:
    """Returns XLA's description (`GpuTargetConfigProto` as text) of every card in a table like ``gpus/cards.csv``, by
    name."""

    def describe(card: dict[str, str]) -> str:
        major, minor = card["compute_capability"].split(".")
        accelerated = {"yes": True, "no": False}[card["accelerated_features"]]
        return _DESCRIPTION.format(
            **card,
            major=major,
            minor=minor,
            suffix="a" if accelerated else "",
            features=" feature_extension: ACCELERATED_FEATURES" if accelerated else "",
        )

    return {card["name"]: describe(card) for card in csv.DictReader(table.splitlines())}


def card_memory(target_config: str) -> int:
    """Returns the bytes of memory of the card described."""
    found = _MEMORY.search(target_config)
    if found is None:
        raise ValueError("the description of the GPU has no `device_memory_size: <bytes>`")
    return int(found.group())


def with_memory(target_config: str, n_bytes: int) -> str:
    """Returns the same card with another amount of memory, which XLA takes as a limit."""
    card_memory(target_config)
    return _MEMORY.sub(str(n_bytes), target_config)


class MissingPlugin(RuntimeError):
    """JAX cannot compile for GPUs here."""


def gpus(target_config: str, n_gpus: int, per_node: int = 8) -> Sequence[Any]:
    """Returns ``n_gpus`` abstract devices to compile for, ``per_node`` to a node.

    Raises MissingPlugin if JAX's CUDA plugin is missing, RuntimeError if JAX is not told to run on the CPU, and
    ValueError for GPUs that do not fill whole nodes.
    """
    if jax.config.values["jax_platforms"] != "cpu":
        raise RuntimeError("compiling for GPUs that are not here needs JAX_PLATFORMS=cpu in the environment")
    nodes, rest = divmod(n_gpus, per_node)
    if rest and nodes:
        raise ValueError(f"{n_gpus} GPUs are not whole nodes of {per_node}")
    topology = f"1x{nodes}x{per_node}" if nodes else f"1x1x{n_gpus}"
    try:
        described = topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=topology)
    except RuntimeError as error:
        raise MissingPlugin(
            f"no CUDA plugin of JAX's version {jax.__version__} to compile with: pip install 'param-decomp[probe]', "
            f"which brings one and the JAX that goes with it ({error})"
        ) from error
    return described.devices
