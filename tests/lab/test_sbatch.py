"""The files in `slurm/`, with `srun`, `scontrol` and `pd` replaced by lines of shell (the real ones: test_slurm.py)."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from param_decomp_lab.config.overrides import parse_overrides
from param_decomp_lab.launch.job import SlurmJob, script_text
from param_decomp_lab.launch.layout import JobLayout
from tests.lab.test_launch import HOSTILE
from tests.lab.tiny_run import ROOT

FILES = sorted([*(ROOT / "slurm").glob("*.sbatch"), *(ROOT / "slurm").glob("*.sh")])
RUN = "p-0000002a"
STUBS = {
    # A task: what follows the options, in a process group of its own, to which Slurm's signal goes.
    "srun": """
        echo "srun $*" >> "$LOG"
        while [[ $1 == --* ]]; do shift; done
        setsid "$@" & task=$!
        if [ -n "${TERM_AFTER:-}" ]; then sleep "$TERM_AFTER"; kill -TERM -- -$task; fi
        wait $task
    """,
    "scontrol": 'echo "scontrol $*" >> "$LOG"; exit ${SCONTROL_STATUS:-0}',
    # What is called is `python [-P] -m param_decomp_lab COMMAND`. `launch` makes a run folder, with the scripts.
    "python": """
        [ "$1" = -P ] && shift
        shift 2
        echo "pd $*" >> "$LOG"
        if [ "$1" = launch ]; then
            [ "${LAUNCH_STATUS:-0}" = 0 ] || exit "$LAUNCH_STATUS"
            run=$2
            for word in "$@"; do case $word in run_id=*) id=${word#*=};; out_dir=*) out=${word#*=};; esac; done
            if [ -n "${out:-}" ]; then out=${out#?}; out=${out%?}; run=${OUT_DIR:-$out}/$id; fi
            printf '%s\\0' "$@" > "$LOG.launch"
            mkdir -p "$run/code" && cp -R "$SLURM_FILES" "$run/code/slurm" && touch "$run/config.yaml"
            exit
        fi
        env | grep -E '^(SLURM_(STEP|CPU_BIND|MEM_PER)|PYTHONPATH|JAX_COMP|XLA_PY|HF_HUB|PD_PREEMPT)' | sort >> "$LOG"
        [ -n "${DEAF:-}" ] || trap 'exit 75' TERM
        [ -z "${KILLED:-}" ] || echo '{"host": "node07", "job": "42", "restarts": 0}' > "$3/lock"
        if [ -n "${TERM_AFTER:-}" ]; then for _ in $(seq 100); do sleep 0.1; done; fi
        exit ${PD_STATUS:-0}
    """,
}


@dataclass
class Cluster:
    """A checkout that a job was submitted from. ``log``: what was called, and with what environment."""

    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        (self.folder / "log").write_text("")
        inherited = {
            **os.environ, "LOG": str(self.folder / "log"), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "VENV": str(self.folder), "SLURM_FILES": str(ROOT / "slurm"),
            "SLURM_SUBMIT_DIR": str(self.folder / "checkout"), "SLURM_JOB_ID": "42",
            "SLURM_JOB_NUM_NODES": "8", "SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "12",
            # As of an interactive job from which this one was submitted.
            "SLURM_STEP_ID": "7", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_MEM_PER_CPU": "100", "SLURM_NTASKS": "1",
        }  # fmt: skip
        for name in ("PYTHONPATH", "JAX_COMPILATION_CACHE_DIR"):
            inherited.pop(name, None)
        return subprocess.run(
            ["bash", str(ROOT / "slurm" / "train.sbatch"), *arguments],
            env={**inherited, **environment}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    for name, text in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{text}\n")
        stub.chmod(0o755)
    (tmp_path / "checkout").mkdir()
    return Cluster(tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_syntax(file: Path) -> None:
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def test_first_start(cluster: Cluster) -> None:
    """Makes the run's folder as `pd launch` does, then starts what is in it."""
    done = cluster.run("configs/a.yaml", "--set", "pd.steps=3")
    assert done.returncode == 0, done.stderr
    out = cluster.folder / "checkout" / "runs"
    made = f'pd launch configs/a.yaml --set run_id={RUN} --set out_dir="{out}" --set pd.steps=3'
    assert cluster.log.startswith(f"{made} --prepare --with-changes\n")
    assert f"pd train --resume {out}/{RUN}\n" in cluster.log
    assert "--nodes=8 --ntasks-per-node=8 --cpus-per-task=12 --mem=0 --kill-on-bad-exit=1" in cluster.log
    of_tasks = cluster.log.rpartition("pd train")[2]
    for variable in ("SLURM_STEP_ID", "SLURM_CPU_BIND_TYPE", "SLURM_MEM_PER_CPU"):
        assert variable not in of_tasks
    for setting in (
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92",
        f"JAX_COMPILATION_CACHE_DIR={out}/compiled",
        f"PYTHONPATH={out}/{RUN}/code",
    ):
        assert f"{setting}\n" in of_tasks
    assert "scontrol" not in cluster.log


def test_goes_on_with_what_the_first_start_made(cluster: Cluster) -> None:
    assert cluster.run("configs/a.yaml", "p-12345678").returncode == 0
    done = cluster.run("configs/a.yaml", "p-12345678", "--set", "pd.steps=3")
    assert done.returncode == 0, done.stderr
    assert "pd launch" not in cluster.log
    assert f"pd train --resume {cluster.folder}/checkout/runs/p-12345678\n" in cluster.log


def test_goes_on_with_a_run_from_elsewhere(cluster: Cluster) -> None:
    """It has its configuration, and gets the code."""
    run = cluster.folder / "checkout" / "runs" / "p-12345678"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert cluster.run("configs/a.yaml", "p-12345678").returncode == 0
    assert cluster.log.startswith(f"pd launch {run} --prepare --with-changes\n")
    assert f"pd train --resume {run}\n" in cluster.log


def test_each_job_has_a_mark_of_its_own(cluster: Cluster) -> None:
    """A second job in the folder, which the lock refuses, must not take away the first one's, nor believe it."""

    def mark(job: str) -> str:
        assert cluster.run("configs/a.yaml", "p-12345678", SLURM_JOB_ID=job).returncode == 0
        (line,) = (line for line in cluster.log.splitlines() if line.startswith("PD_PREEMPTED="))
        return line

    assert mark("42") != mark("43")


def test_a_preemption_that_cannot_be_noted(cluster: Cluster) -> None:
    """The task's own status tells it then."""
    assert cluster.run("configs/a.yaml").returncode == 0
    (cluster.folder / "checkout" / "runs" / RUN / ".preempted-42" / "in the way").mkdir(parents=True)
    done = cluster.run("configs/a.yaml", PD_STATUS="75")
    assert done.returncode == 0, done.stderr
    assert cluster.log.endswith("scontrol requeue 42\n")


def test_a_killed_task_leaves_no_lock(cluster: Cluster) -> None:
    """Its name in there would be believed on other machines."""
    assert cluster.run("configs/a.yaml", PD_STATUS="137", KILLED="yes").returncode == 137
    lock = cluster.folder / "checkout" / "runs" / RUN / "lock"
    assert lock.read_text() == ""
    lock.write_text('{"host": "node07", "job": "43"}')
    assert cluster.run("configs/a.yaml", PD_STATUS="2").returncode == 2
    assert lock.read_text() == '{"host": "node07", "job": "43"}'  # another job's


def test_what_cannot_be_launched(cluster: Cluster) -> None:
    assert cluster.run("configs/a.yaml", LAUNCH_STATUS="2").returncode == 2
    assert "srun" not in cluster.log


@pytest.mark.parametrize("how", ["status", "signal"])
def test_preempted(cluster: Cluster, how: str) -> None:
    """Told to stop, tasks save and leave with 75: srun sees nothing bad in that, the job goes back into the queue."""
    told = {"PD_STATUS": "75"} if how == "status" else {"TERM_AFTER": "1"}
    done = cluster.run("configs/a.yaml", **told)
    assert done.returncode == 0, done.stderr
    assert cluster.log.endswith("scontrol requeue 42\n")
    assert not list((cluster.folder / "checkout" / "runs" / RUN).glob(".preempted*"))
    again = cluster.run("configs/a.yaml")
    assert again.returncode == 0
    assert "scontrol" not in cluster.log


def test_preempted_where_requeueing_is_off(cluster: Cluster) -> None:
    done = cluster.run("configs/a.yaml", PD_STATUS="75", SCONTROL_STATUS="1")
    assert done.returncode == 75
    assert f"sbatch --nodes=8 slurm/train.sbatch configs/a.yaml {RUN}" in done.stderr


@pytest.mark.parametrize("name", [*HOSTILE, "a: b", "x #y"])
def test_names_by_hand(cluster: Cluster, name: str) -> None:
    """Of the folder of the runs and of the configuration; what is printed for later is a command that a shell takes."""
    runs, config = cluster.folder / "out" / name, f"configs/{name}.yaml"
    done = cluster.run(config, PD_STATUS="75", SCONTROL_STATUS="1", OUT_DIR=str(runs), CDPATH=str(cluster.folder))
    assert done.returncode == 75, done.stderr
    assert f"pd train --resume {runs}/{RUN}\n" in cluster.log
    words = (cluster.folder / "log.launch").read_text().split("\0")
    (given,) = parse_overrides(word for word in words if word.startswith("out_dir="))
    assert given.value == str(runs)
    again = done.stderr.partition("resume with: ")[2]
    told = subprocess.run(
        ["bash", "-c", f"sbatch() {{ printf '%s\\0' \"$@\"; }}; {again}"], capture_output=True, text=True
    )
    assert told.stdout.split("\0")[:-1] == ["--nodes=8", "slurm/train.sbatch", config, RUN]
    assert not list(cluster.folder.rglob("x"))


def test_told_before_anybody_listens(cluster: Cluster) -> None:
    """SIGTERM ends a Python that has no handler yet: nothing is lost, and the job goes on."""
    done = cluster.run("configs/a.yaml", TERM_AFTER="1", DEAF="1")
    assert done.returncode == 0, done.stderr
    assert cluster.log.endswith("scontrol requeue 42\n")


# 143 of nobody's telling it: something else has ended the process.
@pytest.mark.parametrize("status", [1, 2, 143])
def test_failed(cluster: Cluster, status: int) -> None:
    assert cluster.run("configs/a.yaml", PD_STATUS=str(status)).returncode == status
    assert "scontrol" not in cluster.log


@pytest.mark.parametrize(("arguments", "reason"), [((), "usage: sbatch"), (("a.yaml", "my-run"), "RUN_ID: is my-run")])
def test_wrong_usage(cluster: Cluster, arguments: tuple[str, ...], reason: str) -> None:
    done = cluster.run(*arguments)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "srun" not in cluster.log


def test_signal_goes_to_the_tasks() -> None:
    """`B:` would tell the script alone, which could do nothing."""
    lines = (ROOT / "slurm" / "train.sbatch").read_text().splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--requeue", "--signal=TERM@300", "--open-mode=append"} <= options


def test_asks_for_what_pd_launch_asks_for() -> None:
    """But for the name, and where the log is."""
    layout = JobLayout(nodes=1, per_node=8, simulated=None)
    launched = script_text(
        SlurmJob(), layout, "param-decomp", [Path("/runs/p-00000001")], Path("/runs/p-00000001/job.sbatch")
    )
    by_hand = (ROOT / "slurm" / "train.sbatch").read_text()

    def options(text: str) -> set[str]:
        given = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
        return {option for option in given if not option.startswith(("--output=", "--chdir="))}

    assert options(launched) == options(by_hand)
