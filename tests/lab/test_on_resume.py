"""What a run may be told anew when it goes on, and what it may not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.on_resume import MAY_CHANGE, allowed_changes, may_change
from param_decomp_lab.config.resolve import difference
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.target_folder import save_target
from tests.core import toys
from tests.lab.test_config import EXAMPLE
from tests.lab.tiny_run import ROOT, pd_here, rows, saved_steps
from tests.lab.toy_run import ARCHITECTURE


@pytest.fixture(scope="module")
def saved() -> RunConfig:
    """As a run finds it in its folder."""
    return RunConfig.from_mapping(yaml.safe_load(load_config(EXAMPLE).to_yaml()), "config.yaml")


ALLOWED = [
    ("mesh.fsdp=4", "mesh.fsdp: 8 -> 4"),
    ("mesh={}", "mesh.fsdp: 8 -> 1"),
    ("memory.component_block=512", "memory.component_block: 8192 -> 512"),
    ("steps_per_dispatch=5", "steps_per_dispatch: 1 -> 5"),
    ("cadence.save_every=7", "cadence.save_every: null -> 7"),
    ("milestones={every: 3}", "milestones.every: 20000 -> 3"),
    ("run_name=again", 'run_name: "llama8b-l18-example" -> "again"'),
    ("wandb.project=x", 'wandb.project: "param-decomp-llama" -> "x"'),
    ("out_dir=/elsewhere", 'out_dir: "runs" -> "/elsewhere"'),
    ("target.folder=/llama", 'target.folder: (absent) -> "/llama"'),
    ("target.spec.model_name=/llama", 'target.spec.model_name: "meta-llama/Llama-3.1-8B" -> "/llama"'),
]


@pytest.mark.parametrize(("assignment", "line"), ALLOWED)
def test_may_change(saved: RunConfig, assignment: str, line: str) -> None:
    assert line in allowed_changes(saved, saved.with_overrides([assignment]), "RUN")


def test_sections_that_were_null() -> None:
    """Where the target or the data were the schema file's own, and are the wrapper's now."""
    assert may_change("target")
    assert may_change("data")
    assert not may_change("data.max_seq_len")
    assert not may_change("target.spec.output_extract")


REFUSED = [
    "pd.seed=1",
    "pd.batch_size=128",
    "pd.steps=7",
    "pd.loss_metrics.0.coeff=0.5",
    "runtime.autocast_bf16=false",
    "cadence.train_log_every=7",
    "eval.n_steps=2",
    "data.max_seq_len=128",
    "memory.state_dtypes={ci_moments: bfloat16}",
    "memory.optimizers.components=lion",
    "init_from=runs/p-1a2b3c4d",
]


@pytest.mark.parametrize("assignment", REFUSED)
def test_must_not_change(saved: RunConfig, assignment: str) -> None:
    key = assignment.partition("=")[0]
    with pytest.raises(UserError) as refusal:
        allowed_changes(saved, saved.with_overrides([assignment]), "RUN")
    message = str(refusal.value)
    assert "RUN was made with another configuration" in message
    assert f"\n  {key}" in message
    assert all(may in message for may in MAY_CHANGE)


def test_only_what_is_refused_is_listed(saved: RunConfig) -> None:
    with pytest.raises(UserError) as refusal:
        allowed_changes(saved, saved.with_overrides(["pd.seed=1", "mesh.fsdp=2"]), "RUN")
    assert "pd.seed: 0 -> 1" in str(refusal.value)
    assert "mesh.fsdp" not in str(refusal.value)


def test_sections_are_meant_as_a_whole() -> None:
    assert may_change("mesh")
    assert may_change("mesh.fsdp")
    assert not may_change("meshes")
    assert not may_change("memory.optimizers")
    assert not may_change("memory.state_dtypes.ci_moments")
    assert may_change("wandb_group")
    assert not may_change("data.max_seq_len")


def test_another_preset_is_the_whole_of_it(saved: RunConfig) -> None:
    """Though every choice of the old one is written out."""
    lean = saved.with_overrides(["memory.preset=lean"])
    assert lean.wrapper.memory == load_config(EXAMPLE, ["memory.preset=lean"]).wrapper.memory
    plain = saved.with_overrides(["memory.preset=plain"])
    assert not plain.wrapper.remat_recon_forwards
    assert (
        plain.wrapper.memory
        == load_config(EXAMPLE, ["memory.preset=plain", "remat_recon_forwards=false"]).wrapper.memory
    )
    both = saved.with_overrides(["memory.preset=lean", "memory.component_block=64"])
    assert both.wrapper.memory.component_block == 64
    kept = saved.with_overrides(["memory.optimizers.ci_fn=lion"]).with_overrides(["memory.preset=lean"])
    assert kept.wrapper.memory.optimizers.ci_fn == "lion"


def test_nothing_is_no_change(saved: RunConfig) -> None:
    assert difference(saved, saved.with_overrides([])) == []
    assert saved.with_overrides([]) == saved


def test_mistakes_are_named(saved: RunConfig) -> None:
    with pytest.raises(UserError, match=r"wrapper of the run's config.yaml with --set mesh.fdsp=2: mesh.fdsp: unknown"):
        saved.with_overrides(["mesh.fdsp=2"])
    with pytest.raises(UserError, match=r"unknown key 'mseh'; did you mean 'mesh'"):
        saved.with_overrides(["mseh.fsdp=2"])


def test_the_page_has_the_list() -> None:
    page = (ROOT / "docs" / "resuming.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `")]
    assert {key for key in MAY_CHANGE if not any(f"`{key}`" in line for line in table)} == set()


# ---- with runs ----


@pytest.fixture(scope="module")
def folder(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a target, the same elsewhere, another of its shapes, and a finished run."""
    folder = tmp_path_factory.mktemp("on-resume")
    shutil.copytree(toy, folder, dirs_exist_ok=True)
    shutil.copytree(folder / "target", folder / "moved")
    weights = toys.weights(ARCHITECTURE)
    nudged = {**weights, "bias": np.nextafter(weights["bias"], np.float32(9), dtype=np.float32)}
    save_target(folder / "other", ARCHITECTURE, nudged)
    return folder


