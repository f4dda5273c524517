"""`pd runs`: what a folder says of its run, whatever is in it, and how a run says that it ended."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.runs import listing as runs
from param_decomp_lab.runs.ending import clear_end, read_ending, record_end
from param_decomp_lab.runs.listing import find_runs, read_run, show_runs
from param_decomp_lab.runs.lock import LOCK_FILE, Holder
from tests.lab.tiny_run import LIGHT, ROOT, STEPS, Tiny, pd_here

LONG_AGO = time.time() - 5 * 86400


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def made(folder: Path, number: int, rows: list[dict[str, Any]] | None = None, steps: int = 100, **files: str) -> Path:
    """A run folder by hand: its configuration, rows, checkpoints at the steps named, other files."""
    run = folder / f"p-{number:08x}"
    run.mkdir(parents=True)
    config = {"wrapper": {"run_name": f"number {number}", "run_id": run.name}, "torch": {"pd": {"steps": steps}}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    if rows is not None:
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in files.items():
        (run / name.replace("__", ".")).write_text(text)
    return run


def row(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "train/loss/total": 0.5, "train/perf/step_time_s": 0.2, "train/perf/tok_per_s": 1e4, **more}


def age(run: Path, since: float = LONG_AGO) -> Path:
    for path in (*run.rglob("*"), run):
        os.utime(path, (since, since))
    return run


def ended(how: str, why: str = "") -> str:
    return json.dumps({"how": how, "why": why, "time": 0.0})


# ---- of a real run ----


def test_a_finished_run(finished: Path) -> None:
    found = read_run(finished)
    assert (found.state, found.step, found.steps, found.checkpoint, found.name) == (
        "finished",
        STEPS,
        STEPS,
        STEPS,
        "tiny",
    )
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert found.main["kl ci"] == last["eval/ce_kl/kl_ci_masked"]
    assert found.main["attack"] == last["eval/loss/PGDReconLoss"]
    assert found.headline["attack, one mask for the batch"] == found.main["attack"]
    assert found.position_attack is None
    of_sites = [last[f"eval/l0/0.0_layers.{n}.mlp.{kind}_proj"] for n in range(2) for kind in ("up", "down")]
    assert found.main["L0"] == pytest.approx(sum(of_sites) / 4)
    assert found.seconds is not None
    assert found.tokens_per_second is not None
    assert read_ending(finished) == ("finished", "")


@pytest.mark.slow
def test_how_runs_end(tiny: Tiny, tmp_path: Path) -> None:
    """Told to stop, killed; and gone on with, whereupon the old ending is forgotten."""
    light = (*LIGHT, "pd.steps=100000", "cadence={train_log_every: 1, save_every: 10}")
    run = tmp_path / "p-00000001"
    with tiny.started(*tiny.train(tmp_path, 1, *light)) as process:
        process.wait_until((run / "ckpts" / "10").exists, "checkpoint 10")
        assert read_run(run).state == "training"
        assert process.stop(signal.SIGTERM) == 75
    stopped = read_run(run)
    assert stopped.state == "stopped"
    assert stopped.step == stopped.checkpoint is not None
    with tiny.started("train", "--resume", run) as process:
        process.wait_until(lambda: (read_run(run).step or 0) > (stopped.step or 0), "another row")
        assert read_ending(run) is None
        assert read_run(run).state == "training"
        process.stop(signal.SIGKILL)
    assert read_ending(run) is None
    assert read_run(age(run)).state == "stopped"


def test_noted_end(tmp_path: Path) -> None:
    """Of an error without words, the kind; nothing where it is another process's to say."""

    def fail_on_the_way(error: Exception) -> None:
        clear_end(tmp_path)
        assert read_ending(tmp_path) is None
        raise error

    with pytest.raises(KeyboardInterrupt), record_end(tmp_path, ValueError):
        raise KeyboardInterrupt
    assert read_ending(tmp_path) == ("failed", "KeyboardInterrupt")
    with pytest.raises(ValueError, match="enough"), record_end(tmp_path, ValueError):
        fail_on_the_way(ValueError("enough"))
    assert read_ending(tmp_path) == ("stopped", "enough")
    with record_end(tmp_path, ValueError, Processes(1, 2, client=object())):
        pass
    assert read_ending(tmp_path) == ("stopped", "enough")
    with pytest.raises(UserError), record_end(tmp_path, ValueError):
        raise UserError("another seed")  # refused: it has not gone on
    assert read_ending(tmp_path) == ("stopped", "enough")
    with pytest.raises(UserError), record_end(tmp_path, ValueError):
        fail_on_the_way(UserError("a file of the data is gone"))
    assert read_ending(tmp_path) == ("failed", "a file of the data is gone")
    with record_end(tmp_path, ValueError):
        ALONE.run_exit_hooks(STOPPED)
        assert read_ending(tmp_path) == ("stopped", "ended with status 75")
    assert read_ending(tmp_path) == ("finished", "")
    other = asdict(replace(Holder.here(), host="node07", boot="another"))
    (tmp_path / LOCK_FILE).write_text(json.dumps(other))
    with pytest.raises(UserError), record_end(tmp_path, ValueError):
        fail_on_the_way(UserError("another job has the folder now"))
    assert read_ending(tmp_path) is None  # the run goes on there
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / "ended.json").write_text('{"how": "fin')
    assert read_ending(tmp_path) is None


