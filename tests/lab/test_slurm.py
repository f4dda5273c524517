"""On a real Slurm: submit, be preempted, come back, and end as if nothing had happened (`make test-slurm`)."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from param_decomp_lab.runs.metrics_file import read_metrics
from tests.lab.chromium import chromium, follow, watched
from tests.lab.one_node import Checkout, Cluster, one_node, sets
from tests.lab.several import environment_of
from tests.lab.test_processes import SMALL
from tests.lab.tiny_run import LIGHT, Tiny, pd_here, rows, saved_arrays, saved_steps

pytestmark = pytest.mark.slurm
STEPS, EVALUATED = 140, 120
RUN = (
    *SMALL,
    f"pd.steps={STEPS}",
    "pd.faithfulness_warmup_steps=1500",
    f"eval={{batch_size: 8, n_steps: 24, every: {EVALUATED}, slow_every: {EVALUATED}, slow_on_first_step: false,"
    " metrics: [{type: CI_L0, groups: null}, {type: CIMeanPerComponent}]}",
    "cadence={train_log_every: 1, save_every: 50}",
    "mesh={fsdp: 4}",
)
"""Long enough in each of its parts to be met there."""
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
TASKS = ("--gpu", "none", "--gpus-per-node", "2", "--cpus-per-task", "1")
ASKS_FOR_GPUS = ("--sbatch", "gpus-per-node=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with one_node(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout.make(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs lie, beside what they have compiled."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, checkout: Checkout, cluster: Cluster, runs: Path) -> Path:
    """The same two tasks of two devices, made by `pd launch --local`."""
    settings = sets((*RUN, f"out_dir={runs}", "run_id=p-00000000"))
    done = checkout.pd("launch", tiny.config, *settings, *TASKS, "--local", environment=cluster.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "p-00000000"


def submitted(checkout: Checkout, cluster: Cluster, *arguments: str | Path) -> str:
    """The number of the job."""
    done = checkout.pd("launch", *arguments, environment=cluster.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search(r"^job (\d+)", done.stdout, re.MULTILINE)[1]  # type: ignore[index]


def assert_same_run(run: Path, undisturbed: Path) -> None:
    """T5: every row once, all of it equal to the last bit, and so is what the last checkpoint holds."""
    assert [row["step"] for row in rows(run)] == list(range(STEPS + 1))
    assert rows(run) == rows(undisturbed)
    want, got = (saved_arrays(folder, STEPS) for folder in (undisturbed, run))
    assert want.keys() == got.keys()
    assert [name for name in want if want[name].tobytes() != got[name].tobytes()] == []
    assert (run / "examples.json").read_bytes() == (undisturbed / "examples.json").read_bytes()


@pytest.mark.parametrize("how", ["requeue", "notice"])
def test_preempted(
    how: str, tiny: Tiny, cluster: Cluster, checkout: Checkout, runs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """In the warm-up, in a step, in an evaluation: by `scontrol requeue`; by SIGTERM with notice, one of these from
    Slurm itself, for a job that is more urgent. The checkout and the configuration are edited meanwhile."""
    shutil.copytree(tiny.folder, tmp_path / "configuration", ignore=shutil.ignore_patterns("data", "target", "text"))
    config = tmp_path / "configuration" / tiny.config.name
    places = (f"target={{folder: {tiny.folder}/target}}",)
    places += (f"data={{train: {tiny.folder}/data/train, eval: {tiny.folder}/data/eval}}",)
    run = runs / {"requeue": "p-00000001", "notice": "p-00000002"}[how]
    settings = sets((*RUN, *places, f"out_dir={runs}", f"run_id={run.name}"))
    job = submitted(checkout, cluster, config, *settings, *TASKS, *ASKS_FOR_GPUS)

    def log() -> str:
        file = run / f"slurm-{job}.log"
        return file.read_text() if file.exists() else ""

    def of_this_start() -> str:
        return log().rpartition(f" job {job}, start ")[2]

    def preempt(moment: str) -> None:
        if how == "requeue":
            cluster.ask("scontrol", "requeue", job)
        elif moment == "step":
            cluster.ask("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
        else:
            cluster.ask("scancel", "--signal=TERM", job)

    def come_back(start: int) -> None:
        cluster.wait(lambda: f" job {job}, start {start}:" in log(), f"start {start}", log)

    with checkout.broken():
        (tmp_path / "configuration" / "torch.yaml").write_text("nonsense")
        cluster.wait(lambda: "faithfulness warm-up" in of_this_start(), "the warm-up", log)
        preempt("warm-up")
        come_back(1)
        assert "stopped in the faithfulness warm-up; nothing was saved" in log()
        assert not (run / "metrics.jsonl").exists()

        cluster.wait(lambda: len(read_metrics(run)) > 3, "some steps", log)
        preempt("step")
        come_back(2)
        at = saved_steps(run)[-1]
        assert f"stopped and saved at step {at};" in log(), log()
        assert 3 < at < EVALUATED

        cluster.wait(lambda: len(read_metrics(run)) >= EVALUATED, "the evaluation", log)
        preempt("evaluation")
        come_back(3)
        assert f"stopped while evaluating and saved at step {EVALUATED};" in log(), log()

        cluster.wait(lambda: cluster.state(job) not in UNFINISHED, "the end", log)
    assert cluster.state(job) == "COMPLETED", log()
    assert "this is not what was launched" not in log()
    assert_same_run(run, undisturbed)
    told = json.loads((run / "launch.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    assert told["jobs"] == [job]
    assert told["commit"] == environment["git_commit"] == checkout.git("rev-parse", "HEAD")
    assert environment["processes"] == 2
    assert len(environment["devices"]) == 4


def test_sweep(tiny: Tiny, cluster: Cluster, checkout: Checkout, tmp_path: Path) -> None:
    """An array, of which each job makes a run of its own, as it would be made alone."""
    settings = sets((*LIGHT, f"out_dir={tmp_path}"))
    sweep = ("--sweep", "pd.seed=3,4", "--gpu", "none", "--cpus-per-task", "1", "--shared")
    job = submitted(checkout, cluster, tiny.config, *settings, *sweep)
    folders = sorted(tmp_path.glob("p-*"))
    assert len(folders) == 2

    def logs() -> str:
        return "".join(path.read_text() for path in tmp_path.rglob("*.log"))

    def states() -> set[str]:
        return {cluster.state(f"{job}_{index}") for index in range(2)}

    cluster.wait(lambda: not states() & set(UNFINISHED), "the end of both", logs)
    assert states() == {"COMPLETED"}, logs()
    seeds = {}
    for folder in folders:
        assert [row["step"] for row in rows(folder)] == [0, 3, 6, 9, 11]
        assert saved_steps(folder) == [12]
        told = json.loads((folder / "launch.json").read_text())
        seeds[told["swept"]["pd.seed"]] = folder
        assert told["jobs"][0] in (f"{job}_0", f"{job}_1")
        assert f"run_name: tiny pd.seed={told['swept']['pd.seed']}" in (folder / "config.yaml").read_text()
        assert len(list(folder.glob("slurm-*.log"))) == 1
    assert seeds.keys() == {3, 4}
    assert rows(seeds[3]) != rows(seeds[4])
    alone = sets((*LIGHT, "pd.seed=4", f"out_dir={tmp_path}", "run_id=p-00000004"))
    assert checkout.pd("train", tiny.config, *alone, environment=cluster.environment()).returncode == 0
    assert rows(seeds[4]) == rows(tmp_path / "p-00000004")


def test_a_sweep_compared(tiny: Tiny, cluster: Cluster, checkout: Checkout, tmp_path: Path) -> None:
    """`pd compare` on twelve runs, of which one was cancelled and one damaged; the page in a real browser."""
    runs = tmp_path / "runs"
    metrics = "[{type: CI_L0, groups: null}, {type: CEandKLLosses, rounding_threshold: 0.0}]"
    evaluation = f"eval={{batch_size: 8, n_steps: 1, every: 400, slow_every: 400, metrics: {metrics}}}"
    losses = "[{{type: FaithfulnessLoss, coeff: 100}}, {{type: CIMaskedReconLoss, coeff: 1}}, {}]"
    minimality = "{type: ImportanceMinimalityLoss, coeff: 0.1, pnorm: 1.0, beta: 0.0, eps: 1.0e-06}"
    longer = ("pd.steps=400", "cadence={train_log_every: 1}", f"pd.loss_metrics={losses.format(minimality)}")
    light = [text for text in LIGHT if text.partition("=")[0] not in ("pd.steps", "pd.loss_metrics", "eval")]
    settings = sets((*light, *longer, evaluation, f"out_dir={runs}"))
    swept = ("--sweep", "pd.seed=0,1,2", "--sweep", "pd.loss_metrics.2.coeff=0,0.001,0.003,0.01")
    job = submitted(
        checkout, cluster, tiny.config, *settings, *swept, "--gpu", "none", "--cpus-per-task", "1", "--shared"
    )
    folders = {
        int(json.loads((folder / "launch.json").read_text())["jobs"][0].rpartition("_")[2]): folder
        for folder in runs.glob("p-*")
    }
    assert sorted(folders) == list(range(12))

    def logs() -> str:
        return "".join(path.read_text() for path in runs.rglob("*.log"))

    cluster.wait(lambda: len(read_metrics(folders[11])) > 3, "steps of the last", logs)
    cluster.ask("scancel", f"{job}_11")
    states = [f"{job}_{index}" for index in range(12)]
    cluster.wait(lambda: not {cluster.state(one) for one in states} & set(UNFINISHED), "the end of all", logs)
    assert [cluster.state(one) for one in states[:11]] == ["COMPLETED"] * 11, logs()
    unfinished, broken = folders[11], folders[3]
    text = (broken / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text(text.replace('"step"', '"ste', 1))

    page_file = tmp_path / "comparison.html"
    done = checkout.pd("compare", runs, "--json", "--agreement", "--out", page_file, environment=cluster.environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    by_id = {run["id"]: run for run in found["runs"]}
    assert len(by_id) == 12
    assert by_id[unfinished.name]["state"] == "stopped"
    assert by_id[broken.name]["state"] == "broken"
    assert "metrics.jsonl:1" in by_id[broken.name]["why"]
    # The front, from the rows themselves.
    points = {}
    for folder in folders.values():
        if folder not in (unfinished, broken):
            last = read_metrics(folder)[-1]
            l0 = np.mean([value for key, value in last.items() if key.startswith("eval/l0/")])
            points[folder.name] = (float(l0), last["eval/ce_kl/kl_ci_masked"])
    best = {
        name
        for name, point in points.items()
        if not any(p[0] <= point[0] and p[1] <= point[1] and p != point for p in points.values())
    }
    front = next(front for front in found["fronts"] if front["error"] == "λ as masks")
    assert set(front["runs"]) == best
    assert len(found["seeds"]) == 4
    assert len(found["agreement"]) == 9  # three seeds of three coefficients; of the last only one run is left
    assert all(pair["cosines"]["matrix"] > 2 * pair["by_chance"]["matrix"] for pair in found["agreement"])

    said: list[str] = []
    with chromium() as browser:
        page = watched(browser, said)
        page.goto(page_file.as_uri())
        assert page.locator("#runs tbody tr").count() == 12
        assert page.locator("#runs .state-broken").inner_text() == "broken"
        assert page.locator("#runs .state-stopped").inner_text() == "stopped"
        chart = page.locator("figure.scatter", has_text="λ as masks")
        assert chart.locator("a.run.best").count() == len(best)
        assert chart.locator("a.run.unfinished").count() <= 1
        follow(chart.locator("a.run.best").first)
        chosen = page.url.partition("#run-")[2]
        assert page.locator(f"#run-{chosen} code").inner_text().endswith(tuple(best))
        page.screenshot(path=tmp_path / "comparison.png", full_page=True)
    assert said == []


def test_one_of_a_sweep_is_preempted(tiny: Tiny, cluster: Cluster, checkout: Checkout, tmp_path: Path) -> None:
    """Slurm gives the array's own number to one of its jobs, and `scontrol requeue` of that number would mean all."""
    longer = ("pd.steps=600", "cadence={train_log_every: 1}")
    settings = sets((*LIGHT, *longer, f"out_dir={tmp_path}"))
    sweep = ("--sweep", "pd.seed=3,4", "--gpu", "none", "--cpus-per-task", "1", "--shared")
    job = submitted(checkout, cluster, tiny.config, *settings, *sweep)
    folders = sorted(tmp_path.glob("p-*"))

    def log(folder: Path) -> str:
        return "".join(path.read_text() for path in folder.glob("slurm-*.log"))

    def logs() -> str:
        return "".join(map(log, folders))

    cluster.wait(lambda: all(len(read_metrics(folder)) > 3 for folder in folders), "steps of both", logs)
    (named,) = [folder for folder in folders if (folder / f"slurm-{job}.log").exists()]
    (other,) = [folder for folder in folders if folder != named]
    index = json.loads((named / "launch.json").read_text())["jobs"][0]
    cluster.ask("scancel", "--signal=TERM", index)
    cluster.wait(lambda: f"job {index}, start 1:" in log(named), "its second start", logs)
    states = {f"{job}_{number}" for number in range(2)}
    cluster.wait(lambda: not {cluster.state(one) for one in states} & set(UNFINISHED), "the end of both", logs)
    assert {cluster.state(one) for one in states} == {"COMPLETED"}, logs()
    assert "stopped" not in log(other)
    assert log(other).count(", start ") == 1, log(other)
    for folder in folders:
        assert [row["step"] for row in rows(folder)] == list(range(600))


