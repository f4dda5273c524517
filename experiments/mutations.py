"""How many faults, put into the code by a program, the project's tests notice; for two versions of the code.

    python -m experiments.mutations draw --seed 1 --count 120 --tree OLD --also NEW --out faults.json
    python -m experiments.mutations cover faults.json --tree OLD --out cover-old.json   # which tests execute which
    python -m experiments.mutations judge faults.json --tree OLD --cover cover-old.json --out results-old.jsonl
    python -m experiments.mutations cover faults.json --tree NEW --out cover-new.json
    python -m experiments.mutations judge faults.json --tree NEW --cover cover-new.json --out results-new.jsonl
    python -m experiments.mutations table faults.json results-old.jsonl results-new.jsonl

OLD and NEW are checkouts of the two versions, with nothing uncommitted in their packages and tests. `cover` runs the
fast tests once, with a call at the place of every fault that notes the test. `judge` goes on where it was interrupted:
one line of results for each fault. Give `cover` the `--marks` of a version that has others.

A fault is judged by the tests that execute its place, in processes that they start, too: quickest first, until one
fails. Then by the other tests of the same files, which may share a fixture or a compiled program with those; all within
a budget of seconds. What no test notices has survived. A fault is noticed, too, if the tests take much longer than
without it (`timeout`). A test that fails without any fault judges none.
"""

import argparse
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.mutation_operators import watched
from experiments.mutation_places import Fault, Placed, Tree, draw, read_faults, write_faults

MARKS = "not slow and not acceptance and not slurm and not plugin"
BUDGET_S = 200.0
"""Of tests, by the time that they take without a fault, for one fault."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "ci", "-p", "mutation_helper")
"""Hypothesis' profile `ci` has no deadlines, which slow machines and tracing miss, and draws the same every time."""
PATIENCE = 3.0
START_S = 240.0
"""Tests may take PATIENCE times as long as without a fault, and START_S for fixtures that several of them share."""
_Item = TypeVar("_Item")
CATCHING = ("caught", "caught at import", "timeout")

HELPER = '''
"""In the path of Python, for all processes. `at` notes which test comes by a fault, the rest how long tests take."""
import json, os
from pathlib import Path

OUT = Path(os.environ["MUTATION_HELPER"])
_seen = set()

def at(fault):
    test = os.environ.get("PYTEST_CURRENT_TEST")  # set by pytest, inherited by processes
    if test is not None and (fault, test) not in _seen:
        _seen.add((fault, test))
        with open(OUT / f"{os.getpid()}.at", "a") as file:
            file.write(json.dumps([fault, test.rpartition(" (")[0]]) + "\\n")

def pytest_sessionstart(session):
    # Programs that were compiled for another fault, or for none, are found again; the tests' own folder of them is new.
    if not hasattr(session.config, "workerinput"):
        folder = session.config._tmp_path_factory.getbasetemp() / "tiny"
        folder.mkdir()
        (folder / "compiled").symlink_to(OUT / "compiled")

def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(OUT / "tests", "a") as file:
            file.write(json.dumps([report.nodeid, report.duration, report.passed]) + "\\n")
'''


def helped(folder: Path, code: Path) -> dict[str, str]:
    """The environment of processes that shall find HELPER, and, wherever they work, the packages in ``code``. What
    HELPER writes is in ``folder``."""
    (folder / "compiled").mkdir(parents=True, exist_ok=True)
    (folder / "mutation_helper.py").write_text(HELPER)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # not of our caller
    return {
        **outside,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, code))),
        "MUTATION_HELPER": str(folder),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


# ---- which tests execute a fault's place ----


@dataclass(frozen=True)
class JudgingTest:
    """``seconds``: without a fault."""

    id: str
    seconds: float

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


