"""Several processes as one run: what they agree on, how weights come to them, and that a run does not show them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.weights.target_folder import save_target
from tests.lab.several import CHILD, Ended, run
from tests.lab.tiny_run import BATCH, Tiny, pd_here, rows, saved_arrays, saved_steps

MIB = 1 << 20
SMALL = (
    "pd.steps=40",
    "pd.faithfulness_warmup_steps=3",
    "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}",
    "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 100},"
    " {type: ImportanceMinimalityLoss, coeff: 0.001, pnorm: 2.0, beta: 0.2, eps: 1.0e-6},"
    " {type: PersistentPGDReconLoss, coeff: 0.5, scope: {type: per_batch_per_position},"
    " optimizer: {type: adam, lr_schedule: {start_val: 0.02}}}]",
    "eval={batch_size: 8, n_steps: 2, every: 20, slow_every: 40, slow_on_first_step: false,"
    " metrics: [{type: CI_L0, groups: null}, {type: CIMeanPerComponent}]}",
    "cadence={train_log_every: 1}",
    "milestones=[]",
)
"""Quick to compile, but with sources that lie with the rows, an evaluation, a figure and text examples."""


def child(count: int, *arguments: str, devices: int = 1, environment: Mapping[str, str] = {}) -> list[Ended]:
    return run([*CHILD, *arguments], count, devices, environment)


# ---- what they agree on ----


@pytest.mark.slow
@pytest.mark.parametrize("told", ["3", "0+1+2+3"])
def test_all_stop_at_the_same_look(told: str) -> None:
    """SIGTERM to one of four, and to all, while each looks at a pace of its own (the third is the slowest)."""
    found = child(4, "look", told)
    assert [process.status for process in found] == [0] * 4, found
    stopped = [int(re.search(r"stopped at (\d+)", process.text)[1]) for process in found]  # type: ignore[index]
    assert len(set(stopped)) == 1
    assert 40 <= stopped[0] < 1000
    print(stopped[0], [re.search(r"a look takes .*", process.text)[0] for process in found])  # type: ignore[index]


def test_agreeing_and_leaving_together(tmp_path: Path) -> None:
    """What each says reaches all; process 0 goes first; a refusal of one is everybody's, and process 0 tells it."""
    first, second = child(2, "agree", "refuse", "1", environment={"CHILD_FOLDER": str(tmp_path)})
    assert (first.status, second.status) == (1, 2)  # the child shows the exception that `pd` turns into status 2
    for process in (first, second):
        assert "gathered ['from 0', 'from 1'] 0\n" in process.text
        assert "the end" not in process.text
    assert "process 0: did it\n" in first.text
    assert "process 1: found it done\n" in second.text
    assert "process 0 of node node0 found []\n" in first.text
    assert "process 1 of node node1 found ['0']\n" in second.text
    assert "refused: process 1 of 2: this one does not like it\n" in first.text
    assert "does not like it" not in second.text


@pytest.mark.slow
def test_once_per_node(tmp_path: Path) -> None:
    """Process 0, then the first one of the other node, then the rest: whether or not the two share a disk."""
    said = [process.text for process in child(4, "agree", "", "", environment={"CHILD_FOLDER": str(tmp_path)})]
    for number, found in enumerate(([], ["0"])):
        assert f"process {number} of node node{number} found {found}\n" in said[number]
    for number in (2, 3):
        assert f"process {number} of node node{number % 2} found ['0', '1'" in said[number]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_failure_ends_all(tmp_path: Path, failing: int) -> None:
    """The other one waits in a collective; left to JAX it would wait for five minutes, and so would the failed one."""
    found = run([*CHILD, "agree", "fail", str(failing)], 2, 1, {"CHILD_FOLDER": str(tmp_path)}, timeout=100)
    assert [process.status for process in found] == [1, 1], found
    assert "RuntimeError: this one has had enough" in found[failing].text
    assert f"process {1 - failing}: ended, because process {failing} of 2 failed" in found[1 - failing].text
    assert "had enough" not in found[1 - failing].text


