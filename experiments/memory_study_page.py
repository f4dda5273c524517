"""The page of the memory study: tables of figures that `memory_study.py` and `memory_habits.py` have kept.

Needs no JAX and compiles nothing. What is not there yet is said to be missing. Paragraphs written by people are in
`memory_study_words.py`.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from experiments.memory_study_figure import save_figure
from experiments.memory_study_numbers import digits, gib, or_blank, ratio, signed, size_of, table
from experiments.memory_study_words import NOTES
from param_decomp_aot import compile

Found = Mapping[str, Any]
MISSING = "not compiled yet"
PUBLISHED_GIB: Mapping[str, float] = {
    "27 sites, seq 2048, 64 GPUs, batch 64": 179.0,
    "27 sites, seq 2048, 64 GPUs, batch 128": 210.2,
    "27 sites, seq 512, 64 GPUs, batch 64": 144.8,
    "27 sites, seq 512, 64 GPUs, batch 256": 150.3,
    "layer 18, 8 GPUs, batch 32": 44.5,
    "layer 18, 8 GPUs, batch 64": 79.0,
    "layer 18, 8 GPUs, batch 128": 125.8,
    "layer 18, 8 GPUs, batch 32, remat off": 56.6,
    "layer 18, 8 GPUs, batch 64, remat off": 102.6,
}
"""By the row's name; of layer 18 temporaries, else the planned peak."""
DID_NOT_FIT = ("27 sites, seq 2048, 64 GPUs, batch 128",)


def _l18(batch: int, remat: bool = True) -> str:
    return f"layer 18, 8 GPUs, batch {batch}" + ("" if remat else ", remat off")


def _l18_to_26(seq: int, batch: int) -> str:
    return f"27 sites, seq {seq}, 64 GPUs, batch {batch}"


TRENDS: Mapping[str, tuple[str, str, int]] = {
    "27 sites, seq 2048: batch 64 to 128": (_l18_to_26(2048, 64), _l18_to_26(2048, 128), 1),
    "27 sites, seq 512: batch 64 to 256, each doubling": (_l18_to_26(512, 64), _l18_to_26(512, 256), 2),
    "27 sites, batch 64: seq 512 to 2048": (_l18_to_26(512, 64), _l18_to_26(2048, 64), 1),
    "layer 18: batch 32 to 64": (_l18(32), _l18(64), 1),
    "layer 18: batch 64 to 128": (_l18(64), _l18(128), 1),
    "layer 18, remat off: batch 32 to 64": (_l18(32, False), _l18(64, False), 1),
    "layer 18, batch 32: remat on to off": (_l18(32), _l18(32, False), 1),
    "layer 18, batch 64: remat on to off": (_l18(64), _l18(64, False), 1),
}
"""From one row to another; the last number is of doublings between them, the growth is of one."""

LADDER: Mapping[str, float] = {
    "fp32, scan, no remat": 20.6,
    "bf16, scan, no remat": 14.6,
    "bf16, unrolled, no remat": 8.8,
    "bf16, scan, remat MLP + Attn": 3.9,
    "bf16, scan, remat Block": 3.8,
    "bf16, scan, remat MLP + Attn, one batch of 64": 6.2,
    "bf16, scan, remat MLP + Attn, one batch of 256": 15.0,
}
"""Published peaks in GB, by variant; records of ours are called ``ladder: <variant>``."""


class Row(Protocol):
    """Of `memory_study.py`."""

    @property
    def name(self) -> str: ...
    @property
    def sets(self) -> tuple[str, ...]: ...


def write_page(page: Path, found: Found, levers: Sequence[Row], published: Sequence[Row]) -> None:
    """``found``: records by ``<row name>, real|unlimited`` and ``habit: <name>``; may be incomplete. Writes the figure
    too, into ``images/`` beside the page, if there is a lever to draw."""
    image = page.parent / "images" / f"{page.stem}.png"
    drawn = lever_differences(found, levers)
    if drawn:
        image.parent.mkdir(parents=True, exist_ok=True)
        save_figure(image, drawn)
    sections = [
        "# What saves device memory, and what it costs",
        INTRODUCTION.format(versions="; ".join(_versions_of(found)), machine=machine()),
        "## Levers",
        LEVERS_SAID,
        levers_table(found, levers),
        f"![Peak against the reference's, by lever](images/{image.name})" if drawn else "",
        "How each is switched on the command line, over the reference's configuration:",
        switches_table(levers),
        NOTES["levers"],
        "## Habits",
        HABITS_SAID,
        habits_table(found),
        NOTES["habits"],
        "## Published steps",
        PUBLISHED_SAID,
        published_table(found, published),
        "GiB by which one grows where another thing is changed (and its factor):",
        trends_table(found),
        NOTES["published"],
        "## The classic ladder",
        LADDER_SAID,
        ladder_table(found),
        NOTES["ladder"],
    ]
    page.write_text("\n\n".join(section for section in sections if section) + "\n")


