"""Processes forked from this one, which has imported the program and started no backend of JAX: a command of `pd` in
some ten milliseconds. For `fuzz.py` and `races.py`."""

import gc
import importlib
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

BROKEN = 98
"""Status of a process that ended by an exception which `pd` would have shown with its traceback."""


@dataclass(frozen=True)
class Ended:
    """``status``: negative for a signal. ``memory``: most bytes that were resident, above what the process began
    with. ``said``: stdout and stderr."""

    status: int
    seconds: float
    memory: int
    said: bytes

    @property
    def text(self) -> str:
        return self.said.decode("utf-8", "surrogateescape")


def warm() -> None:
    """Imports everything that a command needs."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("jax").setLevel(logging.ERROR)
    ours = (
        "check", "cli", "data.token_data", "data.tokenize", "eval.command", "export", "harvest.harvest",
        "launch.command", "opening", "pretrain.pretrain",
        "pretrain.recipe", "pretrain.toys", "runs.listing", "training.run", "weights.import_gguf",
    )  # fmt: skip
    libraries = ("gguf.quants", "orbax.checkpoint", "pyarrow.parquet", "transformers")
    for name in (*(f"param_decomp_lab.{name}" for name in ours), *libraries, "tests.lab.gguf_files"):
        importlib.import_module(name)
    assert not jax._src.xla_bridge._backends, "a backend does not survive a fork"
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Forked:
    """A process that runs."""

    pid: int
    said: Path
    started: float
    base: int

    def wait(self, seconds: float) -> Ended:
        """To its end, or until ``seconds`` after its start, when it is killed."""
        while True:
            done, status, used = os.wait4(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() - self.started > seconds:
                os.kill(self.pid, signal.SIGKILL)
                _, status, used = os.wait4(self.pid, 0)
                break
            time.sleep(0.002)
        took = time.monotonic() - self.started
        with self.said.open("rb") as file:
            said = file.read(4 << 20)
        return Ended(os.waitstatus_to_exitcode(status), took, used.ru_maxrss * 1024 - self.base, said)


def start(act: Callable[[], int | None], work: Path, beside: Path, address_bytes: int | None = None) -> Forked:
    """A process that does ``act`` in the folder ``work``, treats its exceptions as `pd` does, and ends with the status
    that it returns (None: 0).

    ``beside``: what it prints goes into this folder as `said`, temporary files into `tmp`. ``address_bytes``: of
    address space that it may take above what it begins with.
    """
    beside.mkdir(exist_ok=True)
    (beside / "said").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    started, base = time.monotonic(), _status_bytes("VmRSS")
    pid = os.fork()
    if pid == 0:
        _be_the_child(act, work, beside, address_bytes)
    return Forked(pid, beside / "said", started, base)


def _be_the_child(act: Callable[[], int | None], work: Path, beside: Path, address_bytes: int | None) -> None:
    """Never returns."""
    status = BROKEN
    try:
        output = os.open(beside / "said", os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        (beside / "tmp").mkdir()
        tempfile.tempdir = str(beside / "tmp")
        os.environ |= {"HOME": str(beside), "COLUMNS": "200", "TERM": "dumb", "WANDB_MODE": "disabled"}
        os.environ.pop("RUST_BACKTRACE", None)  # with it, a panic prints its whole stack
        os.chdir(work)
        if address_bytes is not None:
            limit = _status_bytes("VmSize") + address_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = _as_pd(act)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _as_pd(act: Callable[[], int | None]) -> int:
    """The status of ``act``, in which a UserError ends as in `pd`, with one message."""
    main, status = sys.modules["param_decomp_lab.cli.app"], 0

    def command() -> None:
        nonlocal status
        status = act() or 0

    try:
        with mock.patch.object(main, "app", command):
            main.main()
    except SystemExit as ended:
        return 1 if isinstance(ended.code, str) else ended.code or status
    return status


def pd(*words: str) -> None:
    """`pd` with these arguments, in this process."""
    from param_decomp_lab.cli import app

    with mock.patch.object(sys, "argv", ["pd", *words]):
        app()


def _status_bytes(name: str) -> int:
    """Of /proc/self/status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
