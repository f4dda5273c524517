"""`experiments/gpu_day`: a day with a card that is not there, its figures, and all of it at toy size on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_day import day as day_module
from experiments.gpu_day import decomposition
from experiments.gpu_day.cards import Card, _parse, table_name
from experiments.gpu_day.day import Day, run_day, run_plans
from experiments.gpu_day.decomposition import cadence, check_smollm2, decompose, steps_in
from experiments.gpu_day.items import ITEMS, PARTS, Asked, Decomposition, Links, Products, Step, named
from experiments.gpu_day.job import Job
from experiments.gpu_day.links import KINDS
from experiments.gpu_day.page import margin, page
from experiments.gpu_day.products import WAYS, measure_products
from experiments.gpu_day.results import Results
from param_decomp_jax.nn.split_product import CHUNK
from param_decomp_lab.config import load_config
from param_decomp_lab.errors import UserError
from tests.lab.tiny_run import ROOT

GIB = 2**30
H100 = Card("NVIDIA H100 80GB HBM3", 79 * GIB, 0, "580")
POOL = int(0.92 * 79 * GIB)
BALANCED = "layer 18, balanced, Δ split, 8 × 512"
LEAN = BALANCED.replace("balanced", "lean")
MEASURED = ROOT / "docs" / "measurements" / "gpu.json"


def test_items() -> None:
    names = [item.name for item in ITEMS]
    assert len({*names}) == len(names)
    assert {part for item in ITEMS for part in item.parts} == {*PARTS}
    for item in ITEMS:
        assert not item.needs or item.needs in names[: names.index(item.name)]
        if isinstance(item, Step | Decomposition):
            assert load_config(ROOT / item.config, item.sets).wrapper.mesh.fsdp == 1
    steps = [item for item in ITEMS if isinstance(item, Step)]
    # On a card of 80 GB.
    fit = [item for item in steps if item.plan_gib < 72.8]
    assert sum("plan" in item.parts and item.over_plan is None for item in fit) >= 5
    assert {"balanced", "lean", "fast"} <= {item.policy for item in fit if "step" in item.parts}
    before = [item for item in ITEMS[: names.index("SmolLM2-135M decomposed")] if not isinstance(item, Links)]
    assert sum(item.expected_s for item in before) < 1300, (
        "too little of 40 minutes would be left for the decomposition"
    )


def test_a_quarter_of_an_hour() -> None:
    """What `--seconds 840` reaches on an H200, the card's own rates included; on an H100 what fits there."""
    first, h100 = ITEMS[:7], 0.92 * 79.6
    assert sum(item.expected_s for item in first) < 840 - 40
    steps = [item for item in first if isinstance(item, Step)]
    assert {item.policy for item in steps} == {"one_card", "balanced", "plain"}
    assert [item.policy for item in steps if item.traced] == ["one_card", "balanced"]
    assert {item.policy for item in steps if item.plan_gib < h100} == {"balanced"}


def of_2026_11_26() -> dict[str, Any]:
    """The recorded results, without any that was measured since: those have their commit."""
    found = Results(MEASURED).all
    return {**found, "measured": {name: x for name, x in found["measured"].items() if "commit" not in x}}


def test_results_of_the_program_before_are_not_taken() -> None:
    """Those of docs/measurements are of steps that asked for no way of computing Δ."""
    assert of_2026_11_26()["measured"].keys() == {
        f"layer 18, {policy}, 8 × 512" for policy in ("balanced", "plain", "lean")
    }
    assert not of_2026_11_26()["measured"].keys() & {item.name for item in ITEMS}


def test_decompositions_have_the_step_that_is_measured() -> None:
    items = [item for item in ITEMS if isinstance(item, Decomposition)]
    assert len(items) == 3
    for item in items:
        step = named(ITEMS, item.needs)
        assert isinstance(step, Step)
        assert (step.config, step.sets) == (item.config, ("eval=null", *item.sets))
        load_config(ROOT / item.config, (*item.sets, *cadence(12000, 0.1), "run_id=p-00000000"))
        # A quarter of an hour is enough for the step and for a start of the run.
        assert step.expected_s + item.expected_s < 840


# ---- a day with a card that is not there ----


