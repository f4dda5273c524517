"""The buffers of a compiled program: when each is alive, and which are alive at the peak.

Three files of a dump (`compile.py:compile_for`) matter, those of the last stage: ``*gpu_after_optimizations`` followed
by ``-buffer-assignment.txt``, ``-live-range.txt`` (for both see `assignment.py`) and ``.txt`` (the program).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from param_decomp_aot.assignment import InstructionSchedule, Region, Role, Value, allocations, schedule
from param_decomp_aot.instructions import Instructions

GIB = 2**30


@dataclass(frozen=True)
class Buffer:
    """Memory that is used at some time, on one device or in its host.

    ``shape``: that of the local part, as XLA writes it, ``f32[9,4096,768]``. ``scope``: where in the code the value
    comes from, by `jax.named_scope` and transformation; for an argument, its name. ``source``: file and line.
    """

    n_bytes: int
    role: Role
    shape: str
    instruction: str
    scope: str
    source: str


@dataclass(frozen=True)
class BufferSpan:
    """A temporary buffer from instruction ``first`` to ``last`` of the schedule, both included."""

    first: int
    last: int
    buffer: Buffer


@dataclass(frozen=True)
class BufferTimeline:
    """The memory of a program over time.

    ``fixed``: arguments, results and constants, which exist from beginning to end. ``spans``: the temporaries; at any
    time, a place is in at most one span. ``temp``: the bytes reserved for temporaries. ``schedule``: the scope of each
    instruction, in the order in which they run, those of loop bodies once.
    """

    fixed: tuple[Buffer, ...]
    spans: tuple[BufferSpan, ...]
    temp: int
    schedule: tuple[str, ...]

    @property
    def base(self) -> int:
        """The bytes that are used on the device from beginning to end."""
        return sum(b.n_bytes for b in self.fixed if b.role != "host")

    @property
    def planned(self) -> int:
        """All bytes on the device: XLA's plan, which `compile.py:ProgramMemory.peak` gives without constants."""
        return self.base + self.temp


@dataclass(frozen=True)
class Peak:
    """The memory at the peak. ``buffers``: largest first; arguments and results exist from beginning to end.

    ``temp``: the bytes reserved for everything else. ``unused``: how many of these are free at the peak, between
    buffers.
    """

    buffers: tuple[Buffer, ...]
    temp: int
    unused: int

    @property
    def explained(self) -> float:
        """The share of the bytes whose scope is known."""
        return sum(b.n_bytes for b in self.buffers if b.scope) / max(1, sum(b.n_bytes for b in self.buffers))


def ledger(assignment: str, live_ranges: str, program: str) -> BufferTimeline:
    """Returns the memory of a program over time, from the three texts together.

    Raises ValueError if they do not have XLA's form, or do not belong to one program.
    """
    instructions, times = Instructions(program), schedule(live_ranges)
    fixed: list[Buffer] = []
    spans: list[BufferSpan] = []
    temp = 0
    for allocation in allocations(assignment):
        if allocation.role == "temp":
            temp += allocation.size
            spans += _spans(allocation.values, times, instructions)
        elif allocation.values:
            own = sorted(allocation.values, key=lambda v: not instructions.is_argument(v.name))
            fixed.append(_buffer(allocation.role, allocation.size, own, instructions))
    scopes = tuple(instructions.origin(name)[0] for name in times.sequence)
    return BufferTimeline(tuple(fixed), tuple(spans), temp, scopes)


def busiest(spans: Sequence[BufferSpan]) -> int:
    """Returns the first moment at which the most bytes are used."""
    events = [(s.first, s.buffer.n_bytes) for s in spans] + [(s.last + 1, -s.buffer.n_bytes) for s in spans]
    taken, most, moment = 0, -1, 0
    for time, change in sorted(events):
        taken += change
        if taken > most:
            most, moment = taken, time
    return moment


def find_peak(ledger: BufferTimeline) -> Peak:
    """Returns the buffers at the moment at which the temporary ones use the most bytes. They are counted here, because
    XLA's own list for that moment, in its live ranges, leaves out all-gathers in progress and what loops carry."""
    moment = busiest(ledger.spans)
    temporary = [s.buffer for s in ledger.spans if s.first <= moment <= s.last]
    buffers = sorted([*ledger.fixed, *temporary], key=lambda b: -b.n_bytes)
    return Peak(tuple(buffers), ledger.temp, ledger.temp - sum(b.n_bytes for b in temporary))


def live_at_peak(assignment: str, live_ranges: str, program: str) -> Peak:
    """Calls `find_peak` on what the texts say (see `ledger`)."""
    return find_peak(ledger(assignment, live_ranges, program))


def table(peak: Peak, rows: int = 40) -> str:
    """Returns the largest buffers as text. Buffers of one shape and scope share a line, and the remaining ones are
    summed."""
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


# ---- from values to buffers ----

_Lifetime = tuple[Value, int, int]


def _spans(values: Sequence[Value], times: InstructionSchedule, instructions: Instructions) -> Iterator[BufferSpan]:
    """Yields what lies in each place over time. Values that share a place (a loop's carry, an update of it) count once;
    a new span begins where something is computed into the place."""
    regions: dict[Region, list[_Lifetime]] = {}
    for value, (first, last) in zip(values, times.lifetimes(values), strict=True):
        regions.setdefault(value.region, []).append((value, first, last))
    for (_, _, n_bytes), lived in regions.items():
        computed = {first for v, first, _ in lived if not v.phi}
        for first, last in _merge_intervals([(first, last) for _, first, last in lived]):
            starts = sorted({first, *(c for c in computed if first < c <= last)})
            for start, end in zip(starts, [*(s - 1 for s in starts[1:]), last], strict=True):
                # The instruction that computes a value says more than a loop that carries it. Of several, the latest so
                # far is nearest.
                nearest = sorted(lived, key=lambda s: (s[0].phi, s[1] > start, abs(start - s[1])))
                yield BufferSpan(start, end, _buffer("temp", n_bytes, [v for v, _, _ in nearest], instructions))


def _merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the union of intervals, as disjoint intervals."""
    union: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if union and first <= union[-1][1]:
            union[-1] = union[-1][0], max(last, union[-1][1])
        else:
            union.append((first, last))
    return union


def _buffer(role: Role, n_bytes: int, values: Sequence[Value], instructions: Instructions) -> Buffer:
    """Returns a buffer named after the first of its values whose origin is known."""
    origins = ((v, instructions.origin(v.name)) for v in values)
    value, (scope, source) = next((found for found in origins if found[1][0]), (values[0], ("", "")))
    return Buffer(n_bytes, role, value.shape, value.name, scope, source)
