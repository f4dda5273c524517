"""Being told to stop: noticed at once, acted on where nothing is lost, and in all processes at the same place."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from param_decomp_lab.processes import ALONE, News, Processes


class StopSignal:
    """Set by SIGTERM or by the first Ctrl-C; the second Ctrl-C interrupts at once.

    With several processes it is enough that one of them is told. All answer yes from the same look on, since one that
    stopped earlier would leave the others waiting in a collective. For that they must look equally often: once for
    each place where they could stop. A look costs no communication: the one told says so to all, a thread in each
    process then holds up its main thread's looks for the moment in which they agree on a number of looks that none has
    reached yet. (JAX's `reached_preemption_sync_point` works like this too. It hears SIGTERM only, and takes it away
    from Python.)
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self.requested = False
        self._processes = processes
        self._looks, self._lock = 0, threading.Lock()
        self._agreed: int | None = None
        self._news: News | None = None
        self._said = False

    def __call__(self) -> bool:
        """Whether to stop here."""
        if self._processes.count == 1:
            return self.requested
        if self.requested and self._news is not None and not self._said:
            # Not in the handler: that may have interrupted anything, even another call of the service.
            self._said = True
            self._news.say("stop")
        with self._lock:
            self._looks += 1
            return self._agreed is not None and self._looks >= self._agreed

    def _agree(self, name: str) -> None:
        """On a thread, in every process. No main thread passes a look until all processes have said how far they are:
        so none is past the greatest number. The main threads may wait for a collective meanwhile; nobody asks them."""
        with self._lock:
            looks = self._processes.gather(str(self._looks), name)
            self._agreed = max(map(int, looks)) + 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        # After jax.distributed.initialize, which takes the handlers of those who came before.
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        processes = self._processes
        if processes.count > 1:
            name = processes.turn()
            self._news = News(processes, processes.turn(), lambda said: self._agree(name))
        try:
            yield self
            processes.gather("")  # a process that has not looked for the last time yet may want to agree
        finally:
            if self._news is not None:
                self._news.close()
            for number, handler in before.items():
                signal.signal(number, handler)
