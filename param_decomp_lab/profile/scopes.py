"""Where the time of traced steps went: the operations of a trace, joined with the scopes of our code by their names."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jax.profiler import ProfileData, ProfileEvent, ProfilePlane

from param_decomp_aot.instructions import Instructions
from param_decomp_aot.scopes import scopes_and_pass

PHASES = (
    *("hold", "clean_pass", "causal_importance", "warm_up_ascents", "losses", "last_ascents"),
    *("components_update", "ci_update"),
)
"""The scopes that a step consists of, in order; whatever is in none of them is small (keys, metrics, copies)."""

INNER = ("faithfulness", "nonlinearity_locality", "error", "draws")
"""Scopes within those, besides the kinds of sites (`up_proj`)."""

UNSCOPED = "(no scope)"
CONTAINERS = frozenset(("while", "conditional", "call"))
"""Their time is that of what they run, which is traced too, maybe on another thread."""


@dataclass(frozen=True, order=True)
class Part:
    """A part of the step. ``way``: forward, recomputed or backward; ``inner``: scopes within the phase."""

    phase: str
    way: str = ""
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Nanoseconds in the operations of a program while it was traced, by part.

    Summed over threads or streams and over the devices of this process: parts that ran at the same time both count.
    ``busy_ns``: how long at least one operation ran on a device, mean over ``devices``. ``unknown_ns``: device time in
    nothing that could be found in the program (kernels replayed from a CUDA graph); not in ``by_part``. ``by_kernel``:
    the same as ``by_part``, by the kernel's name too.
    """

    by_part: dict[Part, int]
    devices: int
    busy_ns: float
    unknown_ns: int = 0
    by_kernel: dict[tuple[str, Part], int] = field(default_factory=dict)


def classify_scope(path: str, kinds: Collection[str]) -> Part:
    """The part that an operation belongs to, by the path of its scopes (`Instructions.origin`).

    ``kinds``: those of the sites. Of paths that XLA has put together with a semicolon the first one counts.
    """
    names, way = scopes_and_pass(path.partition(";")[0])
    known = [name for name in names if name in PHASES or name in INNER or name in kinds]
    phase = next((name for name in known if name in PHASES), UNSCOPED)
    return Part(phase, way, tuple(name for name in known if name not in PHASES))


def read_times(trace: Path, program: str, kinds: Collection[str], devices: int) -> Times:
    """The time that ``trace`` (an .xplane.pb) saw in the operations of ``program`` (the text of a compiled one).

    ``devices``: how many this process has. A GPU's operations are those that ran on it; a CPU's are taken from the
    threads of its executor. Raises ValueError for a text without instructions.
    """
    instructions = Instructions(program)
    module = program.split(maxsplit=2)[1].rstrip(",")
    planes = list(ProfileData.from_file(str(trace)).planes)
    on_devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    parts: dict[str, Part | None] = {}

    def part(name: str) -> Part | None:
        """The part of an operation; None for one that only holds others. Each is looked up once."""
        if name not in parts:
            container = instructions.opcode(name) in CONTAINERS
            parts[name] = None if container else classify_scope(instructions.origin(name)[0], kinds)
        return parts[name]

    by_kernel: Counter[tuple[str, Part]] = Counter()
    busy, unknown = 0.0, 0
    for plane in on_devices or planes:
        spans: list[tuple[float, float]] = []
        for events in _lines(plane):
            known = [event for event in events if event.op is not None and event.module == module]
            unknown += round(sum(event.self_ns for event in events if event.op is None and on_devices))
            for event in known:
                event_part = part(event.op or "")
                if event_part is not None:
                    by_kernel[event.name, event_part] += round(event.self_ns)
                    spans.append((event.start, event.end))
        busy += _union(spans)
    by_part: Counter[Part] = Counter()
    for (_, event_part), ns in by_kernel.items():
        by_part[event_part] += ns
    return Times(dict(by_part), devices, busy / max(1, len(on_devices)), unknown, dict(by_kernel))


@dataclass
class _Event:
    """``op``: the instruction that it executes. ``self_ns``: without the events inside it on the same line."""

    name: str
    start: float
    end: float
    op: str | None
    module: str | None
    self_ns: float


def _lines(plane: ProfilePlane) -> Iterator[list[_Event]]:
    """The events of every thread or stream that may be operations: on a host, those that name one; on a device, all."""
    is_device = plane.name.startswith("/device:")
    for line in plane.lines:
        found = sorted(
            (event for event in map(_event, line.events) if is_device or event.op is not None),
            key=lambda event: (event.start, -event.end),
        )
        _subtract_inner(found)
        yield found


def _event(event: ProfileEvent) -> _Event:
    op = module = None
    for key, value in event.stats:
        if key == "hlo_op":
            op = str(value)
        elif key == "hlo_module":
            module = str(value)
    return _Event(event.name, event.start_ns, event.start_ns + event.duration_ns, op, module, event.duration_ns)


def _subtract_inner(events: Iterable[_Event]) -> None:
    """``self_ns`` of events sorted by their start, those that enclose others first."""
    open_events: list[_Event] = []
    for event in events:
        while open_events and open_events[-1].end <= event.start:
            open_events.pop()
        if open_events and event.end <= open_events[-1].end:
            open_events[-1].self_ns -= event.end - event.start
        open_events.append(event)


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
