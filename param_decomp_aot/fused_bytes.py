"""Bytes that an operation of a compiled program reads and writes in its device's memory, and in the host's.

The rules: an operation reads all of its operands and writes all of its result, once each. Values inside a fusion stay
on the chip. Slices are the exception, alone or inside a fusion. If only slices or gathered rows of an operand are used,
only these are read (through casts, copies, reshapes and transpositions in between). If a result updates an operand in
place, or scatters into it, only the update is written, and the operand is not read. Tuples and views of arrays move
nothing, nor does the workspace of a library's kernel. Caches are ignored: what a small array's second reader finds in
L2 counts all the same, so the number is an upper bound of what must move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from param_decomp_aot.hlo import Computation, Instruction, Module

_VIEWS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency",
}  # fmt: skip
_ELEMENTWISE = {"bitcast", "convert", "copy", "reshape", "transpose"}
_LIBRARIES = ("__cublas", "__cudnn", "__cub")


@dataclass(frozen=True)
class Bytes:
    """Bytes that are read or written, in the device's memory (``device``) and in the host's (``host``)."""

    device: int = 0
    host: int = 0

    def __bool__(self) -> bool:
        return bool(self.device or self.host)

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host)


def bytes_moved(module: Module, inside: Computation, instruction: Instruction) -> Bytes:
    """Returns what one operation of the computation ``inside`` reads and writes; zero for operations that compute
    nothing by themselves (a loop, a call)."""
    i = instruction
    if i.opcode in _VIEWS or i.opcode.endswith("-done"):
        return Bytes()
    if i.opcode == "fusion":
        fused = module.computations[i.called("calls")[0]]
        reads = [_read(module, fused, fused.parameters[n]) for n in range(len(i.operands))]
        return sum(
            (_array_bytes(o, n) for o, n in zip(_sources(inside, i), reads, strict=True)),
            _written(fused, fused.root, i),
        )
    # An operation by itself is treated as the only one in a fusion.
    alone = Computation({}, i)
    reads = [_part_read(alone, i, n, o) for n, o in enumerate(_sources(inside, i))]
    return sum((_array_bytes(o, n) for o, n in zip(_sources(inside, i), reads, strict=True)), _written(inside, i, i))


def multiplies(module: Module, i: Instruction) -> bool:
    """Returns whether an operation is a kernel of a matrix product, a convolution or an attention."""
    match i.opcode:
        case "dot" | "convolution":
            return True
        case "custom-call":
            return any(f'"{library}' in i.attributes for library in ("__cublas", "__cudnn"))
        case "fusion":
            fused = module.computations[i.called("calls")[0]]
            return any(multiplies(module, inner) for inner in fused.instructions.values())
        case _:
            return False


def _sources(inside: Computation, instruction: Instruction) -> Sequence[Instruction]:
    return [inside.instructions[name] for name in instruction.operands]


def _array_bytes(array: Instruction, n_elements: int) -> Bytes:
    """Returns the bytes of ``n_elements`` of an array; zero for a tuple, whose parts are read elsewhere."""
    if len(array.arrays) != 1:
        return Bytes()
    (whole,) = array.arrays
    n_bytes = -(-min(n_elements, whole.n_elements) * whole.element_bits // 8)
    return Bytes(host=n_bytes) if whole.on_host else Bytes(n_bytes)


def _n_elements(instruction: Instruction) -> int:
    return sum(a.n_elements for a in instruction.arrays)


def _read(module: Module, fused: Computation, array: Instruction) -> int:
    """Returns how many elements of ``array`` a fused computation uses."""
    total = 0
    for user in fused.users.get(array.name, ()):
        for n, operand in enumerate(user.operands):
            if operand == array.name:
                if user.opcode in _ELEMENTWISE and user is not fused.root:
                    total += _read(module, fused, user)
                elif user.opcode == "fusion":
                    inner = module.computations[user.called("calls")[0]]
                    total += _read(module, inner, inner.parameters[n])
                else:
                    total += _part_read(fused, user, n, array)
    return min(total, _n_elements(array))


def _part_read(inside: Computation, user: Instruction, n: int, array: Instruction) -> int:
    """Returns how many elements one instruction reads of its operand number ``n``."""
    match user.opcode:
        case "dynamic-slice" | "slice" | "gather" if n == 0:
            return _n_elements(user)
        case "dynamic-update-slice" | "scatter" if n == 0 and user.name in _in_place(inside):
            return 0
        case _:
            return _n_elements(array)


def _in_place(inside: Computation) -> Mapping[str, Instruction]:
    """Returns the instructions whose value is a computation's result, or a part of it, looking through views."""
    found: dict[str, Instruction] = {}
    pending = [inside.root]
    while pending:
        i = pending.pop()
        if i.opcode in ("tuple", "bitcast"):
            pending += [inside.instructions[name] for name in i.operands]
        else:
            found[i.name] = i
    return found


def _written(inside: Computation, result: Instruction, outside: Instruction) -> Bytes:
    """Returns what a fusion writes. ``result``: the result of its computation. ``outside``: the instruction that calls
    it."""
    total, on_host = Bytes(), any(a.on_host for a in outside.arrays[:1])
    for i in _in_place(Computation(inside.instructions, result)).values():
        n_bytes = _result(inside, i) if i is outside or _starts_at_parameter(inside, i) else i.n_bytes
        total += Bytes(host=n_bytes) if on_host else Bytes(n_bytes)
    return total


def _result(inside: Computation, i: Instruction) -> int:
    """Returns the bytes written by ``i``, which may update an operand in place."""
    match i.opcode:
        case "dynamic-update-slice":
            return inside.instructions[i.operands[1]].n_bytes
        case "scatter":
            # The operands are arrays, indices, and one update for each array.
            return sum(inside.instructions[name].n_bytes for name in i.operands[len(i.operands) // 2 + 1 :])
        case "copy-start":
            return i.arrays[0].n_bytes
        case "custom-call" if any(f'"{library}' in i.attributes for library in _LIBRARIES):
            return sum(a.n_bytes for a in i.arrays if a.dtype not in ("s8", "u8"))
        case _:
            return i.n_bytes


def _starts_at_parameter(inside: Computation, i: Instruction) -> bool:
    """Returns whether the first operand is, apart from views, an argument of the fusion: only that can be updated in
    place."""
    source = i
    while source.operands and (source is i or source.opcode == "bitcast"):
        source = inside.instructions[source.operands[0]]
    return source.opcode == "parameter"