def test_time_limit(tiny: Tiny, cluster: Cluster, checkout: Checkout, runs: Path) -> None:
    """Slurm's own notice before it (`--signal`): saved, back into the queue, gone on with where it was."""
    run = runs / "p-00000007"
    longer = ("pd.steps=100000", "cadence={train_log_every: 1}", "mesh={fsdp: 2}")
    settings = sets((*LIGHT, *longer, f"out_dir={runs}", f"run_id={run.name}"))
    # Slurm looks at limits now and then: its notice comes up to a minute early.
    job = submitted(checkout, cluster, tiny.config, *settings, *TASKS, "--time", "00:02:00", "--notice", "30")

    def log() -> str:
        return "".join(path.read_text() for path in sorted(run.glob("slurm-*.log")))

    cluster.wait(lambda: "stopped and saved at step" in log(), "the notice", log)
    at = int(re.search(r"stopped and saved at step (\d+)", log())[1])  # type: ignore[index]
    cluster.wait(lambda: f"resuming {run} at step {at} of 100000" in log(), "its coming back", log)
    cluster.wait(lambda: len(read_metrics(run)) > at + 3, "some steps more", log)
    assert "DUE TO TIME LIMIT" not in log()
    cluster.ask("scancel", job)
    cluster.wait(lambda: cluster.state(job) == "CANCELLED" and not cluster.ask("squeue", "-h"), "the end", log)
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(len(steps)))


