"""`experiments/mutations.py` without whole test suites: operators, places, which tests judge, results."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from experiments.mutation_operators import Site, mutated, statements
from experiments.mutation_places import Fault, Tree, draw, read_faults, write_faults
from experiments.mutations import (
    Clock,
    Cover,
    JudgingTest,
    Result,
    cover,
    judge_one,
    read_results,
    table,
)

MODULE = '''"""A docstring: 1 < 2."""
import os
from typing import TYPE_CHECKING

__all__ = ["area", 1 < 2]
LIMIT: "int" = 3
"""Of λ < 1."""

if TYPE_CHECKING:
    import sys


class Box:
    sides: int = 4

    @property
    def area(self, scale: float = 2.0) -> "float":
        print(f"λ {1 + 2}")
        if self.λ <= 0 or not self.sides:
            raise ValueError(f"no area: {self.λ - 1}")
        self.seen += 1
        other = call(self.λ, 5, strict=True, axis=-1)
        while self.λ - 1 > LIMIT:
            self.settle()
            break
        return scale * other
'''
EVERY_FAULT = [
    ("constant", "3", "4"),
    ("constant", "3", "2"),
    ("constant", "4", "5"),
    ("constant", "4", "3"),
    ("constant", "2.0", "4.0"),
    ("boolean", "self.λ <= 0 or not self.sides", "(self.λ <= 0 and (not self.sides))"),
    ("comparison", "self.λ <= 0", "(self.λ < 0)"),
    ("comparison", "self.λ <= 0", "(self.λ >= 0)"),
    ("constant", "0", "1"),
    ("boolean", "not self.sides", "self.sides"),
    ("statement", "raise ValueError(f'no area: {self.λ - 1}')", "pass"),
    ("statement", "self.seen += 1", "pass"),
    ("constant", "1", "2"),
    ("constant", "1", "0"),
    ("argument", "call(self.λ, 5, strict=True, axis=-1)", "call(self.λ, strict=True, axis=-1)"),
    ("argument", "call(self.λ, 5, strict=True, axis=-1)", "call(self.λ, 5, strict=True)"),
    ("constant", "5", "6"),
    ("constant", "5", "4"),
    ("sign", "-1", "1"),
    ("constant", "1", "2"),
    ("constant", "1", "0"),
    ("comparison", "self.λ - 1 > LIMIT", "(self.λ - 1 >= LIMIT)"),
    ("comparison", "self.λ - 1 > LIMIT", "(self.λ - 1 < LIMIT)"),
    ("sign", "self.λ - 1", "(self.λ + 1)"),
    ("constant", "1", "2"),
    ("constant", "1", "0"),
    ("statement", "self.settle()", "pass"),
    ("statement", "break", "pass"),
    ("sign", "scale * other", "(scale / other)"),
]


def sites(source: str) -> list[Site]:
    return [site for statement in statements(source) for site in statement.sites]


def test_every_fault_there_is_and_no_other() -> None:
    found = [(s.operator, ast.unparse(s.node), s.text) for s in sites(MODULE)]
    assert [fault for fault in found if fault[:2] != ("sign", "self.seen += 1")] == EVERY_FAULT


def test_one_place_is_changed_and_the_rest_stays() -> None:
    for site in sites(MODULE):
        mutant = mutated(MODULE, site)
        assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(MODULE))
        changed = [(a, b) for a, b in zip(MODULE.splitlines(), mutant.splitlines(), strict=True) if a != b]
        assert len(changed) == 1, changed
    # Columns after a letter of two bytes.
    (site,) = (s for s in sites(MODULE) if s.text == "(self.λ >= 0)")
    assert "        if (self.λ >= 0) or not self.sides:\n" in mutated(MODULE, site)


def version(folder: Path, **files: str) -> Tree:
    for name, text in {"param_decomp_jax/__init__": "", "param_decomp_lab/__init__": "", **files}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(folder)


OLD = """
def judged(scene, limit):
    n = len(scene) + 1
    for site in scene:
        n += site.count - 1
    return n < limit


def other(scene):
    n = len(scene) + 1
    return n
"""
RENAMED = """
def unrelated(a):
    return a * 2


def measure(clean_pass, most):
    total = len(clean_pass) + 1
    for site in clean_pass:
        total += site.count - 1
    return total < most
