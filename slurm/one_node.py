#!/usr/bin/env python3
"""A Slurm of one node on this machine, to try batch files on: real daemons, in a folder of their own.

    python slurm/one_node.py start /tmp/slurm --gpus 4
    export SLURM_CONF=/tmp/slurm/slurm.conf      # from here on sbatch, squeue, scancel, scontrol ask this one
    sbatch ...
    python slurm/one_node.py status /tmp/slurm
    python slurm/one_node.py stop /tmp/slurm

It needs the Debian packages slurm-wlm and munge (Slurm 22.05 or newer), and nothing of what they configure: `munged`,
`slurmctld` and `slurmd` run as whoever calls this, with their configuration, key, state, sockets and logs in the
folder, and on ports that were free. The node has as many cores and GPUs as it is told to say: the GPUs are only
counted. Jobs are requeued. Jobs of the partition `urgent` preempt those of `normal`, with a minute's notice.

`stop` ends the jobs and the daemons that were started in that folder, and nothing else. The folder stays, for its logs.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

INSTALL = "apt-get install -y slurm-wlm munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "squeue", "scancel")
DAEMONS = ("slurmd", "slurmctld", "munged")
"""In the order in which they are ended."""
READY_S, ENDED_S = 60.0, 20.0
"""How long to wait for the node to be ready; for a daemon, or for all jobs, to end."""
SOCKET_PATH = 100
"""Characters that the path of a socket may have (the system's limit is 107)."""

CONFIGURATION = """\
ClusterName=one_node
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# Also how long a requeued job waits before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdDebug=verbose
# No cgroups, no binding to cores: neither is there in a container. The node has what is written here.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobRequeue=1
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=normal Default=YES Nodes=localhost MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=localhost MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


class Failure(Exception):
    """What is said, with status 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("start", "configure and start it, in a folder that is empty, new, or was used for this before"),
        ("stop", "end its jobs and its daemons"),
        ("status", "say what runs; the status is 0 when all of it does"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("folder", type=Path)
        if name == "start":
            command.add_argument("--gpus", type=int, default=4, help="that the node says it has (default: 4)")
            command.add_argument("--cpus", type=int, default=64, help="that the node says it has (default: 64)")
            command.add_argument(
                "--kill-wait", type=int, default=30, help="seconds from SIGTERM to SIGKILL when a job is ended"
            )
    given = parser.parse_args()
    folder = given.folder.absolute()
    try:
        match given.command:
            case "start":
                start(folder, given.gpus, given.cpus, given.kill_wait)
            case "stop":
                stop(folder)
            case "status":
                sys.exit(status(folder))
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(1)


# ---- start ----


def start(folder: Path, gpus: int, cpus: int, kill_wait: int) -> None:
    check_installed()
    if running(folder):
        raise Failure(f"{folder}: {', '.join(running(folder))} runs there already; `stop` it first")
    marker = folder / "slurm.conf"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise Failure(f"{folder} is not empty, and no Slurm of this program is in it")
    if len(f"{folder}/munge.socket") > SOCKET_PATH:
        raise Failure(f"{folder}: the path is too long for a socket, which may have {SOCKET_PATH} characters")
    for name in ("state", "spool"):
        shutil.rmtree(folder / name, ignore_errors=True)  # of jobs that are long gone
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    controller_port, node_port = free_ports(2)
    marker.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], folder=folder, user=user_name(), gpus=gpus, cpus=cpus,
            kill_wait=kill_wait, memory=memory_mib(), controller_port=controller_port, node_port=node_port,
        )
    )  # fmt: skip
    (folder / "gres.conf").write_text(devices(folder, gpus))
    try:
        munged = ["munged", "--force", "--num-threads=2"]  # --force: though others cannot look into the folder
        places = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        places |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        run([*munged, *(f"--{option}={folder / name}" for option, name in places.items())], folder)
        run(["slurmctld", "-f", str(marker)], folder)
        run(["slurmd", "-f", str(marker), "-N", "localhost"], folder)
        until(lambda: node_state(folder) == "idle", READY_S, lambda: f"the node is {node_state(folder) or 'not known'}")
    except BaseException:
        stop(folder)
        raise
    print(f"started; for sbatch and the others: export SLURM_CONF={marker}")


