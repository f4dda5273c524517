"""Measures items in sequence, until all are measured or the time is over."""

import json
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
from experiments.gpu_day.items import Asked, Decomposition, Item, Links, Step, named
from experiments.gpu_day.job import ON_CPU, Job
from experiments.gpu_day.links import Fit, as_table
from experiments.gpu_day.page import GIB, margin, page
from experiments.gpu_day.results import Results
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.probe import MEM_FRACTION
from param_decomp_lab.probe.compiler import installed
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.runs.folder import commit_of_the_code

PATIENCE_S = 90.0
"""The time that a run has for saving and for its report when it is told to stop."""
RESERVE_S = PATIENCE_S + 30.0
"""The time reserved at the end of a decomposition that does not end in time."""
TAKEN = GIB
"""The bytes in use from which a card counts as used by somebody else."""


@dataclass(frozen=True)
class Day:
    """One call of the command. ``ends``: when it must end, in terms of `time.monotonic`."""

    asked: Asked
    results: Results
    ends: float
    cards: Sequence[Card]

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def run(self) -> bool:
        """Measures what is missing. Returns whether everything is measured."""
        try:
            self._describe_machine()
            for number, item in enumerate(self.asked.items, 1):
                if not self.results.is_done(item):
                    self._say(f"{number}/{len(self.asked.items)} {item.name} …")
                    self._measure(item)
            planned_for = None if self.asked.toy else table_name(self.results.all["machine"]["device"])
            self.plan(planned_for if self.asked.beside else None)
        finally:
            self.write_page()
        return not self.left()

    def left(self) -> list[str]:
        return [i.name for i in self.asked.items if not self.results.is_done(i) and not self._reason_against(i)]

    def plan(self, card: str | None) -> None:
        """Counts the arithmetic of the measured steps that lack it, and plans them for ``card``, a name in
        ``cards.csv``."""
        missing = [step for step in self.measured_steps() if not self.results.is_planned(step, card)]
        at_once = max(1, self.asked.beside)
        for first in range(0, len(missing), at_once):
            if (left := self.left_s) <= 0:
                return
            jobs = [(item, self._job(item.name, ON_CPU, {"card": card})) for item in missing[first:][:at_once]]
            try:
                for item, job in jobs:
                    self.results.add("planned", item, {"card": card, **job.result(min(left, 900.0))})
            finally:
                for _, job in jobs:
                    job.end()

    def measured_steps(self) -> list[Step]:
        steps = [item for item in self.asked.items if isinstance(item, Step) and not item.needs]
        return [step for step in steps if "step_s" in self.results.of(step)]

    def without_plan(self) -> list[str]:
        return [step.name for step in self.measured_steps() if "plan" not in self.results.of(step, "planned")]

    def write_page(self) -> None:
        if "machine" in self.results.all:
            self.asked.page.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.asked.page, page(self.results.all))

    def _job(self, name: str, variables: Mapping[str, str], given: Mapping[str, Any]) -> Job:
        """Starts a process that calls `__main__._one` with the item's name and what is given."""
        asked = self.asked
        words = ["--one", name, "--given", json.dumps(given), "--work", str(asked.work), *["--toy"] * asked.toy]
        for option, value in (("--smollm2", asked.smollm2), ("--text", asked.text)):
            words += [] if value is None else [option, str(value)]
        log = f"{'planned' if 'card' in given else 'measure'}_{''.join(c if c.isalnum() else '-' for c in name)}.log"
        return Job(words, asked.work / "logs" / log, {**(ON_CPU if asked.toy else {}), **variables})

    def _describe_machine(self) -> None:
        """Describes the machine once; later it compares the machine with that description. Raises UserError if nothing
        can be measured here, or if it is another machine."""
        here, there = [card.name for card in self.cards], self.results.all.get("machine")
        if there is not None:
            if there["cards"] != here:
                raise UserError(
                    f"{self.results.file}: holds figures of {_cards(there['cards'])}, and here "
                    f"{'is' if len(here) < 2 else 'are'} {_cards(here)}; choose another file with --json"
                )
            return
        found = self._job("machine", self._one_card(), {}).result(min(300.0, self.left_s))
        if "failed" in found:
            raise CannotTell(f"nothing can be measured here: {found['failed']}")
        if not self.asked.toy and found["platform"] != "gpu":
            raise UserError(
                f"JAX sees no GPU, only {found['device']}: pip install --constraint constraints.txt --editable "
                "'.[cuda13]'"
            )
        driver, total = (self.cards[0].driver, self.cards[0].memory) if self.cards else (None, None)
        found |= {"cards": here, "driver": driver, "memory": total, "toy": self.asked.toy}
        self.results.all["machine"] = {**found, "commit": commit_of_the_code()}
        self.results.write()

    def _one_card(self) -> dict[str, str]:
        """Returns environment variables with which a process sees only one card."""
        if not self.cards:
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"}

    def _reason_against(self, item: Item) -> str:
        """Returns why an item can never be measured on this machine; empty if it can."""
        if isinstance(item, Links) and not item.simulated and len(self.cards) < 2:
            return "one card has no links"
        if item.needs:
            needed = named(self.asked.items, item.needs)
            against = self._reason_against(needed)
            if against or (self.results.is_done(needed) and "step_s" not in self.results.of(needed)):
                return f"needs {item.needs}, which could not be measured"
        if isinstance(item, Step) and self.cards and item.over_plan is None:
            usable = self.cards[0].memory * MEM_FRACTION / GIB
            if item.plan_gib > usable:
                return f"needs {item.plan_gib:g} GiB, and {usable:.1f} of this card can be used"
        return ""

    def _measure(self, item: Item) -> None:
        """Measures an item, unless there is a reason against it, and adds the result."""
        against, needed = self._reason_against(item), self.results.all["measured"].get(item.needs, {})
        if not against and item.needs and "step_s" not in needed:
            against = f"needs {item.needs} first"
        if not against and self.left_s < item.expected_s:
            against = f"takes {item.expected_s:.0f} s: left for the next call"
        if against:
            self._say(f"    {against}")
            return
        for _ in range(15):  # the memory of a killed process takes a moment to be freed
            if not any(card.used > TAKEN for card in cards_here()[: len(self.cards)]):
                break
            time.sleep(2)
        before, given, limits = self.results.of(item), {}, (min(self.left_s, max(150.0, 3 * item.expected_s)), 0.0)
        noted: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit_of_the_code()}
        noted["parts"] = [*item.parts]
        if isinstance(item, Decomposition):
            given, limits = self._run(item, before, needed), (self.left_s - RESERVE_S, PATIENCE_S)
            noted |= given
            # Stored before the run begins, so that a later call can resume it.
            self.results.add("measured", item, {**noted, "unfinished": True, "stopped": "with the command", "tries": 0})
        job = self._job(item.name, self._variables(item, needed), given)
        self.results.add("measured", item, {"tries": before.get("tries", 0) + 1, **job.result(*limits), **noted})
        self.write_page()
        self._say(f"    {line(self.results.of(item))}")

    def _variables(self, item: Item, needed: Mapping[str, Any]) -> dict[str, str]:
        """Returns the environment variables of the item's process."""
        match item:
            case Links(simulated=devices):
                return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"} if devices else {}
            case Decomposition():
                return {**self._one_card(), "JAX_COMPILATION_CACHE_DIR": str(self.asked.work / "compiled")}
            case Step(traced=True):
                flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
                return {**self._one_card(), "XLA_FLAGS": flags}
            case Step(over_plan=over) if over is not None:
                fraction = (needed["plan"]["peak"] + over * GIB) / (needed["pool"] / MEM_FRACTION)
                return {**self._one_card(), "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.5f}"}
        return self._one_card()

    def _run(self, item: Decomposition, before: Mapping[str, Any], needed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the run's folder and its planned length: those of an earlier call, or new ones."""
        if "run" in before and (Path(before["run"]) / "config.yaml").is_file():
            return {"run": before["run"], "planned": before["planned"]}
        seconds = self.asked.decompose_s or min(item.most_s, self.left_s - RESERVE_S) - item.after_s
        steps = item.steps or steps_in(seconds, needed["step_s"])
        run = self.asked.work / f"p-{secrets.token_hex(4)}"
        self._say(f"    {steps} steps in {run}; logs {self.asked.work}/logs")
        return {"run": str(run), "planned": [*cadence(steps, needed.get("step_s"))]}

    def _say(self, text: str) -> None:
        left = max(0, round(self.left_s))
        print(f"[{left // 60:d}:{left % 60:02d} left] {text}", flush=True)


def line(result: Mapping[str, Any]) -> str:
    """Returns one line for the terminal."""
    shown = {key: result[key] for key in ("step_s", "compile_s", "reached", "report", "stopped") if key in result}
    if "plan" in result:
        shown["plan"] = f"{result['plan']['peak'] / GIB:.3f} GiB"
    for way, product in result.get("products", {}).items():
        shown[way] = product.get("failed") or f"{product['flops_per_s'] / 1e12:.4g} TFLOP/s"
    words = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()]
    return ", ".join([*words, *([f"FAILED: {result['failed'][:500]}"] if "failed" in result else [])])


