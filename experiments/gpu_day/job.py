"""One measurement in a process of its own, which prints a line of JSON and does not outlive the process that started
it."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from param_decomp_lab.probe import MEM_FRACTION

ROOT = Path(__file__).parents[2]
ON_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEM_FRACTION),
}
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Makes the system kill the new process when its parent ends; otherwise it would keep holding the card. Runs
    between fork and exec."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Job:
    """A running `python -m experiments.gpu_day` with these ``words``. Its messages are in ``log``. Ctrl-C reaches only
    the process that started it."""

    def __init__(self, words: Sequence[str], log: Path, extra: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.gpu_day", *words], cwd=ROOT,
                env={**os.environ, **_DEFAULTS, **extra}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=messages, text=True, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def result(self, limit_s: float, patience_s: float = 0.0) -> dict[str, Any]:
        """Returns what the process prints within the limit. ``failed`` says why there is no result, ``unfinished`` that
        it may be tried again. ``patience_s``: the time after the limit and SIGTERM in which it can still print what it
        has."""
        out, in_time = "", True
        try:
            out = self._process.communicate(timeout=max(1.0, limit_s))[0]
        except subprocess.TimeoutExpired:
            in_time = False
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                out = self._process.communicate(timeout=max(0.1, patience_s))[0]
        finally:
            self.end()
        if self._process.returncode == 0:
            found: dict[str, Any] = json.loads(out.splitlines()[-1])
            return found
        if not in_time:
            return {"failed": f"not done in {limit_s:.0f} s", "unfinished": True}
        said = self._log.read_text(errors="replace")
        if "RESOURCE_EXHAUSTED" in said:
            return {"failed": "out of memory"}
        last = (said.strip().splitlines() or ["no output"])[-1][:500]
        return {"failed": f"status {self._process.returncode}, {self._log}: {last}", "unfinished": True}

    def end(self) -> None:
        """Kills the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
