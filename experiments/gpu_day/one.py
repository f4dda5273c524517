"""What a job does: one measurement, or what is found of it without the card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.gpu_day.decomposition import Source, decompose
from experiments.gpu_day.items import ITEMS, Decomposition, Links, Step, toy_items
from param_decomp_lab.errors import UserError


def one(name: str, how: str, source: Source, card: str | None, run: Path | None, sets: Sequence[str]) -> dict[str, Any]:
    """What is found. ``name``: of the item, or "machine". ``how``: "measure", "planned", "counted". ``card``: that is
    planned for. ``run``, ``sets``: the folder of a decomposition, and what its configuration is set to."""
    if name == "machine":
        import experiments.gpu_day.measure  # noqa: F401  (so that a missing package is missed at once)
        from experiments.gpu_day.machine import machine

        return machine(toy=source.toy)
    items = {item.name: item for item in (toy_items(source.work) if source.toy else ITEMS)}
    match how, items.get(name):
        case "measure", Links() as item:
            from experiments.gpu_day.links import measure_links

            return measure_links(item)
        case "measure", Step() as item:
            from experiments.gpu_day.measure import measure

            return measure(item)
        case "measure", Decomposition() as item if run is not None:
            return decompose(item, source, run, sets)
        case "planned", Step() as item if card is not None:
            from experiments.gpu_day.plan import plan

            return plan(item, card)
        case "counted", Step() as item:
            from experiments.gpu_day.plan import count

            return count(item)
    raise UserError(f"--one {name}: should be machine, {', '.join(n for n, i in items.items() if isinstance(i, Step))}")
