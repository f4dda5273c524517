"""`pd probe` and `pd fit`. What compiles for GPUs needs JAX's CUDA plugin (the extra `probe`)."""

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from rich.console import Console

from param_decomp_aot.compile import device_bytes
from param_decomp_jax.nn.attention import _can_be_lowered_for_cuda
from param_decomp_jax.sharding.mesh import make_mesh
from param_decomp_lab.config import load_config
from param_decomp_lab.config import write as write_config_module
from param_decomp_lab.config.write import write_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.evaluation import Evaluation
from param_decomp_lab.probe.answer import ProbeAnswer, compile_parts
from param_decomp_lab.probe.cache import cached
from param_decomp_lab.probe.cards import TABLE, MemoryPool, find_card
from param_decomp_lab.probe.command import gpus_per_node_of_mesh
from param_decomp_lab.probe.fit import FitRequest, fit, own_config, valid_kinds, valid_spaces
from param_decomp_lab.probe.measure import Where
from param_decomp_lab.probe.search import SearchPoint, Variant, best, frontier, largest_that_fits, search
from param_decomp_lab.probe.subject import STEP, Subject, run_subject
from param_decomp_lab.probe.subprocess import probe_in_subprocess
from param_decomp_lab.probe.vary import evaluating_less, kinds, parse_vary
from param_decomp_lab.setup import set_up
from param_decomp_lab.setup.programs import Program
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.training.run import train
from tests.lab.tiny_run import ROOT, Tiny, pd_here
from tests.plugin import needs_plugin

GIB = 2**30
LLAMA = ROOT / "configs" / "llama8b_l18-26_9layer_chunkwise.yaml"


# ---- what is compiled ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [("lean", "{fsdp: 4, tensor: 2}"), ("published", "{replica: 2, fsdp: 4}"), ("fast", "{fsdp: 8, nodes: 2}")],
)
def test_the_probe_lowers_what_the_trainer_lowers(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, mesh: str
) -> None:
    """Every program of a run that is trained for two steps, on the same devices, to the letter."""
    sets = [f"out_dir={tmp_path}", f"mesh={mesh}", f"memory.preset={preset}", "pd.steps=2"]
    config = load_config(tiny.config, [*sets, "pd.faithfulness_warmup_steps=1", "eval.n_steps=1", "wandb=null"])
    trained: list[str] = []
    lower, evaluate = Program.lower, Evaluation._fast_batch

    def recorded(program: Program) -> Any:
        lowered = lower(program)
        trained.append(lowered.as_text())
        return lowered

    evaluated: list[Any] = []

    def watched(self: Evaluation, *arguments: Any) -> Any:
        evaluated.append(self)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Program, "lower", recorded)
    monkeypatch.setattr(Evaluation, "_fast_batch", watched)
    train(config, Console(quiet=True))
    subject = run_subject(config)
    probed = make_mesh(subject.mesh)
    with jax.set_mesh(probed):
        assert [text(subject, STEP, probed)] == trained
        setup = set_up(ResolvedConfig(config), Console(quiet=True))
        real = evaluated[0].programs(*of_evaluation(subject, probed, setup.outline))["evaluation"]
        assert lower(real).as_text() == text(subject, "evaluation", probed)


def text(subject: Subject, phase: str, mesh: Mesh) -> str:
    program = subject.phases[phase](mesh).program
    found: str = program.function.lower(*program.arguments).as_text()
    return found


def of_evaluation(subject: Subject, mesh: Mesh, outline: Any) -> tuple[Any, Any, Any]:
    return outline.state, outline.weights, outline.eval.batch()


def test_nothing_is_allocated(tiny: Tiny) -> None:
    """All parts of a run of an 8B on 64 devices are described within seconds; no array of it exists."""
    subject = run_subject(load_config(LLAMA))
    before = sum(x.nbytes for x in jax.live_arrays())
    assert list(subject.phases) == [
        "making the state", "faithfulness warm-up", STEP, "evaluation", "figures", "save", "restore",
    ]  # fmt: skip
    mesh = Mesh([[[jax.devices()[0]] * 1] * 1], ("replica", "fsdp", "tensor"))
    for phase in subject.phases.values():
        phase(mesh)
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 1 << 20


