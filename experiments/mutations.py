"""How many faults, put into the code by a program, the project's tests notice; for two versions of the code.

    pip install coverage
    python -m experiments.mutations draw --seed 1 --count 120 --tree OLD --also NEW --out faults.json
    python -m experiments.mutations cover --tree OLD --out cover-old       # which tests execute which lines
    python -m experiments.mutations judge faults.json --tree OLD --cover cover-old --out results-old.jsonl
    python -m experiments.mutations cover --tree NEW --out cover-new
    python -m experiments.mutations judge faults.json --tree NEW --cover cover-new --out results-new.jsonl
    python -m experiments.mutations table faults.json results-old.jsonl results-new.jsonl

OLD and NEW are checkouts of the two versions, with nothing uncommitted in their packages and tests. `cover` and `judge`
go on where they were interrupted: one file of coverage for each file of tests, one line of results for each fault.

A fault is judged by the tests that execute its line, in processes that they start, too: quickest first, until one
fails. Then by the other tests of the same files, which may share a fixture or a compiled program with those, and, for a
fault in the laboratory, by tests that start processes; all within a budget of seconds. What no test notices has
survived. A fault is noticed, too, if the tests take much longer than without it (`timeout`). A test that fails without
any fault judges none.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from experiments.mutation_places import Fault, Placed, Tree, draw, packages_of, read_faults, write_faults

MARKS = "not slow and not slurm and not plugin"
BUDGET_S = 300.0
"""Of tests, by the time that they take without a fault, for one fault."""
PYTEST = ("-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "ci")
"""Hypothesis' profile `ci` has no deadlines, which slow machines and tracing miss, and draws the same every time."""
PATIENCE = 3.0
START_S = 90.0
"""A stage may take PATIENCE times as long as without a fault, and START_S for processes to start."""
_Item = TypeVar("_Item")
CATCHING = ("caught", "caught at import", "timeout")

PLUGIN = '''
"""Which lines each test executes, how long it takes, which start processes."""
import json, os, sys, time
import coverage

OUT = os.environ["MUTATION_COVER"]
cov = coverage.Coverage(config_file=OUT + "/rc")
cov.start()
os.environ["COVERAGE_PROCESS_START"] = OUT + "/rc_child"
tests, current = {}, [None]

def _audit(event, arguments):
    if event == "subprocess.Popen" and current[0] and "param_decomp" in str(arguments[1]) + str(arguments[0]):
        tests[current[0]]["starts_processes"] = True

sys.addaudithook(_audit)

def pytest_runtest_logstart(nodeid, location):
    current[0] = nodeid
    tests[nodeid] = {"seconds": 0.0, "passed": True, "starts_processes": False}
    cov.switch_context(nodeid)

def pytest_runtest_logreport(report):
    tests[report.nodeid]["seconds"] += report.duration
    if report.failed or report.skipped:
        tests[report.nodeid]["passed"] = False

def pytest_runtest_logfinish(nodeid, location):
    cov.switch_context("")
    current[0] = None

def pytest_sessionfinish(session, exitstatus):
    cov.stop()
    cov.save()
    with open(OUT + "/tests.json", "w") as file:
        json.dump(tests, file)
'''
RC = "[run]\ndata_file = {folder}/data/coverage\nparallel = true\nsource =\n{source}"
"""Of coverage.py; a process that a test starts gets the test as its context."""


# ---- which tests execute a line ----


@dataclass(frozen=True)
class JudgingTest:
    """``seconds``: without a fault. ``starts_processes``: of this package."""

    id: str
    seconds: float
    starts_processes: bool

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