INTRODUCTION = """\
Written by `python -m experiments.memory_study` and `python -m experiments.memory_habits`. Every figure is XLA's plan
for a B200 (178.4 GiB), compiled on a machine without a GPU: none was involved, and nothing was run. What a plan leaves
out is said in [memory.md](memory.md) and by `pd probe`. Figures are of one GPU but for FLOPs, which are matrix products
of all of them, recomputation included. Peak = temporaries + arguments + results − what is written in place.

{versions}. Compile times: {machine}, several compiles at a time."""

LEVERS_SAID = """\
The training step of `configs/llama8b_l18-26_9layer_chunkwise_seq2048.yaml`: Llama-3.1-8B, 27 MLP sites of layers 18 to
26, C 49,152, sequences of 2048, one for each of 64 GPUs, preset `lean`. In every other row one thing is different. GiB
for a card without limit: on the card as it is, XLA works against its end, and figures near it mean little. Δ is the
peak less the reference's; FLOPs are over the reference's. Then GB that one GPU moves in a step: read and written in its
memory, sent within the node, sent to other nodes (a ? says that not all of the program could be read). Rows of batch
128 are held against the reference at that batch."""

HABITS_SAID = """\
Small programs with one line and without, of the same result (a test runs both); they are in
`experiments/memory_habits_programs.py`. Most are 16 layers of Llama-3.1-8B's widths, scanned and differentiated, on one
node of 8 GPUs. Peaks in GiB; the last three columns are with over without."""

PUBLISHED_SAID = """\
Steps of the same decompositions as others have published them, beside this step with a policy like theirs (preset
`published`; remat off: everything kept). It is another program, so what can agree are sizes and how they grow, not
digits. Rows of layer 18 are temporaries alone, as published; the others peaks. GiB of one B200; a figure is called
limit-bound where it is another for a card without limit."""

LADDER_SAID = """\
One step of pretraining a GPT of 155,877,376 parameters (12 layers, hidden 1024, seq 512, batch 64 in 4 micro-batches)
on one A5000 with 24 GB. GB are 10⁹ bytes; whether the published ones are is not known (GiB would be 7 % more)."""


# ---- tables ----


def levers_table(found: Found, levers: Sequence[Row]) -> str:
    def cells(row: Row) -> list[str]:
        own, reference = _record(found, row.name), _record(found, reference_of(row, levers))
        if own is None:
            return [row.name, MISSING, *[""] * 9]
        sizes = [gib(own["temp"]), gib(own["arguments"]), gib(own["host"])]
        doubt = "?" if own["unknown"] else ""
        moved = [digits(own[name] / 1e9) + doubt for name in ("hbm", "within", "across")]
        against = ["", ""]
        if reference is not None:
            against = [signed(own["peak"] - reference["peak"]), ratio(own["flops"], reference["flops"])]
        peak, seconds = gib(own["peak"]), f"{own['compile_s']:.0f} s"
        return [row.name, peak, against[0], *sizes, against[1], *moved, seconds]

    heads = ["lever", "peak", "Δ", "temp", "args", "host", "FLOPs", "HBM GB", "node GB", "net GB", "compile"]
    return table(heads, map(cells, levers))


def reference_of(row: Row, levers: Sequence[Row]) -> str:
    """Name of the row that this one is held against: the first that is called a reference and has its batch."""

    def batch(row: Row) -> list[str]:
        return [words for words in row.sets if words.startswith("pd.batch_size=")]

    references = [r for r in levers if r.name.startswith("reference")]
    return next((r.name for r in references if batch(r) == batch(row)), references[0].name)


def lever_differences(found: Found, levers: Sequence[Row]) -> dict[str, float]:
    """Peak less the reference's in GiB, of every lever that is compiled."""
    differences = {}
    for row in levers:
        own, reference = _record(found, row.name), _record(found, reference_of(row, levers))
        if not row.name.startswith("reference") and own is not None and reference is not None:
            differences[row.name] = own["peak"] - reference["peak"]
    return differences


def switches_table(levers: Sequence[Row]) -> str:
    def switch(words: str) -> str:
        return f"--set '{words}'" if " " in words or "[" in words else f"--set {words}"

    return table(["lever", "`pd probe …`"], ([row.name, f"`{' '.join(map(switch, row.sets))}`"] for row in levers))


