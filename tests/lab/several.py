"""The same command in several processes at once, as a cluster would start it, each with a few simulated devices."""

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from param_decomp_lab.launch.local import free_port
from tests.lab.tiny_run import ROOT, TIMEOUT, Process

CHILD = (sys.executable, "-m", "tests.lab.child")


class Ended(NamedTuple):
    status: int
    text: str


def environment_of(devices: int, more: Mapping[str, str]) -> dict[str, str]:
    """As `conftest.py` has it for this process, but with so many devices."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {**os.environ, **more, "XLA_FLAGS": " ".join(flags)}


def slurm_task(number: int, count: int, job: int) -> dict[str, str]:
    """What `srun` says to a task: one node, this machine. JAX derives the coordinator's port from the job."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
    }


def job_with_free_port() -> int:
    """A job number whose port (its last 12 bits, counted from 61440) is free."""
    for job in itertools.count(os.getpid()):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", job % 4096 + 61440))
            return job
    raise AssertionError


@contextmanager
def started(
    command: Sequence[str], count: int, devices: int, environment: Mapping[str, str], slurm: bool = False
) -> Iterator[list[Process]]:
    """``command`` in ``count`` processes, which are told how to find each other at its end, or as Slurm does; those
    that still run at the end of the block are killed."""
    coordinator, job = f"127.0.0.1:{free_port()}", job_with_free_port()
    found: list[Process] = []
    with ExitStack() as stack:
        for number in range(count):
            place = ("--coordinator", coordinator, "--processes", str(count), "--process-id", str(number))
            output = stack.enter_context(tempfile.TemporaryFile())
            popen = subprocess.Popen(
                [*command, *(() if slurm else place)],
                env={
                    **environment_of(devices, environment),
                    **(slurm_task(number, count, job) if slurm else {}),
                    "CHILD_NUMBER": str(number),
                },
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            found.append(Process(popen, output))
        yield found


def ended(processes: Sequence[Process], timeout: float = TIMEOUT) -> list[Ended]:
    until = time.monotonic() + timeout
    statuses = [process.popen.wait(max(0.01, until - time.monotonic())) for process in processes]
    return [Ended(status, process.text()) for status, process in zip(statuses, processes, strict=True)]


def run(
    command: Sequence[str],
    count: int,
    devices: int,
    environment: Mapping[str, str],
    timeout: float = TIMEOUT,
    slurm: bool = False,
) -> list[Ended]:
    """``command`` in ``count`` processes, to its end."""
    with started(command, count, devices, environment, slurm) as processes:
        return ended(processes, timeout)
