"""One item after the other, until all are measured or the time is over."""

import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_day.cards import Card, cards_here, table_name
from experiments.gpu_day.decomposition import cadence, check_smollm2, steps_in
from experiments.gpu_day.items import ITEMS, Decomposition, Item, Links, Step, named, toy_items
from experiments.gpu_day.job import ON_CPU, Job
from experiments.gpu_day.links import Fit, as_table
from experiments.gpu_day.margin import margin
from experiments.gpu_day.page import page
from experiments.gpu_day.results import Results
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.probe import MEM_FRACTION
from param_decomp_lab.probe.compiler import installed
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.runs.folder import commit_of_the_code

GIB = 2**30
PATIENCE_S = 90.0
"""Time for a run that is told to stop, to save and to write its report."""
RESERVE_S = PATIENCE_S + 30.0
"""Left at the end of a decomposition that does not end in time."""
TAKEN = GIB
"""Bytes of a card that show that somebody else uses it."""


@dataclass(frozen=True)
class Asked:
    """What the command was asked for. ``decompose_s``: how long the decomposition is to be; None: as long as time is
    left, within the item's own limit. ``beside``: processes that compile without the card, after the measurements."""

    parts: Sequence[str]
    json: Path
    page: Path
    work: Path
    seconds: float
    decompose_s: float | None
    smollm2: Path | None
    text: Path | None
    beside: int
    toy: bool

    @property
    def items(self) -> Sequence[Item]:
        """Those of the parts asked for, and what these need, in order."""
        every = toy_items(self.work) if self.toy else ITEMS
        wanted = {item.name for item in every if {*item.parts} & {*self.parts}}
        wanted |= {item.needs for item in every if item.name in wanted}
        return [item for item in every if item.name in wanted]

    def job(self, how: str, name: str, extra: Mapping[str, str], *more: str) -> Job:
        """A process that does ``how`` with the item."""
        words = ["--one", name, "--how", how, "--work", str(self.work), *(["--toy"] if self.toy else []), *more]
        for option, value in (("--smollm2", self.smollm2), ("--text", self.text)):
            words += [] if value is None else [option, str(value)]
        log = self.work / "logs" / f"{how}_{''.join(c if c.isalnum() else '-' for c in name)}.log"
        return Job(words, log, {**(ON_CPU if self.toy else {}), **extra})