def habits_table(found: Found) -> str:
    records = {key.removeprefix("habit: "): r for key, r in found.items() if key.startswith("habit: ")}
    if not records:
        return f"({MISSING})"

    def cells(name: str, record: Mapping[str, Any]) -> list[str]:
        kept, without = record["with"], record["without"]
        more = "same program" if record["same_program"] else size_of(kept["peak"] - without["peak"])
        times = [ratio(kept[what], without[what]) for what in ("flops", "hbm", "within")]
        return [name, gib(kept["peak"]), gib(without["peak"]), more, *times]

    figures = table(
        ["habit", "with", "without", "costs", "FLOPs", "HBM", "sent"], (cells(name, r) for name, r in records.items())
    )
    lines = table(
        ["habit", "the line", "instead"],
        ([name, record["line"], record["instead"]] for name, record in records.items()),
    )
    return f"{figures}\n\n{lines}"


def published_table(found: Found, published: Sequence[Row]) -> str:
    def cells(row: Row) -> list[str]:
        theirs = PUBLISHED_GIB.get(row.name)
        said = "" if theirs is None else f"{theirs:.1f}" + (" (did not fit)" if row.name in DID_NOT_FIT else "")
        real, unlimited = (_published(found, row.name, limit) for limit in ("real", "unlimited"))
        if real is None and unlimited is None:
            return [row.name, quantity(row.name), said, MISSING, "", "", ""]
        return [
            row.name,
            quantity(row.name),
            said,
            or_blank(real, gib) + (" (limit-bound)" if limit_bound(real, unlimited) else ""),
            or_blank(unlimited, gib),
            *("" if ours is None or theirs is None else f"{ours / theirs:.2f}" for ours in (real, unlimited)),
        ]

    heads = ["row", "of", "published", "ours", "no limit", "ours ÷", "no limit ÷"]
    return table(heads, map(cells, published))


def trends_table(found: Found) -> str:
    def growth(sizes: Sequence[float | None], doublings: int) -> str:
        before, after = sizes
        if before is None or after is None:
            return MISSING
        return f"{signed((after - before) / doublings)} (× {(after / before) ** (1 / doublings):.2f})"

    rows = []
    for name, (first, second, doublings) in TRENDS.items():
        of: list[list[float | None]] = [[PUBLISHED_GIB[row] for row in (first, second)]]
        of += [[_published(found, row, limit) for row in (first, second)] for limit in ("real", "unlimited")]
        rows.append([name, *(growth(sizes, doublings) for sizes in of)])
    return table(["from, to", "published", "ours", "no limit"], rows)


def ladder_table(found: Found) -> str:
    def cells(variant: str, theirs: float) -> list[str]:
        records = [_record(found, f"ladder: {variant}", limit) for limit in ("real", "unlimited")]
        if records == [None, None]:
            return [variant, f"{theirs:g}", MISSING, "", ""]
        real, unlimited = (None if r is None else r["peak"] * 2**30 / 1e9 for r in records)
        best = real if unlimited is None else unlimited
        assert best is not None
        bound = " (limit-bound)" if limit_bound(real, unlimited) else ""
        return [
            variant,
            f"{theirs:g}",
            or_blank(real, digits) + bound,
            or_blank(unlimited, digits),
            f"{(real or best) / theirs:.2f}",
        ]

    return table(["variant", "published", "ours", "no limit", "ours ÷"], (cells(*item) for item in LADDER.items()))


def _record(found: Found, name: str, limit: str = "unlimited") -> Mapping[str, Any] | None:
    return found.get(f"{name}, {limit}")


def quantity(name: str) -> str:
    """What was published of a row."""
    return "temp" if name.startswith("layer 18") else "peak"


def _published(found: Found, name: str, limit: str) -> float | None:
    record = _record(found, name, limit)
    return None if record is None else record[quantity(name)]


def limit_bound(real: float | None, unlimited: float | None) -> bool:
    return real is not None and unlimited is not None and compile.limit_bound(real, unlimited)


def _versions_of(found: Found) -> list[str]:
    """With which the records were compiled."""
    return sorted({record["versions"] for record in found.values() if "versions" in record})


def versions() -> str:
    """Of what decides a plan."""
    names = ("jax", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc")

    def of(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    return f"Python {platform.python_version()}, {', '.join(map(of, names))}"


def machine() -> str:
    return f"{os.cpu_count()} × {platform.machine()} cores"
