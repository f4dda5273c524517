"""Drawing faults from a version of the code, and finding the place of a fault in another version of it.

A fault is named by content, since files move and names change between two versions: by the text of its statement and of
the statements before and after it, and by which of the statement's possible faults it is. In another version its place
is the statement of the same text, or, if names were changed, of the same syntax tree but for names. Of several such it
is the one whose surroundings are most alike; if two are equally so, there is none.
"""

import ast
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.mutation_operators import OPERATORS, Site, Statement, mutated, statements

LABORATORY = "param_decomp_lab"
"""Half of the faults are drawn from it, half from the other packages."""
ALIKE = 0.5
"""Least likeness of the surroundings of a statement in which names were changed."""


@dataclass(frozen=True)
class Fault:
    """``operator``, ``variant`` and ``number`` (of this operator and variant in the statement) say which fault."""

    id: int
    file: str
    line: int
    path: str
    head: str
    before: str
    after: str
    operator: str
    variant: int
    number: int
    original: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.id} {self.file}:{self.line} {self.operator}: {self.original} -> {self.replacement}"


@dataclass(frozen=True)
class Placed:
    """A fault in a file of a version. ``at_import``: its place is executed when the module is imported."""

    file: str
    site: Site
    at_import: bool
    source: str
    mutant: str

    @property
    def line(self) -> int:
        return self.site.node.lineno


@dataclass(frozen=True)
class Candidate:
    file: str
    statement: Statement

    @cached_property
    def shape(self) -> str:
        return shape(self.statement.head)


