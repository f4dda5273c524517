"""The page of what a day with a GPU found."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from experiments.gpu_day.cards import rates_of
from experiments.gpu_day.links import Fit, as_table
from experiments.gpu_day.margin import GIB, difference, live_of_steps, margin
from param_decomp_lab.probe import MARGIN_GIB

Tree = Mapping[str, Any]


def page(found: Tree) -> str:
    """Markdown; sections of which nothing was measured are left out."""
    sections = (_head, _plan, _margin, _step, _phases, _links, _toys, _decomposition, _failed)
    return "\n".join(line for section in sections for line in section(found)) + "\n"


def _table(columns: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """``columns``: as the page has them, between bars."""
    yield f"| {columns} |"
    yield "|---" * (columns.count("|") + 1) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"
    yield ""


def _of(found: Tree, part: str) -> dict[str, Any]:
    return {name: item for name, item in found["measured"].items() if part in item["parts"] and "step_s" in item}


def _head(found: Tree) -> Iterator[str]:
    here = found["machine"]
    rates, cards = here["rates"], here["cards"]
    toy = " --toy" if here["toy"] else ""
    yield "# On a real GPU" if not here["toy"] else "# A day with a GPU, at toy size on a CPU"
    yield ""
    what = f"{len(cards)} × {cards[0]} (driver {here['driver']})" if cards else here["device"]
    versions = ", ".join(f"{name} {v}" for name, v in here["packages"].items())
    commit = f", commit {here['commit']}" if here["commit"] else ""
    product, copy = rates["matmul_flops_per_s"] / 1e12, rates["copy_bytes_per_s"] / 1e12
    yield f"""`python -m experiments.gpu_day{toy}`, {here["date"]}, {what}, {here["cores"]} cores, \
Python {here["python"]}, {versions}{commit}.

Of steps, weights and tokens are random, drawn on the card; the state is fresh, all attacks on. A step is
`pd train`'s own program, on one card. Its time is the median over dispatches after a first one.

The card's own rates: a bf16 product of two {rates["size"]:,} × {rates["size"]:,} matrices of normal numbers \
{product:,.1f} TFLOP/s, a copy {copy:.3f} TB/s, read and written.
"""


def _plan(found: Tree) -> Iterator[str]:
    items = _of(found, "plan")
    if not items:
        return
    yield """## Memory: planned and taken

*Plan*: XLA's, of the program as it ran: temp + arguments + output − alias. *Live*: the most that the
allocator had handed out (`peak_bytes_in_use`), which is of the steps unless marked. *`pd probe`*: its plan
for such a card that is not there. *Libraries*: what the driver counts beyond JAX's memory, 0.92 of it. GiB.
"""

    def cells(name: str, x: Tree) -> Sequence[str]:
        plan, live = x["plan"]["peak"], live_of_steps(x)
        probed = found["planned"].get(name, {}).get("plan", {}).get("peak")
        pool, used, highest = x["pool"], x["driver_used"], x["live"]["steps"]
        shown = _gib(highest) + " (making of the state)" * (live is None and highest is not None)
        libraries = _gib(None if None in (pool, used) else used - pool)
        return name, _gib(plan), shown, _difference(live, plan), _gib(probed), _difference(live, probed), libraries

    columns = "configuration | plan | live | live − plan | `pd probe` | live − `pd probe` | libraries"
    yield from _table(columns, (cells(name, x) for name, x in items.items()))


def _margin(found: Tree) -> Iterator[str]:
    if not _of(found, "plan"):
        return
    told = margin(found)
    yield "### The margin of `pd probe`"
    yield ""
    now = f"today it is {MARGIN_GIB:g}"
    yield f"From this it should be **{told.gib:g} GiB**; {now}." if told.gib is not None else f"Unknown; {now}."
    yield from told.reasons
    yield ""


def _step(found: Tree) -> Iterator[str]:
    items = _of(found, "step")
    if not items:
        return
    rate = found["machine"]["rates"]["matmul_flops_per_s"]
    promised = rates_of(found["machine"]["device"])
    dense = None if promised is None else promised.bf16_flops
    of = "the card is not in `gpus/cards.csv`" if dense is None else f"{dense / 1e12:.0f} TFLOP/s, the data sheet's"
    yield f"""## Steps, by memory policy