@dataclass
class Cover:
    """Of one version: its tests, and for each fault, by its id, those that execute its place. A place in what a module
    does at import belongs to all tests that call a function of the module."""

    tests: dict[str, JudgingTest]
    of_fault: dict[int, set[str]]

    @classmethod
    def read(cls, path: Path) -> "Cover":
        """Of what `cover` has written; without tests that failed."""
        said = json.loads(path.read_text())
        tests = {i: JudgingTest(i, t["seconds"]) for i, t in said["tests"].items() if t["passed"]}
        return cls(tests, {int(fault): tests.keys() & ids for fault, ids in said["faults"].items()})

    def judging(self, fault: Fault, budget: float = BUDGET_S) -> list[JudgingTest]:
        """Tests in the order in which they are to judge a fault; not more than the budget in all, but at least one."""
        direct = self.of_fault.get(fault.id, set())
        files = {self.tests[i].file for i in direct}
        beside = {i for i, test in self.tests.items() if test.file in files} - direct
        found: list[JudgingTest] = []
        for ids in (direct, beside):
            for test in sorted((self.tests[i] for i in ids), key=lambda test: (test.seconds, test.id)):
                budget -= test.seconds
                if budget < 0 and found:
                    return found
                found.append(test)
        return found


def cover(faults: list[Fault], tree: Path, out: Path, workers: int, marks: str) -> None:
    """Runs the tests once, ``workers`` at a time, and writes who came by which fault to ``out``."""
    here, by_file = Tree(tree), defaultdict(list)
    for fault in faults:
        placed = here.place(fault)
        if placed is not None:
            by_file[placed.file].append((fault.id, placed.site, placed.at_import))

    def one(code: Path, _: None) -> None:
        for file, sites in by_file.items():
            (code / file).write_text(watched((code / file).read_text(), sites))
        with tempfile.TemporaryDirectory(prefix="param-decomp-cover-") as name:
            environment = helped(Path(name), code)
            command = [sys.executable, *PYTEST, "-n", str(workers), "--dist", "worksteal", "-m", marks]
            command += ["--basetemp", f"{name}/tmp"]
            with out.with_suffix(".log").open("w") as log:
                subprocess.run(command, cwd=code, env=environment, stdout=log, stderr=log, check=False)
            if not (Path(name) / "tests").exists():
                raise SystemExit(f"no test has run: see {out.with_suffix('.log')}")
            tests: dict[str, dict[str, Any]] = {}
            for line in (Path(name) / "tests").read_text().splitlines():
                test, seconds, passed = json.loads(line)
                so_far = tests.setdefault(test, {"seconds": 0.0, "passed": True})
                so_far["seconds"] = round(so_far["seconds"] + seconds, 3)
                so_far["passed"] &= passed
            came_by = defaultdict(set)
            for notes in Path(name).glob("*.at"):
                for line in notes.read_text().splitlines():
                    fault, test = json.loads(line)
                    came_by[fault].add(test)
            said = {"tests": tests, "faults": {n: sorted(ids) for n, ids in sorted(came_by.items())}}
            out.write_text(json.dumps(said))
        good = sum(t["passed"] for t in tests.values())
        print(f"{good} of {len(tests)} tests passed; they execute {len(came_by)} of {len(faults)} faults")

    _in_copies(tree, 1, [None], one)


# ---- judging ----


@dataclass(frozen=True)
class Result:
    """``verdict``: one of CATCHING, "survived", "not executed" or "not placed". ``by``: the test that failed.
    ``tests``: how many were to judge."""

    fault: int
    verdict: str
    by: str
    file: str
    line: int
    tests: int
    seconds: float


class Clock:
    """Times of modification that differ by whole seconds: Python takes compiled files of an equal one for valid."""

    def __init__(self) -> None:
        self._times = itertools.count(int(time.time()) + 10)
        self._lock = threading.Lock()

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        with self._lock:
            now = next(self._times)
        os.utime(path, (now, now))


