"""The lock of a run folder, which allows one job in it at a time: a file with its holder, plus `flock` if available.

`flock` is released when the process that holds it ends for any reason, and excludes all others until then. But on a
shared file system it may be local to one machine or missing. So the file also names its holder, and a holder on another
machine is believed to be alive unless there is proof that it is not.
"""

import fcntl
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import boot_id, process_start
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.safe_io.files import read_text
from param_decomp_lab.safe_io.json_text import parse_json

LOCK_FILE = "lock"
"""Name of the lock file. Empty when not held. Never removed, since two jobs could then lock two files of that name."""
SETTLE_S = 4.0
"""Wait after writing the lock file, in case another machine writes it at the same time: the later writer wins. Longer
than NFS may return stale contents (3 s)."""
SLURM_PATIENCE_S = 20.0
"""Time for Slurm to answer whether a job still exists."""


@dataclass(frozen=True)
class Holder:
    """A process that holds the lock of a run folder.

    ``boot``: id of the machine's last boot. ``began``: start time of the process in the machine's clock ticks. ``job``,
    ``cluster``: the Slurm job. ``restarts``: how often that was requeued.
    """

    host: str
    boot: str
    pid: int
    began: str
    since: str
    job: str = ""
    restarts: int = 0
    cluster: str = ""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Holder":
        """This process."""
        return cls(
            host=socket.gethostname(),
            boot=boot_id(),
            pid=os.getpid(),
            began=process_start(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            job=environment.get("SLURM_JOB_ID", ""),
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
        )

    @classmethod
    def read(cls, text: str) -> "Holder | None":
        """The holder in a lock file's text; None if that is empty, truncated or of something else."""
        try:
            given = parse_json(text, LOCK_FILE, dict)
            kinds = {field.name: int if field.name in ("pid", "restarts") else str for field in fields(cls)}
            if not all(type(value) is kinds.get(key) for key, value in given.items()):
                return None
            return cls(**given)
        except (UserError, TypeError):
            return None

    @property
    def is_this_process(self) -> bool:
        """Whether the holder is the calling process."""
        return (self.boot, self.pid, self.began) == (boot_id(), os.getpid(), process_start(os.getpid()))

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def why_gone(self, now: "Holder", locked: bool) -> str:
        """Says why this holder has certainly ended, as seen from the process ``now``; "" if it may be alive.

        ``locked``: whether ``now`` has acquired `flock`.
        """
        # Without a boot id and process start times (macOS), compare host names.
        if self.boot == now.boot if self.boot else self.host == now.host:
            if locked:
                return "it has ended"
            return "" if process_start(self.pid) == self.began else "it has ended"
        if self.host == now.host:
            return f"{self.host} has been rebooted since"
        if self.job and self.job == now.job and self.restarts < now.restarts:
            return "the job has been requeued since"
        if self.job and self.job != now.job and self.cluster == now.cluster and _has_left_slurm(self.job):
            return "Slurm no longer has that job"
        return ""


def holder(folder: Path) -> Holder | None:
    """Returns the process named in the lock file, which may have been killed; None if there is none."""
    try:
        return Holder.read(read_text(folder / LOCK_FILE, "the lock"))
    except UserError:
        return None


def displaced_by(folder: Path) -> Holder | None:
    """The process that took the lock from this one, believing it dead; None if this one still holds it."""
    found = holder(folder)
    return None if found is None or found.is_this_process else found


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the lock. None if unknown: the holder is on another machine, or on one without process
    start times."""
    found = holder(folder)
    if found is None:
        return False if (folder / LOCK_FILE).is_file() else None
    if found.boot == (boot := boot_id()):
        return process_start(found.pid) == found.began if boot else None
    return False if found.host == socket.gethostname() else None


@contextmanager
def only_job(folder: Path, console: Console, processes: Processes = ALONE) -> Iterator[Callable[[], None]]:
    """A block in which this run is the only job in ``folder``; process 0 holds the lock for all processes.

    Raises UserError in all processes, naming the other job, if the lock is held. A killed job's lock is taken over.
    Yields a function, to be called by all processes, that raises UserError if another job has the lock: a machine
    that was believed dead may come back.
    """
    file: int | None = None

    def release(status: int = 0) -> None:
        if file is not None:
            with suppress(OSError):  # the disk may be gone; `flock` ends with the process
                if displaced_by(folder) is None:
                    os.ftruncate(file, 0)

    def check_lock() -> None:
        with processes.sharing_errors():
            other = displaced_by(folder) if processes.first else None
            if other is not None:
                raise UserError(
                    f"another job has taken over {folder}: {other}. This one was believed dead and saves nothing more"
                )

    processes.exit_hooks.append(release)
    try:
        with processes.sharing_errors():
            if processes.first:
                file = _take(folder, console)
        yield check_lock
    finally:
        processes.exit_hooks.remove(release)
        release()
        if file is not None:
            os.close(file)


def _take(folder: Path, console: Console) -> int:
    path, now = folder / LOCK_FILE, Holder.here()
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}), and a run writes to its folder") from error
    try:
        locked = _locked(file)
        before = Holder.read(os.pread(file, 1 << 16, 0).decode(errors="replace"))
        gone = before.why_gone(now, bool(locked)) if before is not None and locked is not False else ""
        if locked is False or (before is not None and not gone):
            raise UserError(
                f"another job is in {folder}: {before or 'holder unknown'}. Two jobs in one folder would "
                "overwrite each other's checkpoints and rows. Stop that one first (on SIGTERM it saves and exits), or "
                f"start a new run. If you are sure that it has ended, remove {path}"
            )
        if before is not None:
            console.print(f"taking over {folder} from {before}: {gone}", soft_wrap=True)
        _write(file, now)
        if locked is None or now.job:  # on a cluster `flock` may be local to this machine
            time.sleep(SETTLE_S)
            after = holder(folder)  # opened again: the open file may show stale contents
            if after != now:
                raise UserError(f"another job took {folder} at the same time and has it now: {after}")
    except BaseException:
        os.close(file)
        raise
    return file


def _locked(file: int) -> bool | None:
    """Whether `flock` was acquired; None if the file system does not support it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write(file: int, now: Holder) -> None:
    text = json.dumps(asdict(now)).encode() + b"\n"
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, text, 0)
        os.fsync(file)
    except OSError as error:
        raise UserError(f"the run folder cannot be written: {error.strerror}") from error


def _has_left_slurm(job: str) -> bool:
    """Whether Slurm has no queued or running job of this number; False if it does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%T"],
            capture_output=True, text=True, timeout=SLURM_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return not done.stdout.strip() if done.returncode == 0 else "Invalid job id" in done.stderr
