"""Processes that this one starts: one thing each, within a time limit, with a log; none outlives it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_day.child import PARENT
from param_decomp_lab.probe import MEM_FRACTION

ROOT = Path(__file__).parents[2]
ON_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
PATIENCE_S = 90.0
"""Time for a run that is told to stop, to save."""


@dataclass(frozen=True)
class Ended:
    """``status``: of the process, None if it was stopped at its limit. ``log``: all that it printed."""

    status: int | None
    log: Path

    @property
    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
        return lines[-1][:500]

    @property
    def out_of_memory(self) -> bool:
        return "RESOURCE_EXHAUSTED" in self.log.read_text(errors="replace")


class Children:
    """``work``: a folder for logs and what they write. ``toy``: on CPUs, the toy items."""

    def __init__(self, work: Path, toy: bool) -> None:
        self._work, self._toy = work, toy
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._closed = threading.Lock(), False
        (work / "logs").mkdir(parents=True, exist_ok=True)

    def do(self, what: str, limit_s: float, name: str = "", extra: Mapping[str, str] | None = None, *more: str) -> Any:
        """What `child.py` found. ``failed`` says why it found nothing, ``unfinished`` that it may be tried again."""
        label = "_".join(filter(None, (what, "".join(c if c.isalnum() else "-" for c in name))))
        out = self._work / f"{label}.json"
        out.unlink(missing_ok=True)
        words = [what, "--out", str(out), *(["--name", name] if name else []), *more]
        words += ["--toy", str(self._work)] if self._toy else []
        ended = self.run(words, label, limit_s, extra)
        if out.is_file():
            found = json.loads(out.read_text())
            out.unlink()
            return found
        if ended.status is None:
            return {"failed": f"not done in {limit_s:.0f} s", "unfinished": True}
        if ended.out_of_memory:
            return {"failed": "out of memory"}
        return {"failed": f"status {ended.status}, {ended.log}: {ended.last_line}", "unfinished": True}

    def pd(
        self, words: Sequence[str], label: str, limit_s: float, extra: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> Ended:  # fmt: skip
        """A command of `pd`."""
        return self.run(["pd", *words], label, limit_s, extra, patience_s)

    def run(
        self, words: Sequence[str], label: str, limit_s: float, extra: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> Ended:  # fmt: skip
        """``words``: for `child.py`. ``patience_s``: time to end by itself after SIGTERM, at the limit."""
        return self.command(
            [sys.executable, "-m", "experiments.gpu_day.child", *words], label, limit_s, extra, patience_s
        )

    def command(
        self, command: Sequence[str], label: str, limit_s: float, extra: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> Ended:  # fmt: skip
        """Any command; of a session of its own, so that Ctrl-C reaches this process alone."""
        log = self._work / "logs" / f"{label}.log"
        with log.open("wb") as file:
            process = self._start(command, file, extra or {})
            try:
                status: int | None = process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process, patience_s)
                with self._lock:
                    self._running.discard(process)
        return Ended(status, log)

    def _start(self, command: Sequence[str], file: Any, extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            PARENT: str(os.getpid()),
            "HF_HUB_OFFLINE": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEM_FRACTION),
            **(ON_CPU if self._toy else {}),
            **extra,
        }
        with self._lock:
            if self._closed:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        return process

    def close(self) -> None:
        """Ends those that run in other threads, and starts none any more."""
        with self._lock:
            self._closed = True
            running = [*self._running]
        for process in running:
            _end(process, 0.0)


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """With its own children."""
    if process.poll() is None and patience_s > 0:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