@dataclass
class Cover:
    """Of one version. ``lines``: tests by file and line; line 0 has all tests that execute anything of a file's
    functions."""

    tests: dict[str, JudgingTest] = field(default_factory=dict)
    lines: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def read(cls, folder: Path) -> "Cover":
        """Everything that `cover` has written."""
        found = cls()
        for path in sorted(folder.glob("*.json")):
            said = json.loads(path.read_text())
            tests = said["tests"]
            good = {i: JudgingTest(i, t["seconds"], t["starts_processes"]) for i, t in tests.items() if t["passed"]}
            found.tests |= good
            for file, by_line in said["lines"].items():
                for line, ids in by_line.items():
                    kept = good.keys() & ids
                    found.lines[file, int(line)] |= kept
                    found.lines[file, 0] |= kept
        return found

    def stages(self, placed: Placed, budget: float = BUDGET_S) -> list[tuple[str, list[JudgingTest]]]:
        """Tests that are to judge a fault, by the reason why, quickest first; not more than the budget in all."""
        lines = [0] if placed.at_import else range(placed.line, placed.last_line + 1)
        direct = set().union(*(self.lines[placed.file, line] for line in lines))
        files = {self.tests[i].file for i in direct}
        beside = {i for i, test in self.tests.items() if test.file in files} - direct
        processes: set[str] = set()
        if "param_decomp_lab" in placed.file:
            processes = {i for i, test in self.tests.items() if test.starts_processes} - direct - beside
        found: list[tuple[str, list[JudgingTest]]] = []
        left = budget
        for why, ids in (("executes it", direct), ("beside", beside), ("processes", processes)):
            chosen: list[JudgingTest] = []
            for test in sorted((self.tests[i] for i in ids), key=lambda test: (test.seconds, test.id)):
                left -= test.seconds
                if left < 0 and (chosen or found):
                    break
                chosen.append(test)
            if chosen:
                found.append((why, chosen))
            if left < 0:
                break
        return found


def cover_file(code: Path, file: str, out: Path, marks: str) -> None:
    """Runs one file of tests in the folder ``code`` and writes who executed what to ``out``."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="param-decomp-cover-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        # Python runs a module of this name when it starts: how processes that tests start are measured.
        (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        (folder / "mutation_cover.py").write_text(PLUGIN)
        source = "".join(f"    {code / package}\n" for package in packages_of(code))
        (folder / "rc").write_text(RC.format(folder=folder, source=source))
        (folder / "rc_child").write_text(RC.format(folder=folder, source=source) + "context = ${PYTEST_CURRENT_TEST}\n")
        environment = {**os.environ, "PYTHONPATH": name, "MUTATION_COVER": name}
        command = [sys.executable, *PYTEST, "-v", "-p", "mutation_cover", "-m", marks]
        command += ["--basetemp", str(folder / "tmp"), file]
        log = out.with_suffix(".log")
        with log.open("w") as output:
            ended = subprocess.run(command, cwd=code, env=environment, stdout=output, stderr=output, check=False)
        if not (folder / "tests.json").exists():
            print(f"{file}: pytest did not come to its end, status {ended.returncode}; nothing is kept: see {log}")
            return
        tests = json.loads((folder / "tests.json").read_text())
        # It combines files whose names begin with that of its own.
        whole = coverage.Coverage(data_file=str(folder / "coverage"), config_file=False)
        if any((folder / "data").iterdir()):
            whole.combine([str(folder / "data")])
        data, lines = whole.get_data(), {}
        for measured in data.measured_files():
            by_line: dict[int, list[str]] = {}
            for line, contexts in data.contexts_by_lineno(measured).items():
                # A context is a test, or of a child process, a test and its phase.
                ids = {test for c in contexts if (test := c.rsplit(" (", 1)[0]) in tests}
                if ids:
                    by_line[line] = sorted(ids)
            lines[str(Path(measured).relative_to(code))] = by_line
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps({"tests": tests, "lines": lines}))
        partial.replace(out)


def cover(tree: Path, out: Path, files: Sequence[str], workers: int, marks: str) -> None:
    """Every file of tests that ``out`` has nothing of yet."""
    out.mkdir(parents=True, exist_ok=True)
    files = files or sorted(str(path.relative_to(tree)) for path in (tree / "tests").rglob("test_*.py"))
    to_do = [file for file in files if not _cover_of(out, file).exists()]

    def one(code: Path, file: str) -> None:
        started = time.monotonic()
        cover_file(code, file, _cover_of(out, file), marks)
        print(f"{file}: {time.monotonic() - started:.0f} s", flush=True)

    _in_copies(tree, workers, to_do, one)


def _cover_of(out: Path, file: str) -> Path:
    return out / f"{file.replace('/', '.')}.json"


# ---- judging ----


@dataclass(frozen=True)
class Result:
    """``verdict``: one of CATCHING, "survived", "not executed" or "not placed". ``by``: the test that failed, or why
    those that ran were chosen."""

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


def judge_one(
    code: Path, placed: Placed, stages: list[tuple[str, list[JudgingTest]]], clock: Clock
) -> tuple[str, str, int]:
    """Verdict, by whom, and how many tests were to judge, of a fault in the copy ``code``, which is mended again."""
    path, asked = code / placed.file, 0
    if not stages:
        return "not executed", "", 0
    clock.write(path, placed.mutant)
    try:
        for why, tests in stages:
            asked += len(tests)
            limit = START_S + PATIENCE * sum(test.seconds for test in tests)
            status, said = run_tests(code, [test.id for test in tests], limit)
            if status is None:
                return "timeout", why, asked
            if status in (2, 3, 4):  # nothing could be collected: the fault is in what runs at import
                return "caught at import", said.strip().splitlines()[-1][:200], asked
            if status == 1:
                failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
                return "caught", (failed or [said[-200:]])[0].split(" - ")[0], asked
            assert status == 0, said
        return "survived", ", ".join(why for why, _ in stages), asked
    finally:
        clock.write(path, placed.source)


def run_tests(code: Path, ids: Sequence[str], limit: float) -> tuple[int | None, str]:
    """pytest's exit status, or None where the limit in seconds was reached, and what it said."""
    with tempfile.TemporaryDirectory(prefix="param-decomp-mutant-") as folder:
        wanted = Path(folder) / "ids"
        wanted.write_text("\n".join(ids))
        command = [sys.executable, *PYTEST, "-x", "--tb", "no", "-rfE"]
        command += ["--basetemp", f"{folder}/tmp", f"@{wanted}"]
        with (Path(folder) / "said").open("w+") as output:
            process = subprocess.Popen(command, cwd=code, stdout=output, stderr=output, start_new_session=True)
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


