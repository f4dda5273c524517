"""Compiles a jitted function for GPUs that are not present, and reports its memory plan."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax

from param_decomp_aot.topology import UNLIMITED, card_memory, gpus, with_memory
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh

Options = Mapping[str, str | int | bool]

OPTIONS: Options = {"xla_gpu_autotune_level": 0}
"""XLA's options: without autotuning, because there is no card to time kernels on."""

Program = Callable[[Any], tuple[Any, tuple[Any, ...]]]
"""A map from an abstract mesh to a function (from `jax.jit`) and its arguments, which are shapes with shardings on that
mesh."""


@dataclass(frozen=True)
class ProgramMemory:
    """XLA's plan for one device, in bytes, without the workspace that kernels (cuDNN's) allocate at run time.

    ``host``: everything in the host's memory (offloaded), which is not counted in the others.
    """

    temp: int
    arguments: int
    output: int
    alias: int
    host: int

    @property
    def peak(self) -> int:
        """``temp + arguments + output − alias``: a donated argument and the result in its place count once."""
        return self.temp + self.arguments + self.output - self.alias


@dataclass(frozen=True)
class Compiled:
    """A compiled program. ``unused``: the bytes of arguments that the program does not read. JAX leaves them out of the
    program, so they are not in ``memory``, but they are on the device. ``lower_s``: seconds of tracing and lowering.
    ``compile_s``: seconds in XLA. ``program``: a `jax.stages.Compiled`."""

    memory: ProgramMemory
    unused: int
    lower_s: float
    compile_s: float
    program: Any


@dataclass(frozen=True)
class Estimate:
    """A program compiled for the card as it is, and for the same card with unlimited memory.

    XLA takes the card's memory as a limit and rematerialises to stay below it. Near the limit the total stops growing
    with the batch and means little: an unrolled step of 227.5 GiB came out as 168.7 on a card of 178.
    """

    real: Compiled
    unlimited: Compiled
    capacity: int

    @property
    def limit_bound(self) -> bool:
        """See `limit_bound`."""
        return limit_bound(self.real.memory.peak, self.unlimited.memory.peak)


def limit_bound(real: int | float, unlimited: int | float) -> bool:
    """Returns whether the peaks with and without the card's limit differ by more than 1 in 1000."""
    return abs(real - unlimited) > 1e-3 * unlimited


def compile_for(
    program: Program,
    shape: MeshShape,
    target_config: str,
    dump_to: str = "",
    options: Options = OPTIONS,
    per_node: int = 8,
) -> Compiled:
    """Compiles ``program`` for a mesh of the card that ``target_config`` describes (`topology.py:target_configs`).

    ``dump_to``: a folder into which XLA writes its buffers and its final program (see `buffers.py`), some 50 MB for a
    training step. ``options``: XLA's options. ``per_node``: the number of GPUs per node.
    """
    mesh = make_mesh(shape, gpus(target_config, shape.n_devices, per_node))
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        # JAX silently drops the memory kind of a sharding on devices that are not present; this keeps it.
        function, arguments = program(mesh.abstract_mesh)
        lowered = lower(function, arguments)
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options={**options, **({"xla_dump_to": dump_to} if dump_to else {})})
    done = time.perf_counter()
    memory = memory_plan(compiled)
    given = device_bytes([x for x in jax.tree.leaves(arguments) if getattr(x, "sharding", None) is not None])
    return Compiled(memory, max(0, given - memory.arguments), lowered_at - start, done - lowered_at, compiled)


def lower(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Lowers ``function`` (from `jax.jit`) for abstract arguments, under the current mesh.

    Checks that arguments in host memory are in host memory in the lowered program, too.
    """
    lowered = function.lower(*arguments)
    on_host = sum(on_the_host(x) for x in jax.tree.leaves(arguments))
    if on_host:
        signature, _, _ = lowered.as_text().partition("func.func public @main(")[2].partition(") -> (")
        found = signature.count('mhlo.memory_kind = "pinned_host"')
        assert found == on_host, f"{on_host} arguments lie in host memory, JAX lowered {found} so"
    return lowered


def on_the_host(x: Any) -> bool:
    """Returns whether an array, or what stands for one, lies in pinned host memory."""
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == "pinned_host"


def device_bytes(tree: Any) -> int:
    """Returns how many bytes of one device's own memory arrays (or shapes with shardings) take."""
    leaves = [x for x in jax.tree.leaves(tree) if not on_the_host(x)]
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def estimate(
    program: Program, shape: MeshShape, target_config: str, dump_to: str = "", options: Options = OPTIONS
) -> Estimate:
    """Calls `compile_for` for the card as it is (the dump is of this one) and without a limit, and discards the
    compiled programs."""
    real = replace(compile_for(program, shape, target_config, dump_to, options), program=None)
    without_limit = with_memory(target_config, UNLIMITED)
    unlimited = replace(compile_for(program, shape, without_limit, options=options), program=None)
    return Estimate(real, unlimited, card_memory(target_config))


def memory_plan(compiled: Any) -> ProgramMemory:
    """Returns XLA's memory analysis of a `jax.stages.Compiled`, per device."""
    m = compiled.memory_analysis()
    host = m.host_temp_size_in_bytes + m.host_argument_size_in_bytes + m.host_output_size_in_bytes
    return ProgramMemory(
        temp=m.temp_size_in_bytes,
        arguments=m.argument_size_in_bytes,
        output=m.output_size_in_bytes,
        alias=m.alias_size_in_bytes,
        host=host - m.host_alias_size_in_bytes,
    )
