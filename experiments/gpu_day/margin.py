"""What `pd probe` should leave free beside its plan (`MARGIN_GIB`), from plans and live peaks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION

GIB = 2**30
STEP_GIB = 0.5
UNTESTED_GIB = 1.0
"""For fragmentation, which no plan and no live peak shows, where no step ran in memory of little more than its plan."""


@dataclass(frozen=True)
class Margin:
    """``gib``: what it should be, None where the figures do not tell. ``reasons``: sentences."""

    gib: float | None
    reasons: tuple[str, ...]


def live_of_steps(item: Mapping[str, Any]) -> int | None:
    """Bytes that a step took at most; None where that is not known: on a CPU, or where making the state took more."""
    live = item.get("live", {})
    steps, made = live.get("steps"), live.get("made")
    return None if steps is None or "failed" in item or made >= steps else int(steps)


def margin(found: Mapping[str, Any]) -> Margin:
    """From all that was measured."""
    over: list[tuple[int, str]] = []
    tight: dict[bool, list[float]] = {True: [], False: []}
    for name, item in found["measured"].items():
        live = live_of_steps(item)
        planned = found["planned"].get(name, {}).get("plan", {}).get("peak")
        extra = item.get("asked", {}).get("over_plan")
        if extra is not None:
            if "step_s" in item or "out of memory" in item.get("failed", ""):
                tight["step_s" in item].append(extra)
        elif live is not None and planned is not None:
            over.append((live - planned, name))
    if not over:
        return Margin(None, ("No step has both a live peak and a plan of `pd probe`: nothing follows.",))
    (smallest, _), (largest, where) = min(over), max(over)
    worst = largest / GIB
    by = " to ".join(dict.fromkeys((difference(smallest), difference(largest))))
    of = "one configuration" if len(over) == 1 else f"{len(over)} configurations"
    reasons = [f"In {of} the live peak differed from the plan of `pd probe` by {by}, most for {where}."]
    if tight[False]:
        reasons.append(
            f"In memory of {max(tight[False]):g} GiB over its own plan a step did not run: {MARGIN_GIB:g} stays."
        )
        return Margin(max(MARGIN_GIB, _up(worst)), (*reasons, *_beside(found)))
    if tight[True]:
        least = min(tight[True])
        reasons.append(f"In memory of {least:g} GiB over its own plan a step ran.")
        return Margin(_up(max(worst, least)), (*reasons, *_beside(found)))
    reasons.append(f"No step was tried in memory of little more than its plan: {UNTESTED_GIB:g} GiB for fragmentation.")
    return Margin(_up(max(0.0, worst) + UNTESTED_GIB), (*reasons, *_beside(found)))


def difference(of: int) -> str:
    """Of two figures in bytes; in KiB where three digits of a GiB would not show it."""
    return f"{of / GIB:+.3f} GiB" if abs(of) > GIB // 1000 else f"{round(of / 1024) or 0:+,d} KiB"


def _beside(found: Mapping[str, Any]) -> list[str]:
    """What lies beside JAX's memory, and whether there is room for it."""
    used = [(x["driver_used"] - x["pool"], x["pool"]) for x in found["measured"].values() if x.get("driver_used")]
    used = [(beside, pool) for beside, pool in used if beside > 0]
    if not used:
        return []
    beside, pool = max(used)
    room = pool * (1 / MEM_FRACTION - 1)
    return [
        f"Libraries took {beside / GIB:.2f} GiB beside JAX's memory, of the {room / GIB:.2f} that {MEM_FRACTION:g} of "
        "the card leaves."
    ]


def _up(gib: float) -> float:
    """To the next half GiB; up to 2.5 MiB more are none."""
    return max(STEP_GIB, math.ceil(round(gib / STEP_GIB, 2)) * STEP_GIB)