*MFU*: matrix products, those made again included (`param_decomp_aot/flops.py`), against the dense bf16 rate
({of}); then against the rate measured above. *Useful MFU*: with the
arithmetic of the plain policy, which makes nothing twice, in place of the policy's own.
"""

    def cells(name: str, x: Tree) -> Sequence[str]:
        tokens, seconds = prod(x["leading"]), x["step_s"]
        flops = found["counted"].get(name, {}).get("total")
        plain = _plain_flops_per_token(found, x)
        done = "–" if flops is None else f"{flops / 1e12:,.1f}"
        mfu, of_measured = _share(flops, seconds, dense), _share(flops, seconds, rate)
        useful = _share(None if plain is None else plain * tokens, seconds, dense)
        times = f"{1e3 * seconds:,.1f} ms", f"{tokens / seconds:,.0f}"
        return name, f"{tokens:,}", *times, done, mfu, of_measured, useful, f"{x['compile_s']:.0f} s"

    columns = "configuration | tokens | step | tokens/s | TFLOP | MFU | of the measured rate | useful MFU | compiled in"
    yield from _table(columns, (cells(name, x) for name, x in items.items()))


def _plain_flops_per_token(found: Tree, item: Tree) -> float | None:
    """Of the plain policy, for the same configuration and rows as long; None where that was not counted."""
    for counted in found["counted"].values():
        asked, mine = counted["asked"], item["asked"]
        alike = asked["config"] == mine["config"] and counted["leading"][1:] == item["leading"][1:]
        if asked["policy"] == "plain" and alike:
            total: float = counted["total"]
            return total / prod(counted["leading"])
    return None


def _phases(found: Tree) -> Iterator[str]:
    for name, x in _of(found, "phases").items():
        profile = x["phases"]
        total = sum(profile["phases"].values())
        counted = found["counted"].get(x["asked"]["needs"], {}).get("by_phase", {})
        yield f"## Where the time goes: {name}"
        yield ""
        traced, untraced = 1e3 * profile["step_s_traced"], 1e3 * profile["step_s_untraced"]
        yield (
            f"`pd profile`'s account of {profile['steps']} traced steps, without CUDA graphs: {traced:,.1f} ms a step "
            f"traced, {untraced:,.1f} not; operations under way in {profile['busy']:.1%} of the time; "
            f"{profile['unknown_ms']:,.2f} ms a step in kernels of no known operation."
        )
        yield ""
        rows: list[Sequence[str]] = []
        for phase, ms in profile["phases"].items():
            flops = counted.get(phase)
            done = ("–", "–") if not flops else (f"{flops / 1e12:,.2f}", f"{flops / ms / 1e9:,.0f}")
            rows.append((phase, f"{ms:,.2f}", f"{ms / total:.1%}", *done))
        yield from _table("phase | ms | share | TFLOP | TFLOP/s", rows)
        rows = []
        for scope in profile["scopes"][:12]:
            words = ", ".join(filter(None, (scope["phase"], scope["way"], " · ".join(scope["inner"]))))
            rows.append((words, f"{scope['ms_per_step']:,.2f}", f"{scope['share']:.1%}"))
        yield from _table("largest parts | ms | share", rows)


def _links(found: Tree) -> Iterator[str]:
    items = [x for x in found["measured"].values() if "fits" in x]
    if not items and len(found["machine"]["cards"]) == 1:
        yield "## Links"
        yield ""
        yield "One card has none. `python -m experiments.gpu_day --part links` measures them where there are several."
        yield ""
    for x in items:
        nodes = f", {x['nodes']} nodes" if x["nodes"] > 1 else ""
        yield f"""## Links between {x["devices"]} × {x["device"]}{nodes}

