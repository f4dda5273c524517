"""Fine-tuning: what a run takes over from another one, what it refuses, and what it says of where it comes from."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from param_decomp_lab.config import load_config
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.parent import sites_from_shapes
from param_decomp_lab.weights.target_folder import save_target
from tests.core import toys
from tests.lab.tiny_run import Outcome, pd_here, rows, saved_arrays, saved_steps
from tests.lab.toy_run import ARCHITECTURE, CONFIG
from tests.lab.toy_run import settings as toy_settings

PARENT = 1
QUICK = (
    "pd.steps=2",
    "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 1}, {type: CIMaskedReconLoss, coeff: 1}]",
    "eval=null",
)


@pytest.fixture(scope="module")
def folder(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the target, another one of its shapes, and a finished run: checkpoints of steps 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("parent")
    shutil.copytree(toy, folder, dirs_exist_ok=True)
    weights = toys.weights(ARCHITECTURE)
    save_target(folder / "other", ARCHITECTURE, {**weights, "bias": weights["bias"] + 1})
    return folder


def train(folder: Path, number: int, *more: str) -> Outcome:
    return pd_here("train", str(CONFIG), *toy_settings(folder, number, *more))


def run(folder: Path, number: int) -> Path:
    return folder / f"p-{number:08x}"


@pytest.mark.parametrize(("number", "named", "step"), [(2, "", 12), pytest.param(3, "@10", 10, marks=pytest.mark.slow)])
def test_begins_with_what_was_learned(folder: Path, number: int, named: str, step: int) -> None:
    outcome = train(folder, number, f"init_from={run(folder, PARENT)}{named}", "milestones=[0]", *QUICK)
    assert outcome.status == 0, outcome
    assert f"starting from the components and CI function of {run(folder, PARENT)} at step {step}" in outcome.out
    assert "pd.faithfulness_warmup_steps: has no effect with init_from" in outcome.out
    theirs, ours = saved_arrays(run(folder, PARENT), step), saved_arrays(run(folder, number), 0)
    assert theirs.keys() == ours.keys()
    for name, array in ours.items():
        if name.startswith("learned/"):
            np.testing.assert_array_equal(array, theirs[name])  # no warm-up has touched them
        else:
            assert not array.any(), name  # step 0, moments and counts anew
    assert [row["step"] for row in rows(run(folder, number))] == [0, 1]

    told = json.loads((run(folder, number) / "parent.json").read_text())
    assert (told["run_id"], told["folder"], told["step"]) == ("p-00000001", str(run(folder, PARENT)), step)
    assert "pd.steps: 12 -> 2" in told["changes"]
    assert len(told["fingerprint"]) == len(told["target"]) == 16


@pytest.mark.slow
def test_reads_only_what_was_learned(folder: Path, tmp_path: Path) -> None:
    """From a checkpoint of which nothing else is left."""
    parent = tmp_path / "p-00000001"
    shutil.copytree(run(folder, PARENT), parent)
    for step in (5, 10):
        shutil.rmtree(parent / "ckpts" / str(step))
    shutil.rmtree(parent / "ckpts" / "12" / "training")
    files = parent / "ckpts" / "12" / "files.json"
    files.write_text(json.dumps({k: v for k, v in json.loads(files.read_text()).items() if "training" not in k}))
    before = {path: path.stat().st_mtime_ns for path in parent.rglob("*")}
    outcome = train(folder, 4, f"init_from={parent}", *QUICK)
    assert outcome.status == 0, outcome
    assert {path: path.stat().st_mtime_ns for path in parent.rglob("*")} == before


def test_a_damaged_parent_is_refused(folder: Path, tmp_path: Path) -> None:
    """No other step is taken in its place: the user has named this one, or should name another."""
    parent = tmp_path / "p-00000001"
    shutil.copytree(run(folder, PARENT), parent)
    next((parent / "ckpts" / "12" / "learned").rglob("d/*")).unlink()
    outcome = train(folder, 5, f"init_from={parent}", *QUICK)
    assert outcome.status == 2, outcome
    assert "ckpts/12" in outcome.err
    assert "No such file" in outcome.err


WIDER = "pd.decomposition_targets=[{module_pattern: linear1, C: 21}, {module_pattern: linear2, C: 21}, "
REFUSED = {
    "another C": (WIDER + "{module_pattern: hidden_layers.*, C: 20}]", "linear1: 5 x 2, C 20 -> 5 x 2, C 21"),
    "another site": (
        "pd.decomposition_targets=[{module_pattern: linear1, C: 20}, {module_pattern: linear2, C: 20}]",
        "hidden_layers.0: 2 x 2, C 20 -> no site",
    ),
    "another width": ("pd.ci_config.hidden_dims=[8]", "pd.ci_config.hidden_dims: [16] -> [8]"),
    "another kind": ("pd.ci_config.fn_type=shared_mlp", 'pd.ci_config.fn_type: "mlp" -> "shared_mlp"'),
    "another tie": ("pd.tied_weights=null", 'pd.tied_weights: [["linear1", "linear2"]] -> null'),
    "no such step": ("init_from=PARENT@7", "has no checkpoint of step 7; it has those of steps 5, 10, 12"),
    "not a run": ("init_from=PARENT/ckpts", "is not a run folder: it has no config.yaml; give RUN or RUN@STEP"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("command", ["train", "check"])
def test_what_does_not_agree_is_named(folder: Path, what: str, command: str) -> None:
    assignment, says = REFUSED[what]
    parent = run(folder, PARENT)
    assignments = (f"init_from={parent}", assignment.replace("PARENT", str(parent)), "eval=null")
    outcome = pd_here(command, str(CONFIG), *toy_settings(folder, 6, *assignments))
    assert outcome.status == 2, outcome
    assert "init_from: " in outcome.err
    assert says in outcome.err, outcome.err
    assert not run(folder, 6).exists()


def test_a_parent_that_is_not_there(folder: Path) -> None:
    """May be on another machine: `pd check` says so."""
    given = toy_settings(folder, 6, f"init_from={folder / 'p-00000099'}@newest")
    outcome = pd_here("train", str(CONFIG), *given)
    assert outcome.status == 2, outcome
    assert "p-00000099@newest is not a run folder" in outcome.err
    assert not run(folder, 6).exists()
    outcome = pd_here("check", str(CONFIG), *given)
    assert outcome.status == 0, outcome
    assert "not on this machine: init_from: " in " ".join(outcome.out.split())


def test_check_says_where_a_run_begins(folder: Path) -> None:
    outcome = pd_here("check", str(CONFIG), *toy_settings(folder, 7, f"init_from={run(folder, PARENT)}@5"))
    assert outcome.status == 0, outcome
    text = " ".join(outcome.out.split())
    assert "p-00000001 at step 5" in text
    assert "on faithfulness alone" not in text


@pytest.mark.slow
def test_other_weights_of_the_same_shapes(folder: Path) -> None:
    """May be what is wanted, and is said."""
    assignments = (f"init_from={run(folder, PARENT)}", f"target={{folder: {folder / 'other'}}}", "pd.steps=1")
    outcome = train(folder, 8, *assignments)
    assert outcome.status == 0, outcome
    assert "that run decomposed other weights than this one does" in outcome.out


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_first_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Begins again where it has begun, whatever the parent has learned since."""
    parent = tmp_path / "p-00000001"
    shutil.copytree(run(folder, PARENT), parent)
    shutil.rmtree(parent / "ckpts" / "12")
    assert train(folder, 9, f"init_from={parent}", "milestones=[0]").status == 0
    first = saved_arrays(run(folder, 9), 0)
    shutil.copytree(run(folder, PARENT) / "ckpts" / "12", parent / "ckpts" / "12")
    shutil.rmtree(run(folder, 9) / "ckpts")
    outcome = pd_here("train", "--resume", run(folder, 9))
    assert outcome.status == 0, outcome
    assert f"starting from the components and CI function of {parent} at step 10" in outcome.out
    again = saved_arrays(run(folder, 9), 0)
    assert [name for name in first if first[name].tobytes() != again[name].tobytes()] == []

    # And refuses when that is not there any more.
    shutil.rmtree(run(folder, 9) / "ckpts")
    shutil.rmtree(parent / "ckpts" / "10")
    (parent / "ckpts" / "12").rename(parent / "ckpts" / "10")
    outcome = pd_here("train", "--resume", run(folder, 9))
    assert outcome.status == 2, outcome
    assert "no longer holds what this run began with" in outcome.err


