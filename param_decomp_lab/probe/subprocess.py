"""Runs `pd probe` in a subprocess, because compilers do not release their memory."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from param_decomp_lab.safe_io.files import LISTING_BYTES
from param_decomp_lab.safe_io.json_text import read_json


@dataclass(frozen=True)
class ProbeOutput:
    """The output of a probe. ``answer``: what `pd probe --json` writes; None without a verdict, for the reason in
    ``why``. ``out``: what it prints.
    """

    status: int
    answer: Mapping[str, Any] | None
    out: str
    why: str


def probe_in_subprocess(path: Path, sets: Sequence[str], options: Sequence[str]) -> ProbeOutput:
    """Runs `pd probe` on the configuration in ``path`` with the assignments ``sets``."""
    with tempfile.TemporaryDirectory(prefix="param-decomp-") as folder:
        file = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "param_decomp_lab", "probe", str(path), "--json", str(file), *options]
        command += [argument for text in sets for argument in ("--set", text)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        answer = None
        if done.returncode in (0, 3) and file.is_file():
            answer = read_json(file, "the answer of pd probe", dict, LISTING_BYTES)
    return ProbeOutput(done.returncode, answer, done.stdout, _why(done))


def _why(done: "subprocess.CompletedProcess[str]") -> str:
    """Returns the error message of `pd probe`, or its last output if Python or a library ended it."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"pd probe was ended by {name}{' (was there enough memory?)' * (name == 'SIGKILL')}"
    said = done.stderr.strip() or done.stdout.strip() or f"pd probe ended with status {done.returncode}"
    return said.partition("error: ")[2] or said
