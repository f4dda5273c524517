"""For all tests: several simulated devices, quick compilation, and every shape annotation of the core checked."""

import gc
import importlib.util
import mmap
import os
from pathlib import Path

from tests.machines import chosen

# Before jax starts its backend. The last two flags: compilation dominates, and tiny programs need no optimising
# (a training step compiles in 5 s of CPU time instead of 20). NPROC: threads of the CPU client, enough for 8 devices
# to meet in a collective.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
GONE_IN_SOME = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""As the last two, but not every XLA has them: that of JAX 0.11 has not the first. Cut into 32 parts that are compiled
in parallel, as by default, a training step takes a third more CPU time to compile than as one."""


def known(flag: str) -> bool:
    """Whether the installed XLA has this flag. One that it does not have ends the process that starts it, and there is
    no list of them to ask for: its name is looked for, as a C string, in the library."""
    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None
    assert jaxlib.origin is not None
    name = flag.removeprefix("--").partition("=")[0].encode() + b"\0"
    for library in Path(jaxlib.origin).parent.glob("libjax_common.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(name) >= 0:
                return True
    return False


machine = chosen()
flags = (*FLAGS, *(flag for flag in (*GONE_IN_SOME, *machine.flags) if known(flag)))
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags)).strip()
os.environ["NPROC"] = str(machine.threads)
os.environ["JAX_PLATFORMS"] = "cpu"
# No test asks a hub, but those that have one of their own (`tests/lab/hub_server.py`).
os.environ["HF_HUB_OFFLINE"] = "1"

# Tracing makes millions of small objects that live on; looking through all of them again and again for garbage took a
# seventh of the tests' time.
gc.set_threshold(50_000, 20, 100)

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("param_decomp_jax", "beartype.beartype")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.parts import Part, in_part  # noqa: E402

# How long an example takes says more about the machine than about the code. The same examples every time, so that a
# test fails for a change and not by chance; `make test-full` looks for new ones.
settings.register_profile("new examples", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same examples", settings.get_profile("new examples"), derandomize=True)
settings.load_profile("same examples")


def pytest_configure() -> None:
    if machine.noise:
        from tests.rounding_noise import install

        install(machine.noise)


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