Many collectives in a row inside one compiled program, each of what the one before has left. *Message*:
of an all-gather the result, else the operand, of one device. *Sent*: what each device sends to the
next, over the time. *Fit*: seconds = latency + bytes sent / rate, latency = start + hops × a hop, with
the smallest relative deviations.
"""
        rows: list[Sequence[str]] = []
        for m in x["messages"]:
            time, sent = f"{1e6 * m['seconds']:,.1f} µs", f"{m['ring'] / m['seconds'] / 1e9:,.2f} GB/s"
            rows.append((m["kind"], m["link"], str(m["group"]), _bytes(m["payload"]), time, sent))
        yield from _table("kind | over | devices | message | time | sent", rows)
        fits, rows = [Fit(**one) for one in x["fits"]], []
        for f in fits:
            cells = (_us(f.latency_s), _us(f.start_s), _us(f.hop_s), f"{f.rate_Bps / 1e9:,.2f} GB/s", f"{f.off:.0%}")
            rows.append((f.kind, f.link, str(f.group), *cells))
        yield from _table("fit | over | devices | latency | start | a hop | rate | off by at most", rows)
        for reason in x["not_fitted"]:
            yield f"- {reason}"
        yield from ["```", as_table(fits), "```", ""]


def _toys(found: Tree) -> Iterator[str]:
    items = _of(found, "toys")
    if not items:
        return
    yield "## Toys"
    yield ""
    rows = []
    for name, x in items.items():
        batch, seconds = " × ".join(f"{n:,}" for n in x["leading"]), x["step_s"]
        rows.append((name, batch, _us(seconds), f"{1 / seconds:,.1f}", f"{x['compile_s']:.0f} s"))
    yield from _table("configuration | batch | a step | steps/s | compiled in", rows)


_SHOWN = ("eval/ce_kl/kl_", "eval/loss/", "eval/l0/", "eval/ce_kl/ce_target")


def _decomposition(found: Tree) -> Iterator[str]:
    for name, x in found["measured"].items():
        if "report" not in x:
            continue
        yield f"## {name}"
        yield ""
        batch = " × ".join(f"{n:,}" for n in x["batch"] if n)
        speed = "" if x["tokens_per_s"] is None else f", {x['tokens_per_s']:,.0f} tokens/s in the end"
        spent = "" if x["training_s"] is None else f"{x['training_s'] / 60:.1f} minutes in training steps{speed}. "
        state = f"Stopped {x['stopped']}. " if "stopped" in x else ""
        times = x["reached"] * x["batch"][0] / x["rows"]
        seen = f"of {x['rows']:,} rows each was taken {times:,.1f} times; "
        yield (
            f"{x['reached']:,} of {x['steps']:,} steps of {batch} tokens, in {_times(x['starts'])}; "
            f"{seen}{spent}{state}"
            f"Report: `{x['report'].rpartition('/')[2]}` in the run folder `{x['run'].rpartition('/')[2]}`."
        )
        yield ""
        keys = [key for key in x["last"] if key.startswith(_SHOWN) or ("PGD" in key and key.startswith("eval/"))]
        shown = ((f"`{key.removeprefix('eval/')}`", f"{x['first'][key]:.4g}", f"{x['last'][key]:.4g}") for key in keys)
        yield from _table("| first | last", shown)


def _failed(found: Tree) -> Iterator[str]:
    failed = {name: item["failed"] for name, item in found["measured"].items() if "failed" in item}
    if failed:
        yield "## Not measured"
        yield ""
        for name, reason in failed.items():
            yield f"- {name}: {reason.splitlines()[0]}"
        yield ""


def _times(starts: int) -> str:
    return "one go" if starts == 1 else f"{starts} goes"


def _gib(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else f"{n_bytes / GIB:.3f}"


def _difference(one: int | None, other: int | None) -> str:
    return "–" if one is None or other is None else difference(one - other)


def _share(flops: float | None, seconds: float, rate: float | None) -> str:
    return "–" if flops is None or rate is None else f"{flops / seconds / rate:.1%}"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e6 * seconds:,.1f} µs"


def _bytes(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"
