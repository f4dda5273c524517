"""One run interrupted again and again at random moments (TERM and KILL), and compared with one that nothing disturbed.

    python -m tests.robustness.interruptions --seed 1
    python -m tests.robustness.interruptions --seed 1 --n 20 --page docs/measurements/interruptions.md

The run is the tests' tiny Llama on the CPU, with every kind of state, a row of metrics for every step, and often saved
and evaluated. It is made twice undisturbed, then once more with ``--n`` interruptions: in each phase (warm-up, step,
evaluation, save) a part of them, at a moment drawn between the phase's beginning and its usual length. After each it is
resumed. At the end every array of the last checkpoint must be the same bit for bit, and every row of metrics, each step
once; no interruption may have lost more than what came after the last save, and SIGTERM nothing.

Every process says on the way in which phase it is, in a file: the functions of `pd train` are wrapped for that in the
process alone. What counts is the phase that an interruption has met, not the one that it was meant for.
"""

import argparse
import itertools
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]
PHASES = ("warm-up", "step", "evaluation", "save")
SAVE_EVERY = 10
STEPS = 400
SETTINGS = (
    f"pd.steps={STEPS}",
    "pd.faithfulness_warmup_steps=3000",
    f"cadence={{train_log_every: 1, save_every: {SAVE_EVERY}, keep_last_n_checkpoints: 2}}",
    "eval.every=7",
    "eval.slow_every=28",
    "eval.n_steps=3",
)
DISTURBED, UNDISTURBED, AGAIN = "p-00000001", "p-00000002", "p-00000003"
TIMEOUT_S = 3600.0


# ---- in the process of a run: saying where it is ----


