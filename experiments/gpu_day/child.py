"""One thing in a process of its own: `python -m experiments.gpu_day.child WHAT …`, which `children.py` starts.

It ends with the process that started it, also where that is killed: nothing would read what it finds, and it would
hold the card.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

PARENT = "GPU_DAY_PARENT"
"""Variable with the number of the process that started this one."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    if sys.platform == "linux" and PARENT in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):  # it had ended already
            os._exit(1)


def main() -> None:
    end_with_parent()
    if sys.argv[1:2] == ["pd"]:
        from param_decomp_lab.cli import main as pd

        sys.argv = ["pd", *sys.argv[2:]]
        pd()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("machine", "step", "plan", "count", "links", "run"))
    parser.add_argument("--name", help="of the item")
    parser.add_argument("--card", help="that `plan` compiles for, by its name in cards.csv")
    parser.add_argument("--run", type=Path, help="folder of the run")
    parser.add_argument("--toy", type=Path, help="folder of the toy items")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, JSON")
    options = parser.parse_args()
    from param_decomp_lab.folders import write_whole

    found = _found(options)
    write_whole(options.out, json.dumps(found, default=str))


def _found(options: argparse.Namespace) -> dict[str, Any]:
    from experiments.gpu_day.items import ITEMS, Links, Step, named, toy_items

    items = ITEMS if options.toy is None else toy_items(options.toy)
    match options.what:
        case "machine":
            import experiments.gpu_day.measure  # noqa: F401  (so that a missing package is missed at once)
            from experiments.gpu_day.machine import machine

            return machine(toy=options.toy is not None)
        case "count":
            from experiments.gpu_day.plan import count

            return {item.name: count(item) for item in items if isinstance(item, Step) and not item.needs}
        case "run":
            from experiments.gpu_day.decomposition import summarize

            return summarize(options.run)
    item = named(items, options.name)
    if isinstance(item, Links):
        from experiments.gpu_day.links import measure_links

        return measure_links(item)
    assert isinstance(item, Step)
    if options.what == "plan":
        from experiments.gpu_day.plan import plan

        return plan(item, options.card)
    from experiments.gpu_day.measure import measure

    return measure(item)


if __name__ == "__main__":
    main()
