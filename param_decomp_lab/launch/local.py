"""`pd launch --local`: runs the tasks of a job as processes on this machine."""

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
from param_decomp_lab.launch.job import without_job_variables
from param_decomp_lab.launch.layout import JobLayout, choose_layout
from param_decomp_lab.processes.stop_signal import STOPPED

GRACE_S = 30.0
"""Seconds that the other processes have to end after one has failed, as with `srun --kill-on-bad-exit`."""


def local_layout(config: RunConfig, nodes: int | None, per_node: int | None, available: int) -> JobLayout:
    """Returns a layout with one GPU for each process if any are ``available``, else with simulated devices.

    UserError for too few GPUs or an unsuitable mesh.
    """
    layout = choose_layout(config, nodes, per_node, gpus=available > 0)
    if layout.on_gpus and layout.tasks > available:
        raise UserError(
            f"this machine has {available} GPU{'s'[: available > 1]} for {layout.tasks} processes; take a smaller "
            "mesh, or simulate devices on the CPU with --gpu none"
        )
    return layout


def gpus_here() -> int:
    """Returns the number of GPUs that JAX would use. They are counted in a subprocess, since JAX
    reserves their memory.
    """
    code = "import jax; print(jax.local_device_count() if jax.default_backend() == 'gpu' else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"JAX finds no devices here: {done.stderr.strip()}")
    return int(done.stdout)


def commands(run: Path, layout: JobLayout, port: int) -> list[list[str]]:
    """Returns the commands of the processes of ``run``, which use its copy of the code; process 0
    listens at ``port``.
    """
    command = ["bash", str(run / CODE / "slurm" / "task.sh"), str(run)]
    if layout.tasks == 1:
        return [[*command, "--processes", "1"]]
    address = ("--coordinator", f"127.0.0.1:{port}", "--processes", str(layout.tasks))
    return [[*command, *address, "--process-id", str(number)] for number in range(layout.tasks)]


def run_here(run: Path, layout: JobLayout) -> int:
    """Executes the run. Returns the exit status of the first process that failed, 75 after a signal to stop."""
    with _catch_stop_signals() as signals:
        processes = [
            subprocess.Popen(command, env=_environment(layout, number), start_new_session=True)
            for number, command in enumerate(commands(run, layout, free_port()))
        ]
        try:
            return _wait(processes, signals)
        finally:
            for process in processes:
                _signal(process, signal.SIGKILL)
                process.wait()


def _wait(processes: Sequence["subprocess.Popen[bytes]"], signals: list[int]) -> int:
    n_forwarded, deadline, first_bad = 0, float("inf"), 0
    while None in [process.poll() for process in processes]:  # polls all of them, not only up to the first that runs
        time.sleep(0.1)
        while n_forwarded < len(signals):
            # Forwarded to all, as Slurm does. A second Ctrl-C interrupts at once.
            for process in processes:
                _signal(process, signals[n_forwarded])
            n_forwarded += 1
        bad = [process.returncode for process in processes if process.returncode not in (None, 0, STOPPED)]
        if bad and not first_bad:
            first_bad, deadline = bad[0], time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            for process in processes:
                _signal(process, signal.SIGKILL)
    statuses = [process.returncode for process in processes]
    bad = [status for status in statuses if status not in (0, STOPPED)]
    if first_bad or bad:
        status = first_bad or bad[0]
        return status if status > 0 else 128 - status
    return STOPPED if STOPPED in statuses else 0


@contextmanager
def _catch_stop_signals() -> Iterator[list[int]]:
    """Collects the stop signals received meanwhile, instead of letting them end this process."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _environment(layout: JobLayout, number: int) -> dict[str, str]:
    inherited = without_job_variables(os.environ)
    inherited.pop("PD_PREEMPTED", None)  # set by an enclosing job
    mine = {"PYTHON": sys.executable, **layout.variables(inherited)}
    if layout.on_gpus:
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        mine["CUDA_VISIBLE_DEVICES"] = seen[number] if seen else str(number)
    return {**inherited, **mine}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
