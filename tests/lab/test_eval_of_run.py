"""`pd eval`: the run's own numbers again, other metrics, other batches; what it refuses; that it changes nothing."""

import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from param_decomp_lab.config.loss_schema import LOSSES
from param_decomp_lab.config.method_schema import EvalConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.eval.run_evaluation import Evaluated, evaluate_run
from param_decomp_lab.metrics import METRICS
from param_decomp_lab.runs.folder import saved_config
from tests.cases import same_roundings
from tests.lab.tiny_run import BATCH, EARLY, LATE, LIGHT, STEPS, Outcome, Tiny, pd_here, rows


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy: `pd eval` leaves its results in the run's folder."""
    shutil.copytree(finished, tmp_path / finished.name)
    return tmp_path / finished.name


def evaluated_row(run: Path, step: int) -> dict[str, Any]:
    (row,) = (row for row in rows(run) if row["step"] == step)
    return {key: value for key, value in row.items() if key.startswith("eval/")}


@same_roundings
def test_the_run_s_own_numbers(run: Path) -> None:
    """Of the newest checkpoint, to the last bit: same devices, same batches, same draws, fresh and other attacks."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcome = pd_here("eval", run)
    assert outcome.status == 0, outcome
    made = sorted(path for path in (run / "evals").rglob("*") if path.is_file())
    (file,) = (path for path in made if path.suffix == ".json")
    found = json.loads(file.read_text())
    assert found["row"] == evaluated_row(run, STEPS)
    assert (found["run"], found["step"], found["batches"], found["batch_size"]) == (run.name, STEPS, 2, BATCH)
    pictures = {Path(path).name: Path(path) for path in found["figures"].values()}
    assert {f"{name}_{STEPS}.png" for name in ("ci_histograms", "mean_ci_per_component", "activation_density")} == set(
        pictures
    )
    for name, path in pictures.items():
        assert path.read_bytes() == (run / "figures" / name).read_bytes()
    assert {path: path.read_bytes() for path in before} == before
    for said in ("ce_kl/kl_ci_masked", "l0/0.5_layers.0.mlp.up_proj", "loss/PGDReconLoss", str(file)):
        assert said in outcome.out


@pytest.mark.parametrize(
    "attacks",
    [(), pytest.param(("PersistentPGDReconLoss", "PGDReconLayerwiseLoss"), marks=pytest.mark.slow)],
    ids=["without attacks", "with attacks"],
)
def test_other_metrics_on_an_earlier_checkpoint(run: Path, tmp_path: Path, attacks: tuple[str, ...]) -> None:
    """By type as the run evaluates it, as it trains on it, and as it usually is; by mapping; from a file."""
    (tmp_path / "metrics.yaml").write_text(
        yaml.safe_dump({"metrics": [{"type": "CI_L0", "groups": None, "ci_alive_threshold": 0.25}]})
    )
    mapping = (
        "{type: PGDReconLoss, name: weak, init: zeroes, step_size: 0.01, n_steps: 1, mask_scope: shared_across_batch}"
    )
    out = tmp_path / "found.json"
    types = ("CI_L0", "FaithfulnessLoss", *attacks, mapping)
    arguments = [word for metric in types for word in ("--metric", metric)]
    outcome = pd_here(
        *("eval", run, "--step", str(LATE), *arguments, "--metrics", tmp_path / "metrics.yaml"),
        *("--batches", "3", "--batch-size", "4", "--out", out),
    )
    assert outcome.status == 0, outcome
    found = json.loads(out.read_text())
    assert (found["step"], found["batches"], found["batch_size"]) == (LATE, 3, 4)
    row = found["row"]
    losses = {key.removeprefix("eval/loss/") for key in row if key.startswith("eval/loss/")}
    assert losses == {"FaithfulnessLoss", *attacks, "weak"}
    assert {key.split("_")[0] for key in row if "l0" in key} == {"eval/l0/0.0", "eval/l0/0.25"}
    assert {"eval/l0/0.0_first", "eval/l0/0.0_everything"} <= row.keys()  # the run's own groups
    assert not any("ce_kl" in key for key in row)
    trained = {r["step"]: r for r in rows(run)}[LATE]
    assert row["eval/loss/FaithfulnessLoss"] == pytest.approx(trained["train/loss/FaithfulnessLoss"], rel=1e-5)
    metrics = {(metric["type"], metric.get("name")): metric for metric in found["metrics"]}
    if attacks:
        assert metrics[("PersistentPGDReconLoss", None)]["n_warmup_steps"] == 1
        assert metrics[("PGDReconLayerwiseLoss", None)]["n_steps"] == 20
    assert not (run / "evals").exists()
    assert not out.with_suffix("").exists()  # no figure was asked for


@pytest.mark.slow
def test_on_more_devices(run: Path) -> None:
    """D3: the numbers of one device."""
    one = evaluate_run(run, EvaluationRequest(["CI_L0", "CEandKLLosses"]))
    eight = evaluate_run(run, EvaluationRequest(["CI_L0", "CEandKLLosses"]), devices=8)
    assert eight.row.keys() == one.row.keys()
    for name, value in one.row.items():
        assert eight.row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_other_data(run: Path, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.folder / "data" / "train", tmp_path / "other")
    data = f"data={{train: {tiny.folder / 'data' / 'eval'}, eval: {tmp_path / 'other'}}}"
    found = evaluate_run(run, EvaluationRequest(["CI_L0"], overrides=[data]))
    assert found.data == str(tmp_path / "other")
    assert found.row["eval/l0/0.0_everything"] != evaluated_row(run, STEPS)["eval/l0/0.0_everything"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "41"], f"has no checkpoint of step 41; it has those of {EARLY}, {LATE}, {STEPS}"),
        (["--metric", "CIL0"], "eval.metrics.0"),
        (["--metric", "CI_L0", "--metric", "CI_L0"], "CI_L0 is listed twice and would log the same keys"),
        (["--metric", "{type: CI_L0, groups: {a: [layers.9.*]}}"], "layers.9.* matches none of the sites"),
        (["--metric", "UVPlots"], "eval.metrics.0.identity_patterns: is required"),
        (["--metric", "IdentityCIError"], "eval.metrics.0.identity_ci: is required"),
        (["--metrics", "nowhere.yaml"], "nowhere.yaml: cannot read the metrics: No such file"),
        (["--batches", "1000"], "an evaluation reads 8000"),
        (["--batch-size", "12", "--devices", "8"], "eval.batch_size is 12; it must be a multiple of 8"),
        (["--set", "pd.sigmoid_type=normal"], "an evaluation cannot change the run"),
        (["--set", "mesh.fsdp=2"], "keys that can be set begin with eval, data, memory"),
        (["--out", "/proc/nothing/here.json"], "cannot write /proc/nothing"),
    ],
)
def test_what_is_refused(run: Path, arguments: list[str], message: str) -> None:
    outcome = pd_here("eval", run, *arguments)
    assert outcome.status == 2, outcome
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


@dataclass(frozen=True)
class Measuring:
    """`pd eval` of a run folder made by hand, without a run to measure. ``measured``: how often it came so far."""

    run: Path
    measured: list[Path | None]

    def __call__(self, out: str | Path) -> Outcome:
        return pd_here("eval", self.run, "--out", out)


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measuring:
    run = tmp_path / "renamed"
    (run / "ckpts" / "5").mkdir(parents=True)
    (run / "config.yaml").write_text("wrapper: {}\ntorch: {}\n")
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    measured: list[Path | None] = []

    def evaluated(*_: Any, figures: Path | None, **__: Any) -> Evaluated:
        measured.append(figures)
        settings = EvalConfig.model_validate(
            {"batch_size": 1, "n_steps": 1, "every": 1, "slow_every": 1, "metrics": []}
        )
        return Evaluated(5, {"eval/x": 0.25}, {}, settings, "data")

    monkeypatch.setattr("param_decomp_lab.eval.command.evaluate_run", evaluated)
    return Measuring(run, measured)


def test_results_go_into_a_device_or_a_pipe(measuring: Measuring, tmp_path: Path) -> None:
    """Which stays what it is; there is no place for figures beside it."""
    null, pipe, out = tmp_path / "null", tmp_path / "pipe", tmp_path / "stdout"
    null.symlink_to(os.devnull)
    os.mkfifo(pipe)
    out.symlink_to("/dev/stdout")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for place in (null, pipe, out):
        outcome = measuring(place)
        assert outcome.status == 0, outcome
    assert json.loads(os.read(reader, 1 << 16))["row"] == {"eval/x": 0.25}
    os.close(reader)
    assert json.JSONDecoder().raw_decode(outcome.out)[0]["row"] == {"eval/x": 0.25}  # the table follows
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert null.is_symlink()
    assert out.is_symlink()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert measuring.measured == [None, None, None]


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("renamed/config.yaml", "lies in the folder of the run"),
        ("renamed/metrics.jsonl", "lies in the folder of the run"),
        ("renamed/ckpts/5/new.json", "lies in the folder of the run"),
        ("renamed/evals", "lies in the folder of the run"),
        ("link.json", "lies in the folder of the run"),
        ("renamed/evals/../lock", "lies in the folder of the run"),
        ("renamed.json", "its figures would go into"),
        ("renamed", "is a folder; give the file to write"),
        ("a file/found.json", "cannot write"),
    ],
)
def test_out_that_is_refused_before_the_work(measuring: Measuring, tmp_path: Path, out: str, says: str) -> None:
    (tmp_path / "link.json").symlink_to(measuring.run / "config.yaml")
    (tmp_path / "a file").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    outcome = measuring(tmp_path / out)
    assert outcome.status == 2, outcome
    assert says in outcome.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert measuring.measured == []


def test_nothing_of_the_user_s_goes_where_results_are_written(measuring: Measuring, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / ".writable").write_text("mine")
    (mine / "config.yaml").write_text("a: 1\n")  # which does not make this a run
    (tmp_path / "linked.json").symlink_to(mine / "found")
    for place in ("mine/found.json", "renamed/evals/a/found.json", "linked.json"):
        outcome = measuring(tmp_path / place)
        assert outcome.status == 0, outcome
        assert json.loads((tmp_path / place).read_text())["step"] == 5
    assert {path.name for path in mine.iterdir()} == {".writable", "config.yaml", "found.json", "found"}
    assert (mine / ".writable").read_text() == "mine"
    assert (tmp_path / "linked.json").is_symlink()
    assert measuring(tmp_path / "bare").status == 0
    assert measuring.measured[-1] == tmp_path / "bare-figures"  # a folder `bare` would be in the results' way


def test_every_metric_of_the_vocabulary_is_known_by_its_type_or_says_what_it_needs(run: Path) -> None:
    """Not measured here, only asked for; each goes through, or names the key it wants or the toy it is for."""
    config = saved_config(run)
    taken, refused = set(), {}
    for model in (*LOSSES.values(), *METRICS.values()):
        try:
            evaluation_config(config, EvaluationRequest([model.__name__]), "here")
            taken.add(model.__name__)
        except UserError as error:
            refused[model.__name__] = str(error)
    assert all("is required" in why or "needs a toy" in why for why in refused.values()), refused
    assert {"CEandKLLosses", "CI_L0", "PGDReconLoss", "PersistentPGDReconSubsetLoss", "CIHistograms"} <= taken


@pytest.mark.slow
def test_a_run_without_an_evaluation_of_its_own(tiny: Tiny, tmp_path: Path) -> None:
    """Its data are in two folders, so there is something to evaluate on; but it has to be told what."""
    assert pd_here(*tiny.train(tmp_path, 1, *LIGHT)).status == 0
    run = tmp_path / "p-00000001"
    refused = pd_here("eval", run)
    assert refused.status == 2
    assert "has no eval.metrics: say which" in refused.err
    found = evaluate_run(run, EvaluationRequest(["CI_L0", "CIMaskedReconLoss"], batches=2))
    assert found.row.keys() == {"eval/loss/CIMaskedReconLoss"} | {
        f"eval/l0/0.0_layers.{n}.mlp.{kind}_proj" for n in range(2) for kind in ("up", "down")
    }
    # Of one set of files nothing was held out.
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["wrapper"]["data"] = None
    config["torch"]["data"] |= {"data_files": f"{tiny.folder}/data/train/*.parquet"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match="it trained on all of its data"):
        evaluate_run(run, EvaluationRequest(["CI_L0"]))


@pytest.mark.slow
def test_rows_that_were_trained_on_are_not_held_out(tiny: Tiny, tmp_path: Path) -> None:
    """With one set of files, the last rows are held out: two batches of eight here, and no more can be had later."""
    evaluation = "eval={batch_size: 8, n_steps: 2, every: 12, slow_every: 12, metrics: [{type: CI_L0, groups: null}]}"
    files = f"data.data_files={tiny.folder}/data/train/*.parquet"
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, evaluation, "data=null", files))
    assert outcome.status == 0, outcome
    run = tmp_path / "p-00000001"
    assert evaluate_run(run).row == evaluated_row(run, 12)
    with pytest.raises(UserError, match="has 16 rows, an evaluation reads 24"):
        evaluate_run(run, EvaluationRequest(batches=3))


@pytest.mark.slow
def test_a_toy(toy: Path, tmp_path: Path) -> None:
    run = toy / "p-00000001"
    found = evaluate_run(run, figures=tmp_path / "figures")
    assert found.row == evaluated_row(run, 12)
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"permuted_ci_12.png", "uv_matrices_12.png"}
