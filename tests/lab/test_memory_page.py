"""A compiled step's memory over its schedule, as a figure and as a page."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from param_decomp_aot.buffers import Buffer, BufferSpan, BufferTimeline, find_peak, ledger
from param_decomp_aot.timeline import Timeline, arguments_by_group, bands, timeline
from param_decomp_lab.metrics.figures import save_figure
from param_decomp_lab.probe.memory_page import N_MOMENTS, N_ROWS, N_SPANS, memory_page
from param_decomp_lab.probe.timeline_figure import timeline_figure

DUMP = Path(__file__).parents[1] / "core" / "dump"
TEXTS = [(DUMP / f"{name}.txt").read_text() for name in ("buffer-assignment", "live-range", "program")]
MIB = 2**20


def page_of(found: BufferTimeline, title: str = "a step", **lines: int) -> str:
    return memory_page(title, timeline(found), find_peak(found), arguments_by_group(found), {"card": "b200"}, **lines)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def many(n: int) -> BufferTimeline:
    """``n`` buffers of different sizes and scopes, all different."""
    rng = np.random.default_rng(0)
    spans = tuple(
        BufferSpan(i, i + int(rng.integers(1, 500)), Buffer(int(rng.integers(1, MIB)), "temp", f"f32[{i}]", f"x.{i}",
        f"jit(step)/layer_{i % 50}/part_{i % 7}/op_{i}", f"/somewhere/site-packages/optax/file.py:{i}"))
        for i in range(n)
    )  # fmt: skip
    return BufferTimeline((), spans, 2**40, tuple(f"jit(step)/phase_{i // 1000}/op_{i}" for i in range(n)))


# ---- the page ----


def test_the_page_needs_nothing_from_outside() -> None:
    found = ledger(*TEXTS)
    page = memory_page("a step", timeline(found), find_peak(found), arguments_by_group(found), {"GPUs": "8"})
    assert not re.search(r"https?://|src=|href=|url\(|@import", page)
    assert "default-src 'none'" in page
    for text in ("a step", "<dd>8</dd>", "layers/layer, forward", "state[&#39;ws&#39;]", "experiment.py:12"):
        assert text in page


def test_what_the_pointer_finds_adds_up() -> None:
    found = ledger(*TEXTS)
    data, line = data_of(page_of(found)), timeline(found)
    assert data["at"] == list(range(83))
    assert data["live"] == line.live.tolist()
    for at, live in zip(data["at"], data["live"], strict=True):
        assert sum(n for first, last, n, *_ in data["spans"] if first <= at <= last) == live
    first, last, n, shape, scope, source = data["spans"][0]
    assert (n, data["words"][shape]) == (2**25, "s8[33554432]")
    assert (data["words"][source], first, last) == ("experiment.py:12", 29, 29)
    assert data["words"][scope].endswith("layer/dot_general")


def test_the_areas_are_the_bands() -> None:
    """Upper edge at the peak: what is below it, of the frame's height."""
    found = ledger(*TEXTS)
    page, line = page_of(found), timeline(found)
    areas = re.findall(r'<path d="M([^"]*)Z"', page)
    names = ["arguments, results, constants", *bands(line)]
    assert re.findall(r"<title>([^<]*)</title></path>", page) == names
    x = f"{1000 * line.peak / 82:.1f}"
    top = min(float(p.split(",")[1]) for p in areas[-1].split() if p.startswith(f"{x},"))
    height = 400 * (1 - (line.base + line.live.max()) / (1.06 * line.planned))
    assert top == pytest.approx(height, abs=0.06)


def test_a_large_program_stays_small() -> None:
    found = many(20_000)
    page = page_of(found)
    data, line = data_of(page), timeline(found)
    assert len(page) < 3 * MIB
    assert len(data["at"]) == N_MOMENTS
    assert len(data["spans"]) == N_SPANS
    assert max(data["live"]) == line.live.max()
    assert data["at"][int(np.argmax(data["live"]))] == data["peak"] == line.peak
    assert page.count("<tr>") < N_ROWS + 100
    assert data["words"][data["spans"][0][5]].startswith("optax/file.py:")


def test_the_rest_of_the_table_is_summed() -> None:
    spans = tuple(
        BufferSpan(0, 0, Buffer(1000 - i, "temp", f"u8[{1000 - i}]", f"x{i}", "", "")) for i in range(N_ROWS + 3)
    )
    page = page_of(BufferTimeline((), spans, 2**20, ("",)))
    assert re.search(r'<tfoot><tr><td class="n">0\.000</td><td class="n">3</td>', page)


def test_lines_are_drawn_where_they_are_near() -> None:
    found = ledger(*TEXTS)
    assert "far above: pool 100.0 GiB, card 180.0 GiB" in page_of(found, pool=100 * 2**30, capacity=180 * 2**30)
    near = page_of(found, pool=44 * MIB, capacity=48 * MIB)
    assert 'class="limit pool"' in near
    assert 'class="limit card"' in near
    assert "far above" not in near


def test_words_are_escaped() -> None:
    bad = "</script><img src=x>"
    found = BufferTimeline(
        (), (BufferSpan(0, 1, Buffer(8, "temp", bad, "x", f"jit(f)/{bad}/y", bad)),), 8, (f"jit(f)/{bad}/y",)
    )
    assert bad not in page_of(found, title=bad)


def test_nothing_in_it() -> None:
    page = page_of(BufferTimeline((), (), 0, ()))
    assert data_of(page)["at"] == []


# ---- the figure ----


def drawn(line: Timeline, path: Path, **lines: int) -> tuple[int, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(timeline_figure(line, "a step", **lines), path)
    pixels = np.asarray(Image.open(path))
    return pixels.shape


def test_the_figure(tmp_path: Path) -> None:
    line = timeline(ledger(*TEXTS))
    assert drawn(line, tmp_path / "near.png", pool=44 * MIB, capacity=48 * MIB) == (810, 1650, 4)
    drawn(line, tmp_path / "far.png", pool=2**36, capacity=2**37)
    drawn(timeline(many(5000)), tmp_path / "many.png")
    drawn(timeline(BufferTimeline((), (), 0, ())), tmp_path / "empty.png")


def test_what_the_figure_says() -> None:
    line = timeline(ledger(*TEXTS))
    figure = timeline_figure(line, pool=2**36)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    words = [text.get_text() for text in legend.get_texts()]
    assert words[-2:] == ["0.03  layers/layer, forward", "0.00  arguments, results, constants"]
    said = [text.get_text() for text in figure.axes[0].texts]
    assert "above this axis: pool 64.0 GiB" in said
    assert "peak 0.04 GiB" in said
