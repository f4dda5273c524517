"""The command."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import experiments.gpu_day
from experiments.gpu_day.items import PARTS
from param_decomp_lab.errors import CannotTell, CannotWrite, UserError

ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day",
        description=experiments.gpu_day.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=2400.0, help="time for all of it (default: 2400)")
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this, and what it needs (default: all)")
    parser.add_argument("--json", type=Path, help="results (default: docs/measurements/gpu.json)")
    parser.add_argument("--page", type=Path, help="page (default: beside the results, .md)")
    parser.add_argument("--work", type=Path, help="logs, text, run (default: runs/gpu_day)")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="SmolLM2's weights, for want of a network")
    parser.add_argument(
        "--text", type=Path, metavar="PATH",
        help="what to train on, as pd data tokenize takes it (default: the standard library's 475,000 tokens)",
    )  # fmt: skip
    parser.add_argument(
        "--decompose-seconds", type=float, metavar="S",
        help="how long the decomposition is to take, in several calls maybe (default: what is left, up to 1800)",
    )  # fmt: skip
    parser.add_argument(
        "--beside", type=int, default=3, metavar="N",
        help="plans of pd probe to compile at once, after the measurements; 0: none (default: 3)",
    )  # fmt: skip
    parser.add_argument("--toy", action="store_true", help="all of it at toy size, on a CPU")
    nothing = parser.add_mutually_exclusive_group()
    nothing.add_argument(
        "--page-only", action="store_true", help="measure nothing; write the page of what is in --json"
    )
    nothing.add_argument(
        "--plans-only", action="store_true",
        help="measure nothing; add pd probe's plans of the steps in --json, on any machine, and write the page",
    )  # fmt: skip
    parser.add_argument("--one", metavar="ITEM", help="measure this item alone, here, and print a line of JSON")
    parser.add_argument("--how", default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--card", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        sys.exit(_run(options))
    except (UserError, CannotTell, CannotWrite) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _one(options: argparse.Namespace, work: Path) -> int:
    from experiments.gpu_day.decomposition import Source
    from experiments.gpu_day.one import one

    source = Source(work, options.smollm2, options.text, options.toy)
    print(json.dumps(one(options.one, options.how, source, options.card, options.run, options.set), default=str))
    return 0


def _run(options: argparse.Namespace) -> int:
    work = (options.work or ROOT / "runs" / ("gpu_day_toy" if options.toy else "gpu_day")).absolute()
    if options.one is not None:
        return _one(options, work)
    from experiments.gpu_day.day import Asked, run_day, run_plans
    from experiments.gpu_day.page import page
    from experiments.gpu_day.results import Results

    json_file = (options.json or (work if options.toy else MEASUREMENTS) / "gpu.json").absolute()
    page_file = (options.page or json_file.with_suffix(".md")).absolute()
    if page_file == json_file:
        raise UserError(f"--json {options.json}: is where the page would be written; choose another name, or --page")
    if options.page_only or options.plans_only:
        found = Results(json_file).all
        if "machine" not in found:
            raise UserError(f"{json_file}: holds no results; measure first")
        if options.plans_only and (options.toy or found["machine"].get("toy")):
            raise UserError("--plans-only: --toy measures on a CPU, for which there are no plans")
        try:
            text = page(found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{json_file}: was not written by this version of the command ({error!r})") from error
        if options.page_only:
            page_file.write_text(text)
            print(page_file)
            return 0
    for name in ("seconds", "decompose_seconds"):
        value = getattr(options, name)
        if value is not None and not 30 <= value < 1e6:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: should be at least 30")
    if options.beside < 0:
        raise UserError(f"--beside {options.beside}: should be 0 or more")
    for name in ("smollm2", "text"):
        if getattr(options, name) is not None and options.toy:
            raise UserError(f"--{name}: --toy decomposes a target of its own, on text of its own")
    return (run_plans if options.plans_only else run_day)(
        Asked(
            parts=options.part or PARTS,
            json=json_file,
            page=page_file,
            work=work,
            seconds=options.seconds,
            decompose_s=options.decompose_seconds,
            smollm2=None if options.smollm2 is None else options.smollm2.absolute(),
            text=None if options.text is None else options.text.absolute(),
            beside=options.beside,
            toy=options.toy,
        )
    )


if __name__ == "__main__":
    main()