"""


def faults_of(tree: Tree, file: str) -> list[Fault]:
    found, _ = draw(Tree(tree.root), 0, 2 * len(tree.files[file]))
    return found


@pytest.fixture
def old(tmp_path: Path) -> tuple[Tree, list[Fault]]:
    tree = version(tmp_path / "old", **{"param_decomp_jax/a": OLD, "param_decomp_lab/b": MODULE})
    return tree, draw(tree, seed=1, count=8)[0]


def test_every_fault_has_its_own_place(old: tuple[Tree, list[Fault]]) -> None:
    tree, faults = old
    for fault in faults:
        placed = tree.place(fault)
        assert placed is not None
        assert (placed.file, placed.line) == (fault.file, fault.line)
        assert fault.replacement in placed.mutant
    assert {fault.file.split("/")[0] for fault in faults[:4]} == {"param_decomp_jax"}
    assert {fault.file.split("/")[0] for fault in faults[4:]} == {"param_decomp_lab"}


def test_moved_code_and_changed_names(old: tuple[Tree, list[Fault]], tmp_path: Path) -> None:
    """Files move, `param_decomp_jax` gets a sister, names change; what is gone has no place."""
    tree, _ = old
    moved = {"param_decomp_aot/__init__": "", "param_decomp_aot/deep/c": RENAMED, "param_decomp_lab/room/b": MODULE}
    new = version(tmp_path / "new", **moved)
    in_a, in_b = (draw(tree, seed, 8)[0] for seed in (2, 3))
    for fault in in_a + in_b:
        placed = new.place(fault)
        if fault.path == "other()":
            assert placed is None or placed.file.endswith("c.py"), fault
        elif fault.file.endswith("a.py"):
            assert placed is not None, fault
            assert placed.file == "param_decomp_aot/deep/c.py"
        else:
            assert placed is not None, fault
            assert (placed.file, placed.line) == ("param_decomp_lab/room/b.py", fault.line)


def test_the_one_of_two_whose_surroundings_are_alike(tmp_path: Path) -> None:
    text = "def {}(x):\n    y = {}(x)\n    return x < 1\n"
    old = version(tmp_path / "old", **{"param_decomp_jax/a": text.format("f", "one"), "param_decomp_lab/b": MODULE})
    (fault,) = (f for f in draw(old, 0, 2)[0][:1])
    both = text.format("g", "two") + text.format("f", "one")
    new = version(tmp_path / "new", **{"param_decomp_lab/c": both})
    placed = new.place(fault)
    assert placed is not None
    assert placed.line == fault.line + 3
    twice = version(tmp_path / "twice", **{"param_decomp_lab/c": text.format("f", "one"), "param_decomp_lab/d": ""})
    assert twice.place(fault) is not None
    (tmp_path / "twice" / "param_decomp_lab" / "d").mkdir()
    (tmp_path / "twice" / "param_decomp_lab" / "d" / "c.py").write_text(text.format("f", "one"))
    assert Tree(tmp_path / "twice").place(fault) is None


def test_drawing_is_repeatable_and_replaces_what_has_no_place(old: tuple[Tree, list[Fault]], tmp_path: Path) -> None:
    tree, faults = old
    assert draw(tree, 1, 8) == (faults, [])
    assert draw(tree, 2, 8)[0] != faults
    new = version(tmp_path / "new", **{"param_decomp_jax/c": RENAMED, "param_decomp_lab/b": MODULE})
    common, unplaced = draw(tree, 4, 6, new)
    assert len(common) == 6
    assert all(new.place(fault) is not None for fault in common)
    write_faults(tmp_path / "faults.json", 4, common, unplaced)
    assert read_faults(tmp_path / "faults.json") == common
    assert json.loads((tmp_path / "faults.json").read_text())["seed"] == 4
    with pytest.raises(ValueError, match="faults are wanted"):
        draw(tree, 1, 1000)


def test_which_tests_judge(old: tuple[Tree, list[Fault]], tmp_path: Path) -> None:
    _, (fault, other, *_) = old
    tests = {name: {"seconds": s, "passed": name != "t/a.py::bad"}
             for name, s in (("t/a.py::slow", 9.0), ("t/a.py::quick", 1.0), ("t/a.py::bad", 0.1),
                             ("t/a.py::beside", 2.0), ("t/b.py::else", 1.0))}  # fmt: skip
    faults = {fault.id: ["t/a.py::slow", "t/a.py::quick", "t/a.py::bad"]}
    (tmp_path / "cover.json").write_text(json.dumps({"tests": tests, "faults": faults}))
    cover = Cover.read(tmp_path / "cover.json")

    def chosen(budget: float) -> list[str]:
        return [test.id for test in cover.judging(fault, budget)]

    assert chosen(100) == ["t/a.py::quick", "t/a.py::slow", "t/a.py::beside"]
    assert chosen(11) == ["t/a.py::quick", "t/a.py::slow"]
    assert chosen(0.5) == ["t/a.py::quick"]
    assert cover.judging(other) == []


WATCHED = """'''Of a module.'''
LIMIT = 3 + 1

