"""The text of a compiled program (HLO as XLA prints it), taken apart into computations of instructions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(")
_OPCODE = re.compile(r" ?([a-z][\w-]*)\(")
_NAMED = re.compile(r"%([^\s,(){}]+)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)(\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_PARENTHESIS = re.compile(r"[()]")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


class Array(NamedTuple):
    """One array of a shape. ``element_bits``: 0 for a token. ``on_host``: whether it lies in the host's memory."""

    n_elements: int
    element_bits: int
    dtype: str
    on_host: bool

    @property
    def n_bytes(self) -> int:
        return -(-self.n_elements * self.element_bits // 8)


@dataclass(frozen=True)
class Instruction:
    """An instruction. ``shape``: that of its result, as written; a tuple's is in parentheses. ``arguments``: what is in
    the parentheses after the opcode. ``attributes``: what follows them."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands, which are instructions of the same computation."""
        return tuple(_NAMED.findall(self.arguments))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result."""
        return parse_arrays(self.shape)

    @property
    def n_bytes(self) -> int:
        """The bytes of the whole result."""
        return sum(a.n_bytes for a in self.arrays)

    def called(self, attribute: str) -> tuple[str, ...]:
        """Returns the computations that an attribute names: ``calls``, ``body``, ``branch_computations``."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[^\s,}}]+)", self.attributes)
        return tuple(name.lstrip("%") for name in re.findall(r"[^\s,{}]+", found[1])) if found else ()


@dataclass(frozen=True)
class Computation:
    """A computation. ``instructions``: by name, in order. ``root``: the instruction whose result is the
    computation's."""

    instructions: Mapping[str, Instruction]
    root: Instruction

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that read an instruction, by its name."""
        users: dict[str, list[Instruction]] = {}
        for user in self.instructions.values():
            for operand in dict.fromkeys(user.operands):
                users.setdefault(operand, []).append(user)
        return {name: tuple(found) for name, found in users.items()}


@dataclass(frozen=True)
class Module:
    """A program for ``n_devices`` devices, each of which runs ``entry``."""

    computations: Mapping[str, Computation]
    entry: str
    n_devices: int


def module(program: str) -> Module:
    """Parses a program. Raises ValueError if the text has no entry computation."""
    computations: dict[str, Computation] = {}
    partitions = _PARTITIONS.search(program.partition("\n")[0])
    entry = name = ""
    instructions: dict[str, Instruction] = {}
    for line in program.splitlines():
        if found := INSTRUCTION.match(line):
            is_root, defined = found[1], instruction(found[2], found[3])
            for operand in defined.operands:
                _add_part(instructions, operand)
            instructions[defined.name] = defined
            if is_root:
                computations[name] = Computation(instructions, defined)
        elif found := COMPUTATION.match(line):
            name, instructions = found[2], {}
            entry = name if found[1] else entry
    if entry not in computations:
        raise ValueError("not the text of a program: it has no entry computation")
    return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _add_part(instructions: dict[str, Instruction], name: str) -> None:
    """Adds the instruction that ``%x#1`` stands for, unless it is there. Since JAX 0.11, XLA writes an operand that is
    part 1 of the tuple ``%x`` in this way."""
    whole, _, number = name.rpartition("#")
    if not whole or name in instructions:
        return
    _add_part(instructions, whole)
    shape = parts_of(instructions[whole].shape)[int(number)]
    instructions[name] = Instruction(name, shape, "get-tuple-element", f"%{whole}", f", index={number}")


def parts_of(shape: str) -> tuple[str, ...]:
    """Returns the shapes of a tuple's parts: ``f32[8,4]{1,0}`` and ``s8[16]{0}`` for ``(f32[8,4]{1,0}, s8[16]{0})``."""
    # In a shape, only commas between the parts of a tuple are followed by a space; comments number every fifth part.
    parts, depth = [""], 0
    for piece in re.split(r"(, |[()])", re.sub(r"/\*.*?\*/", "", shape)[1:-1]):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == ", " and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return tuple(parts)


def parse_arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays of a shape as XLA writes it: ``(f32[8,4]{1,0}, s8[16]{0:S(5)})``."""
    found = []
    for letters, digits, more, sizes, layout in _ARRAY.findall(shape):
        n_elements = 1
        for size in filter(None, sizes.split(",")):
            n_elements *= int(size.lstrip("<="))
        bits = 8 if letters == "pred" else int(digits or 0)
        found.append(Array(n_elements, bits, letters + digits + more, "S(5)" in layout))
    return tuple(found)


def instruction(name: str, definition: str) -> Instruction:
    """Parses an instruction. ``definition``: what follows ``%name = ``. Raises ValueError if that does not define
    one."""
    # A tuple's shape is in parentheses and may contain others; other shapes have no space.
    end = _closing(definition, 0) + 1 if definition.startswith("(") else definition.find(" ")
    opcode = _OPCODE.match(definition, end)
    if opcode is None:
        raise ValueError(f"not an instruction of a program: %{name} = {definition[:80]}")
    close = _closing(definition, opcode.end() - 1)
    return Instruction(name, definition[:end], opcode[1], definition[opcode.end() : close], definition[close + 1 :])


def _closing(text: str, at: int) -> int:
    """Returns where the parenthesis that opens at ``at`` is closed."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, at):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")
