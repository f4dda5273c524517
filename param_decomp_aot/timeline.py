"""The memory of a compiled program over time: what is alive at each instruction of its schedule.

The schedule has the body of a loop once, so it shows the stages of a program, not its duration.
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
"""The name of the band for everything that is in no other."""


@dataclass(frozen=True)
class Timeline:
    """Bytes on one device at each of ``n`` instructions, in the order in which they run.

    ``live``: in temporary buffers. ``base``: in arguments, results and constants, all the time. ``temp``: reserved for
    temporaries, including the gaps between buffers. ``spans``: largest first. ``schedule``: scopes of the instructions.
    """

    live: Int[np.ndarray, " n"]
    base: int
    temp: int
    spans: tuple[BufferSpan, ...]
    schedule: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The number of the first instruction at which the most bytes are alive."""
        return int(self.live.argmax()) if self.live.size else 0

    @property
    def planned(self) -> int:
        """The bytes that XLA reserves (see `BufferTimeline.planned`)."""
        return self.base + self.temp

    def at(self, moment: int) -> tuple[BufferSpan, ...]:
        """Returns the temporary buffers at an instruction, largest first."""
        return tuple(s for s in self.spans if s.first <= moment <= s.last)


def timeline(ledger: BufferTimeline) -> Timeline:
    """Returns the timeline of what `buffers.py:ledger` reads from a dump."""
    n = max([len(ledger.schedule), *(s.last + 1 for s in ledger.spans)])
    spans = tuple(sorted(ledger.spans, key=lambda s: (-s.buffer.n_bytes, s.first)))
    schedule = ledger.schedule + ("",) * (n - len(ledger.schedule))
    return Timeline(_live(spans, n), ledger.base, ledger.temp, spans, schedule)


def bands(
    timeline: Timeline, n_bands: int = 10, group: Callable[[Buffer], str] = lambda buffer: stage(buffer.scope)
) -> Mapping[str, Int[np.ndarray, " n"]]:
    """Returns bytes at each instruction, by group of temporary buffers. They add up to ``timeline.live``.

    The bands are the ``n_bands`` groups that hold the most at some moment, where moments count more the closer they are
    to the peak. They are ordered by their size at the peak. The last band is `REST`.
    """
    groups: dict[str, list[BufferSpan]] = {}
    for span in timeline.spans:
        groups.setdefault(group(span.buffer) or REST, []).append(span)
    curves = {name: _live(tuple(spans), timeline.live.size) for name, spans in groups.items() if name != REST}
    # Groups that are large only while little is alive matter less, so bytes are weighted by the square of how full
    # memory is.
    weight = (timeline.live / max(1, timeline.live.max(initial=0))) ** 2
    chosen = sorted(curves, key=lambda name: -float((curves[name] * weight).max(initial=0.0)))[:n_bands]
    ordered = sorted(chosen, key=lambda name: -int(curves[name][timeline.peak]))
    largest = {name: curves[name] for name in ordered}
    rest = timeline.live - sum(largest.values(), start=np.zeros_like(timeline.live))
    return {**largest, REST: rest} if rest.any() else largest


def moments(timeline: Timeline, n_moments: int) -> Int[np.ndarray, " moments"]:
    """Returns at most ``n_moments`` instructions that stand for all, in order. From each stretch it takes the one at
    which the most is alive, so that maxima are kept."""
    n = timeline.live.size
    edges = np.linspace(0, n, min(n, n_moments) + 1).astype(int)
    return np.array([a + timeline.live[a:b].argmax() for a, b in pairwise(edges)], dtype=int)


def phases(timeline: Timeline, n_windows: int = 60) -> tuple[tuple[int, int, str], ...]:
    """Returns what the program does, in words: first and last instruction and `stage` of each stretch of the schedule.

    The schedule interleaves independent instructions, so it is divided into ``n_windows`` windows, each named after
    most of its instructions. Recomputation is part of the backward pass. Stretches of less than three windows are named
    by their pass alone.
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
    """Joins neighbouring stretches of one name; a stretch without a name joins the one before it."""
    found: list[tuple[int, int, str]] = []
    for first, last, name in stretches:
        if found and name in ("", found[-1][2]):
            found[-1] = found[-1][0], last, found[-1][2]
        else:
            found.append((first, last, name))
    return tuple(found)


def arguments_by_group(ledger: BufferTimeline) -> Mapping[str, int]:
    """Returns the bytes on the device of what exists from beginning to end, largest first: arguments by the first part
    of their names, results that do not reuse an argument's memory, and constants."""
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