def test_what_lies_there_meanwhile(tiny: Tiny) -> None:
    """With every part's own arguments it makes up state and weights, on whatever mesh."""
    subject = run_subject(load_config(tiny.config, ["mesh={fsdp: 8}"]))
    mesh = make_mesh(subject.mesh)
    step = subject.phases[STEP](mesh)
    state, weights, inputs, _ = step.program.arguments
    whole = device_bytes((state, weights))
    assert sum(step.groups.values()) == whole - device_bytes(state.step) + device_bytes(inputs) - counts(state)
    for name in ("evaluation", "figures"):
        phase = subject.phases[name](mesh)
        assert phase.elsewhere + device_bytes((state.components, state.ci, weights)) == whole
    warmup = subject.phases["faithfulness warm-up"](mesh)
    assert warmup.elsewhere + device_bytes((state.components, weights)) == whole
    restore = subject.phases["restore"](mesh)
    assert restore.elsewhere + device_bytes(restore.program.arguments) == whole


def counts(state: Any) -> int:
    """Of the ascents, which belong to no group."""
    return sum(device_bytes(a.count) for a in state.adversaries.values())


# ---- the answer ----


def test_the_pool() -> None:
    """memory.md's figure for a B200."""
    b200 = MemoryPool.from_card(find_card("B200"))
    assert b200.capacity / GIB == pytest.approx(178.4, abs=0.05)
    assert b200.usable / GIB == pytest.approx(178.36 * 0.92 - 5, abs=0.05)
    for wrong in ({"fraction": 1.2}, {"fraction": 0}, {"margin_gib": -1}, {"margin_gib": 400}):
        with pytest.raises(UserError):
            MemoryPool.from_card(find_card("b200"), **wrong)  # type: ignore[arg-type]


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    """A file with a card's row is that card; without what the card reaches, an H200's shares are taken."""
    columns, *rows = TABLE.read_text().splitlines()
    h100 = next(row for row in rows if row.startswith("h100,"))
    names, values = columns.split(","), h100.split(",")
    kept = [k for k, name in enumerate(names) if not name.startswith("reached")]
    file = tmp_path / "mine.csv"

    def write(**changed: str) -> str:
        row = {names[k]: changed.get(names[k], values[k]) for k in kept}
        file.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
        return str(file)

    assert find_card(write()) == find_card("h100")
    mine = find_card(write(name="Mine", device_memory_bytes="50000000000", bf16_flops="494.5e12"))
    assert (mine.name, MemoryPool.from_card(mine).capacity) == ("mine", 50_000_000_000)
    assert mine.rates.bf16_flops == pytest.approx(find_card("h100").rates.bf16_flops / 2, rel=0.01)
    for column, value, message in (
        ("core_count", "", "lacks core_count"),
        ("core_count", "1.5", "core_count: should be a count"),
        ("bf16_flops", "nan", "bf16_flops: should be a positive number"),
        ("network_Bps", "0e9", "network_Bps: should be a positive number"),
        ("compute_capability", "9", "compute_capability: should be such as 9.0"),
        ("accelerated_features", "maybe", "accelerated_features: should be yes or no"),
        ("description", "a\\n", "description: should be one line of words"),
    ):
        with pytest.raises(UserError, match=message):
            find_card(write(**{column: value}))
    file.write_text("\n".join((columns, *rows)))
    for wrong, message in ((str(file), "rows; should have one"), ("no.csv", "no.csv"), ("MI300X", "untested")):
        with pytest.raises(UserError, match=message):
            find_card(wrong)