def test_cancelled_and_gone_on_with(tiny: Tiny, cluster: Cluster, checkout: Checkout, runs: Path) -> None:
    """`scancel` is for good, though the tasks still save; the same script goes on."""
    run = runs / "p-00000005"
    longer = ("pd.steps=800", "cadence={train_log_every: 1}", "mesh={fsdp: 2}")
    settings = sets((*LIGHT, *longer, f"out_dir={runs}", f"run_id={run.name}"))
    job = submitted(checkout, cluster, tiny.config, *settings, *TASKS)

    def log() -> str:
        return "".join(path.read_text() for path in sorted(run.glob("slurm-*.log")))

    cluster.wait(lambda: len(read_metrics(run)) > 3, "some steps", log)
    cluster.ask("scancel", job)
    cluster.wait(lambda: cluster.state(job) == "CANCELLED" and not cluster.ask("squeue", "-h"), "the end", log)
    (at,) = saved_steps(run)
    assert 3 < at < 800
    again = cluster.ask("sbatch", "--parsable", str(run / "job.sbatch"))
    cluster.wait(lambda: cluster.state(again) not in UNFINISHED, "the end", log)
    assert cluster.state(again) == "COMPLETED", log()
    assert f"resuming {run} at step {at} of 800" in log()
    assert [row["step"] for row in rows(run)] == list(range(800))


