"""Runs `pd probe` again for the configurations with its answer in their header, and updates the headers.

    pip install -e '.[probe]'
    python -m experiments.benchmarks.probe_headers                            # all of them; twenty minutes on two cores
    python -m experiments.benchmarks.probe_headers configs/llama8b_l18.yaml   # this one

The command is the one in the header, with `--no-cache`. Prints the time and memory of each as Markdown. A configuration
whose probe fails is left unchanged.
"""

import argparse
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEFORE_COMMAND = "#   pd "
WIDTH = 116


def header_command(text: str) -> list[str] | None:
    """Returns what follows ``pd`` in the header's command; None if there is no such command."""
    line = next((line for line in text.splitlines() if line.startswith(f"{BEFORE_COMMAND}probe ")), None)
    return None if line is None else shlex.split(line.removeprefix(BEFORE_COMMAND))


def with_answer(text: str, answer: str) -> str:
    """Returns the configuration ``text`` with everything between its command and its first key replaced by
    ``answer``."""
    lines = text.splitlines()
    command = next(n for n, line in enumerate(lines) if line.startswith(f"{BEFORE_COMMAND}probe "))
    first_key = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    printed = [f"# {line}".rstrip() for line in answer.strip().splitlines()]
    return "\n".join([*lines[: command + 1], "#", *printed, *lines[first_key:]]) + "\n"


def main() -> None:
    """Probes the configurations in sequence, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG")
    options = parser.parse_args()
    found = {path: header_command(path.read_text()) for path in options.configs or sorted(ROOT.glob("configs/*.yaml"))}
    without = [str(path) for path, command in found.items() if command is None]
    if without and options.configs:
        parser.error(f"no line '{BEFORE_COMMAND}probe …' in the header of {', '.join(without)}")
    failed = False
    print("| command | time | highest resident set so far |\n|---|---|---|", flush=True)
    for path, command in found.items():
        if command is None:
            continue
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "param_decomp_lab", *command, "--no-cache"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": str(WIDTH)}, check=False,
        )  # fmt: skip
        taken = time.monotonic() - start
        if done.returncode:
            print(f"{path}: status {done.returncode}; left as it is", file=sys.stderr, flush=True)
            failed = True
            continue
        path.write_text(with_answer(path.read_text(), done.stdout))
        gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(f"| `pd {shlex.join(command)}` | {taken / 60:.1f} min | {gib:.1f} GiB |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