class Tree:
    """The mutable statements of a version of the code, by file, text and shape."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, list[Statement]] = {}
        self.by_head: dict[str, list[Candidate]] = defaultdict(list)
        self.by_shape: dict[str, list[Candidate]] = defaultdict(list)
        for path in sorted(path for package in packages_of(root) for path in (root / package).rglob("*.py")):
            file = str(path.relative_to(root))
            self.files[file] = statements(path.read_text())
            for statement in self.files[file]:
                candidate = Candidate(file, statement)
                self.by_head[statement.head].append(candidate)
                self.by_shape[candidate.shape].append(candidate)

    def place(self, fault: Fault) -> Placed | None:
        """Where the fault is in this version, if its place is found."""
        found = _most_alike(fault, self.by_head[fault.head], least=0.0)
        if found is None and not self.by_head[fault.head]:
            found = _most_alike(fault, self.by_shape[shape(fault.head)], least=ALIKE)
        if found is None:
            return None
        sites = [s for s in found.statement.sites if (s.operator, s.variant) == (fault.operator, fault.variant)]
        if fault.number >= len(sites):
            return None
        source, site = (self.root / found.file).read_text(), sites[fault.number]
        return Placed(found.file, site, found.statement.is_at_import, source, mutated(source, site))


def packages_of(root: Path) -> list[str]:
    """The packages of the project: not its tests and experiments."""
    return sorted(path.parent.name for path in root.glob("param_decomp*/__init__.py"))


def shape(text: str) -> str:
    """Code without its names."""
    if text.startswith(("def ", "class ")):
        text += ":"
    try:
        tree = ast.parse(f"{text} pass" if text.endswith(":") else text)
    except SyntaxError:  # the head of a `match` or `try`
        return text
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(getattr(node, field, None), str):
                setattr(node, field, "_")
    return ast.dump(tree)


def _most_alike(fault: Fault, candidates: list[Candidate], least: float) -> Candidate | None:
    """None, too, if two are equally alike."""

    def likeness(candidate: Candidate) -> float:
        s = candidate.statement
        neighbours = _likeness(fault.before, s.before) + _likeness(fault.after, s.after)
        names = ((fault.head, s.head), (fault.path, s.path), (Path(fault.file).name, Path(candidate.file).name))
        return (2 * neighbours + sum(SequenceMatcher(None, a, b).ratio() for a, b in names)) / 7

    scored = sorted(((likeness(c), n) for n, c in enumerate(candidates)), reverse=True)
    if not scored or scored[0][0] < least or (len(scored) > 1 and scored[0][0] - scored[1][0] < 1e-9):
        return None
    return candidates[scored[0][1]]


def _likeness(a: str, b: str) -> float:
    """Of two heads of statements: 1 where they are equal, nearly so where only names differ."""
    return 1.0 if a == b else 0.9 if shape(a) == shape(b) else SequenceMatcher(None, a, b).ratio() * 0.9


# ---- drawing ----


def draw(tree: Tree, seed: int, count: int, also: Tree | None = None) -> tuple[list[Fault], list[Fault]]:
    """``count`` faults, and those that were drawn but have no place in ``tree`` itself or in ``also``.

    Half are from the core and half from the laboratory; within each, a file gives as many as its share of the mutable
    statements, to the next whole number. A fault without a place is replaced by another of the same file, if it has
    one. No statement gives two. ValueError when there are not enough statements.
    """
    rng = random.Random(seed)
    found: list[Fault] = []
    unplaced: list[Fault] = []
    free = {file: list(of_file) for file, of_file in tree.files.items() if of_file}
    laboratory = [file for file in free if file.startswith(f"{LABORATORY}/")]
    core = [file for file in free if file not in laboratory]
    for files, share in ((core, count // 2), (laboratory, count - count // 2)):
        wanted = len(found) + share
        spread = _spread({file: len(free[file]) for file in files}, share, rng)
        while len(found) < wanted:
            if not any(free[file] for file in files):
                raise ValueError(f"{share} faults are wanted of {files[:1]} and others, which have places for fewer")
            file = next(spread)
            while free[file]:
                statement = free[file].pop(rng.randrange(len(free[file])))
                fault = _fault(len(found), file, statement, rng)
                if tree.place(fault) is not None and (also is None or also.place(fault) is not None):
                    found.append(fault)
                    break
                unplaced.append(fault)
    return found, unplaced


def _spread(sizes: dict[str, int], count: int, rng: random.Random) -> Iterator[str]:
    """Files in proportion to their sizes: ``count`` at equal distances, then any, where those have no more places."""
    step = sum(sizes.values()) / max(count, 1)
    mark, end = rng.uniform(0, step), 0
    for file, size in sizes.items():
        end += size
        while mark < end:
            yield file
            mark += step
    while True:
        yield rng.choices(list(sizes), list(sizes.values()))[0]


def _fault(number: int, file: str, statement: Statement, rng: random.Random) -> Fault:
    """One of the statement's: first the operator, so that the frequent ones do not crowd out the others."""
    operators = [operator for operator in OPERATORS if any(s.operator == operator for s in statement.sites)]
    operator = rng.choice(operators)
    site: Site = rng.choice([s for s in statement.sites if s.operator == operator])
    alike = [s for s in statement.sites if (s.operator, s.variant) == (operator, site.variant)]
    return Fault(
        id=number, file=file, line=site.node.lineno, path=statement.path, head=statement.head,
        before=statement.before, after=statement.after, operator=operator, variant=site.variant,
        number=next(n for n, s in enumerate(alike) if s is site), original=ast.unparse(site.node),
        replacement=site.text,
    )  # fmt: skip


def write_faults(path: Path, seed: int, faults: list[Fault], unplaced: list[Fault]) -> None:
    """As JSON, with the seed, and with what was drawn in vain."""
    said: dict[str, Any] = {"seed": seed, "faults": [asdict(f) for f in faults]}
    path.write_text(json.dumps(said | {"unplaced": [asdict(f) for f in unplaced]}, indent=1) + "\n")


def read_faults(path: Path) -> list[Fault]:
    """Of `write_faults`."""
    return [Fault(**fields) for fields in json.loads(path.read_text())["faults"]]