@pytest.mark.slow
def test_goes_on_without_its_parent(folder: Path, tmp_path: Path) -> None:
    parent = tmp_path / "p-00000001"
    shutil.copytree(run(folder, PARENT), parent)
    assert train(folder, 10, f"init_from={parent}").status == 0
    shutil.rmtree(parent)
    shutil.rmtree(run(folder, 10) / "ckpts" / "12")
    before = rows(run(folder, 10))
    outcome = pd_here("train", "--resume", run(folder, 10))
    assert outcome.status == 0, outcome
    assert rows(run(folder, 10)) == before
    assert saved_steps(run(folder, 10)) == Checkpoints(run(folder, 10)).steps() == [5, 10, 12]


def test_sites_are_read_off_the_arrays() -> None:
    shapes = {
        "components/layers.18-19.mlp.up_proj/V": (2, 8, 5),
        "components/layers.18-19.mlp.up_proj/U": (2, 5, 9),
        "components/linear1/V": (1, 3, 4),
        "components/linear1/U": (1, 4, 2),
        "ci/heads/layers.18-19.mlp.up_proj/W": (2, 8, 5),
    }
    up = {f"layers.{n}.mlp.up_proj": (8, 9, 5) for n in (18, 19)}
    assert sites_from_shapes(shapes) == up | {"linear1": (3, 2, 4)}


def test_no_warm_up(tmp_path: Path) -> None:
    config = load_config(CONFIG, [f"init_from={tmp_path}"])
    assert config.method.pd.faithfulness_warmup_steps > 0
    assert decomposition(config).warmup.steps == 0