def test_by_hand(tiny: Tiny, cluster: Cluster, checkout: Checkout, runs: Path) -> None:
    """`slurm/train.sbatch` does what `pd launch` does, and takes changes of the checkout along."""
    run = runs / "p-00000006"
    (checkout.folder / "slurm" / "note.txt").write_text("not committed\n")
    options = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", f"--output={runs}/by-hand.log")
    settings = sets((*LIGHT, "mesh={fsdp: 2}"))
    where = {"OUT_DIR": str(runs), "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    done = subprocess.run(
        ["sbatch", "--parsable", *options, "slurm/train.sbatch", str(tiny.config), run.name, *settings],
        env={**cluster.environment(), **environment_of(1, where)}, cwd=checkout.folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

    def log() -> str:
        return (runs / "by-hand.log").read_text()

    cluster.wait(lambda: cluster.state(job) not in UNFINISHED, "the end", log)
    assert cluster.state(job) == "COMPLETED", log()
    assert saved_steps(run) == [12]
    assert (run / "code" / "slurm" / "note.txt").read_text() == "not committed\n"
    assert "+not committed" in (run / "code" / "changes.patch").read_text()
    commit = json.loads((run / "environment.json").read_text())["git_commit"]
    assert commit == f"{checkout.git('rev-parse', 'HEAD')}, with changes.patch"
    (checkout.folder / "slurm" / "note.txt").unlink()


def test_a_harvest(finished: Path, cluster: Cluster, checkout: Checkout, tmp_path: Path) -> None:
    """`slurm/harvest.sbatch`: two tasks make what one process makes."""
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    [alone] = [Path(pd_here("harvest", run, "--tokens", "3e4").out.split()[-1])]
    expected = {path.relative_to(alone): path.read_bytes() for path in alone.rglob("*") if path.is_file()}
    shutil.rmtree(alone)
    options = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", f"--output={tmp_path}/harvest.log")
    where = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["sbatch", "--parsable", *options, "slurm/harvest.sbatch", str(run), "--tokens", "3e4"],
        env={**cluster.environment(), **environment_of(1, where)}, cwd=checkout.folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

    def log() -> str:
        file = tmp_path / "harvest.log"
        return file.read_text() if file.exists() else ""

    cluster.wait(lambda: cluster.state(job) not in UNFINISHED, "the end", log)
    assert cluster.state(job) == "COMPLETED", log()
    made = {path.relative_to(alone): path.read_bytes() for path in alone.rglob("*") if path.is_file()}
    assert [path for path in expected if made[path] != expected[path]] == []


def test_refused_by_slurm(tiny: Tiny, cluster: Cluster, checkout: Checkout, tmp_path: Path) -> None:
    """Its own words, and nothing is left."""
    arguments = ("launch", tiny.config, *sets((*LIGHT, f"out_dir={tmp_path}")), "--gpu", "none")
    done = checkout.pd(*arguments, "--partition", "nowhere", environment=cluster.environment())
    assert done.returncode == 2
    assert "sbatch refuses the job: sbatch: error: invalid partition specified: nowhere" in done.stderr
    assert list(tmp_path.iterdir()) == []
