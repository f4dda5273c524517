"""Processes that take turns, so that what they measure meets the same load: each waits while another is at work."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Message = dict[str, float]
ROOT = Path(__file__).parents[2]


class Worker:
    """A process that prints a line of JSON when it is ready, and one more for every line that it is given.

    ``ready``: the first of them. Ends this program if the process ends by itself.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._heard()

    def turn(self, line: object = "") -> Message:
        """What it says to this line."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._heard()

    def end(self) -> None:
        self._process.communicate()

    def _heard(self) -> Message:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a worker has ended; what it said is above")
        message: Message = json.loads(line)
        return message


def say(message: Message) -> None:
    """What a worker prints."""
    print(json.dumps(message), flush=True)
