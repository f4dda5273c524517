"""Counts what a reader of the code has to find their way through: files, lines, rooms and the imports between them.

    python -m experiments.benchmarks.structure                    # this checkout
    python -m experiments.benchmarks.structure --at 0934e07 HEAD  # commits, side by side

A room is a module or a package directly below one of the three packages. grimp reads the imports from the code,
including those under ``TYPE_CHECKING`` and within functions. The floors of a package are the rooms on its longest chain
of imports; rooms in a circle count as one.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("param_decomp_jax", "param_decomp_aot", "param_decomp_lab")
LONG = 400
"""The number of lines from which a module counts as long."""
ROOT = Path(__file__).resolve().parents[2]


def structure(root: Path) -> dict[str, int]:
    """Returns the figures of the checkout at ``root``, by name, from a process that imports from there."""
    child = "import experiments.benchmarks.structure as s, json, sys; print(json.dumps(s.measured(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = sys.argv[1:3]; {child}", str(root), str(ROOT)],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


def measured(root: str) -> dict[str, int]:
    """Returns the figures within this process: the packages are imported from the folder that comes first in
    `sys.path`."""
    figures: dict[str, int] = {}
    lengths: dict[Path, int] = {}
    for part in (*PACKAGES, "experiments", "tests"):
        files = sorted((Path(root) / part).rglob("*.py"))
        own = {file: len(file.read_text().splitlines()) for file in files}
        figures |= {f"{part}: files": len(own), f"{part}: lines": sum(own.values())}
        lengths |= own if part in PACKAGES else {}
    figures[f"modules with more than {LONG} lines"] = sum(n > LONG for n in lengths.values())
    for package in PACKAGES:
        imports = rooms_of(package)
        figures |= {
            f"{package}: rooms": len(imports),
            f"{package}: imports between rooms": sum(map(len, imports.values())),
            f"{package}: rooms in circles": sum(len(circle) for circle in circles(imports) if len(circle) > 1),
            f"{package}: floors": floors(imports),
        }
    return figures


def rooms_of(package: str) -> dict[str, set[str]]:
    """Returns the rooms of a package, and which of the others each imports."""
    import grimp

    graph = grimp.build_graph(package, cache_dir=None)

    def room(module: str) -> str:
        return module.split(".")[1]

    inner = [module for module in graph.modules if "." in module]
    imports: dict[str, set[str]] = {room(module): set() for module in inner}
    for module in inner:
        others = {room(m) for m in graph.find_modules_directly_imported_by(module) if "." in m}
        imports[room(module)] |= others - {room(module)}
    return imports


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Returns the rooms in sets: rooms that reach each other are in one set."""

    def reached(start: str) -> set[str]:
        found, todo = {start}, [start]
        while todo:
            new = imports[todo.pop()] - found
            found |= new
            todo += new
        return found

    by_room = {room: reached(room) for room in imports}
    together = {frozenset(other for other in found if room in by_room[other]) for room, found in by_room.items()}
    return [set(one) for one in together]


def floors(imports: dict[str, set[str]]) -> int:
    """Returns the number of rooms on the longest chain of imports; a circle counts as one."""
    of_room = {room: number for number, circle in enumerate(circles(imports)) for room in circle}
    below: dict[int, set[int]] = {number: set() for number in of_room.values()}
    for room, others in imports.items():
        below[of_room[room]] |= {of_room[other] for other in others} - {of_room[room]}

    def height(number: int) -> int:
        return 1 + max(map(height, below[number]), default=0)

    return max(map(height, below))


def at_commit(commit: str, folder: Path) -> Path:
    """Unpacks the files of a commit into a folder of their own, and returns that."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder / commit, filter="data")
    return folder / commit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", nargs="+", metavar="COMMIT", help="measure these commits instead of the checkout")
    commits = parser.parse_args().at
    with tempfile.TemporaryDirectory() as folder:
        roots = {commit: at_commit(commit, Path(folder)) for commit in commits} if commits else {"checkout": ROOT}
        columns = {name: structure(root) for name, root in roots.items()}
    table = Table(box=None)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure in next(iter(columns.values())):
        table.add_row(figure, *(f"{own[figure]:,}" for own in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
