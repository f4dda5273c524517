"""Compiles one program of a run for GPUs that are not present, and records the result for the cache."""

import dataclasses
import gzip
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from param_decomp_aot.compile import ProgramMemory, compile_for
from param_decomp_aot.topology import UNLIMITED, MissingPlugin, with_memory
from param_decomp_jax.nn.attention import MissingCudnn
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.probe.cache import cached
from param_decomp_lab.probe.subject import Phase, Subject


@dataclass(frozen=True)
class MeasuredProgram:
    """A program on one device, in bytes and seconds. ``elsewhere``: as in `subject.py:Phase`, plus arguments that the
    program does not use. ``groups``: as there. ``dump``: XLA's description of its buffers and its program, if
    requested. ``fresh``: whether it was compiled just now.
    """

    memory: ProgramMemory
    elsewhere: int
    groups: dict[str, int]
    lower_s: float
    compile_s: float
    dump: tuple[str, ...]
    fresh: bool

    @property
    def peak(self) -> int:
        """The peak of the device's memory, including data besides the program's own arguments."""
        return self.memory.peak + self.elsewhere


@dataclass(frozen=True)
class Where:
    """Where to compile. ``card``: XLA's description. ``cache``: a folder; None for no cache."""

    card: str
    per_node: int
    cache: Path | None


def measure(subject: Subject, phase: str, where: Where, limited: bool = True, dump: bool = False) -> MeasuredProgram:
    """Compiles ``phase`` of the subject. ``limited``: whether for the card as it is, or with unlimited memory."""
    card = where.card if limited else with_memory(where.card, UNLIMITED)
    question = "\n".join((subject.identity, phase, str(subject.mesh), str(where.per_node), card, str(dump)))

    def answer() -> dict[str, Any]:
        made: list[Phase] = []

        def program(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
            made.append(subject.phases[phase](mesh))
            return made[0].program.function, made[0].program.arguments

        with tempfile.TemporaryDirectory(prefix="param-decomp-") as folder:
            try:
                compiled = compile_for(program, subject.mesh, card, folder if dump else "", per_node=where.per_node)
            except (MissingPlugin, MissingCudnn) as error:
                raise UserError(str(error)) from error
            except jax.errors.JaxRuntimeError as error:
                raise CannotTell(f"{phase}: the compiler gave up: {error}") from error
            texts = dumped(Path(folder)) if dump else []
        return {
            "elsewhere": made[0].elsewhere + compiled.unused,
            "groups": dict(made[0].groups),
            "memory": dataclasses.asdict(compiled.memory),
            "lower_s": compiled.lower_s,
            "compile_s": compiled.compile_s,
            "dump": [gzip.compress(text.encode(), 3).hex() for text in texts],
        }

    kept, was_there = cached(where.cache, question, answer)
    texts = tuple(gzip.decompress(bytes.fromhex(text)).decode() for text in kept["dump"])
    return MeasuredProgram(
        ProgramMemory(**kept["memory"]),
        kept["elsewhere"],
        kept["groups"],
        kept["lower_s"],
        kept["compile_s"],
        texts,
        not was_there,
    )


def dumped(folder: Path) -> list[str]:
    """Returns what `aot/buffers.py` reads from XLA's dump; of several programs, the largest."""

    def largest(ending: str) -> str:
        files = sorted(folder.glob(f"*gpu_after_optimizations{ending}.txt"), key=lambda path: path.stat().st_size)
        return files[-1].read_text()

    return [largest(ending) for ending in ("-buffer-assignment", "-live-range", "")]
