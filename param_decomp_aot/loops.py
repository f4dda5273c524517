"""Trip counts of ``while`` loops in a compiled program."""

import re

from param_decomp_aot.hlo import Computation, Instruction, Module
from param_decomp_aot.trip_count import rounds

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_PASSED_ON = {"copy", "bitcast", "convert", "reshape"}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def trips(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of ``loop``, an instruction of the computation ``inside``; None if it depends on data.

    XLA usually notes the number. If it does not, one form is recognised: a comparison with a constant bound, of a carry
    that starts at a constant and moves by a constant.
    """
    if noted := _KNOWN.search(loop.attributes):
        return int(noted[1])
    (condition,), (body,) = ([module.computations[c] for c in loop.called(which)] for which in ("condition", "body"))
    compared = _Trace(module, condition).follow(condition.root)
    if compared.instruction.opcode != "compare":
        return None
    found = _DIRECTION.search(compared.instruction.attributes)
    direction = found[1] if found else ""
    sides = [compared.within.follow(compared.within.computation.instructions[o]) for o in compared.instruction.operands]
    left, right = sides
    for relation, counter, bound in ((direction, left, right), (_MIRRORED.get(direction, ""), right, left)):
        limit, position = bound.constant, counter.carried
        if limit is None or position is None or relation not in _MIRRORED:
            continue
        start, step = _start(module, inside, loop, position), _step(module, body, position)
        if start is not None and step is not None:
            return rounds(relation.lower(), start, limit, step)
    return None


class _Origin:
    """An instruction and the trace of the computation that it is in."""

    def __init__(self, instruction: Instruction, within: "_Trace") -> None:
        self.instruction, self.within = instruction, within

    @property
    def constant(self) -> int | None:
        i = self.instruction
        return int(i.arguments) if i.opcode == "constant" and re.fullmatch(r"-?\d+", i.arguments) else None

    @property
    def carried(self) -> int | None:
        """Its position in what the loop carries, if it is read from there."""
        index = _INDEX.search(self.instruction.attributes)
        if self.instruction.opcode != "get-tuple-element" or index is None or self.within.caller is not None:
            return None
        read = self.within.computation.instructions[self.instruction.operands[0]]
        return int(index[1]) if read.opcode == "parameter" else None


class _Trace:
    """Follows values back to where they are computed, out of and into fusions."""

    def __init__(self, module: Module, computation: Computation, caller: _Origin | None = None) -> None:
        """Starts a trace. ``caller``: the fusion whose computation this is."""
        self.module, self.computation, self.caller = module, computation, caller

    def follow(self, instruction: Instruction) -> _Origin:
        found = _Origin(instruction, self)
        if instruction.opcode in _PASSED_ON:
            return self.follow(self.computation.instructions[instruction.operands[0]])
        if instruction.opcode == "parameter" and self.caller is not None:
            outside = self.caller.within
            operand = self.caller.instruction.operands[int(instruction.arguments)]
            return outside.follow(outside.computation.instructions[operand])
        if instruction.opcode == "fusion":
            fused = self.module.computations[instruction.called("calls")[0]]
            return _Trace(self.module, fused, found).follow(fused.root)
        return found


def _start(module: Module, inside: Computation, loop: Instruction, position: int) -> int | None:
    given = inside.instructions[loop.operands[0]]
    if given.opcode != "tuple":
        return None
    return _Trace(module, inside).follow(inside.instructions[given.operands[position]]).constant


def _step(module: Module, body: Computation, position: int) -> int | None:
    """Returns by how much an iteration moves the carry; None if not by a fixed integer."""
    if body.root.opcode != "tuple":
        return None
    moved = _Trace(module, body).follow(body.instructions[body.root.operands[position]])
    if moved.instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (
        moved.within.follow(moved.within.computation.instructions[name]) for name in moved.instruction.operands
    )
    if left.carried == position and right.constant is not None:
        return right.constant if moved.instruction.opcode == "add" else -right.constant
    if right.carried == position and left.constant is not None and moved.instruction.opcode == "add":
        return left.constant
    return None