# ---- how weights come to them ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """136 MiB once cast to fp32, the largest array (the embedding, and the head) 32 MiB."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(8192, 1024, 2, 8, 4, 128, 2048)
    draws = np.random.default_rng(0)
    shapes = config.weight_shapes()
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    save_target(
        folder, config, jax.tree.map(lambda s: draws.random(s, np.float32), shapes, is_leaf=is_shape), "bfloat16"
    )
    return folder


def placed(model: Path, count: int, layout: str, devices: int = 1) -> list[dict[str, Any]]:
    ended = child(count, "place", layout, str(model), devices=devices)
    assert [process.status for process in ended] == [0] * count, ended
    found = [json.loads(process.text.split("FOUND ")[1].splitlines()[0]) for process in ended]
    for how in ("ours", "plain"):
        grown = [(f[how]["peak"] - f[how]["base"]) / MIB for f in found]
        held, largest = found[0][how]["held"] / MIB, found[0][how]["largest"] / MIB
        print(
            f"{how}, {layout}, {count} processes x {devices}: anonymous memory grows by {max(grown):.0f} MiB at most, "
            f"holds {held:.0f}, largest shard {largest:.0f}; asked {found[0][how]['checks']}, "
            f"compiled {found[0][how]['programs']}"
        )
    return found


def assert_only_own_slices(found: list[dict[str, Any]]) -> None:
    """No question to another process, no program (so no collective), and no memory but what stays and one slice."""
    for process in found:
        ours = process["ours"]
        assert ours["checks"] == []
        assert ours["programs"] == 0
        # On a CPU what is placed is anonymous memory itself. 48 MiB: a block of a file, twice, and Python's own.
        assert ours["peak"] - ours["base"] <= ours["held"] + ours["largest"] + 48 * MIB
        plain = process["plain"]
        assert plain["checks"] == ["assert_equal", "process_allgather"]
        assert plain["programs"] > 0
    rows = {int(first): part for process in found for first, part in process["ours"]["rows"].items()}
    assert [row for first in sorted(rows) for row in rows[first]] == list(range(8 * len(rows)))


@pytest.mark.slow
def test_placing_does_not_depend_on_the_number_of_processes(model: Path) -> None:
    """Two processes and four: whole weights take the same memory, by plain `device_put` it grows with the number."""
    two, four = placed(model, 2, "whole"), placed(model, 4, "whole")
    assert_only_own_slices(two)
    assert_only_own_slices(four)

    def peak(found: list[dict[str, Any]], how: str) -> float:
        return max(process[how]["peak"] - process[how]["base"] for process in found)

    assert abs(peak(four, "ours") - peak(two, "ours")) < 24 * MIB
    embedding = four[0]["plain"]["held"]
    assert embedding == 32 * MIB
    assert peak(four, "plain") > peak(two, "plain") + 2 * embedding


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 1), (4, 1), (2, 2)])
def test_placing_slices(model: Path, count: int, devices: int) -> None:
    """Every matrix split over all devices: what a process holds shrinks with their number, and with it its memory."""
    found = placed(model, count, "split", devices)
    assert_only_own_slices(found)
    whole = 136 * MIB
    assert abs(found[0]["ours"]["held"] - whole / count) < 2 * MIB


# ---- runs ----


def options(**given: Any) -> str:
    return json.dumps(given)


def train(
    tiny: Tiny, given: str, arguments: list[str | Path], count: int = 2, devices: int = 2, timeout: float = 400
) -> list[Ended]:
    command = [*CHILD, "pd", given, *map(str, arguments)]
    return run(command, count, devices, tiny.environment(), timeout)


def assert_alike(run: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float) -> None:
    assert [row["step"] for row in run] == [row["step"] for row in other]
    worst = 0.0
    for row, same in zip(run, other, strict=True):
        assert row.keys() == same.keys()
        for name, value in same.items():
            # Differences of cross-entropies (some 5 nats) lose the digits that the two have in common.
            loose = "ce_difference" in name or "ce_unrecovered" in name
            assert row[name] == pytest.approx(value, rel=10 * tolerance if loose else tolerance, abs=0), (
                row["step"],
                name,
            )
            worst = max(worst, 0.0 if loose or not value else abs(row[name] / value - 1))
    print(f"{len(run)} rows, largest relative difference {worst:.1e}")