def judge_one(code: Path, placed: Placed, tests: Sequence[JudgingTest], clock: Clock, helper: Path) -> tuple[str, str]:
    """Verdict, and by whom, of a fault in the copy ``code``, which is mended again. ``helper``: see `helped`."""
    path = code / placed.file
    if not tests:
        return "not executed", ""
    clock.write(path, placed.mutant)
    try:
        limit = START_S + PATIENCE * sum(test.seconds for test in tests)
        status, said = run_tests(code, [test.id for test in tests], limit, helped(helper, code))
        if status is None:
            return "timeout", ""
        if status in (2, 3, 4):  # nothing could be collected: the fault is in what runs at import
            return "caught at import", said.strip().splitlines()[-1][:200]
        if status == 1:
            failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            return "caught", (failed or [said[-200:]])[0].split(" - ")[0]
        assert status == 0, said
        return "survived", ""
    finally:
        clock.write(path, placed.source)


def run_tests(code: Path, ids: Sequence[str], limit: float, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """pytest's exit status, or None where the limit in seconds was reached, and what it said."""
    with tempfile.TemporaryDirectory(prefix="param-decomp-mutant-") as folder:
        wanted = Path(folder) / "ids"
        wanted.write_text("\n".join(ids))
        command = [sys.executable, *PYTEST, "-n", "0", "-x", "--tb", "no", "-rfE"]
        command += ["--basetemp", f"{folder}/tmp", f"@{wanted}"]
        with (Path(folder) / "said").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=code, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # Also what the tests started and left: all of it is in the session that is named after the process.
                _kill(process)
            output.seek(0)
            return status, output.read()


def _kill(process: "subprocess.Popen[Any]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def judge(faults: list[Fault], tree: Path, covered: Path, out: Path, workers: int, budget: float) -> None:
    """Every fault that ``out`` has no line of yet."""
    of, here, clock, lock = Cover.read(covered), Tree(tree), Clock(), threading.Lock()
    done = {result.fault for result in read_results(out)}

    def one(code: Path, fault: Fault) -> None:
        started, placed, tests = time.monotonic(), here.place(fault), of.judging(fault, budget)
        verdict, by = ("not placed", "") if placed is None else judge_one(code, placed, tests, clock, Path(name))
        file, line = (placed.file, placed.line) if placed else ("", 0)
        result = Result(fault.id, verdict, by, file, line, len(tests), round(time.monotonic() - started, 1))
        with lock, out.open("a") as results:
            results.write(json.dumps(asdict(result)) + "\n")
            print(f"{result.seconds:6.0f} s  {verdict:14} {fault}  [{by}]", flush=True)

    with tempfile.TemporaryDirectory(prefix="param-decomp-judge-") as name:
        _in_copies(tree, workers, [fault for fault in faults if fault.id not in done], one)


def read_results(path: Path) -> list[Result]:
    """Whole lines; the last may have been cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Result(**json.loads(line)))
        except ValueError:
            continue
    return found


def _in_copies(tree: Path, workers: int, work: Iterable[_Item], one: Callable[[Path, _Item], None]) -> None:
    """Does the work by threads, each with a copy of the tree; stops all at the first exception, which is raised."""
    to_do: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in work:
        to_do.put(item)
    failures: list[BaseException] = []

    def worker(code: Path) -> None:
        while not failures:
            try:
                one(code, to_do.get_nowait())
            except queue.Empty:
                return
            except BaseException as failure:
                failures.append(failure)

    git = ("git", "-C", str(tree))
    if subprocess.run([*git, "status", "--porcelain", "--", "param_decomp_*", "tests"], capture_output=True).stdout:
        raise SystemExit(f"{tree}: packages or tests have uncommitted changes")
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        copies = [Path(folder) / str(n) for n in range(workers)]
        try:
            for code in copies:
                subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(code), "HEAD"], check=True)
            threads = [threading.Thread(target=worker, args=(code,)) for code in copies]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt as interruption:  # what is being judged comes to its end; nothing else is begun
                failures.append(interruption)
                for thread in threads:
                    thread.join()
        finally:
            for code in copies:
                subprocess.run([*git, "worktree", "remove", "--force", str(code)], check=False)
    if failures:
        raise failures[0]


# ---- the table ----


def table(faults: list[Fault], of_versions: dict[str, list[Result]]) -> str:
    """In Markdown: faults noticed by package and operator, for each version, and every fault judged differently."""
    by_version = {name: {r.fault: r for r in results} for name, results in of_versions.items()}
    common = [f for f in faults if all(f.id in r and r[f.id].verdict != "not placed" for r in by_version.values())]
    lines = [f"{len(common)} of {len(faults)} faults were judged in every version.", ""]
    lines += [f"| | faults | {' | '.join(by_version)} |", "|---|---|" + "---|" * len(by_version)]

    def row(name: str, of: list[Fault]) -> str:
        caught = [sum(r[f.id].verdict in CATCHING for f in of) for r in by_version.values()]
        return f"| {name} | {len(of)} | {' | '.join(f'{n} ({n / max(len(of), 1):.0%})' for n in caught)} |"

    lines.append(row("all", common))
    for name in sorted({f.file.partition("/")[0] for f in common}):
        lines.append(row(f"`{name}`", [f for f in common if f.file.startswith(f"{name}/")]))
    for name in sorted({f.operator for f in common}):
        lines.append(row(f"{name}", [f for f in common if f.operator == name]))
    for name, results in by_version.items():
        counts = Counter(results[f.id].verdict for f in common)
        minutes = sum(results[f.id].seconds for f in common) / 60
        said = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
        lines += ["", f"{name}: {said}; {minutes:.0f} minutes of a worker."]
    lines += ["", "Judged differently, or noticed by no version:", ""]
    for f in common:
        verdicts = [r[f.id].verdict for r in by_version.values()]
        if len({v in CATCHING for v in verdicts}) > 1 or not any(v in CATCHING for v in verdicts):
            lines.append(f"- {f.file}:{f.line} `{f.original}` → `{f.replacement}`: {' / '.join(verdicts)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw faults")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=120)
    drawing.add_argument("--tree", type=Path, default=Path(), help="the version to draw from")
    drawing.add_argument("--also", type=Path, help="a version in which each must have a place, too")
    drawing.add_argument("--out", type=Path, required=True)
    covering = commands.add_parser("cover", help="find which tests execute which faults")
    covering.add_argument("faults", type=Path)
    covering.add_argument("--marks", default=MARKS, help="as pytest -m takes them")
    judging = commands.add_parser("judge", help="have faults judged by the tests")
    judging.add_argument("faults", type=Path)
    judging.add_argument("--cover", type=Path, required=True, help="what `cover` wrote of this tree")
    judging.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of tests for a fault")
    for command in (covering, judging):
        command.add_argument("--tree", type=Path, default=Path())
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--workers", type=int, default=2)
    printing = commands.add_parser("table", help="compare results")
    printing.add_argument("faults", type=Path)
    printing.add_argument("results", type=Path, nargs="+")
    o = parser.parse_args()
    if o.command == "draw":
        found, unplaced = draw(
            Tree(o.tree.resolve()), o.seed, o.count, None if o.also is None else Tree(o.also.resolve())
        )
        write_faults(o.out, o.seed, found, unplaced)
        print(f"seed {o.seed}: {len(found)} faults in {len({f.file for f in found})} files, to {o.out}")
        for fault in unplaced:
            print(f"has no place in {o.also}: {fault}")
    elif o.command == "cover":
        cover(read_faults(o.faults), o.tree.resolve(), o.out.resolve(), o.workers, o.marks)
    elif o.command == "judge":
        judge(read_faults(o.faults), o.tree.resolve(), o.cover, o.out, o.workers, o.budget)
    else:
        print(table(read_faults(o.faults), {path.stem: read_results(path) for path in o.results}))


if __name__ == "__main__":
    main()
