"""A user's mistake: one message that says what and where, exit status 2, and nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from tests.lab.tiny_run import BATCH, SEQ_LEN, STEPS, Outcome, Tiny, pd_here


def assert_refused(outcome: Outcome, *says: str) -> None:
    assert outcome.status == 2, outcome
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    for text in says:
        assert text in outcome.err


def refused(tiny: Tiny, folder: Path, *assignments: str, says: tuple[str, ...]) -> None:
    runs = folder / "runs"
    assert_refused(pd_here(*tiny.train(runs, 1, *assignments)), *says)
    assert not runs.exists()


MAX_LEN = "pd.ci_config.simple_transformer_ci_cfg.attn_config.max_len"
CONFIGURATIONS = {
    "unknown key": (["pd.stepz=1"], ["pd.stepz", "did you mean 'steps'"]),
    "wrong type": (["pd.steps=many"], ["pd.steps", "'many'"]),
    "out of range": (["pd.steps=0"], ["pd.steps"]),
    "missing schema file": (["torch_config=nowhere.yaml"], ["nowhere.yaml", "torch_config of"]),
    "missing target folder": (["target.folder=nowhere"], ["nowhere"]),
    "missing data folder": (["data.train=nowhere"], ["no shards of tokens at", "nowhere"]),
    "missing eval folder": (["data.eval=nowhere"], ["no shards of tokens at", "nowhere"]),
    "same rows for both": (["data.eval=data/train"], ["data.train and data.eval are the same folder"]),
    "pattern without a match": (
        ["pd.decomposition_targets=[{module_pattern: layers.7.*, C: 3}]"], ["layers.7.*", "decomposition_targets"]
    ),
    "batch not divisible": (["mesh={fsdp: 3}"], ["pd.batch_size", f"is {BATCH}", "mesh.replica · mesh.fsdp"]),
    "evaluation batch not divisible": (["mesh={fsdp: 8}", "eval.batch_size=4"], ["eval.batch_size", "is 4"]),
    "more devices than there are": (
        ["mesh={fsdp: 64}", "pd.batch_size=64", "eval.batch_size=64"], ["needs 64 devices", "this machine has 8"]
    ),
    "batch larger than the data": (["pd.batch_size=100000"], ["less than one batch of 100000"]),
    "sequence longer than max_len": ([f"{MAX_LEN}=8"], ["data.max_seq_len", f"is {SEQ_LEN}", "max_len (8)"]),
    "rows of another length": (["data.max_seq_len=8"], [f"rows have {SEQ_LEN} tokens", "data.max_seq_len is 8"]),
    # Valid as a file, but the rows are longer than both.
    "rows longer than max_len": (
        [f"{MAX_LEN}=8", "data.max_seq_len=8"], [f"rows have {SEQ_LEN} tokens", "at most 8", f"or raise {MAX_LEN}"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", CONFIGURATIONS)
def test_configuration(tiny: Tiny, tmp_path: Path, mistake: str) -> None:
    assignments, says = CONFIGURATIONS[mistake]
    refused(tiny, tmp_path, *assignments, says=tuple(says))


def test_missing_configuration(tmp_path: Path) -> None:
    assert_refused(pd_here("train", tmp_path / "nowhere.yaml"), str(tmp_path / "nowhere.yaml"))


def test_nothing_to_do() -> None:
    assert_refused(pd_here("train"), "pd train CONFIG")


def test_assignments_to_a_resumed_run(finished: Path) -> None:
    assert_refused(pd_here("train", "--resume", finished, "--set", "pd.steps=5"), f"pd.steps: {STEPS} -> 5")


def test_token_beyond_the_vocabulary(tiny: Tiny, tmp_path: Path) -> None:
    ids = np.zeros((40, SEQ_LEN), np.int32)
    ids[17, 3] = 256
    for split in ("train", "eval"):
        (tmp_path / split).mkdir()
        column = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), SEQ_LEN)
        pq.write_table(pa.table({"input_ids": column}), tmp_path / split / "part-0.parquet")
    data = f"data={{train: {tmp_path}/train, eval: {tiny.folder}/data/eval}}"
    refused(tiny, tmp_path, data, says=("train/part-0.parquet, row 17, position 3", "token id 256", "0 to 255"))
    data = f"data={{train: {tiny.folder}/data/train, eval: {tmp_path}/eval}}"
    refused(tiny, tmp_path, data, says=("eval/part-0.parquet, row 17, position 3", "token id 256"))


def cut_short(target: Path) -> None:
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_header(target: Path) -> None:
    (target / "model.safetensors").write_bytes(b"\x00" * 4)


def lacking_a_tensor(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors")


def lacking_the_file(target: Path) -> None:
    (target / "model.safetensors").unlink()


def lacking_its_configuration(target: Path) -> None:
    (target / "config.json").unlink()


def of_another_shape(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))


TARGETS: dict[Callable[[Path], None], tuple[str, ...]] = {
    cut_short: ("model.safetensors is not a whole safetensors file", "cut short"),
    no_header: ("model.safetensors is not a whole safetensors file",),
    lacking_a_tensor: ("no tensor model.layers.1.mlp.up_proj.weight",),
    lacking_the_file: ("has no model.safetensors",),
    lacking_its_configuration: ("config.json",),
    of_another_shape: ("down_proj.weight has shape [16, 24]", "implies [16, 32]"),
}


@pytest.mark.parametrize("damage", TARGETS, ids=lambda damage: damage.__name__)
def test_damaged_target(tiny: Tiny, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny.folder / "target", target)
    damage(target)
    refused(tiny, tmp_path, f"target.folder={target}", says=(str(target), *TARGETS[damage]))


def test_run_folder_that_cannot_be_written(tiny: Tiny, tmp_path: Path) -> None:
    """Below a regular file: to root, whom the tests may run as, every folder is writable."""
    (tmp_path / "file").write_text("here first")
    assert_refused(pd_here(*tiny.train(tmp_path / "file" / "runs", 1)), str(tmp_path / "file" / "runs"), "cannot write")
    assert (tmp_path / "file").read_text() == "here first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_run_id_that_is_taken(tiny: Tiny, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert_refused(pd_here(*tiny.train(finished.parent, 1)), str(finished), "exists already", "--resume")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_resuming_what_is_no_run(tmp_path: Path) -> None:
    assert_refused(pd_here("train", "--resume", tmp_path), f"{tmp_path} is not a run folder", "config.yaml")
    assert_refused(pd_here("train", "--resume", tmp_path / "nowhere"), "nowhere is not a run folder")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    run = tmp_path / finished.name
    shutil.copytree(finished, run)
    return run


def test_resuming_under_another_configuration(tiny: Tiny, finished: Path, copied: Path) -> None:
    """T5: refused, with every change as `key: old -> new`, by its number in lists."""
    changed = tiny.train(finished.parent, 1, "pd.steps=300", "pd.loss_metrics.3.coeff=0.25", "mesh={fsdp: 2}")
    says = (
        "another configuration",
        f"pd.steps: {STEPS} -> 300",
        "pd.loss_metrics.3.coeff: 0.5 -> 0.25",
        "These may change, since they affect no results: mesh, memory,",
    )
    outcome = pd_here(*changed, "--resume", copied)
    assert_refused(outcome, *says)
    assert outcome.err.count(" -> ") == 2  # the mesh may change


def test_resuming_with_an_edited_configuration(copied: Path) -> None:
    config = copied / "config.yaml"
    assert f"steps: {STEPS}" in config.read_text()
    config.write_text(config.read_text().replace(f"steps: {STEPS}", "steps: 300").replace("seed: 0", "seed: 1"))
    before = (copied / "metrics.jsonl").read_bytes()
    assert_refused(pd_here("train", "--resume", copied), str(copied), f"pd.steps: {STEPS} -> 300", "pd.seed: 0 -> 1")
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_resuming_with_metrics_that_are_no_json(copied: Path) -> None:
    """Only the last line may be cut off; anything else was done by somebody else."""
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join([*lines[:3], "{oops\n", *lines[3:]]))
    assert_refused(pd_here("train", "--resume", copied), f"{copied / 'metrics.jsonl'}:4")


@pytest.mark.slow
def test_as_a_process(tiny: Tiny, tmp_path: Path) -> None:
    process = tiny.pd(*tiny.train(tmp_path / "runs", 1, "pd.stepz=1"))
    assert_refused(Outcome(process.returncode, process.stdout, process.stderr), "pd.stepz")
    assert process.stdout == ""
    assert not (tmp_path / "runs").exists()