@dataclass
class Day:
    """``ends``: as of `time.monotonic`."""

    asked: Asked
    results: Results
    ends: float
    cards: Sequence[Card]

    def __post_init__(self) -> None:
        self.items = self.asked.items

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def run(self) -> bool:
        """Whether everything is measured."""
        try:
            self._machine()
            for number, item in enumerate(self.items, 1):
                if not self.results.is_done(item):
                    self._say(f"{number}/{len(self.items)} {item.name} …")
                    self._measure(item)
            card = (
                None if self.asked.toy or not self.asked.beside else table_name(self.results.all["machine"]["device"])
            )
            without_the_card(self.asked, self.results, self.measured_steps(), card, self.ends)
        finally:
            write_page(self.asked, self.results)
        return not self.left()

    def measured_steps(self) -> list[Step]:
        return [i for i in self.items if isinstance(i, Step) and not i.needs and "step_s" in self.results.of(i)]

    def left(self) -> list[str]:
        return [i.name for i in self.items if not self.results.is_done(i) and not self._reason_against(i)]

    def _machine(self) -> None:
        """Describes the machine, or compares it with the one described. UserError for one where nothing can be
        measured, or another than before."""
        here, there = [card.name for card in self.cards], self.results.all.get("machine")
        if there is not None:
            if there["cards"] != here:
                raise UserError(
                    f"{self.results.file}: holds figures of {_cards(there['cards'])}, and here "
                    f"{'is' if len(here) < 2 else 'are'} {_cards(here)}; choose another file with --json"
                )
            return
        found = self.asked.job("measure", "machine", self._one_card()).result(min(300.0, self.left_s))
        if "failed" in found:
            raise CannotTell(f"nothing can be measured here: {found['failed']}")
        if not self.asked.toy and found["platform"] != "gpu":
            raise UserError(
                f"JAX sees no GPU, only {found['device']}: pip install --constraint constraints.txt --editable "
                "'.[cuda13]'"
            )
        driver, total = (self.cards[0].driver, self.cards[0].memory) if self.cards else (None, None)
        of_all = {"cards": here, "driver": driver, "memory": total, "toy": self.asked.toy}
        self.results.describe({**found, **of_all, "commit": commit_of_the_code()})
        product, copy = found["rates"]["matmul_flops_per_s"] / 1e12, found["rates"]["copy_bytes_per_s"] / 1e12
        self._say(f"{_cards(here)}: a product {product:,.1f} TFLOP/s, a copy {copy:.3f} TB/s")

    def _one_card(self) -> dict[str, str]:
        """Variables that show a process one card alone."""
        if not self.cards:
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"}

    def _reason_against(self, item: Item) -> str:
        """Why it cannot be measured on this machine, in no later call either; empty if it can."""
        if isinstance(item, Links) and not item.simulated and len(self.cards) < 2:
            return "one card has no links"
        if item.needs:
            needed = named(self.items, item.needs)
            against = self._reason_against(needed)
            if against or (self.results.is_done(needed) and "step_s" not in self.results.of(needed)):
                return f"needs {item.needs}, which could not be measured"
        if isinstance(item, Step) and self.cards and item.over_plan is None:
            usable = self.cards[0].memory * MEM_FRACTION / GIB
            if item.plan_gib > usable:
                return f"needs {item.plan_gib:g} GiB, and {usable:.1f} of this card can be used"
        return ""

    def _measure(self, item: Item) -> None:
        """Measures it, unless there is a reason against it, and adds the result."""
        against, needed = self._reason_against(item), self.results.all["measured"].get(item.needs, {})
        if not against and item.needs and "step_s" not in needed:
            against = f"needs {item.needs} first"
        if not against and self.left_s < item.expected_s:
            against = f"takes {item.expected_s:.0f} s: left for the next call"
        if against:
            self._say(f"    {against}")
            return
        for _ in range(15):  # what a killed process held takes a moment to go
            if not any(card.used > TAKEN for card in cards_here()[: len(self.cards)]):
                break
            time.sleep(2)
        limit, before = min(self.left_s, max(150.0, 3 * item.expected_s)), self.results.of(item)
        match item:
            case Links():
                simulated = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={item.simulated}"}
                found = self.asked.job("measure", item.name, simulated if item.simulated else {}).result(limit)
            case Decomposition():
                found = self._decompose(item, before, needed)
            case Step():
                extra = {**self._one_card(), **_variables(item, needed)}
                found = self.asked.job("measure", item.name, extra).result(limit)
            case _:
                raise AssertionError(item)
        result = {"tries": before.get("tries", 0) + 1, **found, "parts": [*item.parts]}
        self.results.add("measured", item, result)
        write_page(self.asked, self.results)
        self._say(f"    {line(result)}")

    def _decompose(self, item: Decomposition, before: Mapping[str, Any], needed: Mapping[str, Any]) -> dict[str, Any]:
        if "run" in before and (Path(before["run"]) / "config.yaml").is_file():
            run, planned = Path(before["run"]), before["planned"]
        else:
            seconds, step_s = self.asked.decompose_s or min(item.most_s, self.left_s - RESERVE_S), needed.get("step_s")
            planned = [*cadence(item.steps or steps_in(seconds, needed["step_s"]), step_s)]
            run = self.asked.work / f"p-{secrets.token_hex(4)}"
        noted = {"run": str(run), "planned": planned}
        # Before it begins: a later call goes on.
        note = {**noted, "unfinished": True, "stopped": "with the command", "parts": [*item.parts], "tries": 0}
        self.results.add("measured", item, note)
        self._say(f"    {planned[0].removeprefix('pd.steps=')} steps in {run}; logs {self.asked.work}/logs")
        extra = {**self._one_card(), "JAX_COMPILATION_CACHE_DIR": str(self.asked.work / "compiled")}
        more = ("--run", str(run), *(f"--set={one}" for one in planned))
        job = self.asked.job("measure", item.name, extra, *more)
        return {**job.result(self.left_s - RESERVE_S, PATIENCE_S), **noted}

    def _say(self, text: str) -> None:
        left = max(0, round(self.left_s))
        print(f"[{left // 60:d}:{left % 60:02d} left] {text}", flush=True)


def without_the_card(asked: Asked, results: Results, steps: Sequence[Step], card: str | None, ends: float) -> None:
    """Counts the arithmetic of those steps that lack it, and plans them for the card (by its name in ``cards.csv``)."""

    kinds = ("counted",) if card is None else ("counted", "planned")
    missing = [(kind, item) for kind in kinds for item in steps if not results.has(kind, item)]
    at_once = max(1, asked.beside)
    for first in range(0, len(missing), at_once):
        if (left := ends - time.monotonic()) <= 0:
            return
        given = ["--card", card or ""]
        jobs = [(kind, item, asked.job(kind, item.name, ON_CPU, *given)) for kind, item in missing[first:][:at_once]]
        try:
            for kind, item, job in jobs:
                results.add(kind, item, job.result(min(left, 900.0)))
        finally:
            for _, _, job in jobs:
                job.end()


