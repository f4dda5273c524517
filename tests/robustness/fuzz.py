"""Damages the files that the program reads, at random from a seed, and says what it made of them.

    python -m tests.robustness.fuzz                                    # 20 cases of every format
    python -m tests.robustness.fuzz --format gguf --format wheel --cases 2000 --workers 2 --out cases.jsonl
    python -m tests.robustness.fuzz --format gguf --seed 3 --case 117  # this case alone; --keep FOLDER leaves its files
    python -m tests.robustness.fuzz --table cases.jsonl                # what came of them, by format

A case is a whole specimen of a format, one fault, and one command that reads it, in a process of its own: forked from
this one, which has imported everything and started no backend of JAX. Whatever the fault, a case must end

- with status 0, 1 or 2, within --seconds, and without a traceback or a message of more than some kB;
- with no more than 2 GiB of memory above what importing takes;
- with every file outside of what the command writes as it was, and nothing of what lies outside of the case's folder in
  any output;
- without control characters in what it prints;
- refused, where the fault is one that may not be accepted; else with the numbers that were saved.

What did not is printed and makes the status 1. A case follows from its format, the seed and its number alone.
"""

import argparse
import base64
import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

from param_decomp_lab.ui.tables import markdown_table
from tests.robustness.forked import BROKEN, Ended, start, warm
from tests.robustness.fuzz_faults import SECRET, Fault
from tests.robustness.fuzz_formats import FORMATS, Command, Format, WrongNumbers, choose

MEMORY_BYTES = 2 << 30
"""More than a case may take, resident, above what it begins with."""
ADDRESS_BYTES = 4 << 30
"""Of address space above what a case begins with: what asks for more gets MemoryError, before the machine is full."""
MESSAGE_BYTES = 12 << 10
"""Of a refusal."""
PRINTED_BYTES = 1 << 20
"""Of an accepted case."""
SMALL_BYTES = 16 << 20
"""Files up to this size are compared by content."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What is not to come to a terminal: C0 and C1 without newline and tab, changes of direction, lone surrogates."""
WRONG = 97
"""Status of a case's process that ended by WrongNumbers."""
OWN = "own"
"""Beside `work`: the folder of a case's process, in which what it prints lies."""


@dataclass(frozen=True)
class Result:
    """``wrong``: what is not as it must be, "" if nothing. ``megabytes``: above what the process began with."""

    format: str
    seed: int
    case: int
    fault: str
    command: str
    status: int
    seconds: float
    megabytes: float
    wrong: str
    said: str

    @property
    def again(self) -> str:
        return f"python -m tests.robustness.fuzz --format {self.format} --seed {self.seed} --case {self.case}"