def announcing(file: Path, arguments: Sequence[str]) -> None:
    """`pd` with these arguments. A line of ``file``: nanoseconds, `begin`, `end`, `did` or `restored`, and of what."""
    from param_decomp_lab.cli import main
    from param_decomp_lab.eval.evaluation import Evaluation
    from param_decomp_lab.runs.checkpoints.store import Checkpoints
    from param_decomp_lab.training import loop, run, start
    from param_decomp_lab.training.recorder import Recorder

    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(what: str) -> None:
        os.write(out, f"{time.monotonic_ns()} {what}\n".encode())

    def phase(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def announced(*arguments: Any, **named: Any) -> Any:
            say(f"begin {name}")
            found = call(*arguments, **named)
            say(f"end {name}")
            return found

        return announced

    save, restore, add = Checkpoints.save, Checkpoints.restore, Recorder.add

    def saving(self: Checkpoints, step: int, *rest: Any) -> None:
        if step in self.steps():
            return save(self, step, *rest)  # there already: nothing is done
        say(f"begin save {step}")
        save(self, step, *rest)
        return say(f"end save {step}")

    def restoring(self: Checkpoints, step: int, *rest: Any) -> Any:
        say(f"restored {step}")
        return phase("restore", restore)(self, step, *rest)

    def adding(self: Recorder, first: int, n: int, *rest: Any) -> None:
        say(f"did {first + n}")
        add(self, first, n, *rest)

    owners = {"warm-up": (start, "_warm_up"), "step": (loop.Loop, "run"), "finish": (run, "finish"),
              "build": (run, "set_up"), "compile": (loop, "compile_steps")}  # fmt: skip
    with ExitStack() as stack:
        for name, (owner, function) in owners.items():
            stack.enter_context(mock.patch.object(owner, function, phase(name, getattr(owner, function))))
        for function, name in {"compile": "compile", "fast": "evaluation", "figures": "evaluation"}.items():
            stack.enter_context(mock.patch.object(Evaluation, function, phase(name, getattr(Evaluation, function))))
        stack.enter_context(mock.patch.multiple(Checkpoints, save=saving, restore=restoring))
        stack.enter_context(mock.patch.object(Recorder, "add", adding))
        stack.enter_context(mock.patch.object(sys, "argv", ["pd", *arguments]))
        main()


class Event(NamedTuple):
    ns: int
    kind: str
    what: str


def events_of(file: Path) -> list[Event]:
    """What has been said so far; a line that is being written is left out."""
    text = file.read_text() if file.exists() else ""
    lines = (line.split(" ", 2) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [Event(int(ns), kind, what.rstrip("\n")) for ns, kind, what in lines]


def phase_at(events: Sequence[Event], ns: int) -> tuple[str, int]:
    """The innermost phase at that time, and when it began or, of a step, when the last one had been started."""
    stack = [("start", events[0].ns if events else ns)]
    for event in events:
        if event.ns > ns:
            break
        match event.kind:
            case "begin":
                stack.append((event.what.split()[0], event.ns))
            case "end":
                stack.pop()
            case "did":
                stack[-1] = (stack[-1][0], event.ns)
    return stack[-1]


def durations(events: Sequence[Event]) -> dict[str, float]:
    """The usual length of each phase in seconds; of a step: between two of them that nothing came between."""
    found: dict[str, list[int]] = {name: [] for name in PHASES}
    begun: list[Event] = []
    for event in events:
        if event.kind == "begin":
            begun.append(event)
        elif event.kind == "end":
            name, length = event.what.split()[0], event.ns - begun.pop().ns
            if name in found and name != "step":  # that one is the whole loop
                found[name].append(length)
    pairs = itertools.pairwise(events)
    found["step"] = [event.ns - before.ns for before, event in pairs if event.kind == before.kind == "did"]
    return {name: statistics.median(lengths) / 1e9 for name, lengths in found.items()}


# ---- around it ----


@dataclass(frozen=True)
class Interruption:
    """``meant``, ``met``: phases. ``after_s``: from the beginning of the phase met. ``left_s``: until the process was
    gone. ``done``: steps begun; ``saved``: the last save completed (None: none yet); ``resumed``: at which step the
    next process went on."""

    number: int
    signal: signal.Signals
    meant: str
    met: str
    after_s: float
    left_s: float
    status: int
    done: int
    saved: int | None
    resumed: int | None = None

    @property
    def lost(self) -> int:
        return self.done - (self.resumed or 0)

    def check(self) -> None:
        assert self.status == (75 if self.signal is signal.SIGTERM else -signal.SIGKILL), self
        if self.met == "warm-up":
            # Told in its last steps, it is over before anybody looks, and what it has made is saved.
            assert self.done == 0, self
            assert self.saved in (None, 0), self
        elif self.signal is signal.SIGTERM:
            assert self.lost == 0, self
        assert (self.resumed or 0) >= (self.saved or 0), self
        assert 0 <= self.lost <= SAVE_EVERY, self


class Experiment:
    """``tiny``: the tests' `Tiny`. ``runs``: where the three runs go. ``say``: is told what happens."""

    def __init__(self, tiny: Any, runs: Path, draws: random.Random, say: Callable[[str], None]) -> None:
        self._tiny, self._runs, self._draws, self._say = tiny, runs, draws, say
        self._files = 0
        self.run = runs / DISTURBED

    def start(self, run_id: str) -> list[str]:
        sets = (f"out_dir={self._runs}", f"run_id={run_id}", *SETTINGS)
        return ["train", str(self._tiny.config), *(word for one in sets for word in ("--set", one))]

    def process(self, arguments: Sequence[str]) -> tuple["subprocess.Popen[str]", Path]:
        self._files += 1
        file = self._runs / f"phases-{self._files}"
        command = [sys.executable, "-m", "tests.robustness.interruptions", "--announce", str(file), *arguments]
        with (self._runs / f"output-{self._files}").open("w") as output:
            popen = subprocess.Popen(
                command, cwd=ROOT, env=self._tiny.environment(), stdout=output, stderr=subprocess.STDOUT, text=True
            )
        return popen, file

    def to_its_end(self, arguments: Sequence[str]) -> list[Event]:
        popen, file = self.process(arguments)
        status = popen.wait(TIMEOUT_S)
        assert status == 0, (self._runs / f"output-{self._files}").read_text()
        return events_of(file)

    def next_arguments(self) -> list[str]:
        return ["train", "--resume", str(self.run)] if self.run.exists() else self.start(DISTURBED)

    def interrupted(
        self, number: int, meant: str, kind: signal.Signals, usual: dict[str, float], saved: int | None
    ) -> tuple[Interruption, int | None]:
        """A process that is interrupted, and at which step it had gone on. ``saved``: by those before it."""
        occurrence = {"warm-up": 1, "step": self._draws.randint(2, 12)}.get(meant, self._draws.randint(1, 2))
        delay = self._draws.uniform(0, 0.9 * usual[meant])
        popen, file = self.process(self.next_arguments())
        try:
            self._wait_for(popen, file, meant, occurrence)
            time.sleep(delay)
            sent = time.monotonic_ns()
            popen.send_signal(kind)
            status = popen.wait(TIMEOUT_S)
        finally:
            popen.kill()
            popen.wait()
        left = (time.monotonic_ns() - sent) / 1e9
        events = events_of(file)
        met, begun = phase_at(events, sent)
        saves = [int(e.what.split()[1]) for e in events if e.kind == "end" and e.what.startswith("save")]
        restored = next((int(e.what) for e in events if e.kind == "restored"), None)
        done = max([int(e.what) for e in events if e.kind == "did"], default=restored or 0)
        last = max([*saves, *([] if saved is None else [saved])], default=None)
        found = Interruption(number, kind, meant, met, (sent - begun) / 1e9, left, status, done, last)
        self._say(f"{number:3} {kind.name} meant for {meant}, met {met} after {found.after_s * 1e3:.0f} ms: "
                  f"status {status} after {left:.2f} s, {done} steps done, saved {last}")  # fmt: skip
        return found, restored

    def _wait_for(self, popen: "subprocess.Popen[str]", file: Path, phase: str, occurrence: int) -> None:
        end = time.monotonic() + TIMEOUT_S

        def seen(event: Event) -> bool:
            if phase == "step":
                return event.kind == "did"
            return event.kind == "begin" and event.what.split()[0] == phase

        while sum(map(seen, events_of(file))) < occurrence:
            output = f"{(self._runs / f'output-{self._files}').read_text()}\nbefore {phase} {occurrence}"
            assert popen.poll() is None, f"ended with {popen.returncode}:\n{output}"
            assert time.monotonic() < end, output
            time.sleep(0.002)


def plan(n: int, draws: random.Random) -> list[tuple[str, signal.Signals]]:
    """Equal shares of the phases, the rest by chance; both signals in each. Warm-up comes first: it comes once."""
    counts = {name: n // len(PHASES) for name in PHASES}
    for name in draws.choices(PHASES, k=n % len(PHASES)):
        counts[name] += 1
    drawn: dict[str, list[signal.Signals]] = {}
    for name, count in counts.items():
        signals = [signal.SIGTERM, signal.SIGKILL] * (count // 2 + 1)
        first = draws.randint(0, 1)
        drawn[name] = signals[first : first + count]
        draws.shuffle(drawn[name])
    later = [(name, kind) for name in PHASES[1:] for kind in drawn[name]]
    draws.shuffle(later)
    return [("warm-up", kind) for kind in drawn["warm-up"]] + later


def interrupt(experiment: Experiment, n: int, draws: random.Random, usual: dict[str, float]) -> list[Interruption]:
    """Interrupts until ``n`` have been made, and every phase has been met in its share; then lets the run end."""
    waiting = plan(n, draws)
    wanted = {name: n // len(PHASES) for name in PHASES}
    found: list[Interruption] = []
    saved: int | None = None
    while waiting:
        assert len(found) < 3 * n, "too many have met another phase than they were meant for"
        meant, kind = waiting.pop(0)
        latest, restored = experiment.interrupted(len(found) + 1, meant, kind, usual, saved)
        found, saved = [*_went_on(found, restored), latest], latest.saved
        if latest.met != meant and sum(one.met == meant for one in found) + _count(waiting, meant) < wanted[meant]:
            waiting.insert(0, (meant, kind))
    events = experiment.to_its_end(experiment.next_arguments())
    found = _went_on(found, next((int(e.what) for e in events if e.kind == "restored"), None))
    for one in found:
        one.check()
    for name in PHASES:
        assert sum(one.met == name for one in found) >= wanted[name], f"{name} was met too seldom"
    return found


def _went_on(found: list[Interruption], restored: int | None) -> list[Interruption]:
    return found[:-1] + [replace(one, resumed=restored) for one in found[-1:]]


def _count(waiting: Sequence[tuple[str, signal.Signals]], phase: str) -> int:
    return sum(name == phase for name, _ in waiting)


# ---- what came of it ----


class Same(NamedTuple):
    """How much was compared and found the same."""

    arrays: int
    bytes: int
    rows: int


def same_run(run: Path, other: Path) -> Same:
    """AssertionError where two runs differ in anything but what depends on the clock."""
    from tests.lab.tiny_run import rows, saved_arrays, saved_steps

    ours, theirs = rows(run), rows(other)
    assert [row["step"] for row in ours] == list(range(STEPS + 1))
    for row, expected in zip(ours, theirs, strict=True):
        assert row == expected, row["step"]
    assert saved_steps(run) == saved_steps(other)
    assert saved_steps(run)[-1] == STEPS
    arrays, others = saved_arrays(run, STEPS), saved_arrays(other, STEPS)
    assert arrays.keys() == others.keys()
    assert [name for name in arrays if arrays[name].tobytes() != others[name].tobytes()] == []
    assert (run / "examples.json").read_bytes() == (other / "examples.json").read_bytes()
    figures = [sorted(path.name for path in (folder / "figures").iterdir()) for folder in (run, other)]
    assert figures[0] == figures[1]
    return Same(len(arrays), sum(array.nbytes for array in arrays.values()), len(ours))


def table(found: Sequence[Interruption]) -> Iterator[str]:
    yield "| | signal | phase | gone after | status | steps done | last save | steps lost |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in found:
        saved = "–" if one.saved is None else str(one.saved)
        yield (
            f"| {one.number} | {one.signal.name.removeprefix('SIG')} | {one.met} | {one.left_s:.2f} s | "
            f"{one.status} | {one.done} | {saved} | {one.lost} |"
        )


PAGE = """# Interruptions

**A run that was interrupted {n} times at random moments ends bit for bit like an undisturbed one. SIGTERM lost no step,
and a kill only what came after the last save.**

`{command}`, on {machine}.

The tests' tiny Llama ({steps} steps, a save every {every}, an evaluation every 7, a row of metrics for each step) runs
twice undisturbed, and once with {n} interruptions, resumed after each. {arrays} arrays ({size:,} bytes) of the last
checkpoint and {rows} rows of metrics, each step once, are the same in all three. Met: {met}.

{table}

- *Phase*: where the process was when the signal was sent. *Status*: 75 is preempted and saved, -9 is killed.
- *Steps done*: started by then, with the one in progress. *Last save*: completed before the process ended, with the one
  that SIGTERM causes; each run resumed there. The warm-up has nothing to save (–); the run begins again.
"""


def machine() -> str:
    import jax

    python = f"Python {platform.python_version()}, JAX {jax.__version__} on CPU"
    return f"{os.cpu_count()} cores ({platform.machine()}, not quiet), {python}"


def main(arguments: Sequence[str] | None = None) -> list[Interruption]:
    """Interrupts a run; prints the table, and writes the page where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="drawn and printed if it is not given")
    parser.add_argument("--n", type=int, default=20, help="interruptions")
    parser.add_argument("--page", type=Path, help="write the table here, as Markdown")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        from tests.lab.tiny_run import Tiny

        tiny = Tiny(Path(folder) / "made", Path(folder) / "compiled")
        tiny.make()
        found, same = experiment(tiny, Path(folder) / "runs", options.n, seed)
    lines = "\n".join(table(found))
    print(f"{lines}\nthe same: {same}")
    if options.page is not None:
        met = ", ".join(f"{name} {sum(one.met == name for one in found)} times" for name in PHASES)
        options.page.write_text(
            PAGE.format(
                command=f"python -m tests.robustness.interruptions --seed {seed} --n {options.n}", machine=machine(),
                steps=STEPS, every=SAVE_EVERY, n=len(found), arrays=same.arrays, size=same.bytes,
                rows=same.rows, met=met, table=lines,
            )
        )  # fmt: skip
    return found


def experiment(tiny: Any, runs: Path, n: int, seed: int) -> tuple[list[Interruption], Same]:
    """The two undisturbed runs and the disturbed one, compared."""
    runs.mkdir()
    draws = random.Random(seed)
    made = Experiment(tiny, runs, draws, lambda line: print(line, flush=True))
    made.to_its_end(made.start(UNDISTURBED))
    usual = durations(made.to_its_end(made.start(AGAIN)))  # nothing is compiled any more
    print("usual lengths: " + ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in usual.items()), flush=True)
    same_run(runs / AGAIN, runs / UNDISTURBED)
    found = interrupt(made, n, draws, usual)
    return found, same_run(made.run, runs / UNDISTURBED)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--announce"]:
        announcing(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
