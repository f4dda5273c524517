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

import pytest  # noqa: E402

from tests.parts import Part, in_part  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="the K-th (from 1) of N parts of the tests, and those marked always")


# After the selection by markers, so that what is left is dealt evenly.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part is None:
        return
    chosen = in_part(Part.parse(config.option.part), items)
    config.hook.pytest_deselected(items=[item for item, is_in in zip(items, chosen, strict=True) if not is_in])
    items[:] = [item for item, is_in in zip(items, chosen, strict=True) if is_in]