def test_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def answer() -> dict[str, Any]:
        asked.append(1)
        return {"a": len(asked)}

    assert cached(tmp_path, "q", answer) == ({"a": 1}, False)
    assert cached(tmp_path, "q", answer) == ({"a": 1}, True)
    assert cached(tmp_path, "another", answer) == ({"a": 2}, False)
    for file in tmp_path.iterdir():
        file.write_text("{ cut off")
    assert cached(tmp_path, "q", answer) == ({"a": 3}, False)
    assert cached(None, "q", answer) == ({"a": 4}, False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_kind")
    assert cached(tmp_path, "q", answer) == ({"a": 5}, False)
    with jax.default_matmul_precision("highest"):
        assert cached(tmp_path, "q", answer) == ({"a": 6}, False)
    (tmp_path / "file").touch()
    assert cached(tmp_path / "file" / "folder", "q", answer) == ({"a": 7}, False)
    assert "the result cannot be cached (Not a directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("kill -KILL $$", "pd probe was ended by SIGKILL (was there enough memory?)"),
        ("echo compiling >&2; echo error: no such thing >&2; exit 2", "no such thing"),
        ("echo Segmentation fault >&2; exit 1", "Segmentation fault"),
        ("exit 1", "pd probe ended with status 1"),
    ],
)
def test_a_probe_that_ends_without_an_answer(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    told = probe_in_subprocess(LLAMA, (), ())
    assert told.answer is None
    assert told.why == why


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((LLAMA, "--gpu", "b100"), "--gpu b100: unknown; did you mean '"),
        ((LLAMA, "--nodes", "3"), "fsdp 64 × tensor 1 are 64 devices, but 3 nodes of 21 GPUs are 63"),
        ((LLAMA, "--nodes", "4", "--gpus-per-node", "8"), "are 32; make them equal, such as with --set mesh.fsdp=32"),
        ((LLAMA, "--set", "mesh.fsdp=12", "--batch", "12", "--set", "eval.batch_size=12"), "whole nodes of 8"),
        ((LLAMA, "--batch", "100"), "it must be a multiple of mesh.replica · mesh.fsdp = 1 · 64"),
        ((LLAMA, "--seq", "4096"), "max_len"),
        (("nowhere.yaml",), "nowhere.yaml: cannot read"),
        ((LLAMA, "--mem-fraction", "2"), "--mem-fraction 2"),
    ],
)  # fmt: skip
def test_wrong_questions(arguments: tuple[Any, ...], said: str) -> None:
    outcome = pd_here("probe", *arguments)
    assert outcome.status == 2
    assert said in outcome.err


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""

    def missing(**_: Any) -> None:
        raise RuntimeError("no plugin 'cuda'")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    outcome = pd_here("probe", LLAMA, "--quick", "--no-cache")
    assert outcome.status == 2
    assert f"no CUDA plugin of JAX's version {jax.__version__} to compile with" in outcome.err
    assert "pip install 'param-decomp[probe]'" in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["probe", "fit --gpus 8"])
