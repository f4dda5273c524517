"""The same command in several processes at once, as a cluster would start it, each with a few simulated devices."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from tests.lab.tiny_run import ROOT, TIMEOUT, Process

CHILD = (sys.executable, "-m", "tests.lab.child")


class Ended(NamedTuple):
    status: int
    text: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def environment_of(devices: int, more: Mapping[str, str]) -> dict[str, str]:
    """As `conftest.py` has it for this process, but with so many devices."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {**os.environ, **more, "XLA_FLAGS": " ".join(flags)}


@contextmanager
def started(
    command: Sequence[str], count: int, devices: int, environment: Mapping[str, str], explicit: bool = True
) -> Iterator[list[Process]]:
    """``command`` in ``count`` processes, told how to find each other at its end unless not ``explicit``; those that
    still run at the end of the block are killed."""
    coordinator = f"127.0.0.1:{free_port()}"
    found: list[Process] = []
    with ExitStack() as stack:
        for number in range(count):
            place = ("--coordinator", coordinator, "--processes", str(count), "--process-id", str(number))
            output = stack.enter_context(tempfile.TemporaryFile())
            popen = subprocess.Popen(
                [*command, *(place if explicit else ())],
                env={**environment_of(devices, environment), "CHILD_NUMBER": str(number)},
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
    command: Sequence[str], count: int, devices: int, environment: Mapping[str, str], timeout: float = TIMEOUT
) -> list[Ended]:
    """``command`` in ``count`` processes, to its end."""
    with started(command, count, devices, environment) as processes:
        return ended(processes, timeout)
