"""A real Slurm of one node (slurm/one_node.py), and a checkout that runs are launched from."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from param_decomp_lab.launch.code_copy import PARTS
from tests.lab.several import environment_of
from tests.lab.tiny_run import PD, ROOT

RIG = ROOT / "slurm" / "one_node.py"
PATIENCE_S = 600.0
"""For anything that a job does; the machine may be busy."""
FAST = {"WANDB_MODE": "disabled", "COLUMNS": "200", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def rig(command: str, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(RIG), command, str(folder), *options], capture_output=True, text=True, timeout=120
    )


@contextmanager
def one_node(folder: Path) -> Iterator["Cluster"]:
    started = rig("start", folder, "--gpus", "4")
    assert started.returncode == 0, started.stderr
    try:
        yield Cluster(folder)
    finally:
        stopped = rig("stop", folder)
        assert stopped.returncode == 0, stopped.stderr


@dataclass(frozen=True)
class Cluster:
    folder: Path

    def environment(self) -> dict[str, str]:
        """With eight devices, as in `conftest.py`: a job has to say how many it wants."""
        return {**environment_of(8, FAST), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Such as RUNNING; of a job that has ended COMPLETED, FAILED, CANCELLED."""
        return re.search(r"JobState=(\S+)", self.ask("scontrol", "show", "job", job))[1]  # type: ignore[index]

    def wait(
        self, happened: Callable[[], bool], what: str, log: Callable[[], str], seconds: float = PATIENCE_S
    ) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, f"{what}: not in {seconds:.0f} s\n{self.ask('squeue')}\n{log()}"
            time.sleep(0.05)


@dataclass(frozen=True)
class Checkout:
    """A repository with this code as its only commit; what it is edited into later is not what was launched."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Checkout":
        for part in PARTS:
            source, to = ROOT / part, folder / part
            to.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, to)
        (folder / ".gitignore").write_text("__pycache__/\n")
        made = cls(folder)
        for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "all")):
            made.git(*command)
        return made

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere.example")
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def pd(
        self, *arguments: str | Path, environment: dict[str, str], timeout: float = PATIENCE_S
    ) -> "subprocess.CompletedProcess[str]":
        """`pd` of this checkout, called in its folder. Past the time it is told to stop, with its own."""
        command = [*PD, *map(str, arguments)]
        with subprocess.Popen(
            command, env={**environment, "PYTHONPATH": str(self.folder)}, cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Somebody edits it meanwhile: nothing that is run from it would start."""
        file = self.folder / "param_decomp_lab" / "training" / "run.py"
        text = file.read_text()
        try:
            file.write_text("raise SystemExit('this is not what was launched')\n")
            yield
        finally:
            file.write_text(text)


def sets(assignments: Sequence[str]) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def bare_environment() -> dict[str, str]:
    """Of a machine without Slurm."""
    return {name: value for name, value in {**os.environ, **FAST}.items() if not name.startswith("SLURM")}
