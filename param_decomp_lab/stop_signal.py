"""Being told to stop: noticed at once, acted on where nothing is lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Set by SIGTERM or by the first Ctrl-C; the second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
