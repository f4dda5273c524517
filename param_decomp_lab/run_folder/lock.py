"""One job in a run folder at a time: a file that says who is in there, held by the system's lock where there is one.

`flock` ends with the process that holds it, whatever ends that, and nobody else can take it meanwhile. But on a shared
file system it may hold on one machine alone, or not be there at all. So the file names its holder, too, and one who
finds the name of somebody on another machine there believes it.
"""

import fcntl
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.group import ALONE, Processes

LOCK_FILE = "lock"
"""In a run folder. Empty when nobody is in there; it is never removed, or two could hold two files of one name."""
SETTLE_S = 4.0
"""Without `flock` over several machines: after so long, of two who wrote their names at the same time the later one has
the folder. Longer than NFS may show what was there before (3 s)."""
SLURM_PATIENCE_S = 20.0
"""For Slurm to say whether a job is still there."""


@dataclass(frozen=True)
class Holder:
    """A process in a run folder. ``boot``: of the machine since it was last started; ``began``: of the process, in the
    machine's own ticks. ``job``: Slurm's, of ``cluster``, with how often it was put back into the queue."""

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
            boot=_boot(),
            pid=os.getpid(),
            began=_began(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            job=environment.get("SLURM_JOB_ID", ""),
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
        )

    @classmethod
    def read(cls, text: str) -> "Holder | None":
        """None for an empty file, or one that was cut off."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def is_this_process(self) -> bool:
        return (self.boot, self.pid, self.began) == (_boot(), os.getpid(), _began(os.getpid()))

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def why_gone(self, now: "Holder", locked: bool) -> str:
        """Why this process is certainly no longer in there, as seen by ``now``; "" if it may be.

        ``locked``: whether ``now`` has got the system's lock.
        """
        # A system that does not name its starts, nor those of its processes (macOS), goes by the machine's name.
        if self.boot == now.boot if self.boot else self.host == now.host:
            if locked:
                return "it has ended"
            return "" if _began(self.pid) == self.began else "it has ended"
        if self.host == now.host:
            return f"{self.host} was started again since"
        if self.job and self.job == now.job and self.restarts < now.restarts:
            return "the job was put back into the queue since"
        if self.job and self.job != now.job and self.cluster == now.cluster and _has_left_slurm(self.job):
            return "Slurm has that job no longer"
        return ""


def holder(folder: Path) -> Holder | None:
    """Who says that it is in the run folder; it may have been killed there."""
    try:
        return Holder.read((folder / LOCK_FILE).read_text())
    except OSError:
        return None


def displaced_by(folder: Path) -> Holder | None:
    """Another process that says it is in the run folder of this one, which was believed to be dead."""
    found = holder(folder)
    return None if found is None or found.is_this_process else found


def is_held(folder: Path) -> bool | None:
    """Whether a process is in the run folder; None where nothing tells: it is said to be one on another machine, or on
    one that does not tell its processes apart."""
    found = holder(folder)
    if found is None:
        return False if (folder / LOCK_FILE).is_file() else None
    if found.boot == (boot := _boot()):
        return _began(found.pid) == found.began if boot else None
    return False if found.host == socket.gethostname() else None


@contextmanager
def only_job(folder: Path, console: Console, processes: Processes = ALONE) -> Iterator[Callable[[], None]]:
    """A block in which this run is the only job in ``folder``; process 0 holds the lock for all.

    UserError, in all processes, when another job is in there, saying which. One that was killed there is no obstacle.
    Gives a look, to be taken by all processes, at whether that is still so: a machine that was believed to be dead may
    come back when another job has its folder. UserError then.
    """
    file: int | None = None

    def sign_off(status: int = 0) -> None:
        if file is not None:
            with suppress(OSError):  # the disk may be gone; the lock goes with the process
                if displaced_by(folder) is None:
                    os.ftruncate(file, 0)

    def check_lock() -> None:
        with processes.sharing_errors():
            other = displaced_by(folder) if processes.first else None
            if other is not None:
                raise UserError(
                    f"another job has {folder} now: {other}. This one, believed to be dead, saves nothing more"
                )

    processes.exit_hooks.append(sign_off)
    try:
        with processes.sharing_errors():
            if processes.first:
                file = _take(folder, console)
        yield check_lock
    finally:
        processes.exit_hooks.remove(sign_off)
        sign_off()
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
                f"another job is in {folder}: {before or 'it has not said which'}. Two jobs in one folder would "
                "overwrite each other's checkpoints and rows. End that one first (SIGTERM: it saves and leaves), or "
                f"start a new run. If you are sure that it is gone, remove {path}"
            )
        if before is not None:
            console.print(f"taking over {folder} from {before}: {gone}", soft_wrap=True, markup=False)
        _write(file, now)
        if locked is None or now.job:  # on a cluster `flock` may hold on this machine alone
            time.sleep(SETTLE_S)
            after = holder(folder)  # opened anew: what is open already may be shown as it was
            if after != now:
                raise UserError(f"another job came into {folder} at the same time: {after}. It has the folder now")
    except BaseException:
        os.close(file)
        raise
    return file


def _locked(file: int) -> bool | None:
    """Whether the system's lock could be had; None where the file system has none."""
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
    """Whether Slurm, asked now, has neither queued nor running what had this number; False where it does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%T"],
            capture_output=True, text=True, timeout=SLURM_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return not done.stdout.strip() if done.returncode == 0 else "Invalid job id" in done.stderr


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process of this machine was started; "" if there is none of this number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
