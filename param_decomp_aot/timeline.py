"""The memory of a compiled program over time: what is alive at each instruction of its schedule.

The schedule has the body of a loop once: along it lie the kinds of moments of a program, not its duration.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from param_decomp_aot.buffers import Buffer, BufferSpan, BufferTimeline
from param_decomp_aot.scopes import stage

REST = "everything else"
"""Name of the band of what is in no other."""


@dataclass(frozen=True)
class Timeline:
    """Bytes on one device at each of ``n`` instructions, in the order in which they run.

    ``live``: in temporary buffers. ``base``: in arguments, results and constants, all the time. ``temp``: set aside for
    temporaries, buffers and the gaps between them. ``spans``: largest first. ``schedule``: scopes of the instructions.
    """

    live: Int[np.ndarray, " n"]
    base: int
    temp: int
    spans: tuple[BufferSpan, ...]
    schedule: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Number of the first instruction at which most is alive."""
        return int(self.live.argmax()) if self.live.size else 0

    @property
    def planned(self) -> int:
        """Bytes that XLA sets aside, see `BufferTimeline.planned`."""
        return self.base + self.temp

    def at(self, moment: int) -> tuple[BufferSpan, ...]:
        """The temporary buffers at an instruction, largest first."""
        return tuple(s for s in self.spans if s.first <= moment <= s.last)


def timeline(ledger: BufferTimeline) -> Timeline:
    """From what `buffers.py:ledger` reads in the texts of a dump."""
    n = max([len(ledger.schedule), *(s.last + 1 for s in ledger.spans)])
    spans = tuple(sorted(ledger.spans, key=lambda s: (-s.buffer.n_bytes, s.first)))
    schedule = ledger.schedule + ("",) * (n - len(ledger.schedule))
    return Timeline(_live(spans, n), ledger.base, ledger.temp, spans, schedule)


def bands(
    timeline: Timeline, n_bands: int = 10, group: Callable[[Buffer], str] = lambda buffer: stage(buffer.scope)
) -> Mapping[str, Int[np.ndarray, " n"]]:
    """The temporaries by group of their buffers: bytes at each instruction. They add up to ``timeline.live``.

    The ``n_bands`` groups that hold most at some moment where nearly the most is alive, or most at all, largest at the
    peak first; the last band is `REST`.
    """
    groups: dict[str, list[BufferSpan]] = {}
    for span in timeline.spans:
        groups.setdefault(group(span.buffer) or REST, []).append(span)
    curves = {name: _live(tuple(spans), timeline.live.size) for name, spans in groups.items() if name != REST}
    # What is large only where little is alive matters less: a byte weighs as the moment is near the peak.
    weight = (timeline.live / max(1, timeline.live.max(initial=0))) ** 2
    chosen = sorted(curves, key=lambda name: -float((curves[name] * weight).max(initial=0.0)))[:n_bands]
    ordered = sorted(chosen, key=lambda name: -int(curves[name][timeline.peak]))
    largest = {name: curves[name] for name in ordered}
    rest = timeline.live - sum(largest.values(), start=np.zeros_like(timeline.live))
    return {**largest, REST: rest} if rest.any() else largest


def moments(timeline: Timeline, n_moments: int) -> Int[np.ndarray, " moments"]:
    """At most ``n_moments`` instructions that stand for all, in order: of each stretch the one where most is alive, so
    that no maximum is lost."""
    n = timeline.live.size
    edges = np.linspace(0, n, min(n, n_moments) + 1).astype(int)
    return np.array([a + timeline.live[a:b].argmax() for a, b in pairwise(edges)], dtype=int)


def phases(timeline: Timeline, n_windows: int = 60) -> tuple[tuple[int, int, str], ...]:
    """What the program is at, in words: first and last instruction and `stage` of each stretch of the schedule.

    The schedule mixes what does not depend on each other, so it is looked at in ``n_windows`` windows, each named by
    most of its instructions. What is recomputed is part of the backward pass, and of what takes less than three windows
    only the pass is said.
    """
    names = [stage(scope, 1).replace("recomputed", "backward") for scope in timeline.schedule]
    edges = np.linspace(0, len(names), min(len(names), n_windows) + 1).astype(int)
    windows: list[tuple[int, int, str]] = []
    for first, after in pairwise(int(e) for e in edges):
        named = Counter(name for name in names[first:after] if name)
        windows.append((first, after - 1, named.most_common(1)[0][0] if named else ""))
    found = _joined(windows)
    short = 3 * len(names) / n_windows - 1
    return _joined([(a, b, name.split(", ")[-1] if b + 1 - a < short else name) for a, b, name in found])


def _joined(stretches: Sequence[tuple[int, int, str]]) -> tuple[tuple[int, int, str], ...]:
    """Neighbours of one name as one; what has none belongs to what comes before."""
    found: list[tuple[int, int, str]] = []
    for first, last, name in stretches:
        if found and name in ("", found[-1][2]):
            found[-1] = found[-1][0], last, found[-1][2]
        else:
            found.append((first, last, name))
    return tuple(found)


def arguments_by_group(ledger: BufferTimeline) -> Mapping[str, int]:
    """Bytes on the device of what is there from beginning to end: arguments by the first part of their names, results
    that have no argument's place, constants. Largest first."""
    sums: Counter[str] = Counter()
    for buffer in ledger.fixed:
        if buffer.role != "host":
            sums[stage(buffer.scope) if buffer.role == "argument" else f"{buffer.role}s"] += buffer.n_bytes
    return dict(sums.most_common())


def _live(spans: tuple[BufferSpan, ...], n: int) -> Int[np.ndarray, " n"]:
    change = np.zeros(n + 1, np.int64)
    for attribute, sign, after in (("first", 1, 0), ("last", -1, 1)):
        times = [getattr(s, attribute) + after for s in spans]
        np.add.at(change, times, [sign * s.buffer.n_bytes for s in spans])
    return change.cumsum()[:-1]
