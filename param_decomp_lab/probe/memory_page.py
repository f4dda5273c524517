"""Renders ``memory.html``: a step's memory over its schedule, as one self-contained, interactive page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from param_decomp_aot.buffers import Buffer, BufferSpan, Peak
from param_decomp_aot.scopes import from_package, stage
from param_decomp_aot.timeline import REST, Timeline, bands, moments, phases
from param_decomp_lab.probe.timeline_figure import COLORS, GIB, GREY
from param_decomp_lab.ui.templates import templates_beside

N_MOMENTS = 1600
N_SPANS = 4000
N_ROWS = 400
"""The most items that are drawn or listed: instructions, buffers under the pointer, rows of the table at the peak."""

_WIDTH, _HEIGHT = 1000.0, 400.0


def memory_page(
    title: str,
    timeline: Timeline,
    peak: Peak,
    argument_groups: Mapping[str, int],
    summary: Mapping[str, str],
    *,
    pool: int | None = None,
    capacity: int | None = None,
) -> str:
    """Returns the page as a string: a few hundred kB, at most 3 MB.

    ``argument_groups``: bytes by group, see `timeline.py:arguments_by_group`. ``summary``: names and values at the top
    of the page. ``pool``, ``capacity``: bytes that the program may use, and that the card has.
    """
    at = moments(timeline, N_MOMENTS)
    lines = {name: n for name, n in (("pool", pool), ("card", capacity)) if n is not None}
    near = {name: n for name, n in lines.items() if n < 2 * timeline.planned}
    top = 1.06 * max([timeline.planned, *near.values(), 1])
    drawn = _drawn(timeline, at, top)
    environment = templates_beside(__file__)
    environment.filters.update(gib=lambda n: f"{n / GIB:,.3f}", short=from_package, stage=stage)
    rows, n_left, left = _rows(peak)
    return environment.get_template("memory_page.html").render(
        title=title,
        summary=summary,
        timeline=timeline,
        alive=timeline.base + int(timeline.live.max(initial=0)),
        bands=drawn,
        lines=[(name, n, 100 * (1 - n / top)) for name, n in near.items()],
        far=[(name, n) for name, n in lines.items() if name not in near],
        ticks=[(y, 100 * (1 - y * GIB / top)) for y in _ticks(top / GIB)],
        phases=_phases(timeline),
        view=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        data=_data(timeline, at, top),
        rows=rows,
        n_left=n_left,
        left=left,
        unused=peak.unused,
        groups=argument_groups,
        most=max(argument_groups.values(), default=1),
    )


# ---- the picture ----


@dataclass(frozen=True)
class _Band:
    """A band of the picture. ``at_peak``: bytes. ``path``: the SVG path of its area."""

    name: str
    color: str
    at_peak: int
    path: str


def _drawn(timeline: Timeline, at: Int[np.ndarray, " moments"], top: float) -> list[_Band]:
    """Returns the bands from below, starting with that of the arguments."""
    x = at / max(1, timeline.live.size - 1) * _WIDTH
    below = np.zeros(len(at))
    found = {"arguments, results, constants": np.full(timeline.live.size, timeline.base), **bands(timeline)}
    drawn = []
    for i, (name, band) in enumerate(found.items()):
        above = below + band[at]
        color = "var(--base)" if not i else GREY if name == REST else COLORS[(i - 1) % len(COLORS)]
        n = int(band[timeline.peak]) if band.size else timeline.base
        drawn.append(_Band(name, color, n, _area(x, _HEIGHT * (1 - below / top), _HEIGHT * (1 - above / top))))
        below = above
    return drawn


def _area(x: Any, below: Any, above: Any) -> str:
    """Returns the path along the upper edge and back along the lower, without points within horizontal segments."""

    def edge(y: Any) -> list[str]:
        keep = [i for i in range(len(y)) if not 0 < i < len(y) - 1 or not y[i - 1] == y[i] == y[i + 1]]
        return [f"{x[i]:.1f},{y[i]:.1f}" for i in keep]

    return f"M{' '.join([*edge(above), *reversed(edge(below))])}Z" if len(x) else ""


def _ticks(top: float) -> list[float]:
    """Returns about five round numbers of GiB from 0."""
    size = 10.0 ** np.floor(np.log10(top / 4)) if top > 0 else 1.0
    step = next(size * m for m in (1, 2, 5, 10) if top / (size * m) <= 6)
    return [float(y) for y in np.arange(0, top, step)]


def _phases(timeline: Timeline) -> list[dict[str, Any]]:
    n = max(1, timeline.live.size)
    return [
        {"name": name, "left": 100 * first / n, "width": 100 * (last + 1 - first) / n}
        for first, last, name in phases(timeline)
    ]


# ---- what the pointer finds ----


def _data(timeline: Timeline, at: Int[np.ndarray, " moments"], top: float) -> dict[str, Any]:
    """Returns the moments and the largest buffers, with each text stored once. Other buffers are what remains of the
    live bytes.
    """
    words: dict[str, int] = {}

    def number(word: str) -> int:
        return words.setdefault(word, len(words))

    # A long lifetime counts like a large size, because the pointer hovers over an area.
    def weight(span: BufferSpan) -> int:
        return span.buffer.n_bytes * (span.last - span.first + 100)

    chosen = sorted(sorted(timeline.spans, key=weight)[-N_SPANS:], key=lambda s: -s.buffer.n_bytes)
    spans = [
        [
            s.first,
            s.last,
            s.buffer.n_bytes,
            *(
                number(w)
                for w in (s.buffer.shape, s.buffer.scope or s.buffer.instruction, from_package(s.buffer.source))
            ),
        ]
        for s in chosen
    ]
    return {
        "n": max(1, timeline.live.size - 1),
        "top": top,
        "base": timeline.base,
        "at": at.tolist(),
        "live": timeline.live[at].tolist(),
        "doing": [number(timeline.schedule[i]) for i in at],
        "peak": timeline.peak,
        "spans": spans,
        "words": list(words),
    }


# ---- the table at the peak ----


@dataclass(frozen=True)
class _Row:
    """A group of like buffers; ``n_bytes`` in total."""

    n_bytes: int
    count: int
    first: Buffer


def _rows(peak: Peak) -> tuple[Sequence[_Row], int, int]:
    """Returns the largest groups of like buffers, and the number and bytes of the remaining buffers."""
    alike: dict[tuple[str, ...], list[Buffer]] = {}
    for b in peak.buffers:
        alike.setdefault((b.role, b.shape, b.scope, b.source), []).append(b)
    rows = [_Row(sum(b.n_bytes for b in group), len(group), group[0]) for group in alike.values()]
    rows.sort(key=lambda row: -row.n_bytes)
    left = rows[N_ROWS:]
    return rows[:N_ROWS], sum(row.count for row in left), sum(row.n_bytes for row in left)