def write_page(asked: Asked, results: Results) -> None:
    if "machine" in results.all:
        asked.page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(asked.page, page(results.all))


def _variables(item: Step, needed: Mapping[str, Any]) -> dict[str, str]:
    """Of the item's process."""
    if item.traced:
        return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()}
    if item.over_plan is None:
        return {}
    fraction = (needed["plan"]["peak"] + item.over_plan * GIB) / (needed["pool"] / MEM_FRACTION)
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.5f}"}


def line(result: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    words = []
    if "plan" in result:
        words.append(f"plan {result['plan']['peak'] / GIB:.3f} GiB")
    if result.get("live", {}).get("steps"):
        words.append(f"live {result['live']['steps'] / GIB:.3f} (made {result['live']['made'] / GIB:.2f})")
    if "step_s" in result:
        words.append(f"step {1e3 * result['step_s']:.3f} ms, compiled in {result['compile_s']:.0f} s")
    if "fits" in result:
        words.append(f"{len(result['messages'])} messages between {result['devices']} devices")
    if "report" in result:
        words.append(f"{result['reached']:,} of {result['steps']:,} steps, {result['report']}")
    if "stopped" in result:
        words.append(f"stopped {result['stopped']}")
    if "failed" in result:
        words.append(f"FAILED: {result['failed'][:500]}")
    return ", ".join(words)


def _cards(names: Sequence[str]) -> str:
    return ", ".join(f"{[*names].count(name)} × {name}" for name in dict.fromkeys(names)) or "a CPU"


def run_day(asked: Asked) -> int:
    """Exit status: 0, or 75 where something is left. UserError for what cannot be measured."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cards = [] if asked.toy else cards_here()
    if not asked.toy and not cards:
        raise UserError("nvidia-smi lists no GPU here; --toy runs all of it at toy size on a CPU")
    if cards and cards[0].used > TAKEN:
        raise UserError(
            f"{cards[0].used / GIB:.1f} GiB of the card are taken by another process (nvidia-smi says which); figures "
            "would mean nothing"
        )
    if asked.smollm2 is not None:
        check_smollm2(asked.smollm2)
    if asked.text is not None and not asked.text.exists():
        raise UserError(f"--text {asked.text}: is not there; should be a file or a folder of text")
    asked.work.mkdir(parents=True, exist_ok=True)
    day = Day(asked, Results(asked.json), started + asked.seconds, cards)
    try:
        done = day.run()
    except KeyboardInterrupt:
        print(f"stopped; {asked.json} has what was measured. The same command goes on.", flush=True)
        return STOPPED
    for links in (one for one in day.results.all["measured"].values() if "fits" in one):
        print(as_table([Fit(**one) for one in links["fits"]]), flush=True)
    found = margin(day.results.all)
    told = "unknown" if found.gib is None else f"{found.gib:g} GiB"
    print("\n".join((f"margin of pd probe: {told}", *found.reasons)))
    print(f"results  {asked.json}\npage     {asked.page}", flush=True)
    if asked.beside and not asked.toy and any(not day.results.has("planned", step) for step in day.measured_steps()):
        print("without a plan of pd probe yet: some steps; --plans-only adds them, here or elsewhere")
    if not done:
        print(f"left: {', '.join(day.left())}. The same command goes on.", flush=True)
    return 0 if done else STOPPED


def run_plans(asked: Asked) -> int:
    """Adds, on a machine without the card, the plans of `pd probe` that the measured steps lack.

    Exit status: 0, or 75 where one is missing yet. UserError for figures of a card or a JAX that it cannot plan for.
    """
    results = Results(asked.json)
    machine = results.all["machine"]
    card = table_name(machine["device"])
    if card is None:
        raise UserError(f"{asked.json}: holds figures of {machine['device']}, which `pd probe` does not know")
    here, there = installed("jax"), machine["packages"]["jax"]
    if here != there:
        raise UserError(f"{asked.json}: was measured with JAX {there}, and here is {here}; plans are of one version")
    steps = [item for item in ITEMS if isinstance(item, Step) and not item.needs and "step_s" in results.of(item)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        without_the_card(asked, results, steps, card, time.monotonic() + asked.seconds)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    write_page(asked, results)
    left = [item.name for item in steps if "plan" not in results.all["planned"].get(item.name, {})]
    print("\n".join([*(f"no plan: {name}" for name in left), str(asked.page)]), flush=True)
    return STOPPED if left else 0
