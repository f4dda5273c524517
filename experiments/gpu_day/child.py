"""One thing in a process of its own: `python -m experiments.gpu_day.child WHAT …`, which `children.py` starts.

It ends with the process that started it, also where that is killed: nothing would read what it finds, and it would
hold the card.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PARENT = "GPU_DAY_PARENT"
"""Variable with the number of the process that started this one."""
NOT_NEEDED = ("pyarrow", "orbax", "matplotlib")
"""Packages that modules of the laboratory import and that no measurement of a step uses; large ones, and not on every
machine with a card. A decomposition does need them."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    if sys.platform == "linux" and PARENT in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):  # it had ended already
            os._exit(1)


class _StandIns(MetaPathFinder, Loader):
    """Modules whose every attribute can be named and called, for packages that are imported and not used."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        setattr(module, "__getattr__", _anything)  # noqa: B010  (mypy refuses the assignment)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def stand_in_for_missing() -> None:
    """Before anything of the laboratory is imported."""
    sys.meta_path.append(_StandIns([name for name in NOT_NEEDED if importlib.util.find_spec(name) is None]))


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
    if options.what != "run":
        stand_in_for_missing()
    found = _found(options)
    unfinished = options.out.with_suffix(".new")
    unfinished.write_text(json.dumps(found, default=str))
    unfinished.replace(options.out)


def _found(options: argparse.Namespace) -> dict[str, Any]:
    from experiments.gpu_day.items import ITEMS, Links, Step, named, toy_items

    items = ITEMS if options.toy is None else toy_items(options.toy)
    match options.what:
        case "machine":
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