def assert_rows_shared(tiny: Tiny, log: Path, first: int, stop: int) -> None:
    """Of every training batch each of two processes has read its half, and nothing else."""
    logs = [json.loads(Path(f"{log}.{number}").read_text()) for number in range(2)]
    data = TokenData(tiny.folder / "data" / "train")
    batches = Batches(data, BATCH, seed=0)
    read = [{step: numbers for source, step, numbers in log if source == data.source} for log in logs]
    for step in range(first, stop):
        expected = batches.rows(step).tolist()
        assert read[0][step] == expected[: BATCH // 2]
        assert read[1][step] == expected[BATCH // 2 :]


@pytest.mark.slow
@pytest.mark.always
def test_run_of_two_processes_stopped_and_resumed(tiny: Tiny, tmp_path: Path) -> None:
    """D3: two processes of two devices each, of which one gets SIGTERM on the way, make the run of one device."""
    two, log = tmp_path / "p-00000001", tmp_path / "rows"
    mesh = "mesh={replica: 2, fsdp: 2}"
    first, second = train(tiny, options(term=[1, 8], rows=str(log)), tiny.train(tmp_path, 1, mesh, *SMALL))
    assert (first.status, second.status) == (75, 75), (first, second)
    (at,) = saved_steps(two)
    assert f"stopped and saved at step {at}; resume with" in first.text
    assert "stopped" not in second.text  # process 0 speaks for all
    assert 5 <= at < 40
    assert_rows_shared(tiny, log, 0, at)
    assert [row["step"] for row in rows(two)] == list(range(at))

    first, second = train(tiny, options(rows=str(log)), ["train", "--resume", two])
    assert (first.status, second.status) == (0, 0), (first, second)
    assert f"resuming {two} at step {at} of 40" in first.text
    assert_rows_shared(tiny, log, at, 40)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2
    assert sorted(path.name for path in (two / "figures").iterdir()) == ["mean_ci_per_component_40.png"]

    for number, alone in ((2, "mesh={fsdp: 4}"), (3, "mesh={}")):
        outcome = pd_here(*tiny.train(tmp_path, number, alone, *SMALL))
        assert outcome.status == 0, outcome
        one = tmp_path / f"p-{number:08x}"
        assert_alike(rows(two), rows(one), 1e-5)
        told, same = (json.loads((folder / "examples.json").read_text()) for folder in (two, one))
        assert told["sites"].keys() == same["sites"].keys()
        want, got = saved_arrays(one, 40), saved_arrays(two, 40)
        for name in want:
            # D4: parameters per array.
            assert np.linalg.norm(got[name] - want[name]) <= 1e-5 * np.linalg.norm(want[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("by", ["device", "node"])
def test_two_processes_hold_copies(tiny: Tiny, tmp_path: Path, by: str) -> None:
    """D3, D4: two processes, each a node of two devices, with held copies of everything make the run of one device that
    holds nothing: trained, evaluated, and with the figures of held-out text."""
    shared = [text.replace("per_batch_per_position", "broadcast_across_batch") for text in SMALL]
    short = (*shared, "pd.steps=20", "eval.slow_every=20")
    held = f"memory.held={{components: {by}, ci: {by}, sources: {by}, target: {by}}}"
    layout = ("mesh={fsdp: 4, nodes: 2}", "memory.preset=fast", held, "remat_recon_forwards=true")
    first, second = train(tiny, options(), tiny.train(tmp_path, 1, *layout, *short))
    assert (first.status, second.status) == (0, 0), (first, second)
    outcome = pd_here(*tiny.train(tmp_path, 2, "mesh={}", *short))
    assert outcome.status == 0, outcome
    two, one = tmp_path / "p-00000001", tmp_path / "p-00000002"
    assert_alike(rows(two), rows(one), 1e-5)
    want, got = saved_arrays(one, 20), saved_arrays(two, 20)
    for name in want:
        assert np.linalg.norm(got[name] - want[name]) <= 1e-5 * np.linalg.norm(want[name]), name
