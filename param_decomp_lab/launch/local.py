"""`pd launch --local`: the tasks of a job as processes on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.code_copy import CODE
from param_decomp_lab.launch.job import scrubbed
from param_decomp_lab.launch.place import Place, find_place
from param_decomp_lab.processes.stop_signal import STOPPED

GRACE_S = 30.0
"""For the other processes to end, once one has failed: what `srun --kill-on-bad-exit` does, with time for a message."""


def local_place(config: RunConfig, nodes: int | None, per_node: int | None, there: int) -> Place:
    """One GPU for each process where ``there`` are some, else simulated devices.

    UserError where there are too few, or the mesh does not suit.
    """
    place = find_place(config, nodes, per_node, gpus=there > 0)
    if place.on_gpus and place.tasks > there:
        raise UserError(
            f"this machine has {there} GPU{'s'[: there > 1]} for {place.tasks} processes; take a smaller mesh, or "
            "--gpu none to simulate devices on the CPU"
        )
    return place


def gpus_here() -> int:
    """Of those that JAX would use. Asked in a process of its own, since JAX takes their memory."""
    code = "import jax; print(jax.local_device_count() if jax.default_backend() == 'gpu' else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"JAX finds no devices here: {done.stderr.strip()}")
    return int(done.stdout)


def commands(run: Path, place: Place, port: int) -> list[list[str]]:
    """The processes of ``run``, from its copy of the code; process 0 listens at ``port``."""
    command = ["bash", str(run / CODE / "slurm" / "task.sh"), str(run)]
    if place.tasks == 1:
        return [[*command, "--processes", "1"]]
    address = ("--coordinator", f"127.0.0.1:{port}", "--processes", str(place.tasks))
    return [[*command, *address, "--process-id", str(number)] for number in range(place.tasks)]


def run_here(run: Path, place: Place) -> int:
    """Makes the run, to its end; the status of what failed first, 75 where it was told to stop."""
    with _told_to_stop() as told:
        processes = [
            subprocess.Popen(command, env=_environment(place, number), start_new_session=True)
            for number, command in enumerate(commands(run, place, free_port()))
        ]
        try:
            return _ended(processes, told)
        finally:
            for process in processes:
                _signal(process, signal.SIGKILL)
                process.wait()


def _ended(processes: Sequence["subprocess.Popen[bytes]"], told: list[int]) -> int:
    passed_on, until, first_bad = 0, float("inf"), 0
    while None in [process.poll() for process in processes]:  # all are asked, not only up to the first that runs
        time.sleep(0.1)
        while passed_on < len(told):
            # All are told, as by Slurm. A second Ctrl-C interrupts at once.
            for process in processes:
                _signal(process, told[passed_on])
            passed_on += 1
        bad = [process.returncode for process in processes if process.returncode not in (None, 0, STOPPED)]
        if bad and not first_bad:
            first_bad, until = bad[0], time.monotonic() + GRACE_S
        if time.monotonic() > until:
            for process in processes:
                _signal(process, signal.SIGKILL)
    statuses = [process.returncode for process in processes]
    bad = [status for status in statuses if status not in (0, STOPPED)]
    if first_bad or bad:
        status = first_bad or bad[0]
        return status if status > 0 else 128 - status
    return STOPPED if STOPPED in statuses else 0


@contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """The signals that came, instead of their ending this process."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _environment(place: Place, number: int) -> dict[str, str]:
    inherited = scrubbed(os.environ)
    inherited.pop("PD_PREEMPTED", None)  # of a job that this is done in
    mine = {"PYTHON": sys.executable, **place.variables(inherited)}
    if place.on_gpus:
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        mine["CUDA_VISIBLE_DEVICES"] = seen[number] if seen else str(number)
    return {**inherited, **mine}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
