"""One item after the other, until all are measured or the time is over."""

import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.gpu_day.beside import Asked, Beside, say
from experiments.gpu_day.cards import Card, cards_here, table_name
from experiments.gpu_day.children import ON_CPU, PATIENCE_S, Children
from experiments.gpu_day.decomposition import (
    Inputs,
    NotPrepared,
    cadence,
    check_smollm2,
    steps_in,
    train_command,
)
from experiments.gpu_day.items import ITEMS, Decomposition, Item, Links, Step, named, toy_items
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
from param_decomp_lab.safe_io.json_text import read_json

GIB = 2**30
RESERVE_S = PATIENCE_S + 30.0
"""Left at the end of a decomposition that does not end in time: to save, and for its report."""
TAKEN = GIB
"""Bytes of a card that show that somebody else uses it."""


@dataclass
class Day:
    asked: Asked
    results: Results
    children: Children
    ends: float
    cards: Sequence[Card]

    def __post_init__(self) -> None:
        self.beside = Beside(self.asked, self.results, self.children, self.ends)

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    @cached_property
    def items(self) -> Sequence[Item]:
        """Those of the parts asked for, and what these need, in order."""
        every = toy_items(self.asked.work) if self.asked.toy else ITEMS
        wanted = {item.name for item in every if {*item.parts} & {*self.asked.parts}}
        wanted |= {item.needs for item in every if item.name in wanted}
        return [item for item in every if item.name in wanted]

    def run(self) -> bool:
        """Whether everything is measured."""
        try:
            self._machine()
            inputs: Future[Inputs] | None = None
            for number, item in enumerate(self.items, 1):
                if self.results.is_done(item):
                    continue
                if "toys" in item.parts:
                    self.beside.wait()  # microseconds of a step depend on what else the processor does
                elif not self.beside.has_begun:
                    possible = [one for one in self.items if not self._reason_against(one)]
                    inputs = self.beside.begin(possible, self.results.all["machine"]["device"])
                self._say(f"{number}/{len(self.items)} {item.name} …")
                result = self._measure(item, inputs)
                if result is not None:
                    self._add(item, result)
            self.beside.wait()
        except BaseException:
            self.children.close()
            raise
        finally:
            self.beside.close()
            self._write_page()
        return all(self.results.is_done(item) or self._reason_against(item) for item in self.items)

    # ---- the card ----

    def _machine(self) -> None:
        """Describes the machine, or compares it with the one described. UserError for one where nothing can be
        measured, or another than before."""
        here = [card.name for card in self.cards]
        there = self.results.all.get("machine")
        if there is not None:
            if there["cards"] != here:
                raise UserError(
                    f"{self.results.file}: holds figures of {_cards(there['cards'])}, and here {_is_are(here)}; choose "
                    "another file with --json"
                )
            return
        found = self.children.do("machine", min(300.0, self.left_s), "", self._one_card())
        if "failed" in found:
            raise CannotTell(f"nothing can be measured here: {found['failed']}")
        if not self.asked.toy and found["platform"] != "gpu":
            raise UserError(
                f"JAX sees no GPU, only {found['device']}: pip install --constraint constraints.txt --editable "
                "'.[cuda13]'"
            )
        driver = self.cards[0].driver if self.cards else None
        total = self.cards[0].memory if self.cards else None
        of_all = {"cards": here, "driver": driver, "memory": total, "toy": self.asked.toy}
        self.results.describe({**found, **of_all, "commit": commit_of_the_code()})
        rates = found["rates"]
        self._say(
            f"{_cards(here)}: a product {rates['matmul_flops_per_s'] / 1e12:,.1f} TFLOP/s, "
            f"a copy {rates['copy_bytes_per_s'] / 1e12:.3f} TB/s"
        )

    def _one_card(self) -> dict[str, str]:
        """Variables that show a process one card alone."""
        if not self.cards:
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"}

    def _wait_until_free(self) -> None:
        """What a killed process held takes a moment to go."""
        for _ in range(15):
            if not any(card.used > TAKEN for card in cards_here()[: len(self.cards)]):
                return
            time.sleep(2)

    # ---- one item ----

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

    def _measure(self, item: Item, inputs: Future[Inputs] | None) -> dict[str, Any] | None:
        """What was found; None where the item was not begun."""
        against = self._reason_against(item)
        needed = self.results.all["measured"].get(item.needs, {}) if item.needs else None
        if not against and needed is not None and "step_s" not in needed:
            against = f"needs {item.needs} first"
        if not against and self.left_s < item.expected_s:
            against = f"takes {item.expected_s:.0f} s: left for the next call"
        if against:
            self._say(f"    {against}")
            return None
        self._wait_until_free()
        limit = min(self.left_s, max(150.0, 3 * item.expected_s))
        match item:
            case Links():
                simulated = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={item.simulated}"}
                found = self.children.do("links", limit, item.name, simulated if item.simulated else {})
            case Decomposition():
                assert inputs is not None
                found = self._decompose(item, inputs)
            case Step():
                found = self.children.do("step", limit, item.name, {**self._one_card(), **_variables(item, needed)})
            case _:
                raise AssertionError(item)
        result: dict[str, Any] = found
        return result

    def _add(self, item: Item, result: dict[str, Any]) -> None:
        tries = self.results.of(item).get("tries", 0) + 1
        extra = {"asked": item.asked, "parts": [*item.parts], "tries": result.get("tries", tries)}
        self.results.add("measured", item.name, {**result, **extra})
        self._write_page()
        self._say(f"    {line(result)}")

    # ---- the decomposition ----

    def _decompose(self, item: Decomposition, inputs: Future[Inputs]) -> dict[str, Any]:
        try:
            made = inputs.result(timeout=max(1.0, self.left_s))
        except (NotPrepared, TimeoutError) as error:
            return {"failed": str(error) or "weights and text were not made in time", "unfinished": True, "tries": 0}
        before = self.results.of(item)
        run, planned = self._plan(item, before)
        extra = {**self._one_card(), "JAX_COMPILATION_CACHE_DIR": str(self.asked.work / "compiled")}
        ended = self.children.pd(
            train_command(item, run, made, planned), "train", self.left_s - RESERVE_S, extra, PATIENCE_S
        )
        rows = read_json(made.tokens / "meta.json", "the tokens' description", dict)["train"]["rows"]
        noted = {"planned": [*planned], "run": str(run), "rows": rows}
        if not (run / "config.yaml").is_file():
            return {"failed": f"{ended.log}: {ended.last_line}", "unfinished": True, **noted}
        found = self.children.do("run", 120.0, "", ON_CPU, "--run", str(run))
        if ended.status == 0:
            return {**found, **noted}
        if ended.status is None or ended.status == STOPPED:
            reached = f"{found.get('reached', 0):,} of {found.get('steps', 0):,} steps"
            return {**found, **noted, "stopped": f"at {reached}: to be gone on with", "unfinished": True, "tries": 0}
        return {
            **found,
            **noted,
            "failed": f"status {ended.status}, {ended.log}: {ended.last_line}",
            "unfinished": True,
        }

    def _plan(self, item: Decomposition, before: Mapping[str, Any]) -> tuple[Path, Sequence[str]]:
        """The run's folder, and what its configuration is set to. Noted before it begins: a later call goes on."""
        if "run" in before and (Path(before["run"]) / "config.yaml").is_file():
            return Path(before["run"]), before["planned"]
        seconds = self.asked.decompose_s or min(item.most_s, self.left_s - RESERVE_S)
        step_s = self.results.all["measured"][item.needs]["step_s"] if item.needs else None
        steps = item.steps
        if steps is None:
            assert step_s is not None
            steps = steps_in(seconds, step_s)
        planned = cadence(steps, step_s)
        run = self.asked.work / f"p-{secrets.token_hex(4)}"
        note = {"run": str(run), "planned": [*planned], "unfinished": True, "stopped": "with the command"}
        self.results.add("measured", item.name, {**note, "asked": item.asked, "parts": [*item.parts], "tries": 0})
        self._say(f"    {planned[0].removeprefix('pd.steps=')} steps in {run}; log {self.asked.work}/logs/train.log")
        return run, planned

    # ---- what is said ----

    def _say(self, text: str) -> None:
        say(self.left_s, text)

    def _write_page(self) -> None:
        if "machine" in self.results.all:
            self.asked.page.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.asked.page, page(self.results.copy()))