@pytest.fixture
def stopped(folder: Path, tmp_path: Path) -> Path:
    """The run without its end."""
    run = tmp_path / "p-00000001"
    shutil.copytree(folder / "p-00000001", run)
    shutil.rmtree(run / "ckpts" / "12")
    return run


@pytest.mark.slow
def test_changes_are_said_and_written_down(folder: Path, stopped: Path) -> None:
    given = ("--set", "mesh.fsdp=2", "--set", f"target.folder={folder / 'moved'}", "--set", "milestones=[11]")
    outcome = pd_here("train", "--resume", stopped, *given)
    assert outcome.status == 0, outcome
    assert "changed since step 10: mesh.fsdp: 1 -> 2" in outcome.out
    assert saved_steps(stopped) == [5, 10, 11, 12]
    assert [row["step"] for row in rows(stopped)] == list(range(13))
    now = yaml.safe_load((stopped / "config.yaml").read_text())["wrapper"]
    assert now["mesh"]["fsdp"] == 2
    assert now["target"]["folder"] == str(folder / "moved")
    first, second = (json.loads(line) for line in (stopped / "history.jsonl").read_text().splitlines())
    assert (first["step"], first["changes"]) == (0, [])
    assert second["step"] == 10
    assert sorted(line.partition(":")[0] for line in second["changes"]) == ["mesh.fsdp", "milestones", "target.folder"]
    assert {"command", "host", "git_commit", "packages", "devices", "started"} <= second.keys()

    # The next start needs no --set.
    shutil.rmtree(stopped / "ckpts" / "12")
    outcome = pd_here("train", "--resume", stopped)
    assert outcome.status == 0, outcome
    assert "changed since" not in outcome.out
    assert len((stopped / "history.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_other_weights_under_an_allowed_key(folder: Path, stopped: Path) -> None:
    """One bit of one of them."""
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    outcome = pd_here("train", "--resume", stopped, "--set", f"target.folder={folder / 'other'}")
    assert outcome.status == 2, outcome
    assert "was made with another target than the present" in outcome.err
    assert {path: path.read_bytes() for path in before} == before


def test_a_mesh_that_is_not_there_leaves_the_configuration(stopped: Path) -> None:
    before = (stopped / "config.yaml").read_text()
    outcome = pd_here("train", "--resume", stopped, "--set", "mesh.fsdp=8", "--set", "mesh.tensor=2")
    assert outcome.status == 2, outcome
    assert "needs 16 devices" in outcome.err
    assert (stopped / "config.yaml").read_text() == before
