"""The page with the results of a day with a GPU, and what follows from them for `pd probe`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from experiments.gpu_day.cards import rates_of
from experiments.gpu_day.links import Fit, as_table
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION
from param_decomp_lab.ui.tables import markdown_table

GIB = 2**30
STEP_GIB = 0.5
UNTESTED_GIB = 1.0
"""GiB to allow for fragmentation, which neither plans nor live peaks show, if no step ran in memory barely above its
plan."""
GOAL = 4900.0
"""The goal in tokens/s, for layer 18 at 8 × 512 on one H200."""
Tree = Mapping[str, Any]


def page(found: Tree) -> str:
    """Returns the page in Markdown, without sections of which nothing was measured."""
    intro = (_title, _takeaway, _head)
    sections = (*intro, _plan, _margin, _step, _clock, _phases, _links, _toys, _decomposition, _failed)
    return "\n".join(line for section in sections for line in section(found)) + "\n"


def _section(
    found: Tree, part: str, head: str, columns: str, cells: Callable[[str, Tree], Sequence[object]]
) -> Iterator[str]:
    """Yields a row for each step that was measured for this part. ``cells``: makes them from its name and its
    result."""
    items = _steps(found, part)
    if items:
        yield from (head, "", *markdown_table(columns, (cells(name, x) for name, x in items.items())), "")


def _steps(found: Tree, part: str) -> dict[str, Any]:
    return {name: item for name, item in found["measured"].items() if part in item["parts"] and "step_s" in item}


def _title(found: Tree) -> Iterator[str]:
    yield f"# {'A day with a GPU, at toy size on a CPU' if found['machine']['toy'] else 'On a real GPU'}\n"


def _takeaway(found: Tree) -> Iterator[str]:
    """Yields how close `pd probe` came, in memory and time, if both are known."""
    apart = [live - plan for _, live, plan in _live_and_planned(found)]
    off = [abs(predicted_s / step_s - 1) for _, step_s, predicted_s in _timed_and_predicted(found)]
    if apart and off:
        by = _difference(max(apart, key=abs)).lstrip("+−-")
        yield (
            f"**The live peaks of {len(apart)} steps differed from the plans of `pd probe` by at most {by}, and the "
            f"times of {len(off)} from its predictions by at most {max(off):.1%}.**\n"
        )


def _live_and_planned(found: Tree) -> Iterator[tuple[str, int, int]]:
    """Yields the names of the steps that had all of the card's memory, with the bytes they took and those of `pd
    probe`'s plan."""
    for name, x in found["measured"].items():
        live, planned = live_of_steps(x), _probed(found, name)
        if x.get("asked", {}).get("over_plan") is None and live is not None and planned is not None:
            yield name, live, planned


def _timed_and_predicted(found: Tree) -> Iterator[tuple[str, float, float]]:
    """Yields every step that was measured and was planned by a `pd probe` that predicts times, with both times in
    seconds."""
    for name, x in found["measured"].items():
        predicted_s = found["planned"].get(name, {}).get("predicted_s")
        if predicted_s is not None and "step_s" in x:
            yield name, x["step_s"], predicted_s


def _head(found: Tree) -> Iterator[str]:
    here = found["machine"]
    rates, cards = here["rates"], here["cards"]
    toy = " --toy" if here["toy"] else ""
    what = f"{len(cards)} × {cards[0]} (driver {here['driver']})" if cards else here["device"]
    versions = ", ".join(f"{name} {v}" for name, v in here["packages"].items())
    commit = f", commit {here['commit']}" if here["commit"] else ""
    product, copy = rates["matmul_flops_per_s"] / 1e12, rates["copy_bytes_per_s"] / 1e12
    yield f"""\
`python -m experiments.gpu_day{toy}`, {here["date"]}, {what}, {here["cores"]} cores, \
Python {here["python"]}, {versions}{commit}.

A step is `pd train`'s own program, on one card, with random weights and tokens drawn there, a fresh state, and all
attacks on. Its time is the median over dispatches after a first one.

The card's own rates: a bf16 product of two {rates["size"]:,} × {rates["size"]:,} matrices of normal numbers \
{product:,.1f} TFLOP/s, a copy {copy:.3f} TB/s, read and written.
"""
    origin = (here["date"], here["commit"])
    later: dict[tuple[str, str | None], list[str]] = {}
    for name, x in found["measured"].items():
        if (when := (x.get("date", origin[0]), x.get("commit", origin[1]))) != origin:
            later.setdefault(when, []).append(name)
    for (date, of), names in later.items():
        yield f"Measured on {date}, commit {of or 'unknown'}: {'; '.join(names)}.\n"
    yield from _products(found)


def _products(found: Tree) -> Iterator[str]:
    for x in (x for x in found["measured"].values() if "products" in x):
        (d_in, C, d_out), (n, m) = x["shape"], x["checked"]
        x3 = " A CPU computes `BF16_BF16_F32_X3` in float32." if x["device"] == "cpu" else ""
        yield f"""## V U of Δ

{d_in:,} × {C:,} × {d_out:,}, normal numbers in float32; times with the casts and splits. *TFLOP/s*: of one product,
however many are made. *Error*: ‖error‖ / ‖V U‖ against float64, of {n:,} × {m:,} entries;
*smaller by*: the part of it that makes V U as a whole smaller.{x3}
"""
        rows = (_product(way, product) for way, product in x["products"].items())
        yield from (*markdown_table("V U | time | TFLOP/s | error | smaller by", rows), "")


def _product(way: str, x: Tree) -> Sequence[str]:
    if "failed" in x:
        return way, x["failed"].replace("|", "/"), "–", "–", "–"
    times = (f"{1e3 * x['s']:,.2f} ms", f"{x['flops_per_s'] / 1e12:,.1f}")
    return way, *times, f"{x['error']:.1e}", f"{x['smaller_by']:.0e}"


def _plan(found: Tree) -> Iterator[str]:
    head = """## Memory: planned and taken

In GiB. *Plan*: XLA's, of the program as it ran: temp + arguments + output − alias. *Live*: the most that the
allocator had handed out (`peak_bytes_in_use`), in the steps unless marked. *`pd probe`*: its plan, made without
the card. *Libraries*: what the driver counts beyond JAX's memory, which is 0.92 of the card."""

    def cells(name: str, x: Tree) -> Sequence[object]:
        plan, live, probed = x["plan"]["peak"], live_of_steps(x), _probed(found, name)
        pool, used, highest = x["pool"], x["driver_used"], x["live"]["steps"]
        shown = _gib(highest) + " (making of the state)" * (live is None and highest is not None)
        libraries = _gib(None if None in (pool, used) else used - pool)
        return name, _gib(plan), shown, _difference(live, plan), _gib(probed), _difference(live, probed), libraries

    columns = "configuration | plan | live | live − plan | `pd probe` | live − `pd probe` | libraries"
    yield from _section(found, "plan", head, columns, cells)


def _probed(found: Tree, name: str) -> int | None:
    """Returns the bytes at the peak of `pd probe`'s plan."""
    peak: int | None = found["planned"].get(name, {}).get("plan", {}).get("peak")
    return peak


def live_of_steps(item: Tree) -> int | None:
    """Returns the most bytes that a step took; None if unknown: on a CPU, or if making the state took more."""
    live = item.get("live", {})
    steps, made = live.get("steps"), live.get("made")
    return None if steps is None or "failed" in item or made >= steps else int(steps)


def _margin(found: Tree) -> Iterator[str]:
    if _steps(found, "plan"):
        gib, reasons = margin(found)
        told = "Unknown" if gib is None else f"From this it should be **{gib:g} GiB**"
        yield from ("### The margin of `pd probe`", "", f"{told}; today it is {MARGIN_GIB:g}.", *reasons, "")


def margin(found: Tree) -> tuple[float | None, list[str]]:
    """Returns what `pd probe` should leave free in addition to its plan (`MARGIN_GIB`), in GiB, or None if the figures
    do not determine it; and the reasons, in sentences."""
    over = [(live - planned, name) for name, live, planned in _live_and_planned(found)]
    tight: dict[bool, list[float]] = {True: [], False: []}
    for item in found["measured"].values():
        extra = item.get("asked", {}).get("over_plan")
        if extra is not None and ("step_s" in item or "out of memory" in item.get("failed", "")):
            tight["step_s" in item].append(extra)
    if not over:
        return None, ["No step has both a live peak and a plan of `pd probe`: nothing follows."]
    (smallest, _), (largest, where) = min(over), max(over)
    worst = largest / GIB
    by = " to ".join(dict.fromkeys((_difference(smallest), _difference(largest))))
    of = "one configuration" if len(over) == 1 else f"{len(over)} configurations"
    reasons = [f"In {of} the live peak differed from the plan of `pd probe` by {by}, most for {where}."]
    if tight[False]:
        gib = max(MARGIN_GIB, _up(worst))
        tried = f"In memory of {max(tight[False]):g} GiB over its own plan a step did not run: {MARGIN_GIB:g} stays."
    elif tight[True]:
        gib = _up(max(worst, min(tight[True])))
        tried = f"In memory of {min(tight[True]):g} GiB over its own plan a step ran."
    else:
        gib = _up(max(0.0, worst) + UNTESTED_GIB)
        tried = f"No step was tried in memory of little more than its plan: {UNTESTED_GIB:g} GiB for fragmentation."
    return gib, [*reasons, tried, *_beside(found)]


def _beside(found: Tree) -> Iterator[str]:
    """Yields what is used outside of JAX's memory, and whether there is room for it."""
    used = [(x["driver_used"] - x["pool"], x["pool"]) for x in found["measured"].values() if x.get("driver_used")]
    beside, pool = max(used, default=(0, 0))
    if beside > 0:
        yield (
            f"Libraries took {beside / GIB:.2f} GiB beside JAX's memory, of the "
            f"{pool * (1 / MEM_FRACTION - 1) / GIB:.2f} that {MEM_FRACTION:g} of the card leaves."
        )


def _up(gib: float) -> float:
    """Rounds up to the next half GiB; an excess of up to 2.5 MiB is ignored."""
    return max(STEP_GIB, math.ceil(round(gib / STEP_GIB, 2)) * STEP_GIB)


def _before_and_after(found: Tree) -> Iterator[str]:
    """Yields steps that differ only in how Δ is computed, at least one of which has it set."""
    alike: dict[tuple[str, ...], dict[str, float]] = {}
    for x in _steps(found, "step").values():
        batch, sets = " × ".join(f"{n:,}" for n in x["leading"]), x["asked"]["sets"]
        delta = next((d for d in ("fp32", "split") if f"numerics={{delta: {d}}}" in sets), "")
        alike.setdefault((x["asked"]["config"], x["asked"]["policy"], batch), {})[delta] = x["step_s"]
    rows: list[Sequence[str]] = []
    for (_, policy, batch), times in alike.items():
        if {*times} != {""}:
            shown = (f"{1e3 * times[delta]:,.1f} ms" if delta in times else "–" for delta in ("", "fp32", "split"))
            rate = prod(map(int, batch.split(" × "))) / min(times.values())
            of_goal = f"{rate / GOAL:.0%}" if batch == "8 × 512" else "–"
            rows.append((policy, batch, *shown, f"{rate:,.0f}", of_goal))
    if rows:
        yield f"""## Before and after

The step of layer 18 by how V U of Δ is computed. *Older program*: in fp32, before this was a choice.
*Tokens/s*: of the fastest of the three. The goal is {GOAL:,.0f} tokens/s with 8 × 512 on an H200.
"""
        columns = "policy | batch | older program | Δ fp32 | Δ split | tokens/s | of the goal"
        yield from (*markdown_table(columns, rows), "")


def _step(found: Tree) -> Iterator[str]:
    yield from _before_and_after(found)
    rate, dense = found["machine"]["rates"]["matmul_flops_per_s"], _dense(found)
    of = "the card is not in `gpus/cards.csv`" if dense is None else f"{dense / 1e12:.0f} TFLOP/s, the data sheet's"
    head = f"""## Steps, by memory policy

*MFU*: matrix products, recomputed ones included (`param_decomp_aot/flops.py`), against the dense bf16 rate
({of}); then against the rate measured above. *Useful MFU*: with the
arithmetic of the plain policy, which recomputes nothing."""

    def cells(name: str, x: Tree) -> Sequence[object]:
        tokens, seconds = prod(x["leading"]), x["step_s"]
        flops, plain = found["planned"].get(name, {}).get("total"), _plain_flops_per_token(found, x)
        done = "–" if flops is None else f"{flops / 1e12:,.1f}"
        mfu, of_measured = _share(flops, seconds, dense), _share(flops, seconds, rate)
        useful = _share(None if plain is None else plain * tokens, seconds, dense)
        times = f"{1e3 * seconds:,.1f} ms", f"{tokens / seconds:,.0f}"
        return name, f"{tokens:,}", *times, done, mfu, of_measured, useful, f"{x['compile_s']:.0f} s"

    columns = "configuration | tokens | step | tokens/s | TFLOP | MFU | of the measured rate | useful MFU | compiled in"
    yield from _section(found, "step", head, columns, cells)


def _clock(found: Tree) -> Iterator[str]:
    rows: list[Sequence[str]] = []
    for name, step_s, predicted_s in _timed_and_predicted(found):
        times = (f"{1e3 * seconds:,.1f} ms" for seconds in (step_s, predicted_s))
        rows.append((name, *times, f"{predicted_s / step_s - 1:+.1%}"))
    if rows:
        head = "## Times, measured and predicted by `pd probe`"
        yield from (head, "", *markdown_table("configuration | step | predicted | difference", rows), "")


def _plain_flops_per_token(found: Tree, item: Tree) -> float | None:
    """Returns FLOPs per token of the plain policy, for the same configuration and row length; None if they were not
    counted."""
    for counted in found["planned"].values():
        asked = counted["asked"]
        alike = "total" in counted and counted["leading"][1:] == item["leading"][1:]
        if alike and (asked["policy"], asked["config"]) == ("plain", item["asked"]["config"]):
            return float(counted["total"] / prod(counted["leading"]))
    return None


def _phases(found: Tree) -> Iterator[str]:
    dense = _dense(found)
    for name, x in _steps(found, "phases").items():
        profile = x["phases"]
        total = sum(profile["phases"].values())
        counted = found["planned"].get(x["asked"]["needs"], {}).get("by_phase", {})
        traced, untraced = 1e3 * profile["step_s_traced"], 1e3 * profile["step_s_untraced"]
        yield f"""## Where the time goes: {name}

`pd profile`'s account of {profile["steps"]} traced steps, without CUDA graphs: {traced:,.1f} ms a step \
traced, {untraced:,.1f} not; operations under way in {profile["busy"]:.1%} of the time; \
{profile["unknown_ms"]:,.2f} ms a step in kernels of no known operation.
"""
        rows: list[Sequence[str]] = []
        for phase, ms in profile["phases"].items():
            flops = counted.get(phase)
            done = ("–", "–") if not flops else (f"{flops / 1e12:,.2f}", f"{flops / ms / 1e9:,.0f}")
            rows.append((phase, f"{ms:,.2f}", f"{ms / total:.1%}", *done, _share(flops or None, ms / 1e3, dense)))
        yield from (*markdown_table("phase | ms | share | TFLOP | TFLOP/s | MFU", rows), "")
        rows = [(_scope(scope), *_time(scope)) for scope in profile["scopes"][:12]]
        yield from (*markdown_table("largest parts | ms | share", rows), "")
        # Names of generated kernels may be long.
        rows = [(f"`{x['kernel'][:80]}`", _scope(x), *_time(x)) for x in profile.get("kernels", ())]
        yield from (*markdown_table("largest kernels | part | ms | share", rows), "")


def _scope(x: Tree) -> str:
    return ", ".join(filter(None, (x["phase"], x["way"], " · ".join(x["inner"]))))


def _time(x: Tree) -> Sequence[str]:
    return f"{x['ms_per_step']:,.2f}", f"{x['share']:.1%}"


def _links(found: Tree) -> Iterator[str]:
    items = [x for x in found["measured"].values() if "fits" in x]
    if not items and len(found["machine"]["cards"]) == 1:
        yield """## Links

One card has none. `python -m experiments.gpu_day --part links` measures them where there are several.
"""
    for x in items:
        nodes = f", {x['nodes']} nodes" if x["nodes"] > 1 else ""
        yield f"""## Links between {x["devices"]} × {x["device"]}{nodes}

Many collectives in a row inside one compiled program, each of what the one before has left. *Message*:
of an all-gather the result, else the operand, of one device. *Sent*: what each device sends to the
next, over the time. *Fit*: seconds = latency + bytes sent / rate, latency = start + hops × a hop, with
the smallest relative deviations.
"""
        rows: list[Sequence[object]] = []
        for m in x["messages"]:
            size = f"{m['payload'] >> 10:,} KiB"
            rows.append(
                (
                    *(m[key] for key in ("kind", "link", "group")),
                    size,
                    _us(m["seconds"]),
                    _rate(m["ring"] / m["seconds"]),
                )
            )
        yield from (*markdown_table("kind | over | devices | message | time | sent", rows), "")
        fits, rows = [Fit(**one) for one in x["fits"]], []
        for f in fits:
            times = (_us(f.latency_s), _us(f.start_s), _us(f.hop_s))
            rows.append((f.kind, f.link, f.group, *times, _rate(f.rate_Bps), f"{f.off:.0%}"))
        yield from (*markdown_table("fit | over | devices | latency | start | a hop | rate | off by at most", rows), "")
        yield from (*(f"- {reason}" for reason in x["not_fitted"]), "```", as_table(fits), "```", "")


def _toys(found: Tree) -> Iterator[str]:
    def cells(name: str, x: Tree) -> Sequence[object]:
        batch, seconds = " × ".join(f"{n:,}" for n in x["leading"]), x["step_s"]
        return name, batch, _us(seconds), f"{1 / seconds:,.1f}", f"{x['compile_s']:.0f} s"

    yield from _section(found, "toys", "## Toys", "configuration | batch | a step | steps/s | compiled in", cells)


_SHOWN = ("eval/ce_kl/kl_", "eval/loss/", "eval/l0/", "eval/ce_kl/ce_target")


def _decomposition(found: Tree) -> Iterator[str]:
    for name, x in found["measured"].items():
        if "report" not in x:
            continue
        batch = " × ".join(f"{n:,}" for n in x["batch"] if n)
        speed = "" if x["tokens_per_s"] is None else f", {x['tokens_per_s']:,.0f} tokens/s in the end"
        spent = "" if x["training_s"] is None else f"{x['training_s'] / 60:.1f} minutes in training steps{speed}. "
        state = f"Stopped {x['stopped']}. " if "stopped" in x else ""
        times, starts = x["reached"] * x["batch"][0] / x["rows"], x["starts"]
        yield f"""## {name}

{x["reached"]:,} of {x["steps"]:,} steps of {batch} tokens, in {"one go" if starts == 1 else f"{starts} goes"}; \
of {x["rows"]:,} rows each was taken {times:,.1f} times; {spent}{state}\
Report: `{x["report"].rpartition("/")[2]}` in the run folder `{x["run"].rpartition("/")[2]}`.
"""
        keys = [key for key in x["last"] if key.startswith(_SHOWN) or ("PGD" in key and key.startswith("eval/"))]
        rows = ((f"`{key.removeprefix('eval/')}`", f"{x['first'][key]:.4g}", f"{x['last'][key]:.4g}") for key in keys)
        yield from (*markdown_table("| first | last", rows), "")
        if "over_best_baseline" in x:
            over = "; ".join(f"{key} {value:.3g}" for key, value in x["over_best_baseline"].items())
            yield from (f"Over the best baseline at the run's L0 (`pd eval --baselines`): {over}.", "")


def _failed(found: Tree) -> Iterator[str]:
    failed = {name: item["failed"] for name, item in found["measured"].items() if "failed" in item}
    if failed:
        yield from ("## Not measured", "", *(f"- {name}: {why.splitlines()[0]}" for name, why in failed.items()), "")


def _gib(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else f"{n_bytes / GIB:.3f}"


def _difference(one: int | None, other: int | None = 0) -> str:
    """Returns a difference, in KiB if three digits of a GiB would not show it."""
    if one is None or other is None:
        return "–"
    of = one - other
    return f"{of / GIB:+.3f} GiB" if abs(of) > GIB // 1000 else f"{round(of / 1024) or 0:+,d} KiB"


def _share(flops: float | None, seconds: float, rate: float | None) -> str:
    return "–" if flops is None or rate is None else f"{flops / seconds / rate:.1%}"


def _dense(found: Tree) -> float | None:
    """Returns the data sheet's rate of the card, in FLOP/s of bf16."""
    promised = rates_of(found["machine"]["device"])
    return None if promised is None else promised.bf16_flops


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e6 * seconds:,.1f} µs"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"