# ---- states by what is in the folder ----


def test_states(tmp_path: Path) -> None:
    assert read_run(made(tmp_path, 1)).state == "waiting"
    assert read_run(age(made(tmp_path, 2))).state == "waiting"
    starting = made(tmp_path, 3)
    (starting / "ckpts").mkdir()
    assert read_run(starting).state == "training"  # in its warm-up, or compiling
    going_on = made(tmp_path, 4, [row(0), row(10)])
    assert (read_run(going_on).state, read_run(going_on).step) == ("training", 11)
    assert read_run(age(going_on)).state == "stopped"
    slow = made(tmp_path, 5, [row(0), {**row(100), "train/perf/step_time_s": 60.0}])
    assert read_run(age(slow, time.time() - 10 * 3600)).state == "training"  # a row takes it 100 minutes
    done = made(tmp_path, 6, [row(99), {"step": 100, "eval/loss/PGDReconLoss": 2.0}])
    (done / "ckpts" / "100").mkdir(parents=True)
    found = read_run(age(done))
    assert (found.state, found.step, found.checkpoint) == ("finished", 100, 100)
    assert found.main == {"loss": 0.5, "attack": 2.0}
    told = made(tmp_path, 7, [row(5)], ended__json=ended("failed", "no space left\non the device"))
    assert (read_run(told).state, read_run(told).why) == ("failed", "no space left\non the device")


def test_a_lock_that_is_held_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = age(made(tmp_path, 1, [row(5)]))
    busy = made(tmp_path, 2, [row(5)])
    monkeypatch.setattr(runs, "is_held", lambda folder: folder == quiet)
    assert read_run(quiet).state == "training"
    assert read_run(busy).state == "stopped"


def test_on_another_machine(tmp_path: Path) -> None:
    """Its name in the lock, later than the last end: it loads, warms up or compiles, and writes nothing yet."""

    def name(run: Path, when: float) -> None:
        (run / LOCK_FILE).write_text(json.dumps(asdict(replace(Holder.here(), host="node07", boot="another"))))
        os.utime(run / LOCK_FILE, (when, when))

    waiting = age(made(tmp_path, 1))
    name(waiting, time.time())
    assert read_run(waiting).state == "training"
    resumed = age(made(tmp_path, 2, [row(5)], ended__json=ended("failed", "the disk was full")))
    name(resumed, time.time())
    assert (read_run(resumed).state, read_run(resumed).why) == ("training", "")
    name(resumed, LONG_AGO - 60)  # one that was killed, before another one ended
    assert read_run(resumed).state == "failed"
    killed = age(made(tmp_path, 3, [row(5)]))
    name(killed, LONG_AGO)
    assert read_run(killed).state == "stopped"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda run: (run / "config.yaml").unlink(), "config.yaml: cannot read the configuration"),
        (lambda run: (run / "config.yaml").write_text("a: ["), "not valid YAML"),
        (lambda run: (run / "config.yaml").write_text("[1, 2]"), "should be a mapping"),
        (lambda run: (run / "config.yaml").write_text("wrapper: {}\n"), "KeyError: 'torch'"),
        (lambda run: (run / "config.yaml").write_text("{torch: {pd: {steps: x}}, wrapper: {}}"), "pd.steps is 'x'"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
        (lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()), None),
        (lambda run: (run / "metrics.jsonl").write_text('\x00\n{"step": "x"}\n[1]\n{"step": 3, "a": {}}\n{"st'), None),
        (lambda run: (run / "ended.json").write_text("[]"), None),
        (lambda run: (run / "ckpts").write_text("a file"), None),
    ],
)  # fmt: skip
def test_broken_folders(tmp_path: Path, damage: Any, why: str | None) -> None:
    """Shown as such, or by what is still legible; never a traceback."""
    run, whole = made(tmp_path, 1, [row(5)]), made(tmp_path, 2, [row(6)])
    damage(run)
    found = {Path(found.folder).name: found for found in find_runs([tmp_path])}
    assert found[whole.name].state == "training"
    if why is not None:
        assert found[run.name].state == "broken"
        assert why in found[run.name].why
    else:
        assert found[run.name].state in ("training", "waiting")
    for arguments in ((), ("--json",)):
        outcome = pd_here("runs", tmp_path, *arguments)
        assert outcome.status == 0, outcome
        assert "Traceback" not in outcome.out + outcome.err


# ---- the list ----


