"""Connects the processes of a run, by an address that is given or by Slurm's variables."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.group import ALONE, Processes, propagate_failures

TIMEOUT_S = 300
"""How long processes wait for each other at the start."""

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""What `srun` sets for each task. `sbatch` and `salloc` set some of them too, for the shell that they start."""


@dataclass(frozen=True)
class ByAddress:
    """``coordinator``: host and port at which process 0 listens."""

    coordinator: str
    count: int
    number: int


@dataclass(frozen=True)
class BySlurm:
    """A task of ``srun``. ``devices``: the GPUs it owns among those it sees; None leaves the choice to JAX."""

    devices: tuple[int, ...] | None


def find_place(
    coordinator: str | None, count: int | None, number: int | None, environment: Mapping[str, str]
) -> ByAddress | BySlurm | None:
    """Returns the place of this process among those of the run; None if it is alone.

    Explicit arguments take precedence over the variables of `srun`; ``count`` 1 means alone, whatever the environment
    says. Raises UserError if the three are not given together or are inconsistent.
    """
    if count == 1 and number in (None, 0):
        return None
    if coordinator is None and count is None and number is None:
        if not all(name in environment for name in SLURM) or int(environment["SLURM_NTASKS"]) == 1:
            return None
        return BySlurm(task_devices(environment))
    if coordinator is None or count is None or number is None:
        given = {"--coordinator": coordinator, "--processes": count, "--process-id": number}
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise UserError(
            f"{missing} missing: several processes need --coordinator HOST:PORT, --processes N and --process-id I "
            "(0 to N - 1, different in each); `srun` needs none of the three"
        )
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(f"--coordinator: {coordinator} is not HOST:PORT, such as node01:29400")
    if not 0 <= number < count:
        raise UserError(f"--process-id: is {number}, but with --processes {count} it goes from 0 to {count - 1}")
    return ByAddress(coordinator, count, number)


def task_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPUs of a task, numbered as it sees them: an equal share of the node's, or all that Slurm reserved
    for it.

    By default, JAX takes one GPU per task, the one with the task's number on its node. This is wrong for a task that
    has a node to itself, and for a task that sees only its own GPU.
    """
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0]
    shown = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    on_node = int(environment.get("SLURM_GPUS_ON_NODE", len(shown)))
    seen = len(shown) or on_node
    if seen == 0 or not tasks.isdecimal():
        return None
    if seen < on_node or seen < int(tasks):
        return tuple(range(seen))
    share, own = seen // int(tasks), int(environment["SLURM_LOCALID"])
    return tuple(range(own * share, (own + 1) * share))


@contextmanager
def joined(coordinator: str | None = None, count: int | None = None, number: int | None = None) -> Iterator[Processes]:
    """Joins the processes of this run, found as in `find_place`. Enter it before anything asks JAX for a device.

    Raises UserError if they cannot be found. A failure inside the block ends all of them (`propagate_failures`).
    """
    place = find_place(coordinator, count, number, os.environ)
    if place is None:
        yield ALONE
        return
    processes = _initialize(place)
    with propagate_failures(processes):
        yield processes


def _initialize(place: ByAddress | BySlurm) -> Processes:
    import jax
    from jax._src.distributed import global_state  # not public, but orbax takes the store from here, too

    # JAX's own handler would replace ours for SIGTERM and ignore Ctrl-C (see stop_signal.py).
    jax.config.update("jax_enable_preemption_service", False)
    match place:
        case ByAddress(coordinator, processes, number):
            _check_address(place)
            jax.distributed.initialize(
                coordinator, processes, number, cluster_detection_method="deactivate", initialization_timeout=TIMEOUT_S
            )
        case BySlurm(devices):
            jax.distributed.initialize(
                local_device_ids=devices, cluster_detection_method="slurm", initialization_timeout=TIMEOUT_S
            )
    return Processes(global_state.process_id, global_state.num_processes, global_state.client)


def _check_address(place: ByAddress) -> None:
    """Raises UserError if JAX could not listen or nobody answers; JAX itself would abort with a stack trace."""
    host, _, port = place.coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    try:
        socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"--coordinator: no host {host} ({error.strerror or error})") from error
    if place.number == 0:
        _refuse_taken(place.coordinator, address[1])
        return
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection(address, timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"--coordinator: nobody has answered at {place.coordinator} for {TIMEOUT_S} s "
                    f"({error.strerror or error}); is process 0 running there, and can its port be reached?"
                ) from error
            time.sleep(0.2)


def _refuse_taken(coordinator: str, port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier run may have left it in TIME_WAIT
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(f"--coordinator: {coordinator}: cannot listen at port {port} ({error.strerror})") from error
