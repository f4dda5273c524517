"""One job in a run folder at a time: real processes, and what a shared file system may do."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.lock import LOCK_FILE, Holder, holder, is_held, only_job
from tests.lab.tiny_run import ROOT

HOLDS = """
import sys
from pathlib import Path
from rich.console import Console
from param_decomp_lab.runs.lock import only_job
with only_job(Path(sys.argv[1]), Console()):
    print("holds", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """By a process of its own; killed at the end."""
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line == "holds\n"
            yield process
        finally:
            process.kill()


def taken(folder: Path) -> str:
    """Takes the lock and leaves it; what was said on the way."""
    console = Console(record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    with only_job(folder, console):
        assert holder(folder) == Holder.here() or (holder(folder) or Holder.here()).pid == os.getpid()
    assert (folder / LOCK_FILE).read_bytes() == b""
    return console.export_text()


def write(folder: Path, who: Holder) -> None:
    (folder / LOCK_FILE).write_text(json.dumps(asdict(who)))


def test_is_taken_and_left(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert taken(tmp_path) == taken(tmp_path) == ""
    assert holder(tmp_path) is None


def test_a_second_process_is_told_who_is_there(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(UserError) as refusal:
            taken(tmp_path)
        message = str(refusal.value)
        assert f"another job is in {tmp_path}: process {process.pid} on {os.uname().nodename}" in message
        assert "on SIGTERM it saves and exits" in message
        assert holder(tmp_path) is not None
        process.communicate("")  # leaves in order
        assert taken(tmp_path) == ""


def test_one_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        said = taken(tmp_path)
    assert said.startswith(f"taking over {tmp_path} from process {process.pid} on")
    assert "it has ended" in said


ELSEWHERE = replace(Holder.here(), host="node07", boot="another", pid=4242, since="2026-01-01T00:00:00+00:00")


def test_a_job_on_another_machine_is_believed(tmp_path: Path) -> None:
    write(tmp_path, replace(ELSEWHERE, job="123"))
    with pytest.raises(UserError, match=r"process 4242 on node07, Slurm job 123, since 2026-01-01") as refusal:
        taken(tmp_path)
    assert f"If you are sure that it has ended, remove {tmp_path / LOCK_FILE}" in str(refusal.value)
    assert holder(tmp_path) == replace(ELSEWHERE, job="123")  # untouched


@pytest.mark.parametrize(
    ("job", "restarts", "gone"), [("123", 1, True), ("123", 0, False), ("124", 1, False), ("", 0, False)]
)
def test_a_requeued_job_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, restarts: int, gone: bool
) -> None:
    """The same job on another node, after Slurm has ended its first start."""
    write(tmp_path, replace(ELSEWHERE, job="123", restarts=0))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    if gone:
        assert "the job has been requeued since" in taken(tmp_path)
    else:
        with pytest.raises(UserError, match="another job is in"):
            taken(tmp_path)


@pytest.mark.parametrize(
    ("squeue", "gone"),
    [
        ("exit 0", True),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", True),
        ("echo RUNNING", False),
        ("echo PENDING", False),
        ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", False),
        (None, False),
    ],
)
def test_a_job_that_slurm_has_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str | None, gone: bool
) -> None:
    """Killed with its whole job on another node: Slurm knows, if it is the same Slurm."""
    before = replace(ELSEWHERE, job="123", cluster="here")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    if squeue is not None:
        program = tmp_path / "bin" / "squeue"
        program.write_text(f'#!/bin/sh\n[ "$2" = --jobs=123 ] || exit 7\n{squeue}\n')
        program.chmod(0o755)
    write(tmp_path, before)
    if gone:
        assert "Slurm no longer has that job" in taken(tmp_path)
        write(tmp_path, replace(before, cluster="another"))
    with pytest.raises(UserError, match="another job is in"):
        taken(tmp_path)


def test_a_machine_that_was_started_again(tmp_path: Path) -> None:
    write(tmp_path, replace(Holder.here(), boot="the one before"))
    assert "has been rebooted since" in taken(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"host": "a"}'])
def test_a_name_that_was_cut_off(tmp_path: Path, text: str) -> None:
    """The lock itself was free."""
    (tmp_path / LOCK_FILE).write_text(text)
    assert taken(tmp_path) == ""


def test_without_the_systems_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Lustre that is mounted without it: what is written in the file decides."""

    def none(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with held(tmp_path) as process:
        monkeypatch.setattr(fcntl, "flock", none)
        monkeypatch.setattr("param_decomp_lab.runs.lock.SETTLE_S", 0.05)
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            taken(tmp_path)
        process.kill()
        process.wait()
        assert "it has ended" in taken(tmp_path)
    # Another start of this very machine's number of a process is somebody else.
    write(tmp_path, replace(Holder.here(), began="1"))
    assert "it has ended" in taken(tmp_path)


def test_a_system_that_does_not_name_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS: with the system's lock all is known; without, nobody on this machine is taken for dead."""

    def none(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("param_decomp_lab.runs.lock.boot_id", lambda: "")
    monkeypatch.setattr("param_decomp_lab.runs.lock.process_start", lambda pid: "")
    monkeypatch.setattr("param_decomp_lab.runs.lock.SETTLE_S", 0.05)
    other = replace(Holder.here(), pid=4242)
    write(tmp_path, other)
    assert is_held(tmp_path) is None
    assert "it has ended" in taken(tmp_path)
    write(tmp_path, other)
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError, match=r"another job is in .*: process 4242 on"):
        taken(tmp_path)


def test_two_that_come_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the system's lock the later name counts."""

    def none(file: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr("param_decomp_lab.runs.lock.time.sleep", lambda seconds: write(tmp_path, ELSEWHERE))
    with pytest.raises(UserError, match=r"took .* at the same time and has it now: process 4242 on node07"):
        taken(tmp_path)
    assert holder(tmp_path) == ELSEWHERE


def test_on_a_cluster_the_name_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's lock may be this machine's alone there."""
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setattr("param_decomp_lab.runs.lock.time.sleep", lambda seconds: write(tmp_path, ELSEWHERE))
    with pytest.raises(UserError, match=r"took .* at the same time and has it now: process 4242 on node07"):
        taken(tmp_path)


def test_one_that_was_believed_dead_does_not_sign_off_for_another(tmp_path: Path) -> None:
    with only_job(tmp_path, Console(quiet=True)) as check_lock:
        check_lock()
        (tmp_path / LOCK_FILE).unlink()  # somebody has followed the message, and nobody else came
        check_lock()
        write(tmp_path, ELSEWHERE)
        with pytest.raises(UserError, match=r"another job has taken over .*: process 4242 on node07"):
            check_lock()
    assert holder(tmp_path) == ELSEWHERE


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Nor can root: what should be a folder is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\), and a run writes to its folder"):
        taken(tmp_path / "file")
