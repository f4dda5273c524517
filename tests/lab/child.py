"""What a process of `several.py` does: `python -m tests.lab.child WHAT ARGUMENTS --coordinator …`."""

import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

NUMBER = int(os.environ["CHILD_NUMBER"])

SAMPLE = """
import os, select, sys
peak, file = 0, open(f"/proc/{sys.argv[1]}/status")
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    file.seek(0)
    peak = max(peak, *(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
print(peak * 1024)
"""
"""A process of its own watches, so that nothing this one does can hide a moment from it."""


def anonymous() -> int:
    """Bytes of anonymous memory; what is mapped from a file is not in it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak_memory(found: dict[str, Any]) -> Iterator[None]:
    """``found["base"]``, ``found["peak"]``: anonymous memory before the block, and the most within it."""
    command = [sys.executable, "-S", "-c", SAMPLE, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        found["base"] = anonymous()
        yield
        out, _ = watcher.communicate("stop\n")
        found["peak"] = int(out)


@contextmanager
def watched(found: dict[str, Any]) -> Iterator[None]:
    """What is asked of other processes within the block: JAX's checks by name, and the programs it compiles."""
    import jax
    from jax.experimental import multihost_utils as utils

    calls: list[str] = []
    programs: list[str] = []
    names = ("assert_equal", "process_allgather", "broadcast_one_to_all", "sync_global_devices")

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: calls.append(name) or original(*a, **k)

    def compiled(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(compiled)
    with mock.patch.multiple(utils, **{name: noted(name, getattr(utils, name)) for name in names}):
        yield
    found |= {"checks": calls, "programs": len(programs)}


def place(layout: str, folder: str) -> dict[str, Any]:
    """Weights onto all devices, ``split`` or ``whole``: by our loader, then the embedding by `jax.device_put`."""
    import jax
    import numpy as np

    from param_decomp_jax.sharding.mesh import MeshShape, make_mesh, sharding, whole
    from param_decomp_jax.sharding.placement import from_host, from_process_rows, process_batch_rows
    from param_decomp_lab.weights.target_folder import load_target, read_architecture

    mesh = make_mesh(MeshShape(fsdp=jax.device_count()))
    shapes = read_architecture(folder).weight_shapes()
    shardings = jax.tree.map(
        lambda shape: (
            sharding(mesh, shape, (None, "batch")) if layout == "split" and math.prod(shape) > 1 << 16 else whole(mesh)
        ),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )

    def sizes(tree: Any) -> dict[str, Any]:
        parts = [part.data.nbytes for x in jax.tree.leaves(tree) for part in x.addressable_shards]
        return {"held": sum(parts), "largest": max(parts)}

    ours: dict[str, Any] = {}
    with watched(ours), peak_memory(ours):
        _, weights = load_target(folder, "float32", shardings)
        size = 8 * jax.device_count()
        lo, hi = process_batch_rows(mesh, size)
        rows = from_process_rows(np.arange(lo, hi, dtype=np.int32), sharding(mesh, (size,), ("batch",)), 0, lo, size)
        small = from_host(np.arange(5.0, dtype=np.float32), whole(mesh))
        jax.block_until_ready((weights, rows, small))
    ours |= sizes(weights)
    ours["rows"] = {part.index[0].start: part.data.tolist() for part in rows.addressable_shards}
    del weights

    plain: dict[str, Any] = {}
    with watched(plain), peak_memory(plain):
        embed = np.ones(shapes["embed"], np.float32)
        put = jax.block_until_ready(jax.device_put(embed, shardings["embed"]))
    plain |= sizes(put)
    return {"ours": ours, "plain": plain}


def stuck(*_: Any, **__: Any) -> None:
    """For ever, in native code that no signal interrupts and without Python's lock: like XLA while it compiles."""
    print("stuck", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def pd(options: str, *arguments: str) -> None:
    """`pd`, with a log of the rows that this process reads, and with what is to happen to it on the way.

    ``options``: JSON. ``rows``: where to write the number of each batch that was read, and of its rows. ``term``,
    ``fail``, ``damage``: ``[process, n]``, at whose n-th batch it gets SIGTERM, an exception is raised, or a
    shard cannot be read. ``stuck``: ``[process, function]``, which gets stuck where it should call that function.
    """
    from param_decomp_lab.cli import main
    from param_decomp_lab.data.batches import Batches
    from param_decomp_lab.data.read_ahead import ReadAhead
    from param_decomp_lab.errors import UserError

    given = json.loads(options)
    log: list[tuple[str, int, list[int]]] = []
    original, original_take = Batches.__getitem__, ReadAhead.take

    def note(batches: Batches, step: int) -> None:
        log.append((batches.data.source, step, batches.rows(step).tolist()))
        here = [NUMBER, len(log)]
        if given.get("term") == here:
            os.kill(os.getpid(), signal.SIGTERM)
        if given.get("fail") == here:
            raise OSError("the disk is gone")
        if given.get("damage") == here:
            raise UserError(f"{batches.data.source} cannot be read: it is damaged")

    def read(self: Batches, step: int) -> Any:
        note(self, step)
        return original(self, step)

    def take(self: ReadAhead, first: int, n: int) -> Any:
        """Where the training asks for batches; a thread has read them before."""
        for step in range(first, first + n):
            note(self._batches, step)
        return original_take(self, first, n)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Batches, "__getitem__", read))
        stack.enter_context(mock.patch.object(ReadAhead, "take", take))
        stack.enter_context(mock.patch.object(sys, "argv", ["pd", *arguments]))
        if given.get("stuck", [None])[0] == NUMBER:
            stack.enter_context(mock.patch(given["stuck"][1], stuck))
        try:
            main()
        finally:
            if "rows" in given:
                Path(f"{given['rows']}.{NUMBER}").write_text(json.dumps(log))