def judge(faults: list[Fault], tree: Path, cover_folder: Path, out: Path, workers: int, budget: float) -> None:
    """Every fault that ``out`` has no line of yet."""
    of, here, clock, lock = Cover.read(cover_folder), Tree(tree), Clock(), threading.Lock()
    done = {result.fault for result in read_results(out)}

    def one(code: Path, fault: Fault) -> None:
        started, placed = time.monotonic(), here.place(fault)
        if placed is None:
            verdict, by, tests = "not placed", "", 0
        else:
            verdict, by, tests = judge_one(code, placed, of.stages(placed, budget), clock)
        file, line = (placed.file, placed.line) if placed else ("", 0)
        result = Result(fault.id, verdict, by, file, line, tests, round(time.monotonic() - started, 1))
        with lock, out.open("a") as results:
            results.write(json.dumps(asdict(result)) + "\n")
            print(f"{result.seconds:6.0f} s  {verdict:14} {fault}  [{by}]", flush=True)

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
    with tempfile.TemporaryDirectory(prefix="param-decomp-mutations-") as folder:
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
    covering = commands.add_parser("cover", help="find which tests execute which lines")
    covering.add_argument("files", nargs="*", help="files of tests, relative to the tree; without, all")
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
        cover(o.tree.resolve(), o.out.resolve(), o.files, o.workers, o.marks)
    elif o.command == "judge":
        judge(read_faults(o.faults), o.tree.resolve(), o.cover, o.out, o.workers, o.budget)
    else:
        print(table(read_faults(o.faults), {path.stem: read_results(path) for path in o.results}))


if __name__ == "__main__":
    main()