class FakeJob:
    """A job that answers at once. What is asked of all of them is kept in ``log``."""

    log: list[tuple[str, dict[str, str], dict[str, Any]]]
    """The item's name, the variables, and what is given."""
    dies_at: str | None
    """The name of the item in which the day is killed."""
    answers: dict[str, dict[str, Any]]
    """By the item's name, in place of the usual one."""

    def __init__(self, words: Sequence[str], log: Path, extra: Mapping[str, str]) -> None:
        assert words[0:3:2] == ["--one", "--given"]
        self._name, self._given = words[1], json.loads(words[3])
        self.log.append((self._name, dict(extra), self._given))

    def end(self) -> None:
        pass

    def result(self, limit_s: float, patience_s: float = 0.0) -> dict[str, Any]:
        if self._name == self.dies_at:
            raise KeyboardInterrupt
        if self._name == "machine":
            rates = {"size": 64, "matmul_flops_per_s": 800e12, "copy_bytes_per_s": 3e12}
            here = {"platform": "gpu", "device": H100.name, "rates": rates}
            return {**here, "date": "2026-01-01", "cores": 16, "python": "3.12", "packages": {"jax": "1"}}
        if "card" in self._given:
            counted = {"total": 200e12, "leading": [8, 512], "by_phase": {"losses": 150e12}}
            return {**counted, **({"plan": {"peak": 60 * GIB}, "predicted_s": 0.45} if self._given["card"] else {})}
        if "run" in self._given:
            run = Path(self._given["run"])
            run.mkdir(exist_ok=True)
            (run / "config.yaml").touch()
            return {
                "run": str(run), "report": f"{run}/report.html", "steps": 100, "reached": 50, "starts": 2, "rows": 1600,
                "batch": [64, 256], "training_s": 600.0, "tokens_per_s": 1e5,
                "first": {"eval/ce_kl/kl_ci_masked": 0.5}, "last": {"eval/ce_kl/kl_ci_masked": 0.25},
                "over_best_baseline": {"l0": 3.9, "error": 0.4567},
            } | self.answers.get(self._name, {})  # fmt: skip
        if self._name == "V U in Δ":
            split = {"s": 5e-3, "flops_per_s": 577e12, "error": 5e-6, "smaller_by": 2e-6}
            products = {"split": split, "`X3`": {"failed": "no such algorithm"}}
            return {"device": H100.name, "shape": [4096, 24576, 14336], "checked": [512, 512], "products": products}
        part = {"phase": "losses", "way": "backward", "inner": ["up_proj"]}
        profile = {
            "steps": 3, "step_s_traced": 0.6, "step_s_untraced": 0.5, "busy": 0.9, "unknown_ms": 1.0,
            "phases": {"clean_pass": 100.0, "losses": 300.0},
            "kernels": [{"kernel": "nvjet_1", **part, "ms_per_step": 90, "share": 0.225}],
            "scopes": [{**part, "ms_per_step": 200, "share": 0.5}],
        }  # fmt: skip
        usual = {
            "plan": {"peak": 61 * GIB},
            "live": {"made": 50 * GIB, "steps": 62 * GIB},
            "pool": POOL,
            "driver_used": POOL + GIB,
            "step_s": 0.5,
            "leading": [8, 512],
            "compile_s": 30.0,
            **({"phases": profile} if "traced" in self._name else {}),
        }
        return self.answers.get(self._name, usual)


def measured() -> list[str]:
    """Names of the steps and links that were begun since the last `a_day`."""
    return [name for name, _, given in FakeJob.log if name != "machine" and not given]


def trained() -> list[dict[str, Any]]:
    return [given for _, _, given in FakeJob.log if "run" in given]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(day_module, "cards_here", lambda: [H100])
    monkeypatch.setattr(day_module, "Job", FakeJob)
    monkeypatch.setattr(FakeJob, "dies_at", None, raising=False)
    monkeypatch.setattr(FakeJob, "answers", {}, raising=False)
    monkeypatch.setattr(FakeJob, "log", [], raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "work").mkdir()
    return Asked(
        parts=PARTS, json=tmp_path / "gpu.json", page=tmp_path / "gpu.md", work=tmp_path / "work", seconds=2400.0,
        decompose_s=None, smollm2=None, text=None, beside=2, toy=False,
    )  # fmt: skip


def a_day(asked: Asked, seconds: float = 2400.0, cards: Sequence[Card] = (H100,)) -> Day:
    FakeJob.log.clear()
    return Day(asked, Results(asked.json), time.monotonic() + seconds, cards)