def f(x):
    '''Of f.'''
    y = x + 1
    y -= 1
    return y + 2 + 3

def g(x):
    if x < 0:
        return 0
    elif x < 1:
        raise ValueError
    return -x
"""


@pytest.mark.slow
def test_what_tests_execute(tmp_path: Path) -> None:
    """Here and in processes that they start, every kind of place; a test that fails is known to."""
    version(tmp_path, **{"param_decomp_jax/m": WATCHED, "param_decomp_lab/b": MODULE})
    (tmp_path / "tests").mkdir()
    process = "subprocess.run([sys.executable, '-c', 'from param_decomp_jax.m import g; g(1)'], check=True)"
    (tmp_path / "tests" / "test_m.py").write_text(
        "import subprocess, sys\nfrom param_decomp_jax.m import f\n\ndef test_here():\n    assert f(1) == 6\n\n"
        f"def test_process():\n    {process}\n\ndef test_fails():\n    assert f(1) == 3\n"
    )
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    faults = draw(Tree(tmp_path), 0, 18)[0]
    cover(faults, Tree(tmp_path).root, tmp_path / "cover.json", 1, "not slow")
    found = Cover.read(tmp_path / "cover.json")
    assert {i.partition("::")[2] for i in found.tests} == {"test_here", "test_process"}
    here, process, both = {"test_here"}, {"test_process"}, {"test_here", "test_process"}
    by = {2: both, 6: here, 7: here, 8: here, 11: process, 12: set(), 13: process, 14: set(), 15: process}
    of_module = [fault for fault in faults if fault.file.endswith("m.py")]
    assert {fault.line for fault in of_module} == by.keys()
    for fault in of_module:
        assert {i.partition("::")[2] for i in found.of_fault.get(fault.id, ())} == by[fault.line], fault


@pytest.mark.parametrize(
    ("assertion", "verdict"),
    [
        ("f(1) == 2", "caught"),
        pytest.param("f(1) > 0", "survived", marks=pytest.mark.slow),
        pytest.param("g(1)", "caught at import", marks=pytest.mark.slow),
    ],
)
def test_judging_by_pytest(tmp_path: Path, assertion: str, verdict: str) -> None:
    source = "def f(x):\n    return x + 1\n"
    tree = version(tmp_path, **{"param_decomp_jax/m": source, "param_decomp_lab/b": MODULE})
    name = "g" if "g(" in assertion else "f"
    code = f"from param_decomp_jax.m import {name}\n\ndef test_it():\n    assert {assertion}\n"
    (tmp_path / "test_m.py").write_text(code)
    (fault,) = (f for f in draw(tree, 0, 2)[0][:1])
    placed = tree.place(fault)
    assert placed is not None
    helper = tmp_path / "helper"
    got, _ = judge_one(tmp_path, placed, [JudgingTest("test_m.py::test_it", 0.1)], Clock(), helper)
    assert got == verdict
    assert (tmp_path / placed.file).read_text() == source  # mended
    assert judge_one(tmp_path, placed, [], Clock(), helper)[0] == "not executed"


def test_results_survive_an_interruption_and_make_a_table(old: tuple[Tree, list[Fault]], tmp_path: Path) -> None:
    _, faults = old
    lines = [
        json.dumps({"fault": n, "verdict": verdict, "by": "", "file": "", "line": 1, "tests": 1, "seconds": 30.0})
        for n, verdict in ((0, "caught"), (1, "survived"), (2, "timeout"), (3, "not placed"))
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(lines) + '\n{"fault": 4, "verd')
    results = read_results(tmp_path / "r.jsonl")
    assert [result.fault for result in results] == [0, 1, 2, 3]
    assert read_results(tmp_path / "none.jsonl") == []
    other = [Result(n, "caught", "", "", 1, 1, 30.0) for n in range(4)]
    page = table(faults[:4], {"before": results, "after": other})
    assert "3 of 4 faults were judged in every version." in page
    assert "| all | 3 | 2 (67%) | 3 (100%) |" in page
    assert page.count("survived / caught") == 1