def _cards(names: Sequence[str]) -> str:
    return ", ".join(f"{[*names].count(name)} × {name}" for name in dict.fromkeys(names)) or "a CPU"


def run_day(asked: Asked) -> int:
    """Measures what was asked for. Returns the exit status: 0, or 75 if something is left. Raises UserError for what
    cannot be measured."""
    ends = time.monotonic() + asked.seconds
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
    day = Day(asked, Results(asked.json), ends, cards)
    try:
        done = day.run()
    except KeyboardInterrupt:
        print(f"stopped; {asked.json} has what was measured. Run the same command again to continue.", flush=True)
        return STOPPED
    found = day.results.all
    for links in (one for one in found["measured"].values() if "fits" in one):
        print(as_table([Fit(**one) for one in links["fits"]]))
    told, reasons = margin(found)
    print("\n".join((f"margin of pd probe: {'unknown' if told is None else f'{told:g} GiB'}", *reasons)))
    print(f"results  {asked.json}\npage     {asked.page}", flush=True)
    if asked.beside and not asked.toy and day.without_plan():
        print("without a plan of pd probe yet: some steps; --plans-only adds them, here or elsewhere")
    if not done:
        print(f"left: {', '.join(day.left())}. Run the same command again to continue.", flush=True)
    return 0 if done else STOPPED


def run_plans(asked: Asked) -> int:
    """Adds, on a machine without the card, the plans of `pd probe` that the measured steps lack.

    Returns the exit status: 0, or 75 if one is still missing. Raises UserError for figures of a card or a version of
    JAX for which it cannot plan.
    """
    day = Day(asked, Results(asked.json), time.monotonic() + asked.seconds, ())
    machine = day.results.all["machine"]
    card = table_name(machine["device"])
    if card is None:
        raise UserError(f"{asked.json}: holds figures of {machine['device']}, which `pd probe` does not know")
    here, there = installed("jax"), machine["packages"]["jax"]
    if here != there:
        raise UserError(f"{asked.json}: was measured with JAX {there}, and here is {here}; plans are of one version")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        day.plan(card)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    day.write_page()
    print("\n".join([*(f"no plan: {name}" for name in day.without_plan()), str(asked.page)]), flush=True)
    return STOPPED if day.without_plan() else 0