def test_a_day(asked: Asked) -> None:
    assert a_day(asked).run()
    # What an 80 GB card cannot hold is not begun, one card has no links.
    fit = [item for item in ITEMS if isinstance(item, Products) or (isinstance(item, Step) and item.plan_gib < 72)]
    assert measured() == [item.name for item in fit if "one_card" not in item.needs]
    environments = {name: extra for name, extra, given in FakeJob.log if "card" not in given}
    assert {extra["CUDA_VISIBLE_DEVICES"] for extra in environments.values()} == {"0"}
    assert environments[f"{BALANCED}, traced"]["XLA_FLAGS"].endswith("--xla_gpu_enable_command_buffer=")
    tight = environments[f"{BALANCED}, 0.5 GiB over its plan"]
    assert float(tight["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * 79 == pytest.approx(61.5, abs=1e-2)
    text, fast = asked.page.read_text(), BALANCED.replace("balanced", "fast")
    assert f"| {fast} | 61.000 | 62.000 | +1.000 GiB | 60.000 | +2.000 GiB | 1.000 |" in text
    # 200 TFLOP in 0.5 s of 989 promised and 800 measured; what a plain step computes is not known here.
    assert f"| {fast} | 4,096 | 500.0 ms | 8,192 | 200.0 | 40.4% | 50.0% | – | 30 s |" in text
    assert f"| {fast} | 500.0 ms | 450.0 ms | -10.0% |" in text
    assert "| losses | 300.00 | 75.0% | 150.00 | 500 | 50.6% |" in text
    assert "| `nvjet_1` | losses, backward, up_proj | 90.00 | 22.5% |" in text
    assert "| split | 5.00 ms | 577.0 | 5.0e-06 | 2e-06 |\n| `X3` | no such algorithm | – | – | – |" in text
    assert "| `ce_kl/kl_ci_masked` | 0.5 | 0.25 |" in text
    assert "at the run's L0 (`pd eval --baselines`): l0 3.9; error 0.457." in text
    assert "50 of 100 steps of 64 × 256 tokens, in 2 goes; of 1,600 rows each was taken 2.0 times; 10.0 minutes" in text
    assert "it should be **2 GiB**; today it is 5" in text
    # Again: nothing is left to do.
    assert a_day(asked).run()
    assert FakeJob.log == []


def test_plans_are_added_without_the_card(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was measured on it, and of nothing else."""
    name = BALANCED
    FakeJob.dies_at = BALANCED.replace("split", "fp32")
    with pytest.raises(KeyboardInterrupt):
        a_day(replace(asked, parts=("step",))).run()
    assert "From this it should be" not in asked.page.read_text()
    FakeJob.log.clear()
    monkeypatch.setattr(day_module, "cards_here", list)
    with pytest.raises(UserError, match="was measured with JAX 1, and here is"):
        run_plans(asked)
    monkeypatch.setattr(day_module, "installed", lambda package: "1")
    assert run_plans(asked) == 0
    assert [(of, given) for of, _, given in FakeJob.log] == [(name, {"card": "h100"})]
    assert f"| {name} | 61.000 | 62.000 | +1.000 GiB | 60.000 | +2.000 GiB | 1.000 |" in asked.page.read_text()
    assert "it should be **3 GiB**" in asked.page.read_text()


def test_a_day_goes_on_where_it_was_killed(asked: Asked) -> None:
    FakeJob.dies_at = LEAN
    with pytest.raises(KeyboardInterrupt):
        a_day(asked).run()
    assert asked.page.is_file()
    before, FakeJob.dies_at = measured(), None
    assert a_day(asked).run()
    assert measured()[0] == before[-1] == LEAN
    assert not {*measured()[1:]} & {*before}
    assert "machine" not in [name for name, _, _ in FakeJob.log]


def test_what_does_not_end_in_time_is_left(asked: Asked) -> None:
    assert not a_day(asked, seconds=70).run()
    assert measured() == [
        "V U in Δ",
        "tms_5-2, 100 at once",
        "resid_mlp1, 50 at once",
        "SmolLM2-135M, balanced, 64 × 256",
    ]


def test_the_decomposition_takes_the_time_that_is_left(asked: Asked) -> None:
    assert a_day(asked, seconds=1000).run()
    planned = [
        next(int(one.rpartition("=")[2]) for one in given["planned"] if one.startswith("pd.steps="))
        for given in trained()
    ]
    # Of 1,000 s two minutes are kept to stop it and four are its start; half a second a step. Those of many layers
    # leave two minutes to the comparison and the harvest.
    before, after = (0.85 * (1000 - 120 - 240 - kept) / 0.5 for kept in (0, 120))
    assert planned == pytest.approx([before, after, after], rel=0.01)


def test_the_decomposition_is_resumed(asked: Asked) -> None:
    name = "SmolLM2-135M decomposed"
    FakeJob.answers[name] = {"stopped": "at 50 of 100 steps: …", "unfinished": True, "tries": 0}
    day = a_day(asked)
    assert not day.run()
    begun, *_ = trained()
    assert day.left() == [name]
    assert "Stopped at 50 of 100 steps" in asked.page.read_text()
    for _ in range(3):  # stopped is not failed: as often as it takes
        assert not a_day(asked).run()
        assert trained() == [begun]
    FakeJob.answers.clear()
    assert a_day(asked).run()
    assert trained() == [begun]
    assert "Stopped" not in asked.page.read_text()


def test_what_fails_twice_is_not_begun_again(asked: Asked) -> None:
    name = BALANCED
    FakeJob.answers[name] = {"failed": "status 1: no\nmore", "unfinished": True}
    assert not a_day(asked).run()
    assert a_day(asked).run()
    assert measured() == [name]
    assert a_day(asked).run()
    assert measured() == []
    assert f"- {name}: status 1: no\n" in asked.page.read_text()


def test_another_card_is_refused(asked: Asked) -> None:
    assert a_day(asked).run()
    with pytest.raises(UserError, match=r"holds figures of 1 × NVIDIA H100 80GB HBM3, and here are 2 × NVIDIA B200"):
        a_day(asked, cards=[Card("NVIDIA B200", 178 * GIB, 0, "580")] * 2).run()


def test_several_cards_have_links(asked: Asked) -> None:
    a_day(asked, cards=[H100, H100]).run()
    (links,) = (extra for name, extra, _ in FakeJob.log if name == "links")
    assert links == {}, "it sees all cards"


def test_parts_bring_what_they_need(asked: Asked) -> None:
    needed = ["layer 18, one_card, Δ split, 8 × 512", BALANCED]
    items = replace(asked, parts=("phases",)).items
    assert [item.name for item in items if "traced" not in item.name] == needed


def test_no_card_and_a_taken_card_are_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day_module, "cards_here", list)
    with pytest.raises(UserError, match="lists no GPU here; --toy"):
        run_day(asked)
    monkeypatch.setattr(day_module, "cards_here", lambda: [Card(H100.name, H100.memory, 30 * GIB, "580")])
    with pytest.raises(UserError, match=r"30\.0 GiB of the card are taken"):
        run_day(asked)
    assert not asked.json.exists()


def test_without_weights_the_decomposition_says_what_helps(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other items go on, and a later call tries again."""
    item = named(ITEMS, "SmolLM2-135M decomposed")
    assert isinstance(item, Decomposition)
    monkeypatch.setattr(decomposition, "SMOLLM2", tmp_path / "smollm2")
    monkeypatch.setattr(decomposition, "run", lambda words, extra: 1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        found = decompose(item, asked, tmp_path / "run", ())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "--smollm2 FOLDER, made by `pd demo --smollm2` elsewhere" in found["failed"]
    assert (found["unfinished"], found["tries"]) == (True, 0)


def test_what_follows_the_decomposition_is_made_up_for(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has ended is not trained again when the comparison was stopped."""
    item = named(ITEMS, "SmolLM2-135M, layers 22 to 29, decomposed")
    assert isinstance(item, Decomposition)
    folder, said, stopped_in = tmp_path / "p-00000000", list[str](), "eval"

    def run(words: Sequence[str], extra: dict[str, str]) -> int:
        said.append(words[1])
        if words[1] == "train":
            folder.mkdir()
            (folder / "config.yaml").touch()
            (folder / "ended.json").write_text('{"how": "finished", "why": ""}')
        return 75 if words[1] == stopped_in else 0

    monkeypatch.setattr(decomposition, "run", run)
    monkeypatch.setattr(decomposition, "prepare", lambda item, asked: (tmp_path, tmp_path))
    monkeypatch.setattr(decomposition, "summarize", lambda folder: {})
    monkeypatch.setattr(decomposition, "read_json", lambda *arguments: {"train": {"rows": 1}})
    monkeypatch.setattr(os, "environ", {**os.environ})
    before = signal.getsignal(signal.SIGTERM)
    try:
        first = decompose(item, asked, folder, ())
        stopped_in = ""
        second = decompose(item, asked, folder, ())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == ["train", "eval", "eval", "harvest"]
    assert (first["stopped"], first["unfinished"]) == ("in pd eval, to be resumed", True)
    assert "unfinished" not in second


# ---- its parts ----


def test_results_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    for text, message in (("[1]", "should be an object"), ('{"measured": 3}', "does not hold results"), ("{", "JSON")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            Results(file)


def test_the_page_in_the_documentation_is_of_its_results() -> None:
    assert MEASURED.with_suffix(".md").read_text() == page(Results(MEASURED).all)


def test_a_result_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    item, other = (Step(name="x", parts=(), expected_s=1, config="c", sets=(s,)) for s in ("a", "b"))
    results = Results(tmp_path / "gpu.json")
    results.add("measured", item, {"step_s": 1.0})
    again = Results(tmp_path / "gpu.json")
    assert again.is_done(item)
    assert not again.is_done(other)


def test_cards() -> None:
    (card,) = _parse("NVIDIA H100 80GB HBM3, 81559, 3, 580.159.04\n")
    assert card == Card("NVIDIA H100 80GB HBM3", 81559 << 20, 3 << 20, "580.159.04")
    known = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA H100 PCIe": None}
    assert {name: table_name(name) for name in known} == known


def test_margin() -> None:
    def item(live: float, made: float = 50, **more: Any) -> dict[str, Any]:
        return {"live": {"made": made * GIB, "steps": live * GIB}, "step_s": 1.0, "asked": {}, **more}

    def of(planned: float = 60, **measured: dict[str, Any]) -> Any:
        return margin({"measured": measured, "planned": {name: {"plan": {"peak": planned * GIB}} for name in measured}})

    assert of(a=item(60.2), b=item(59))[0] == 1.5  # 0.2, and 1 for fragmentation
    gib, reasons = of(a=item(60 + 2**-14))
    assert gib == 1
    assert reasons[0].startswith("In one configuration the live peak differed from the plan of `pd probe` by +64 KiB,")
    assert of(a=item(60.2), tight=item(60, asked={"over_plan": 0.5}))[0] == 0.5
    assert of(a=item(62.1), tight=item(60, asked={"over_plan": 0.5}))[0] == 2.5
    out = {"asked": {"over_plan": 0.5}, "failed": "out of memory while it ran"}
    assert of(a=item(60.2), tight=out)[0] == 5
    # Where making the state took more than the steps, their own peak is not known.
    assert of(a=item(66, made=66))[0] is None
    assert of(a=item(61, driver_used=73.6 * GIB, pool=72.6 * GIB))[1][-1].startswith("Libraries took 1.00 GiB")


def test_steps_of_the_decomposition() -> None:
    assert steps_in(1800, 0.1) == int(0.85 * 1560 / 0.1)
    assert steps_in(100, 0.1) == 20
    assert "cadence.save_every=1200" in cadence(12000, 0.1)
    assert "cadence.save_every=30" in cadence(30, 0.1)


def test_products_with_their_errors() -> None:
    """Only bf16 is far off; chunks make no difference here."""
    shape = (16, 3 * CHUNK, 24)
    found = measure_products(Products(name="x", parts=(), expected_s=0, shape=shape, checked=8))
    errors = {way: x["error"] for way, x in found["products"].items() if "failed" not in x}
    assert errors.keys() >= {*list(WAYS)[:4]}
    fp32, split, in_one_go, bf16 = (errors[way] for way in list(WAYS)[:4])
    assert fp32 < 1e-6 < split < 1e-5
    assert in_one_go == pytest.approx(split, rel=0.1)
    assert 1e-3 < bf16 < 4e-3
    assert found["checked"] == [8, 8]


def test_times_before_and_after_are_of_what_was_asked() -> None:
    found = of_2026_11_26()
    assert "## Before and after" not in page(found), "nothing was asked for another way of computing Δ then"
    after = {x.policy: x for x in ITEMS if isinstance(x, Step) and x.name.endswith("Δ split, 8 × 512")}
    old = found["measured"]["layer 18, plain, 8 × 512"]
    for policy, seconds in (("plain", 0.9), ("one_card", 0.8)):
        new = {"step_s": seconds, "asked": after[policy].asked, "commit": "abc", "date": "2026-12-01"}
        found["measured"][after[policy].name] = {**old, **new}
    text = page(found)
    assert "| plain | 8 × 512 | 1,460.1 ms | – | 900.0 ms | 4,551 | 93% |" in text
    assert "| one_card | 8 × 512 | – | – | 800.0 ms | 5,120 | 104% |" in text
    assert f"Measured on 2026-12-01, commit abc: {after['plain'].name}; {after['one_card'].name}." in text


def test_a_folder_that_is_not_smollm2_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"has no model\.safetensors and no tokenizer\.json; should be the folder that"):
        check_smollm2(tmp_path)


def test_a_job_is_stopped_at_its_limit(tmp_path: Path) -> None:
    assert Job(["--one", "machine", "--toy"], tmp_path / "log", {}).result(1.0) == {
        "failed": "not done in 1 s",
        "unfinished": True,
    }


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    found = Job(["--one", "nothing"], tmp_path / "log", {}).result(60.0)
    assert found["unfinished"]
    assert "status 2" in found["failed"]
    assert "error: --one nothing: should be machine, V U in Δ, layer 18, one_card, Δ split" in found["failed"]


def test_a_job_ends_with_its_parent(tmp_path: Path) -> None:
    """Else it would hold the card while the next call measures."""
    starter = f"""
import time; from pathlib import Path; from experiments.gpu_day.job import Job
Job(["--one", "machine", "--toy"], Path({str(tmp_path / "log")!r}), {{"JAX_PLATFORMS": "cpu"}}); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        until(lambda: bool(children.read_text()))
        (child,) = map(int, children.read_text().split())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


def until(condition: Any, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "5"], "--seconds 5: should be at least 30"),
        (["--beside", "-1"], "--beside -1: should be 0 or more"),
        (["--json", "found.md", "--toy"], "the page would be written there"),
        (["--page-only", "--json", "nothing.json"], "has no results; measure first"),
        (["--plans-only", "--json", "nothing.json"], "has no results; measure first"),
        (["--plans-only", "--toy", "--json", str(MEASURED)], "plans are for GPUs, and --toy measures on a CPU"),
        (["--toy", "--smollm2", "x"], "--toy has its own target"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.gpu_day.__main__ import main

    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


# ---- all of it, at toy size ----


@pytest.mark.slow
def test_toy_day_killed_and_gone_on_with(tmp_path: Path) -> None:
    work, file = tmp_path / "work", tmp_path / "gpu.json"
    command = [sys.executable, "-m", "experiments.gpu_day", "--toy", "--work", str(work), "--json", str(file)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def measured() -> dict[str, Any]:
        return json.loads(file.read_text())["measured"] if file.is_file() else {}

    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as first:
        until(lambda: "tiny, balanced, Δ split, 2 × 512" in measured(), 300.0)
        first.kill()
    before = measured()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as second:
        until(lambda: any(work.glob("p-*/ckpts/[0-9][0-9][0-9]")), 600.0)
        second.kill()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny, balanced, Δ split" not in done.stdout
    found = measured()
    for name, item in found.items():
        assert "failed" not in item, (name, item)
        assert name not in before or before[name] == item
        if "step_s" in item:
            assert item["plan"]["peak"] > 0
            assert item["step_s"] > 0
            assert item["finite"]
    assert {"clean_pass", "losses"} <= found["tiny, one_card, Δ split, 2 × 512, traced"]["phases"]["phases"].keys()
    links = found["links"]
    assert {(m["kind"], m["link"]) for m in links["messages"]} == {
        (kind, link) for kind in KINDS for link in ("node", "network")
    }
    run = found["the demo's target decomposed"]
    assert run["reached"] == run["steps"] == 600
    assert run["starts"] == 2
    assert Path(run["report"]).is_file()
    assert run["over_best_baseline"].keys() == {"l0", "error", "random", "attack"}
    assert len([*Path(run["run"]).glob("harvests/*")]) == 1
    text = file.with_suffix(".md").read_text()
    for part in ("V U of Δ", "Before and after", "Memory: planned and taken", "Steps, by memory policy",
                 "Where the time goes", "Links between 8", "Toys", "the demo's target decomposed"):  # fmt: skip
        assert f"## {part}" in text