def agree(how: str, which: str, *place: str) -> None:
    """What `Processes` is for. ``how``: `refuse` or `fail` in process ``which`` at the end, or neither."""
    from param_decomp_lab.errors import UserError
    from param_decomp_lab.processes.joining import joined

    with joined(place[1], int(place[3]), int(place[5])) if place else joined() as processes:
        print("gathered", processes.gather(f"from {processes.number}"), processes.from_first(str(processes.number)))
        done = Path(os.environ["CHILD_FOLDER"]) / "done"

        def once() -> str:
            found = done.exists()
            done.touch()
            return f"process {processes.number}: {'found it done' if found else 'did it'}"

        print(processes.in_turn(once))
        nodes = Path(os.environ["CHILD_FOLDER"]) / "nodes"

        def on_disk() -> str:
            found = sorted(path.name for path in nodes.glob("*"))
            nodes.mkdir(exist_ok=True)
            (nodes / str(processes.number)).touch()
            return f"process {processes.number} of node {node} found {found}"

        # Two nodes, to which the processes are dealt in turn.
        node = f"node{processes.number % 2}"
        with mock.patch("socket.gethostname", return_value=node):
            print(processes.once_per_node(on_disk))
        if how == "refuse":
            try:
                with processes.sharing_errors():
                    if processes.number == int(which):
                        raise UserError("this one does not like it")
            except UserError as error:
                print(f"refused: {error}")
                raise
        if how == "fail":
            _wait_for_ever(processes.number == int(which))
    print("the end")


def _wait_for_ever(failing: bool) -> None:
    """In a collective that one process does not join."""
    import jax
    import jax.numpy as jnp

    from param_decomp_jax.sharding.mesh import MeshShape, make_mesh, sharding, whole

    mesh = make_mesh(MeshShape(fsdp=jax.device_count()))
    x = jax.jit(lambda: jnp.ones(jax.device_count()), out_shardings=sharding(mesh, (jax.device_count(),), ("batch",)))()
    total = jax.jit(jnp.sum, out_shardings=whole(mesh))
    print("sum", float(total(x)), flush=True)
    if failing:
        raise RuntimeError("this one has had enough")
    float(total(x))


def look(told: str, *place: str) -> None:
    """Looks at the stop signal, at a pace of its own; the ``told`` ones (``1+3``) get SIGTERM on the way."""
    from param_decomp_lab.processes.joining import joined
    from param_decomp_lab.processes.stop_signal import StopSignal

    pace = random.Random(NUMBER)
    with joined(place[1], int(place[3]), int(place[5])) as processes:
        before = signal.getsignal(signal.SIGTERM)
        stop = StopSignal()
        with stop.listening(), stop.among(processes):
            stop.must_save()
            started = time.perf_counter()
            assert not any(stop() for _ in range(10_000))
            print(f"a look takes {(time.perf_counter() - started) / 1e4 * 1e6:.2f} us")
            for number in range(10_000):
                if number == 40 and str(processes.number) in told.split("+"):
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop():
                    break
                time.sleep(pace.uniform(0, 0.002 * (1 + NUMBER)))
        assert signal.getsignal(signal.SIGTERM) == before == signal.SIG_DFL
        print(f"stopped at {number}")


def main() -> None:
    what, *arguments = sys.argv[1:]
    match what:
        case "place":
            import jax

            *arguments, _, coordinator, _, count, _, number = arguments
            jax.distributed.initialize(coordinator, int(count), int(number), cluster_detection_method="deactivate")
            print("FOUND " + json.dumps(place(*arguments)), flush=True)
        case "pd":
            pd(*arguments)
        case "agree":
            agree(*arguments)
        case "look":
            look(*arguments)


if __name__ == "__main__":
    main()
