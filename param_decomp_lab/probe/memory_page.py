"""``memory.html``: a step's memory over its schedule, as one page that stands by itself and answers to the pointer."""

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
"""What is drawn and listed at most: instructions, buffers that the pointer finds, rows of the table at the peak."""

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
    """The page as a string: a few hundred kB, at most 3 MB.

    ``argument_groups``: bytes by group, see `timeline.py:arguments_by_group`. ``summary``: names and values that head
    the page. ``pool``, ``capacity``: bytes that the program may use, and that the card has.
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
    """``at_peak``: bytes. ``path``: of the area, in SVG's words."""

    name: str
    color: str
    at_peak: int
    path: str


def _drawn(timeline: Timeline, at: Int[np.ndarray, " moments"], top: float) -> list[_Band]:
    """Bands from below, that of the arguments first."""
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
    """Along the upper edge, and back along the lower, without the points that lie on a level stretch."""

    def edge(y: Any) -> list[str]:
        keep = [i for i in range(len(y)) if not 0 < i < len(y) - 1 or not y[i - 1] == y[i] == y[i + 1]]
        return [f"{x[i]:.1f},{y[i]:.1f}" for i in keep]

    return f"M{' '.join([*edge(above), *reversed(edge(below))])}Z" if len(x) else ""


def _ticks(top: float) -> list[float]:
    """Round numbers of GiB from 0, some five of them."""
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
    """Moments and the largest buffers; words once each. What is alive beside these buffers is the rest."""
    words: dict[str, int] = {}

    def number(word: str) -> int:
        return words.setdefault(word, len(words))

    # A long life counts like a large size: what is hovered over is an area.
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
    """Alike buffers; ``n_bytes`` of all of them."""

    n_bytes: int
    count: int
    first: Buffer


def _rows(peak: Peak) -> tuple[Sequence[_Row], int, int]:
    """The largest groups of alike buffers; how many buffers are left, and their bytes."""
    alike: dict[tuple[str, ...], list[Buffer]] = {}
    for b in peak.buffers:
        alike.setdefault((b.role, b.shape, b.scope, b.source), []).append(b)
    rows = [_Row(sum(b.n_bytes for b in group), len(group), group[0]) for group in alike.values()]
    rows.sort(key=lambda row: -row.n_bytes)
    left = rows[N_ROWS:]
    return rows[:N_ROWS], sum(row.count for row in left), sum(row.n_bytes for row in left)