class Bench:
    """Whole specimens in ``folder``, and what every command reads of them."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._readings: dict[tuple[str, str], Any] = {}

    def make(self, formats: Iterable[Format]) -> None:
        for found in formats:
            whole = self.folder / "whole" / found.name
            whole.mkdir(parents=True)
            found.make(whole)

    def reading(self, found: Format, command: Command) -> Any:
        """Of the whole specimen, made once; None of a command line. RuntimeError if the command refuses it."""
        key = (found.name, command.name)
        if key not in self._readings and not found.in_arguments:
            with tempfile.TemporaryDirectory(dir=self.folder) as name:
                place = Path(name) / "case"
                self._lay_out(found, place)
                ended = self._fork(place, command, Fault("nothing", "none"), None)
                if ended.status != 0:
                    raise RuntimeError(f"{found.name}, {command.name}: undamaged, but {ended.status}: {ended.text}")
                reading = place / "reading"
                self._readings[key] = pickle.loads(reading.read_bytes()) if reading.exists() else None
        return self._readings.get(key)

    def case(self, found: Format, seed: int, number: int, keep: Path | None = None) -> Result:
        random = Random(f"{found.name} {seed} {number}")
        place = keep or self.folder / f"{found.name}-{seed}-{number}"
        self._lay_out(found, place)
        fault = found.damage(place / "work", random)
        command = choose(found.commands, random)
        reading = self.reading(found, command)
        before = contents(place)
        ended = self._fork(place, command, fault, reading)
        wrong = find_wrong(place, command, fault, ended, before, self.seconds)
        if keep is None:
            shutil.rmtree(place, ignore_errors=True)
        return Result(
            found.name, seed, number, _ascii(fault.what, 300), command.name, ended.status, round(ended.seconds, 3),
            round(ended.memory / 1e6, 1), _ascii("; ".join(wrong), 600), _ascii(ended.said, 600),
        )  # fmt: skip

    def _lay_out(self, found: Format, place: Path) -> None:
        shutil.copytree(self.folder / "whole" / found.name, place / "work", symlinks=True)
        (place / "outside").mkdir()
        (place / "outside" / "secret.txt").write_text(SECRET)

    def _fork(self, place: Path, command: Command, fault: Fault, reading: Any) -> Ended:
        def act() -> int:
            try:
                found = command.act(fault, reading)
            except WrongNumbers as wrong:
                print(f"\n{wrong!s:.500}")
                return WRONG
            if fault.file == "none":
                (place / "reading").write_bytes(pickle.dumps(found))
            return 0

        return start(act, place / "work", place / OWN, ADDRESS_BYTES).wait(self.seconds)


def find_wrong(
    place: Path, command: Command, fault: Fault, ended: Ended, before: dict[str, str], seconds: float
) -> list[str]:
    """What is not as it must be. ``before``: the `contents` of the case's folder. ``seconds``: that it may take."""
    text, wrong = ended.text, []
    if ended.seconds > seconds:
        wrong.append(f"not done after {seconds:.0f} s")
    elif ended.status == BROKEN or "Traceback (most recent call last)" in text:
        wrong.append(f"traceback: {text.strip().splitlines()[-1] if text.strip() else ''}")
    elif ended.status == WRONG:
        wrong.append(f"accepted, but {text.strip().splitlines()[-1]}")
    elif ended.status not in (0, 1, 2):
        wrong.append(f"status {ended.status}")
    elif ended.status == 0 and fault.refused:
        wrong.append("accepted")
    if ended.memory > MEMORY_BYTES:
        wrong.append(f"took {ended.memory / 1e9:.1f} GB")
    if (control := CONTROL.search(text)) is not None:
        wrong.append(f"printed {control[0]!a}")
    if len(ended.said) > (PRINTED_BYTES if ended.status == 0 else MESSAGE_BYTES):
        wrong.append(f"said {len(ended.said):,} bytes")
    after = contents(place)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or any(fnmatchcase(name, f"work/{p}") for p in command.writes):
            continue
        if command.makes and name not in before and name.startswith("work/"):
            continue
        if fault.what.endswith(": huge") and ended.status == 2 and name.startswith("work/.out.unfinished"):
            continue  # many units of text, of which others may be done before the one that is refused: they are kept
        how = "removed" if name not in after else "made" if name not in before else "changed"
        wrong.append(f"{name} was {how}")
    if SECRET in text or _leaked(place, command):
        wrong.append("what lies outside of the folder was read and shown")
    return wrong


def contents(place: Path) -> dict[str, str]:
    """What every path below the folder is and holds; without what the case's process keeps there itself."""
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            short = os.path.relpath(path, place)
            if short.split(os.sep)[0] in (OWN, "reading"):
                continue
            about = os.lstat(path)
            what = f"{stat.S_IFMT(about.st_mode):o}"
            if stat.S_ISLNK(about.st_mode):
                what += os.readlink(path)
            elif stat.S_ISREG(about.st_mode):
                what += f" {about.st_size}"
                if about.st_size <= SMALL_BYTES:
                    with open(path, "rb") as file:
                        what += hashlib.file_digest(file, "sha256").hexdigest()
                else:
                    what += f" {about.st_mtime_ns}"
            found[short] = what
    return found


def _leaked(place: Path, command: Command) -> bool:
    """Whether a file that the command may write holds what lies outside."""
    shown = (SECRET.encode(), base64.b64encode(SECRET.encode())[:32])
    for path in (place / "work").rglob("*"):
        name = str(path.relative_to(place / "work"))
        if any(fnmatchcase(name, p) for p in command.writes) and path.is_file() and path.stat().st_size < 1 << 28:
            content = path.read_bytes()
            if any(part in content for part in shown):
                return True
    return False


