"""The buffers that are alive when a compiled program needs most, from the texts that XLA dumps beside it.

Three files of a dump (`compile.py:compile_for`) matter, those of the last stage: ``*gpu_after_optimizations`` followed
by ``-buffer-assignment.txt`` (where every value lies, and how large it is), ``-live-range.txt`` (when) and ``.txt``
(the program: what it is).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from param_decomp_jax.aot.instructions import Instructions

GIB = 2**30

Role = Literal["argument", "output", "constant", "temp", "host"]
"""``host``: whatever lies in the host's memory; the others are on the device."""


@dataclass(frozen=True)
class Buffer:
    """Memory that is taken at the peak, of one device or by it in its host.

    ``shape``: as XLA writes it, ``f32[9,4096,768]``, of the local part. ``scope``: where in the code the value comes
    from, by `jax.named_scope` and transformation; of an argument its name. ``source``: file and line.
    """

    n_bytes: int
    role: Role
    shape: str
    instruction: str
    scope: str
    source: str


@dataclass(frozen=True)
class Peak:
    """``buffers``: largest first; arguments and results are there from beginning to end.

    ``temp``: bytes set aside for everything else. ``unused``: how much of these is free at the peak, between buffers.
    """

    buffers: tuple[Buffer, ...]
    temp: int
    unused: int

    @property
    def explained(self) -> float:
        """Share of the bytes whose scope is known."""
        return sum(b.n_bytes for b in self.buffers if b.scope) / max(1, sum(b.n_bytes for b in self.buffers))


def live_at_peak(assignment: str, live_ranges: str, program: str) -> Peak:
    """The buffers at the moment at which the temporary ones take most, counted here: XLA's own list of the moment, in
    the second text, leaves out what an all-gather has under way and what loops carry.

    Raises ValueError where the texts are not of XLA's form, or not of one program.
    """
    allocations = list(_allocations(assignment))
    found = _RANGE.findall(live_ranges)
    ranges = {(name, index): (int(first), int(last)) for name, index, first, last in found}
    temporary = [value for a in allocations if a.role == "temp" for value in a.values]
    missing = [value.name for value in temporary if value.key not in ranges]
    if not ranges or missing:
        raise ValueError(f"not the dump of one program: no live range for {missing[:3] or 'anything'}")
    moment = _busiest([(value.place, *ranges[value.key]) for value in temporary])
    instructions = Instructions(program)

    buffers, taken = [], 0
    for allocation in allocations:
        if allocation.role != "temp":
            own = sorted(allocation.values, key=lambda v: not instructions.is_argument(v.name))
            buffers += [_buffer(allocation.role, allocation.size, own, instructions)] if own else []
            continue
        for (_, _, size), values in _by_place(allocation.values).items():
            spans = [(v, *ranges[v.key]) for v in values]
            if any(first <= moment <= last for _, first, last in spans):
                # What computes a value says more than a loop that carries it; of such the latest until now is nearest.
                nearest = sorted(spans, key=lambda s: (s[0].phi, s[1] > moment, abs(moment - s[1])))
                buffers.append(_buffer("temp", size, [v for v, _, _ in nearest], instructions))
                taken += size
    temp = sum(a.size for a in allocations if a.role == "temp")
    return Peak(tuple(sorted(buffers, key=lambda b: -b.n_bytes)), temp, temp - taken)


def table(peak: Peak, rows: int = 40) -> str:
    """The largest buffers as text, alike ones (of one shape and scope) on one line, and the rest as a sum."""
    alike: dict[tuple[str, ...], list[Buffer]] = {}
    for b in peak.buffers:
        alike.setdefault((b.role, b.shape, b.scope, b.source), []).append(b)
    groups = sorted(alike.values(), key=lambda group: -sum(b.n_bytes for b in group))
    lines = [_line(group) for group in groups[:rows]]
    rest = sum(b.n_bytes for group in groups[rows:] for b in group)
    lines.append(f"{rest / GIB:9.3f} GiB  in {sum(map(len, groups[rows:]))} smaller buffers")
    lines.append(f"{peak.unused / GIB:9.3f} GiB  of {peak.temp / GIB:.3f} for temporaries lie between buffers")
    lines.append(f"{100 * peak.explained:9.1f} %    of the bytes have a scope")
    return "\n".join(lines)


def _line(group: list[Buffer]) -> str:
    b, times = group[0], f"{len(group)} × " if len(group) > 1 else ""
    total = sum(x.n_bytes for x in group) / GIB
    return f"{total:9.3f} GiB  {b.role:8}  {times}{b.shape}  {b.scope or b.instruction}  {b.source}".rstrip()


# ---- XLA's texts ----

_Place = tuple[int, int, int]
"""Number of an allocation, offset and size in it."""


@dataclass(frozen=True)
class _Value:
    """A value of the program: an instruction's result, or the part of it that ``index`` says. ``phi``: a loop's name
    for what it carries."""

    name: str
    index: str
    phi: bool
    place: _Place
    shape: str

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.index


@dataclass(frozen=True)
class _Allocation:
    size: int
    role: Role
    values: list[_Value]


_ON_THE_HOST = "color 5, "
"""XLA's number for pinned host memory, before the rest of an allocation's description."""

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+), (.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)


def _allocations(assignment: str) -> Iterator[_Allocation]:
    """All but what lives in registers."""
    number = -1
    values: list[_Value] = []
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            number, values = int(head[1]), []
            if (role := _role(head[3])) is not None:
                yield _Allocation(int(head[2]), role, values)
        elif line.startswith(" value: "):
            value = _VALUE.match(line)
            if value is None:
                raise ValueError(f"not a value of a buffer assignment: {line}")
            name, index, phi, size, offset, shape = value.groups()
            place = number, int(offset), int(size)
            shape = "tuple" if shape.startswith("(") else shape.partition("{")[0]
            values.append(_Value(name, index or "{}", phi is not None, place, shape))


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


def _busiest(spans: Sequence[tuple[_Place, int, int]]) -> int:
    """The moment at which most bytes are taken; values in one place (a loop's carry, an update of it) count once."""
    events = sorted(
        [(first, 1, place) for place, first, _ in spans] + [(last + 1, 0, place) for place, _, last in spans]
    )
    users: Counter[_Place] = Counter()
    taken, most, moment = 0, -1, 0
    for time, comes, place in events:
        users[place] += 1 if comes else -1
        if users[place] == comes:
            taken += place[2] if comes else -place[2]
        if taken > most:
            most, moment = taken, time
    return moment


def _by_place(values: Sequence[_Value]) -> dict[_Place, list[_Value]]:
    places: dict[_Place, list[_Value]] = {}
    for value in values:
        places.setdefault(value.place, []).append(value)
    return places


def _buffer(role: Role, n_bytes: int, values: Sequence[_Value], instructions: Instructions) -> Buffer:
    """Named by the first of its values whose origin is known."""
    origins = [(v, instructions.origin(v.name)) for v in values]
    value, (scope, source) = next(((v, origin) for v, origin in origins if origin[0]), origins[0])
    return Buffer(n_bytes, role, value.shape, value.name, scope, source)
