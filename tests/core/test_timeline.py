"""Memory over a program's schedule, from the texts of `dump/` (see `test_aot.py`)."""

from pathlib import Path

import numpy as np
import pytest

from param_decomp_aot.buffers import Buffer, BufferSpan, BufferTimeline, busiest, find_peak, ledger
from param_decomp_aot.scopes import stage
from param_decomp_aot.timeline import REST, arguments_by_group, bands, moments, phases, timeline

DUMP = Path(__file__).parent / "dump"
TEXTS = [(DUMP / f"{name}.txt").read_text() for name in ("buffer-assignment", "live-range", "program")]
WEIGHTS, BATCH = 3 * 1024 * 128 * 4, 128 * 1024 * 2


def span(first: int, last: int, n_bytes: int, scope: str = "") -> BufferSpan:
    return BufferSpan(first, last, Buffer(n_bytes, "temp", f"u8[{n_bytes}]", "x", scope, ""))


def test_the_ledger_is_xlas_plan() -> None:
    """Arguments + results + constants + temporaries; the one result lies in the donated argument's place."""
    found = ledger(*TEXTS)
    constants = sum(b.n_bytes for b in found.fixed if b.role == "constant")
    assert found.base == WEIGHTS + BATCH + constants
    assert found.planned == 41159224 + found.base
    assert 0 < constants < 100


def test_no_place_is_taken_twice() -> None:
    """At every instruction the spans fit into what is set aside."""
    line = timeline(ledger(*TEXTS))
    assert line.live.max() <= line.temp == 41159224
    assert line.live.size == len(line.schedule) == 82 + 1  # results outlive the last instruction
    assert sum(s.buffer.n_bytes * (s.last - s.first + 1) for s in line.spans) == line.live.sum()


def test_the_peak_is_the_one_of_the_list_of_buffers() -> None:
    found = ledger(*TEXTS)
    line, peak = timeline(found), find_peak(found)
    assert line.peak == busiest(found.spans)
    assert line.live[line.peak] == peak.temp - peak.unused
    assert {s.buffer for s in line.at(line.peak)} == {b for b in peak.buffers if b.role == "temp"}


def test_a_place_has_a_span_for_each_thing_that_is_computed_into_it() -> None:
    """The gradient's stack: zeros, then what the backward loop's body makes of them in the same place."""
    line = timeline(ledger(*TEXTS))
    zeros = next(s for s in line.spans if s.buffer.instruction == "loop_broadcast_fusion.2")
    updated = next(s for s in line.spans if s.buffer.instruction == "loop_dynamic_update_slice_fusion.4")
    assert zeros.last + 1 == updated.first
    assert zeros.buffer.n_bytes == updated.buffer.n_bytes == WEIGHTS
    assert line.schedule[updated.first] == updated.buffer.scope


def test_bands_add_up() -> None:
    line = timeline(ledger(*TEXTS))
    for n in (1, 3, 100):
        found = bands(line, n)
        assert np.array_equal(sum(found.values(), start=np.zeros_like(line.live)), line.live)
        assert len(found) <= n + 1
    assert list(bands(line, 2))[:2] == ["layers/layer, forward", "layers/layer, backward"]
    assert list(bands(line, 3, lambda b: "all")) == ["all"]


def test_bands_by_weight() -> None:
    """The largest at the peak comes first; what is large only elsewhere is left to the rest."""
    spans = (span(0, 1, 100, "jit(f)/a/x"), span(1, 1, 200, "jit(f)/b/x"), span(3, 3, 30, "jit(f)/c/x"), span(3, 4, 1))
    line = timeline(BufferTimeline((), spans, 400, ()))
    assert line.live.tolist() == [100, 300, 0, 31, 1]
    assert {name: band.tolist() for name, band in bands(line, 2).items()} == {
        "b": [0, 200, 0, 0, 0],
        "a": [100, 100, 0, 0, 0],
        REST: [0, 0, 0, 31, 1],
    }


def test_moments_keep_the_maxima() -> None:
    line = timeline(BufferTimeline((), tuple(span(i, i, 1 + (i * 7919) % 1009) for i in range(5000)), 2000, ()))
    chosen = moments(line, 100)
    assert len(chosen) == 100
    assert (np.diff(chosen) > 0).all()
    assert line.live[chosen].max() == line.live.max()
    for stretch, moment in zip(np.array_split(line.live, 100), chosen, strict=True):
        assert stretch.max() == line.live[moment]
    assert moments(line, 9000).tolist() == list(range(5000))


def test_phases() -> None:
    """By windows; short ones by their pass, what is recomputed with the backward, what has no name with what is before
    it."""
    parts = [(40, "jit(f)/clean_pass/x"), (4, ""), (6, "jit(f)/jvp(up)/x"), (20, "jit(f)/jvp(error)/x"),
             (20, "jit(f)/transpose(jvp())/rematted_computation/x"), (10, "jit(f)/transpose(jvp())/x")]  # fmt: skip
    schedule = tuple(scope for n, scope in parts for _ in range(n))
    line = timeline(BufferTimeline((), (), 0, schedule))
    assert phases(line, 50) == (
        (0, 43, "clean_pass"),
        (44, 49, "up, forward"),
        (50, 69, "error, forward"),
        (70, 99, "backward"),
    )
    assert phases(line, 25)[1] == (44, 51, "forward")
    assert phases(timeline(BufferTimeline((), (), 0, ()))) == ()


def test_a_program_without_temporaries() -> None:
    line = timeline(BufferTimeline((), (), 0, ()))
    assert (line.peak, line.planned, moments(line, 10).tolist(), dict(bands(line))) == (0, 0, [], {})


def test_arguments_by_group() -> None:
    groups = arguments_by_group(ledger(*TEXTS))
    assert list(groups) == ["state", "batch", "constants"]
    assert (groups["state"], groups["batch"]) == (WEIGHTS, BATCH)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("jit(step)/jvp(layers)/while/body/closed_call/layer/dot_general", "layers/layer, forward"),
        (
            "jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/up_proj/mul",
            "layers/up_proj, recomputed",
        ),
        ("jit(step)/transpose(jvp(jvp()))/checkpoint/up_proj/dot_general", "up_proj, backward"),
        ("jit(step)/jvp()/jit(_threefry_fold_in)/step/threefry2x32", "forward"),
        ("jit(step)/jvp()/mul", "forward"),
        ("jit(step)/sub", "step"),
        ("jvp()", "forward"),
        ("checkpoint", ""),
        ("state.components['layers.18'].V", "state.components"),
        ("state.ci.blocks.q", "state.ci"),
        ("batch", "batch"),
        ("", ""),
    ],
)
def test_stages(scope: str, expected: str) -> None:
    assert stage(scope) == expected