def _variables(item: Step, needed: Mapping[str, Any] | None) -> dict[str, str]:
    """Of the item's process."""
    if item.traced:
        return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()}
    if item.over_plan is None:
        return {}
    assert needed is not None
    total = needed["pool"] / MEM_FRACTION
    fraction = (needed["plan"]["peak"] + item.over_plan * GIB) / total
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
    kinds = dict.fromkeys(names)
    return ", ".join(f"{[*names].count(name)} × {name}" for name in kinds) or "a CPU"


def _is_are(names: Sequence[str]) -> str:
    return f"is {_cards(names)}" if len(names) < 2 else f"are {_cards(names)}"


def run_day(asked: Asked) -> int:
    """Exit status: 0, or 75 where something is left. UserError for what cannot be measured."""
    started = time.monotonic()
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
    with _only_one(asked.work), _stopping():
        day = Day(asked, Results(asked.json), Children(asked.work, asked.toy), started + asked.seconds, cards)
        try:
            done = day.run()
        except KeyboardInterrupt:
            print(f"stopped; {asked.json} has what was measured. The same command goes on.", flush=True)
            return STOPPED
    for links in (one for one in day.results.all["measured"].values() if "fits" in one):
        print(as_table([Fit(**one) for one in links["fits"]]), flush=True)
    found = margin(day.results.copy())
    print(
        "\n".join((f"margin of pd probe: {'unknown' if found.gib is None else f'{found.gib:g} GiB'}", *found.reasons))
    )
    print(f"results  {asked.json}\npage     {asked.page}", flush=True)
    if not done:
        left = [item.name for item in day.items if not day.results.is_done(item) and not day._reason_against(item)]
        print(f"left: {', '.join(left)}. The same command goes on.", flush=True)
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
    asked.work.mkdir(parents=True, exist_ok=True)
    with _only_one(asked.work), _stopping():
        children = Children(asked.work, asked.toy)
        beside = Beside(asked, results, children, time.monotonic() + asked.seconds)
        try:
            beside.begin_plans(steps, card)
            beside.wait()
        except KeyboardInterrupt:
            print("stopped", flush=True)
        finally:
            children.close()
            beside.close()
    asked.page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(asked.page, page(results.copy()))
    left = [item.name for item in steps if "plan" not in results.all["planned"].get(item.name, {})]
    print("\n".join([*(f"no plan: {name}" for name in left), str(asked.page)]), flush=True)
    return STOPPED if left else 0


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """UserError if another process measures with the same folder."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--work {work}: another process measures there; wait until it has ended") from error
        yield


@contextmanager
def _stopping() -> Iterator[None]:
    """A block in which SIGTERM does what Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
