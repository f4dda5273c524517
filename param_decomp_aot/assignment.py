"""Parses the buffer assignment and the live ranges of a compiled program from XLA's dump.

The files are ``*gpu_after_optimizations-buffer-assignment.txt`` (where every value lies, and how large it is) and
``-live-range.txt`` (when it is alive).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["argument", "output", "constant", "temp", "host"]
"""The role of memory. ``host``: everything in the host's memory; the others are on the device."""

Region = tuple[int, int, int]
"""The number of an allocation, and an offset and a size in it."""


@dataclass(frozen=True)
class Value:
    """A value of the program: an instruction's result, or the part of it at ``index``. ``phi``: whether it is a loop's
    name for what the loop carries. ``shape``: as XLA writes it, ``f32[9,4096,768]``."""

    name: str
    index: str
    phi: bool
    region: Region
    shape: str


@dataclass(frozen=True)
class Allocation:
    """``size`` bytes that are reserved once, and the values that lie there at one time or another."""

    size: int
    role: Role
    values: list[Value]


@dataclass(frozen=True)
class InstructionSchedule:
    """The order of instructions and the lifetimes of values. ``sequence``: the program's instructions in the order in
    which they run, loop bodies once. ``alive``: the first and the last number in the sequence at which a value is
    alive, both included, by the value's name and index."""

    sequence: tuple[str, ...]
    alive: dict[tuple[str, str], tuple[int, int]]

    def lifetimes(self, values: Sequence[Value]) -> list[tuple[int, int]]:
        """Returns the lifetimes of ``values``. Raises ValueError if one is missing."""
        missing = [v.name for v in values if (v.name, v.index) not in self.alive]
        if not self.alive or missing:
            raise ValueError(f"not the dump of one program: no live range for {missing[:3] or 'anything'}")
        return [self.alive[v.name, v.index] for v in values]


_ON_THE_HOST = "color 5, "
"""XLA's number for pinned host memory, before the rest of an allocation's description."""

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+), (.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_ALIVE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_NUMBERED = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)


def allocations(assignment: str) -> list[Allocation]:
    """Returns all allocations except registers. Raises ValueError if the text does not have XLA's form."""
    found: list[Allocation] = []
    number = -1
    values: list[Value] = []
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            number, values = int(head[1]), []
            if (role := _role(head[3])) is not None:
                found.append(Allocation(int(head[2]), role, values))
        elif line.startswith(" value: "):
            value = _VALUE.match(line)
            if value is None:
                raise ValueError(f"not a value of a buffer assignment: {line}")
            name, index, phi, size, offset, shape = value.groups()
            region = number, int(offset), int(size)
            shape = "tuple" if shape.startswith("(") else shape.partition("{")[0]
            values.append(Value(name, index or "{}", phi is not None, region, shape))
    return found


def schedule(live_ranges: str) -> InstructionSchedule:
    """Returns the order of instructions and the lifetimes of values."""
    alive = {(name, index): (int(first), int(last)) for name, index, first, last in _ALIVE.findall(live_ranges)}
    numbered = {int(number): name for number, name in _NUMBERED.findall(live_ranges)}
    length = 1 + max([*numbered, *(last for _, last in alive.values())], default=-1)
    return InstructionSchedule(tuple(numbered.get(i, "") for i in range(length)), alive)


def _role(description: str) -> Role | None:
    if "thread-local" in description:
        return None
    if description.startswith(_ON_THE_HOST):
        return "host"
    if description.startswith("parameter"):
        return "argument"
    if "preallocated-temp" in description:
        return "temp"
    return "constant" if description.startswith("constant") else "output"
