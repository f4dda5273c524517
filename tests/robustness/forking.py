"""Runs the commands of this folder that fork a process for each case."""

import os
import subprocess
import sys

from tests.lab.tiny_run import ROOT


def run_forking(module: str, *words: object) -> None:
    """In a process of its own: this one may have started a backend of JAX, which forked ones could not use."""
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tests.robustness.{module}", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