def test_with_a_compiler_of_another_version(tmp_path: Path, command: str) -> None:
    """Said before JAX starts, which would print a traceback and go on with half of the plugin."""
    for part in ("plugin", "pjrt"):
        (tmp_path / f"jax_cuda13_{part}-0.1.2.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: jax-cuda13-{part}\nVersion: 0.1.2\n"
        (tmp_path / f"jax_cuda13_{part}-0.1.2.dist-info" / "METADATA").write_text(metadata)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "param_decomp_lab", *command.split(), str(LLAMA), "--gpu", "b200"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"JAX is {jax.__version__} and what is installed is jax-cuda13-plugin 0.1.2 and" in done.stderr
    assert "pip install 'param-decomp[probe]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_search_for_the_batch_is_not_cut_short() -> None:
    outcome = pd_here("fit", LLAMA, "--gpus", "8", "--for", "batch", "--minutes", "1")
    assert outcome.status == 2
    assert "--minutes: only a search --for speed can be cut short" in outcome.err


def test_without_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that finds no cuDNN; the file for scripts says so, too."""

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr("param_decomp_jax.nn.attention._cudnn", missing)
    monkeypatch.setattr("param_decomp_lab.probe.measure.compile_for", lambda *_, **__: _can_be_lowered_for_cuda())
    _can_be_lowered_for_cuda.cache_clear()
    outcome = pd_here("probe", LLAMA, "--quick", "--no-cache")
    _can_be_lowered_for_cuda.cache_clear()
    assert outcome.status == 2
    assert "pip install nvidia-cudnn-cu13" in outcome.err


def test_a_compiler_that_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the run's fault: neither of the verdicts."""

    def gives_up(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: out of ideas")

    monkeypatch.setattr("param_decomp_lab.probe.measure.compile_for", gives_up)
    outcome = pd_here("probe", LLAMA, "--quick", "--no-cache", "--json", tmp_path / "a.json")
    assert outcome.status == 1
    assert "training step: the compiler gave up: INTERNAL: out of ideas" in outcome.err
    assert json.loads((tmp_path / "a.json").read_text())["verdict"] == "unknown"


def test_gpus_of_a_node() -> None:
    mesh = run_subject(load_config(LLAMA)).mesh
    assert gpus_per_node_of_mesh(mesh, None, None) == 8
    assert gpus_per_node_of_mesh(mesh, 16, None) == 4
    assert gpus_per_node_of_mesh(mesh, None, 4) == 4
    assert gpus_per_node_of_mesh(replace(mesh, nodes=8), None, None) == 8
    with pytest.raises(UserError, match=r"are 16 GPUs in each, but a node has 8; try --set mesh\.nodes=8"):
        gpus_per_node_of_mesh(replace(mesh, nodes=4), None, None)


@needs_plugin
def test_a_whole_answer(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts of the tiny run on a node; asked again at once; too large for a card with nothing left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, page = tmp_path / "answer.json", tmp_path / "page.html"
    request = ("probe", tiny.config, "--set", "mesh.fsdp=8", "--json", file)
    outcome = pd_here(*request, "--html", page)
    assert outcome.status == 0, outcome.err
    assert outcome.out.rstrip().splitlines()[-1].startswith("fits: 0.")
    answer = json.loads(file.read_text())
    assert answer["verdict"] == "fits"
    assert answer["limit_bound"] is False
    assert answer["peak_gib"] == max(part["peak_gib"] for part in answer["parts"].values())
    assert answer["peak_gib_unlimited"] <= answer["peak_gib"]
    step = answer["parts"][STEP]
    assert answer["ledger_gib"] == pytest.approx(step["peak_gib"], rel=0.02)
    assert sum(answer["arguments"].values()) == pytest.approx(step["arguments_gib"], rel=0.01)
    # XLA forgets where a few of its own buffers come from.
    largest = answer["buffers"][:10]
    assert sum(b["gib"] for b in largest if named_in_the_code(b)) > 0.9 * sum(b["gib"] for b in largest)
    # Also what a part does not read, and so is not given: the target in the warm-up, V and U in the figures.
    there = {name: part["arguments_gib"] + part["elsewhere_gib"] for name, part in answer["parts"].items()}
    for name in ("faithfulness warm-up", STEP, "evaluation", "figures", "restore"):
        assert there[name] >= there["save"] * (1 - 1e-6)
    assert answer["collectives"]
    assert answer["matmul_flops"] == sum(answer["flops"].values())
    assert set(answer["flops"]) == {"tf32", "fp32"}  # the tiny run is not in bf16; Δ is in true fp32
    terms = {name: seconds for name, seconds in answer["roofline_s"].items() if name != "overlapping"}
    assert answer["step_s"] == pytest.approx(sum(terms.values()))
    assert answer["roofline_s"]["overlapping"] < answer["step_s"]
    assert 0 < answer["bytes_moved"]["memory_by_products"] < answer["bytes_moved"]["memory"]
    assert answer["rates"] == "an H200's shares of the data sheet"
    assert f"\npredicted step {1000 * answer['step_s']:,.0f} ms, " in outcome.out
    assert "rates reached: an H200's shares of the data sheet" in " ".join(outcome.out.split())
    assert all(f"matrix products, {precision} " in outcome.out for precision in answer["flops"])
    assert page.stat().st_size > 10_000
    assert page.with_suffix(".png").stat().st_size > 10_000
    monkeypatch.setattr("param_decomp_lab.probe.measure.compile_for", None)
    assert pd_here(*request).status == 0
    small = pd_here(*request, "--margin-gib", str(answer["capacity_gib"] * 0.92 - 1e-6))
    assert small.status == 3
    assert small.out.rstrip().splitlines()[-1].startswith("does not fit: ")


def named_in_the_code(buffer: dict[str, Any]) -> bool:
    """An argument by what the step is given; anything else by a file and line of ours."""
    if buffer["role"] == "argument":
        return buffer["scope"].split(".")[0].split("[")[0] in ("state", "weights", "inputs", "n")
    file, _, line = buffer["source"].rpartition(":")
    return (
        bool(buffer["scope"]) and (ROOT / file).is_file() and int(line) <= len((ROOT / file).read_text().splitlines())
    )


@needs_plugin
def test_the_host_is_another_memory(tiny: Tiny, tmp_path: Path) -> None:
    """Moments in pinned host memory are counted there, of arguments and of results."""
    parts = ("components_moments", "ci_moments", "sources_moments")
    wide = "pd.decomposition_targets=[{module_pattern: 'layers.*.mlp.*_proj', C: 2048}]"

    def asked(*offloaded: str) -> ProbeAnswer:
        sets = ["mesh.fsdp=8", wide, f"memory.offload={json.dumps(list(offloaded))}", "eval=null"]
        subject, b200 = run_subject(load_config(tiny.config, sets)), find_card("b200")
        return compile_parts(
            subject, b200, Where(b200.description, 8, None), MemoryPool.from_card(b200), lambda _: None, quick=True
        )

    jax.config.update("jax_platforms", "cpu")
    here, there = asked(), asked(*parts)
    moved = here.parts[STEP].memory.arguments - there.parts[STEP].memory.arguments
    assert here.parts[STEP].memory.host == 0
    assert moved > 0
    assert there.parts[STEP].memory.host >= moved
    # They come back when the gradients are there: at the peak they are away.
    assert there.parts[STEP].memory.peak < here.parts[STEP].memory.peak


# ---- the search ----


@given(
    needs=st.lists(st.integers(1, 100), min_size=1, max_size=40).map(sorted),
    limit=st.integers(0, 101),
)
def test_bisection_finds_the_largest(needs: list[int], limit: int) -> None:
    """With as many questions as a bisection takes, and one at most for a kind that fits throughout."""
    asked: list[int] = []

    def point(kind: Variant, batch: int) -> SearchPoint:
        asked.append(batch)
        return made_up(kind, batch, peak=needs[batch - 1], limit=limit)

    points = largest_that_fits(Variant("k", (), tuple(range(1, len(needs) + 1))), point)
    fitting = [batch for batch in range(1, len(needs) + 1) if needs[batch - 1] <= limit]
    found = best(points)
    assert (found.batch if found else None) == (max(fitting) if fitting else None)
    assert len(asked) == len(set(asked)) <= len(needs).bit_length() + 1
    if len(fitting) == len(needs):
        assert len(asked) == 1


def made_up(kind: Variant, batch: int, peak: float, limit: float, step_s: float = 1.0) -> SearchPoint:
    moved = {"memory": 0, "within_node": 0, "between_nodes": 0}
    answer = {"verdict": "fits" if peak <= limit else "does_not_fit", "peak_gib": peak, "tokens_per_step": batch * 8}
    times = {"arithmetic": step_s, "overlapping": step_s}
    rest = {"pool_gib": limit, "capacity_gib": 2 * limit, "gpu": "b200", "matmul_flops": 10**15, "step_s": step_s}
    return SearchPoint(kind, batch, {**answer, **rest, "roofline_s": times, "bytes_moved": moved, "largest_part": STEP})


def test_the_best_of_several_kinds() -> None:
    """Most tokens first, then speed; what cannot be told ends its kind and no other."""
    a, b, c = (Variant(name, (), (8, 16, 32)) for name in "abc")
    speeds = {"a": 2.0, "b": 1.0}

    def point(kind: Variant, batch: int) -> SearchPoint:
        if kind is c:
            return SearchPoint(c, batch, None, "the compiler gave up")
        return made_up(kind, batch, peak=batch, limit=20, step_s=speeds[kind.name])

    points = search((a, b, c), point, workers=2)
    chosen = best(points)
    assert chosen is not None
    assert (chosen.kind, chosen.batch) == (b, 16)
    assert [p.batch for p in points if p.kind is c] == [32]
    assert frontier(points) == [chosen]
    assert best([p for p in points if p.kind is c]) is None


def test_what_may_vary() -> None:
    found = parse_vary(["batch=64..1000", "seq=512,2048", "mesh=1x64x1,8x8x1", "memory.component_block=4096,null"])
    assert found == {
        "batch": [64, 128, 256, 512], "seq": [512, 2048], "mesh": [(1, 64, 1), (8, 8, 1)],
        "memory.component_block": [4096, None],
    }  # fmt: skip
    every = kinds(load_config(LLAMA), 64, found)
    assert len(every) == 2 * 2 * 2 * 2
    assert every[0].name == "balanced, 1×64×1, seq 512, memory.component_block 4096"
    assert dict(every[0].settings)["mesh"] == {"replica": 1, "fsdp": 64, "tensor": 1, "nodes": 1}
    default = kinds(load_config(LLAMA), 8, {})
    assert [kind.name for kind in default] == ["balanced", "lean"]
    assert default[0].batches == (8, 16, 32, 64, 128, 256, 512)


LAYER_18 = ROOT / "configs" / "llama8b_l18.yaml"


def test_what_is_said_is_not_varied() -> None:
    """And batches are cut into micro-batches."""

    def found(*overrides: str, vary: Sequence[str] = ()) -> list[Variant]:
        request = FitRequest(LAYER_18, overrides, "h100", 8, 8)
        return valid_kinds(request, load_config(LAYER_18, overrides), parse_vary(vary))

    assert [kind.name for kind in found()] == ["lean", "balanced"]
    assert found()[0].batches == tuple(16 * 2**k for k in range(7))  # `memory.micro_batches` is 2
    assert found("memory.micro_batches=1")[0].batches == tuple(8 * 2**k for k in range(7))
    parts = found(vary=["memory.micro_batches=1,4", "memory=lean"])
    assert [kind.batches[0] for kind in parts] == [8, 32]
    (alone,) = found("memory.preset=balanced", "pd.batch_size=48")
    assert (alone.name, alone.batches) == ("balanced", (48,))
    (evaluated,) = found("memory.preset=lean", "memory.micro_batches=3", "eval.batch_size=48", "pd.batch_size=48",
                         vary=["mesh=2x4x1"])  # fmt: skip
    assert "eval.batch_size" not in dict(evaluated.settings)


def documented(command: str) -> list[list[str]]:
    """Calls of the command in the docs and in its own help, as words."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "param_decomp_lab" / "cli").glob("*.py")]
    lines = [line.strip().strip("`") for page in pages for line in page.read_text().splitlines()]
    return [shlex.split(line.partition("`")[0]) for line in lines if line.startswith(f"{command} ")]


def test_documented_calls_of_fit_are_valid() -> None:
    calls = [call[2:] for call in documented("pd fit") if call[2].startswith("configs/")]
    assert len(calls) >= 3
    for path, *words in calls:
        options: dict[str, list[str]] = {}
        for name, value in zip(words[::2], words[1::2], strict=True):
            options.setdefault(name, []).append(value)
        assert options.keys() <= {"--gpu", "--gpus", "--vary", "--set", "--for"}
        (goal,) = options.get("--for", ["speed"])
        n_gpus, sets = int(options["--gpus"][0]), tuple(options.get("--set", ()))
        request = FitRequest(
            ROOT / path, sets, "b200", n_gpus, min(n_gpus, 8), (), "batch" if goal == "batch" else "speed"
        )
        valid = valid_kinds if goal == "batch" else valid_spaces
        assert valid(request, own_config(request), parse_vary(options.get("--vary", ())))


@pytest.mark.parametrize(
    "wrong",
    [
        "pd.batch_size=64",
        "memory.preset=lean",
        "mesh.tensor=2",
        "data.max_seq_len=512",
        "batch",
        "batch=x",
        "batch=0",
        "batch=9..8",
        "seq=512..",
        "mesh=64",
        "mesh=1x0x64",
        "memory=thin",
    ],
)
def test_what_may_not_vary(wrong: str) -> None:
    with pytest.raises(UserError, match="--vary"):
        parse_vary([wrong])


def test_meshes_must_take_all_gpus() -> None:
    with pytest.raises(UserError, match="takes 32 GPUs, --gpus says 64"):
        kinds(load_config(LLAMA), 64, {"mesh": [(1, 32, 1)]})
    with pytest.raises(UserError, match="do not divide 6"):
        kinds(load_config(LLAMA, ["mesh={fsdp: 16, tensor: 4}"]), 6, {})


def test_evaluation_follows_the_mesh() -> None:
    every = kinds(load_config(LLAMA), 48, {"batch": [48]})
    assert dict(every[0].settings)["eval.batch_size"] == 144


@pytest.mark.parametrize(
    ("overrides", "fits"), [((), True), (("eval.n_steps=4",), False), (("eval.batch_size=64",), False)]
)
def test_an_evaluation_that_is_too_large(
    overrides: tuple[str, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets smaller batches and sees as many rows; not if the user has said how many, and never less than a row on
    each GPU."""
    asked: list[tuple[int, int]] = []

    def needs(request: FitRequest, kind: Variant, batch: int, options: tuple[str, ...]) -> SearchPoint:
        config = load_config(request.path, request.sets(kind, batch))
        assert config.method.eval is not None
        evaluated = config.method.eval.batch_size
        if options:
            return made_up(kind, batch, peak=batch, limit=40)
        asked.append((evaluated, config.method.eval.n_steps))
        point = made_up(kind, batch, peak=max(batch, evaluated), limit=40)
        return replace(point, answer={**point.answer, "largest_part": "figures"}) if evaluated > batch else point

    monkeypatch.setattr("param_decomp_lab.probe.fit._probe_point", needs)
    request = FitRequest(LLAMA, overrides, "b200", 8, 8)
    vary = ["batch=16,32,64", "memory=lean"]
    found = fit(request, vary, Console(quiet=True))
    own = load_config(LLAMA, overrides).method.eval
    assert own is not None
    assert asked[0] == (own.batch_size, own.n_steps)
    if not fits:
        assert found.best is None
        assert [point.batch for point in found.points if point.verdict == "fits"] == []
        return
    assert found.best is not None
    assert found.best.batch == 32
    assert asked[-1][0] == 32
    assert {size * n for size, n in asked} == {own.batch_size * own.n_steps}
    kind = found.best.kind
    sizes = []
    while (kind := evaluating_less(load_config(LLAMA), kind)) is not None:  # type: ignore[assignment]
        sizes.append(dict(kind.settings)["eval.batch_size"])
    assert sizes == [16, 8]


def test_the_configuration_is_written(tiny: Tiny, tmp_path: Path) -> None:
    """Paths keep their meaning in another folder, all else is as it was but for what was set."""
    out = tmp_path / "found" / "run.yaml"
    sets = ("pd.batch_size=16", "memory.preset=lean", "mesh={fsdp: 2}")
    write_config(tiny.config, sets, out, ["why", "not"], "pd fit")
    assert out.read_text().startswith("# Written by pd fit from wrapper.yaml.\n# why\n# not\n")
    written, meant = load_config(out), load_config(tiny.config, sets)
    assert written.wrapper.model_dump(exclude={"torch_config"}) == meant.wrapper.model_dump(exclude={"torch_config"})
    assert written.method == meant.method
    write_config(tiny.config, sets, out, [], "pd fit")
    out.write_text("run_name: mine\n")
    with pytest.raises(UserError, match="pd fit has not written it"):
        write_config(tiny.config, sets, out, [], "pd fit")


def test_two_searches_into_one_place(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper and the schema file that stay are of one of them, whatever comes between."""
    out, write = tmp_path / "found.yaml", write_config_module.write_whole
    other = threading.Thread(
        target=write_config, args=(tiny.config, ["pd.seed=2", "run_name=second"], out, [], "pd fit")
    )

    def slowly(file: Path, text: str) -> None:
        write(file, text)
        if file.parent.name == "torch" and other.ident is None:
            other.start()
            other.join(1.0)

    monkeypatch.setattr(write_config_module, "write_whole", slowly)
    write_config(tiny.config, ["pd.seed=1", "run_name=first"], out, [], "pd fit")
    other.join()
    found = load_config(out)
    assert (found.wrapper.run_name, found.method.pd.seed) == ("second", 2)


@needs_plugin
@pytest.mark.slow
def test_fit_from_question_to_training(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin that leaves room for a small batch only; what is written passes the probe, and trains."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "fitted.yaml"
    # bf16: XLA 0.10.2 gives up on the tiny step in fp32 with more than a row on each GPU (a fused `concatenate`).
    sets = (f"out_dir={tmp_path}", "runtime.autocast_bf16=true", "eval=null")
    base = ("--gpu", "b200", *(word for assignment in sets for word in ("--set", assignment)))
    file = tmp_path / "16.json"
    lean = ("--set", "mesh.fsdp=8", "--set", "memory.preset=lean")
    asked = tiny.pd("probe", tiny.config, *base, *lean, "--batch", "16", "--quick", "--json", file)
    assert asked.returncode == 0, asked.stderr
    of_16 = json.loads(file.read_text())
    margin = of_16["capacity_gib"] * 0.92 - 1.1 * of_16["peak_gib"]
    vary = ("--vary", "batch=8..32", "--vary", "memory=lean")

    def fit_with(margin: float) -> Any:
        words = ("--gpus", "8", "--for", "batch", *base, *vary, "--margin-gib", str(margin), "--out", out)
        return tiny.pd("fit", tiny.config, *words, timeout=1200)

    done = fit_with(margin)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "fits" in done.stdout.splitlines()[-1]
    assert out.with_suffix(".png").stat().st_size > 10_000
    batch = yaml.safe_load((tmp_path / "torch" / "fitted.yaml").read_text())["pd"]["batch_size"]
    assert batch == 16
    assert tiny.pd("probe", out, "--margin-gib", str(margin)).returncode == 0
    trained = tiny.pd("train", out, "--set", "pd.steps=4")
    assert trained.returncode == 0, trained.stderr
    nothing = fit_with(of_16["capacity_gib"] * 0.92 - 1e-6)
    assert nothing.returncode == 3


@needs_plugin
@pytest.mark.slow
def test_fit_for_speed_from_question_to_training(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 nodes of 4, with less memory than the first layout needs; what is written passes the probe, and trains on
    simulated devices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, file = tmp_path / "fitted.yaml", tmp_path / "fast.json"
    sets = (f"out_dir={tmp_path}", "runtime.autocast_bf16=true", "eval=null", "pd.batch_size=16")
    base = ("--gpu", "b200", "--gpus-per-node", "4", *(word for text in sets for word in ("--set", text)))
    fast = ("--set", "mesh={fsdp: 8, nodes: 2}", "--set", "memory.preset=fast", "--set", "remat_recon_forwards=true")
    asked = tiny.pd("probe", tiny.config, *base, *fast, "--quick", "--json", file)
    assert asked.returncode == 0, asked.stderr
    first = json.loads(file.read_text())
    margin = ("--margin-gib", str(first["capacity_gib"] * 0.92 - 0.98 * first["peak_gib"]))
    few = ("--vary", "mesh=1x8x1", "--set", "memory.micro_batches=1", "--set", "memory.component_block=null")
    done = tiny.pd("fit", tiny.config, "--gpus", "8", *base, *few, *margin, "--out", out, timeout=1200)
    assert done.returncode == 0, done.stderr + done.stdout
    written = yaml.safe_load(out.read_text())
    assert written["mesh"] == {"replica": 1, "fsdp": 8, "tensor": 1, "nodes": 2}
    assert written["memory"]["preset"] == "fast"
    assert set(written["memory"]) > {"preset"}
    assert tiny.pd("probe", out, "--gpus-per-node", "4", *margin).returncode == 0
    trained = tiny.pd("train", out, "--set", "pd.steps=4")
    assert trained.returncode == 0, trained.stderr
