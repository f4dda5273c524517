"""What small habits cost in device memory: programs with and without one line, compiled for GPUs that are not here.

    pip install -e '.[probe]'
    python -m experiments.memory_habits                       # every habit; some minutes on two cores
    python -m experiments.memory_habits --only one-hot        # those whose name has this in it
    python -m experiments.memory_habits --only one-hot --force
    python -m experiments.memory_habits --print               # the table of what is there, compiling nothing

The programs are in memory_habits_programs.py. Figures go to docs/memory_study.json, from which
`python -m experiments.memory_study --table` writes the page; a habit that is there is not compiled again.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: with a GPU at hand it would take its memory

import jax
from jax.sharding import Mesh, NamedSharding

from experiments.memory_habits_parts import Given, Habit, Program, Size
from experiments.memory_habits_programs import HABITS
from experiments.memory_study_page import habits_table
from param_decomp_aot.compile import compile_for
from param_decomp_aot.flops import matmul_flops
from param_decomp_aot.traffic import traffic
from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_lab.probe.answer import GIB
from param_decomp_lab.probe.cards import card

KEPT = Path(__file__).parents[1] / "docs" / "memory_study.json"
NODE = MeshShape(fsdp=8)


def key(habit: Habit) -> str:
    return f"habit: {habit.name}"


def compiled(program: Program) -> tuple[dict[str, Any], str]:
    """Sizes in GiB and bytes moved of one of 8 B200s, the arithmetic of all; and the program's text."""
    counted = {}

    def on(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        def of(given: Given) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(given.shape, given.dtype, sharding=NamedSharding(mesh, given.spec))

        arguments = jax.tree.map(of, program.arguments)
        counted["flops"] = matmul_flops(jax.make_jaxpr(program.function)(*arguments)).total
        return jax.jit(program.function, donate_argnums=program.donated), arguments

    found = compile_for(on, NODE, card("b200"))
    text, memory = found.program.as_text(), found.memory
    moved = traffic(text)
    sizes = {"peak": memory.peak, "temp": memory.temp, "arguments": memory.arguments}
    figures = {name: size / GIB for name, size in sizes.items()}
    return {**figures, **counted, "hbm": moved.hbm, "within": moved.within, "compile_s": found.compile_s}, text


def measure(habit: Habit, size: Size) -> dict[str, Any]:
    """``same_program``: XLA makes the same of both."""
    kept, without = (compiled(habit.program(size, is_kept)) for is_kept in (True, False))
    same = anonymous(kept[1]) == anonymous(without[1])
    return {"line": habit.line, "instead": habit.instead, "with": kept[0], "without": without[0], "same_program": same}


def anonymous(text: str) -> str:
    """A program without where in the source it comes from, its names numbered as they come."""
    text = re.sub(r",? metadata=\{[^{}]*\}", "", text)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=\n\n)", "", text, flags=re.DOTALL)
    numbers: dict[str, int] = {}
    return re.sub(r"%[\w.-]+", lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", text)


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def said(record: Mapping[str, Any]) -> str:
    kept, without = record["with"], record["without"]
    same = ", the same program" if record["same_program"] else ""
    return f"{kept['peak']:.2f} GiB with, {without['peak']:.2f} without{same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="habits whose name has this in it")
    parser.add_argument("--force", action="store_true", help="compile again what is there")
    parser.add_argument("--print", action="store_true", dest="only_print", help="only print the table")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the file of figures")
    options = parser.parse_args()
    chosen = [habit for habit in HABITS if options.only in habit.name]
    if not chosen:
        parser.error(f"--only {options.only}: no habit has this in its name; they are {[h.name for h in HABITS]}")
    for habit in [] if options.only_print else chosen:
        if key(habit) in load(options.kept) and not options.force:
            continue
        print(f"{habit.name} …", file=sys.stderr, flush=True)
        record = measure(habit, Size())
        # Read again: the study of levers writes into the same file.
        options.kept.write_text(json.dumps({**load(options.kept), key(habit): record}, indent=1) + "\n")
        print(f"    {said(record)}", file=sys.stderr, flush=True)
    print(habits_table(load(options.kept)))


if __name__ == "__main__":
    main()
