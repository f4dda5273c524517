"""The page of what `gpu_day.py` found."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from experiments.gpu_day import DENSE_BF16, GIB

Tree = Mapping[str, Any]
PLAIN = "layer 18, plain, 8 × 512"
"""Whose arithmetic is done without anything being made twice."""


def page(found: Tree) -> str:
    """Markdown; sections of which nothing was measured are left out."""
    sections = (_head, _plan, _step, _phases, _small, _failed)
    return "\n".join(line for section in sections for line in section(found)) + "\n"


def _of(found: Tree, part: str) -> dict[str, Any]:
    return {name: item for name, item in found["measured"].items() if part in item["parts"] and "step_s" in item}


def _head(found: Tree) -> Iterator[str]:
    here, packages = found["machine"], found["machine"]["packages"]
    rates = here["rates"]
    yield "# On a real GPU"
    yield ""
    card, versions = here["card"] or here["device"], ", ".join(f"{name} {v}" for name, v in packages.items() if v)
    yield (
        f"`python -m experiments.gpu_day`, {here['date']}, on one {card}, {here['cores']} cores, "
        f"Python {here['python']}, {versions}."
    )
    yield ""
    yield "Weights and tokens are random, drawn on the device; the state is fresh, all attacks on. A step is"
    yield "`pd train`'s own program. Its time is the median over dispatches after a first one."
    yield ""
    product, copy = rates["matmul_flops_per_s"] / 1e12, rates["copy_bytes_per_s"] / 1e12
    yield (
        f"The machine's own rates in the same call: a bf16 product of two {rates['size']:,} × {rates['size']:,} "
        f"matrices of normal numbers {product:,.0f} TFLOP/s, a copy {copy:.2f} TB/s, read and written."
    )
    yield ""


def _plan(found: Tree) -> Iterator[str]:
    items = _of(found, "plan")
    if not items:
        return
    yield "## Memory: planned and taken"
    yield ""
    yield "*Plan*: XLA's, of the program as it ran: temp + arguments + output − alias. *Live*: the most that the"
    yield "allocator had handed out (`peak_bytes_in_use`), which is of the steps unless marked. *`pd probe`*: its plan"
    yield "for an H200 that is not there. *Libraries*: what the driver counts beyond JAX's pool (0.92 of it). GiB."
    yield ""
    yield "| configuration | plan | live | live − plan | `pd probe` | live − `pd probe` | libraries |"
    yield "|---|---|---|---|---|---|---|"
    for name, x in items.items():
        plan, live = x["plan"]["peak"], x["live"]["steps"]
        probed = found["probed"].get(name, {}).get("plan", {}).get("peak")
        pool, used = x["pool"], x["driver_used"]
        made = live is not None and x["live"]["made"] >= live
        cells = (
            _gib(plan),
            _gib(live) + " (making of the state)" * made,
            "–" if made else _apart(live, plan),
            _gib(probed),
            "–" if made else _apart(live, probed),
            _gib(None if None in (pool, used) else used - pool),
        )
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _step(found: Tree) -> Iterator[str]:
    items = _of(found, "step")
    if not items:
        return
    rate = found["machine"]["rates"]["matmul_flops_per_s"]
    plain = found["counted"].get(PLAIN, {}).get("total")
    tokens_of_plain = prod(found["measured"][PLAIN]["leading"]) if PLAIN in found["measured"] else None
    yield "## The layer-18 step"
    yield ""
    yield "*MFU*: matrix products, those made again included (`aot/flops.py`), against "
    yield f"{DENSE_BF16 / 1e12:.0f} TFLOP/s, the dense bf16 rate of the data sheet; then against the rate measured"
    yield "above. *Useful MFU*: with the arithmetic of the plain policy, which makes nothing twice, in place of the"
    yield "policy's own."
    yield ""
    yield "| configuration | step | tokens/s | TFLOP | MFU | of the measured rate | useful MFU | compiled in |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, x in items.items():
        tokens, seconds = prod(x["leading"]), x["step_s"]
        flops = found["counted"].get(name, {}).get("total")
        useful = None if plain is None or tokens_of_plain is None else plain * tokens / tokens_of_plain
        cells = (
            f"{1e3 * seconds:,.1f} ms",
            f"{tokens / seconds:,.0f}",
            "–" if flops is None else f"{flops / 1e12:,.1f}",
            _share(flops, seconds * DENSE_BF16),
            _share(flops, seconds * rate),
            _share(useful, seconds * DENSE_BF16),
            f"{x['compile_s']:.0f} s",
        )
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _phases(found: Tree) -> Iterator[str]:
    for name, x in _of(found, "phases").items():
        profile = x["phases"]
        total = sum(profile["phases"].values())
        counted = found["counted"].get(name, {}).get("by_phase", {})
        yield f"## Where the time goes: {name}"
        yield ""
        traced, untraced = 1e3 * profile["step_s_traced"], 1e3 * profile["step_s_untraced"]
        yield (
            f"`pd profile`'s account of {profile['steps']} traced steps, without CUDA graphs: {traced:,.1f} ms a step "
            f"traced, {untraced:,.1f} not; operations under way in {profile['busy']:.1%} of the time; "
            f"{profile['unknown_ms']:,.2f} ms a step in kernels of no known operation."
        )
        yield ""
        yield "| phase | ms | share | TFLOP | TFLOP/s |"
        yield "|---|---|---|---|---|"
        for phase, ms in profile["phases"].items():
            flops = counted.get(phase)
            done = ("–", "–") if not flops else (f"{flops / 1e12:,.2f}", f"{flops / ms / 1e9:,.0f}")
            yield f"| {phase} | {ms:,.2f} | {ms / total:.1%} | {' | '.join(done)} |"
        yield ""
        yield "| largest parts | ms | share |"
        yield "|---|---|---|"
        for scope in profile["scopes"][:12]:
            words = ", ".join(filter(None, (scope["phase"], scope["way"], " · ".join(scope["inner"]))))
            yield f"| {words} | {scope['ms_per_step']:,.2f} | {scope['share']:.1%} |"
        yield ""


def _small(found: Tree) -> Iterator[str]:
    items = _of(found, "toys") | _of(found, "small")
    if not items:
        return
    yield "## Small ones"
    yield ""
    yield "| configuration | batch | a step | steps/s | compiled in |"
    yield "|---|---|---|---|---|"
    for name, x in items.items():
        batch = " × ".join(f"{n:,}" for n in x["leading"])
        milliseconds = 1e3 * x["step_s"]
        yield f"| {name} | {batch} | {milliseconds:,.3f} ms | {1 / x['step_s']:,.1f} | {x['compile_s']:.0f} s |"
    yield ""


def _failed(found: Tree) -> Iterator[str]:
    failed = {name: item["failed"] for name, item in found["measured"].items() if "failed" in item}
    if failed:
        yield "## Not measured"
        yield ""
        for name, reason in failed.items():
            yield f"- {name}: {reason.splitlines()[0]}"
        yield ""


def _gib(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else f"{n_bytes / GIB:.3f}"


def _apart(one: int | None, other: int | None) -> str:
    return "–" if one is None or other is None else f"{(one - other) / GIB:+.3f}"


def _share(one: float | None, of: float) -> str:
    return "–" if one is None else f"{one / of:.1%}"
