"""The command line of a day with a GPU."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import experiments.gpu_day
from experiments.gpu_day.items import PARTS, Asked, Decomposition, Links, Products, Step
from experiments.gpu_day.job import ROOT
from param_decomp_lab.errors import CannotTell, CannotWrite, UserError


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day",
        description=experiments.gpu_day.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=2400.0, help="time for all of it (default: 2400)")
    add(
        "--part",
        dest="parts",
        action="append",
        choices=PARTS,
        help="measure this part, and what it needs (default: all)",
    )
    add("--json", type=Path, help="results (default: docs/measurements/gpu.json)")
    add("--page", type=Path, help="page (default: beside the results, .md)")
    add("--work", type=Path, help="logs, text, run (default: runs/gpu_day)")
    add("--smollm2", type=Path, metavar="FOLDER", help="SmolLM2's weights, on a machine without a network")
    add("--text", type=Path, metavar="PATH", help="what to train on, as pd data tokenize takes it (default: the "
        "standard library's 475,000 tokens)")  # fmt: skip
    add("--decompose-seconds", dest="decompose_s", type=float, metavar="S", help="how long the decomposition may "
        "take, over several calls (default: what is left, up to 1800)")  # fmt: skip
    add("--beside", type=int, default=3, metavar="N", help="plans of pd probe to compile at once, after the "
        "measurements; 0: none (default: 3)")  # fmt: skip
    add("--toy", action="store_true", help="all of it at toy size, on a CPU")
    nothing = parser.add_mutually_exclusive_group()
    nothing.add_argument("--page-only", action="store_true", help="measure nothing; write the page from --json")
    nothing.add_argument(
        "--plans-only", action="store_true",
        help="measure nothing; add pd probe's plans of the steps in --json, on any machine, and write the page",
    )  # fmt: skip
    add("--one", metavar="ITEM", help="measure only this item, in this process, and print a line of JSON")
    add("--given", type=json.loads, default={}, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    try:
        sys.exit(_run(options, _asked(options)))
    except (UserError, CannotTell, CannotWrite) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _asked(options: argparse.Namespace) -> Asked:
    """Returns what the options say, with defaults filled in and paths absolute. Raises UserError for impossible
    options."""
    for option, value in (("--seconds", options.seconds), ("--decompose-seconds", options.decompose_s)):
        if value is not None and not 30 <= value < 1e6:
            raise UserError(f"{option} {value:g}: should be at least 30")
    if options.beside < 0:
        raise UserError(f"--beside {options.beside}: should be 0 or more")
    for name in ("smollm2", "text"):
        if getattr(options, name) is not None and options.toy:
            raise UserError(f"--{name}: --toy has its own target and text")
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Asked)}
    given["parts"] = options.parts or PARTS
    work = given["work"] = options.work or ROOT / "runs" / ("gpu_day_toy" if options.toy else "gpu_day")
    file = given["json"] = options.json or (work if options.toy else ROOT / "docs" / "measurements") / "gpu.json"
    page = given["page"] = options.page or file.with_suffix(".md")
    if page.absolute() == file.absolute():
        raise UserError(f"--json {options.json}: the page would be written there; choose another name, or --page")
    given |= {name: value.absolute() for name, value in given.items() if isinstance(value, Path)}
    return Asked(**given)


def _run(options: argparse.Namespace, asked: Asked) -> int:
    """Runs the command, and returns its exit status."""
    if options.one is not None:
        print(json.dumps(_one(options.one, options.given, asked), default=str))
        return 0
    from experiments.gpu_day.day import run_day, run_plans
    from experiments.gpu_day.page import page
    from experiments.gpu_day.results import Results

    if not (options.page_only or options.plans_only):
        return run_day(asked)
    found = Results(asked.json).all
    if "machine" not in found:
        raise UserError(f"{asked.json}: has no results; measure first")
    if options.plans_only and (asked.toy or found["machine"].get("toy")):
        raise UserError("--plans-only: plans are for GPUs, and --toy measures on a CPU")
    try:
        text = page(found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{asked.json}: was not written by this version of the command ({error!r})") from error
    if options.plans_only:
        return run_plans(asked)
    asked.page.write_text(text)
    print(asked.page)
    return 0


def _one(name: str, given: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Measures one item, or describes the "machine".

    ``given``: for a decomposition, its folder `run` and the settings of its configuration, `planned`; for a step that
    is planned without the card, the card's name, `card`.
    """
    if name == "machine":
        from experiments.gpu_day.measure import machine

        return machine(asked.toy)
    items = {item.name: item for item in asked.every}
    match items.get(name):
        case Links() as item:
            from experiments.gpu_day.links import measure_links

            return measure_links(item)
        case Products() as item:
            from experiments.gpu_day.products import measure_products

            return measure_products(item)
        case Step() as item:
            from experiments.gpu_day.measure import measure, plan

            return plan(item, given["card"]) if "card" in given else measure(item)
        case Decomposition() as item if given:
            from experiments.gpu_day.decomposition import decompose

            return decompose(item, asked, Path(given["run"]), given["planned"])
    known = ", ".join(n for n, i in items.items() if not isinstance(i, Decomposition))
    raise UserError(f"--one {name}: should be machine, {known}")


if __name__ == "__main__":
    main()