def _ascii(text: str | bytes, length: int) -> str:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    text = ascii(re.sub(r"\s+", " ", text.strip()))[1:-1]
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 2 :]}"


def run(formats: Sequence[Format], seed: int, cases: Sequence[int], out: Path, workers: int, seconds: float) -> None:
    """Appends a line of JSON for every case to ``out``."""
    warm()
    with tempfile.TemporaryDirectory(prefix="param-decomp-fuzz-") as name:
        bench = Bench(Path(name), seconds)
        bench.make(formats)
        work = [(found, number) for number in cases for found in formats]
        print(f"seed {seed}: {len(work)} cases of {', '.join(found.name for found in formats)}", flush=True)
        children = []
        for worker in range(workers):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    _work(bench, work[worker::workers], seed, out, loud=worker == 0)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            children.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        if any(statuses):
            raise SystemExit("a worker failed")


def _work(bench: Bench, work: Sequence[tuple[Format, int]], seed: int, out: Path, loud: bool) -> None:
    told = time.monotonic()
    for done, (found, number) in enumerate(work):
        result = bench.case(found, seed, number)
        with out.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if loud and time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"  {done} of {len(work)} of this worker", flush=True)


def read(path: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def table(results: Sequence[Result]) -> str:
    """In Markdown, a row for each format."""
    by_format, rows = defaultdict(list), []
    for result in results:
        by_format[result.format].append(result)
    for name, found in by_format.items():
        good = [r for r in found if not r.wrong]
        accepted, most = sum(r.status == 0 for r in good), max(r.megabytes for r in found)
        slowest = f"{max(r.seconds for r in found):.1f}"
        rows.append((name, len(found), accepted, len(good) - accepted, slowest, f"{most:.0f}", len(found) - len(good)))
    columns = "format | cases | accepted | refused | seconds, most | MB, most | not as it must be"
    return "\n".join(markdown_table(columns, rows)) + "\n"


def kinds(results: Sequence[Result]) -> list[tuple[str, int, Result]]:
    """What went wrong, alike cases together, the commonest first: what, how often, and the first of them."""
    alike: Counter[str] = Counter()
    first: dict[str, Result] = {}
    for result in results:
        if result.wrong:
            kind = f"{result.format}, {result.command}: {re.sub(r'[0-9]+|/tmp/[^ ]+', '#', result.wrong)[:110]}"
            alike[kind] += 1
            first.setdefault(kind, result)
    return [(kind, count, first[kind]) for kind, count in alike.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", choices=FORMATS, help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=20, help="of each format")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--case", type=int, help="this one alone, with all it said")
    parser.add_argument("--keep", type=Path, help="with --case: the folder in which to leave its files")
    parser.add_argument("--out", type=Path, help="lines of JSON, added to")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="that a case may take")
    parser.add_argument("--table", type=Path, help="print the table of these results and do nothing else")
    given = parser.parse_args()
    formats = [FORMATS[name] for name in given.format or FORMATS]
    if given.table is not None:
        results = read(given.table)
    elif given.case is not None:
        if len(formats) != 1:
            raise SystemExit("--case needs one --format")
        _again(formats[0], given.seed, given.case, given.keep, given.seconds)
        return
    else:
        with tempfile.TemporaryDirectory() as name:
            out = given.out or Path(name, "results")
            before = len(read(out)) if out.exists() else 0
            numbers = range(given.first, given.first + given.cases)
            run(formats, given.seed, numbers, out, given.workers, given.seconds)
            results = read(out)[before:]
    print(table(results))
    for kind, count, example in kinds(results):
        print(f"{count} × {kind}\n    {example.fault}\n    {example.again}")
    if any(result.wrong for result in results):
        raise SystemExit(1)


def _again(found: Format, seed: int, number: int, keep: Path | None, seconds: float) -> None:
    warm()
    with tempfile.TemporaryDirectory(prefix="param-decomp-fuzz-") as name:
        bench = Bench(Path(name), seconds)
        bench.make([found])
        place = keep or Path(name) / "case"
        result = bench.case(found, seed, number, place)
        print((place / OWN / "said").read_text(errors="backslashreplace")[:20_000])
        for key, value in asdict(result).items():
            if key != "said":
                print(f"{key:10} {value}")
    if result.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