def test_which_are_found_and_in_which_order(tmp_path: Path) -> None:
    now = time.time()
    for number, folder in enumerate((tmp_path, tmp_path / "sweep", tmp_path / "a" / "b" / "c")):
        age(made(folder, number, [row(1)]), now - 3600 * (2 - number))
    (tmp_path / "p-0000000f").mkdir()  # by its name
    age(tmp_path / "p-0000000f")
    made(tmp_path / ".hidden", 7)
    made(tmp_path / "a" / "b" / "c" / "d", 8)
    (tmp_path / "a-target").mkdir()
    (tmp_path / "a-target" / "config.json").write_text("{}")
    names = [Path(found.folder).name for found in find_runs([tmp_path, tmp_path / "sweep"])]
    assert names == ["p-00000002", "p-00000001", "p-00000000", "p-0000000f"]
    (alone,) = find_runs([tmp_path / "p-00000000"])
    assert alone.name == "number 0"


def test_table_and_json(tmp_path: Path) -> None:
    made(tmp_path, 1, [row(41, **{"eval/ce_kl/kl_ci_masked": 0.0123, "train/loss/total": float("nan")})], steps=4000)
    text = pd_here("runs", tmp_path).out
    for said in ("p-00000001", "number 1", "training", "42 of 4,000", "200 ms", "10,000", "kl ci 0.0123", "loss NaN"):
        assert said in text, said
    found = json.loads(pd_here("runs", tmp_path, "--json").out, parse_constant=pytest.fail)
    assert found[0]["state"] == "training"
    assert (found[0]["step"], found[0]["main"], found[0]["seconds"]) == (42, {"loss": None, "kl ci": 0.0123}, 0.2)
    missing = pd_here("runs", tmp_path / "nowhere")
    assert missing.status == 2
    assert "is not a folder" in missing.err
    (tmp_path / "empty").mkdir()
    assert "no runs here" in pd_here("runs", tmp_path / "empty").out


def test_a_long_history_costs_its_end(tmp_path: Path) -> None:
    """100 MB of rows: a megabyte of them is read, and that holds the last evaluation."""
    run = made(tmp_path, 1, [row(0)])
    line = json.dumps(row(1, **{f"train/padding/{n}": 0.5 for n in range(60)})) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line * (100_000_000 // len(line)))
        file.write(json.dumps(row(77, **{"eval/loss/PGDReconLoss": 3.0})) + "\n")
        file.write(line.replace('"step": 1', '"step": 78') * 20)
    before = _bytes_read()
    found = read_run(run)
    assert _bytes_read() - before < 2_000_000
    assert (found.step, found.main["attack"]) == (79, 3.0)


def test_the_attack_has_its_scope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words follow the evaluation's configuration; the attack on each position comes from the newest comparison
    with baselines, and a damaged one is left out."""
    run = made(tmp_path, 1, [row(99), {"step": 100, "eval/loss/PGDReconLoss": 2.0}])
    config = yaml.safe_load((run / "config.yaml").read_text())
    words = {"shared_across_batch": ", one mask for the batch", "per_row": ", a mask for each row",
             "unique_per_datapoint": ", a mask for each position", "else": ""}  # fmt: skip
    for scope, said in words.items():
        config["torch"]["eval"] = {"metrics": [{"type": "PGDReconLoss", "n_steps": 20, "mask_scope": scope}]}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        assert read_run(run).headline == {"loss": 0.5, f"attack{said}": 2.0}
    (run / "evals").mkdir()
    for step, error in ((50, 7.0), (100, 8.0)):
        point = {"parts": "decomposition", "chosen": "λ as masks", "attacked": [5.0, error]}
        whole = {"points": [point | {"chosen": "λ above", "attacked": [1.0, 1.0]}, point], "lengths": [20, 80]}
        (run / "evals" / f"baselines_{step}.json").write_text(json.dumps(whole))
    found = read_run(run)
    assert found.headline == {"loss": 0.5, "attack": 2.0, "attack, a mask for each position, beside baselines": 8.0}
    show_runs([found], as_json=False)
    assert "attack, a mask for each position, beside baselines 8" in " ".join(capsys.readouterr().out.split())
    (run / "evals" / "baselines_100.json").unlink()
    (run / "evals" / "baselines_50.json").rename(run / "evals" / "baselines_1050.json")
    found = read_run(run)
    assert found.headline["attack, a mask for each position, beside baselines at step 1,050"] == 7.0
    show_runs([found], as_json=False)
    assert "beside baselines at step 1,050 7" in " ".join(capsys.readouterr().out.split())
    (run / "evals" / "baselines_1050.json").unlink()
    for text in ("{", "[]", '{"points": [{}], "lengths": [20]}', '{"points": 3, "lengths": [20]}'):
        (run / "evals" / "baselines_100.json").write_text(text)
        assert read_run(run).headline == {"loss": 0.5, "attack": 2.0}


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_needs_no_jax(finished: Path, tmp_path: Path) -> None:
    """It answers at once, and with the arrays gone."""
    shutil.copytree(finished, tmp_path / finished.name)
    for path in (tmp_path / finished.name / "ckpts").rglob("*"):
        if path.is_file():
            path.unlink()
    code = (
        "import sys\nfrom pathlib import Path\nfrom param_decomp_lab.runs.listing import find_runs\n"
        "(run,) = find_runs([Path(sys.argv[1])])\nassert run.state == 'finished', run\n"
        "assert not {'jax', 'orbax', 'tensorstore'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=120, check=True)