def devices(folder: Path, gpus: int) -> str:
    """GPUs as they are declared. Slurm counts as many as have a file; these are empty ones."""
    for number in range(gpus):
        (folder / f"gpu{number}").touch()
    return "".join(f"NodeName=localhost Name=gpu File={folder}/gpu{number}\n" for number in range(gpus))


def check_installed() -> None:
    missing = [name for name in PROGRAMS if not found(name)]
    if missing:
        raise Failure(f"{', '.join(missing)} not installed: {INSTALL}")


def found(program: str) -> str | None:
    """Daemons are in places where others than root do not look."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")


def run(command: list[str], folder: Path) -> None:
    """A daemon, which goes into the background once it runs."""
    program = found(command[0])
    assert program is not None
    done = subprocess.run(
        [program, *command[1:]], env=environment(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=READY_S, cwd=folder, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Failure(f"{command[0]} does not start ({done.returncode}): {done.stdout.strip()}\n{tail(folder)}")
    name = command[0]
    until(lambda: name in running(folder), READY_S, lambda: f"{name} has gone again\n{tail(folder)}")


def environment(folder: Path) -> dict[str, str]:
    """For clients and daemons alike: not of another Slurm, nor of a job of one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}
    return {**kept, "SLURM_CONF": str(folder / "slurm.conf")}


def node_state(folder: Path) -> str:
    return ask(folder, "sinfo", "--noheader", "--partition=normal", "--format=%T")


def ask(folder: Path, *command: str) -> str:
    """What a client says; nothing where it cannot."""
    try:
        done = subprocess.run(
            command, env=environment(folder), capture_output=True, text=True, timeout=ENDED_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ---- stop, status ----


def stop(folder: Path) -> None:
    """Ends what runs; no error where nothing does."""
    there = running(folder)
    if {"slurmctld", "slurmd", "munged"} <= there.keys():
        ask(folder, "scancel", "--user", user_name())
        with suppress(Failure):
            until(lambda: not ask(folder, "squeue", "--noheader"), ENDED_S, lambda: "jobs")
    for name in DAEMONS:
        if name in there:
            end([there[name]])
    # What was left of jobs: their guardians outlive the daemon.
    steps = [pid for pid in processes() if is_step(pid, folder)]
    end([*steps, *(child for pid in steps for child in below(pid))])


def status(folder: Path) -> int:
    there = running(folder)
    for name in reversed(DAEMONS):
        print(f"{name:10} {f'process {there[name]}' if name in there else 'does not run'}")
    if len(there) < len(DAEMONS):
        return 1
    print(ask(folder, "sinfo", "--Node", "--long") or "the controller does not answer")
    print(ask(folder, "squeue") or "")
    return 0


def running(folder: Path) -> dict[str, int]:
    """The daemons of this folder that run, with their process numbers."""
    there = {}
    for name in DAEMONS:
        with suppress(OSError, ValueError):
            pid = int((folder / f"{name}.pid").read_text())
            # The number may be another process's by now.
            if name in command_of(pid)[0] and any(str(folder) in word for word in command_of(pid)):
                there[name] = pid
    return there


def command_of(pid: int) -> list[str]:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")


def processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def is_step(pid: int, folder: Path) -> bool:
    """Whether a process guards a step of a job of this Slurm."""
    with suppress(OSError):
        if (Path("/proc") / str(pid) / "comm").read_text().strip() == "slurmstepd":
            variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
            return f"SLURM_CONF={folder / 'slurm.conf'}".encode() in variables
    return False


def below(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    found = []
    with suppress(OSError):
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *below(child)]
    return found


def end(pids: list[int]) -> None:
    """SIGTERM, and SIGKILL for those who do not heed it in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(Failure):
            until(lambda: not any(map(alive, pids)), ENDED_S, lambda: "")
            return


def alive(pid: int) -> bool:
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---- small things ----


def until(happened: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Raises Failure with ``why()`` where it has not happened in time."""
    end_s = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end_s:
            raise Failure(f"not in {seconds:.0f} s: {why()}")
        time.sleep(0.1)


def tail(folder: Path) -> str:
    """The ends of the logs."""
    logs = [path for path in sorted(folder.glob("*.log")) if path.stat().st_size]
    return "\n".join(f"-- {path.name}\n" + "\n".join(path.read_text().splitlines()[-8:]) for path in logs)


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def user_name() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


if __name__ == "__main__":
    main()
