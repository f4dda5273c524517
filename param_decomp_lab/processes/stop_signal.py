"""Being told to stop: noticed at once, acted on where nothing is lost, and in all processes at the same place."""

import atexit
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from param_decomp_lab.processes.group import ALONE, News, Processes

NUMBERS = (signal.SIGTERM, signal.SIGINT)
STOPPED = 75
"""Exit status: told to stop; what could be saved is saved."""
PATIENCE_S = 5.0
"""For the main thread to leave by itself when nothing would be lost by ending it."""
LAST_PATIENCE_S = 60.0
"""The same once it is on its way out: it closes files, and the other processes may be writing the report."""


class StopSignal:
    """Set by SIGTERM or by the first Ctrl-C; the second Ctrl-C interrupts at once.

    There are two ways to leave, both with status 75:

    - In order, where the main thread looks (by calling this object) and is told to stop. It saves what is new first.
    - At once, from a thread, while nothing new could be saved (`may_leave`): the main thread may be compiling, loading,
      or waiting for another process, and Python cannot interrupt that. It has some seconds to leave in order.

    With several processes it is enough that one of them is told. To leave in order all must answer yes from the same
    look on, since one that stopped earlier would leave the others waiting in a collective. For that they must look
    equally often: once for each place where they could stop. A look costs no communication: the one told says so to
    all, a thread in each process then holds up its main thread's looks for the moment in which they agree on a number
    of looks that none has reached yet. (JAX's `reached_preemption_sync_point` works like this too. It hears SIGTERM
    only, and takes it away from Python.) Leaving at once needs no agreement: a step takes all processes, so where one
    has begun no step since the last save, none has finished one.
    """

    def __init__(self) -> None:
        self.requested = False
        self.hint = ""
        """What to do next, for the message of one who leaves at once."""
        self._listening = self._interrupted = False
        self._told_at: float | None = None
        self._processes = ALONE
        self._lock = threading.Lock()
        self._looks = 0
        self._agreed: int | None = None
        self._news: News | None = None
        self._heard, self._tell = socket.socketpair()
        # Until something is begun there is nothing to save.
        self._nothing_new: str | None = "while starting; nothing was to be saved"
        self._since, self._patience = time.monotonic(), PATIENCE_S

    @property
    def is_listening(self) -> bool:
        return self._listening

    def __call__(self) -> bool:
        """Whether to stop here."""
        if self._processes.count == 1:
            return self.requested
        with self._lock:
            self._looks += 1
            return self._agreed is not None and self._looks >= self._agreed

    def may_leave(self, where: str, patience: float = PATIENCE_S) -> None:
        """From here on nothing is lost by ending this process: all there is to save is saved.

        ``where``: continues "stopped …". ``patience``: seconds for the main thread to leave in order.
        """
        with self._lock:
            self._nothing_new, self._since, self._patience = where, time.monotonic(), patience

    def must_save(self) -> None:
        """From here on there is something to save."""
        with self._lock:  # one that is about to leave does not let the main thread go on
            self._nothing_new = None

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Hears signals within the block, which the main thread must run."""
        assert not self._listening, "listens once"
        self._listening = True
        self._heard.setblocking(False)
        self._tell.setblocking(False)
        before = {number: signal.getsignal(number) for number in NUMBERS}
        wakeup = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        self._take_signals()
        watcher = threading.Thread(target=self._watch, name="listens for signals", daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            # What remains is Python's own end. Interrupted there, a finished run would have failed.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
            self._tell.close()
            watcher.join()
            self._heard.close()

    @contextmanager
    def among(self, processes: Processes) -> Iterator[None]:
        """Within the block this process is one of several, and all of them stop together."""
        self._take_signals()  # jax.distributed may have taken the handlers of those who came before
        if processes.count == 1:
            yield
            return
        name = processes.turn()
        news = News(processes, processes.turn(), lambda said: self._agree(name))
        with self._lock:
            self._processes, self._news = processes, news
        if self.requested:
            news.say("stop")
        try:
            yield
            processes.gather("")  # a process that has not looked for the last time yet may want to agree
        finally:
            news.close()

    def _take_signals(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted = self.requested = True
        self._wake(number)  # somebody else may have taken the place of our descriptor

    def _wake(self, number: int) -> None:
        with suppress(BlockingIOError):  # full: there is enough to hear
            self._tell.send(bytes([number]))

    def _watch(self) -> None:
        """On a thread, which hears by the descriptor: handlers run only when the main thread is in Python."""
        while True:
            if select.select([self._heard], [], [], None if self._told_at is None else 0.1)[0]:
                numbers = self._heard.recv(64)
                if not numbers:
                    return
                if self._told_at is None and any(number in numbers for number in NUMBERS):
                    self._told_at = time.monotonic()
                    self.requested = True
                    with self._lock:
                        news = self._news
                    if news is not None:
                        with suppress(RuntimeError):  # the others are gone: JAX ends this one
                            news.say("stop")
            self._leave_if_due()

    def _leave_if_due(self) -> None:
        with self._lock:
            if self._nothing_new is None or self._told_at is None:
                return
            if time.monotonic() - max(self._told_at, self._since) < self._patience:
                return
            self._processes.end(STOPPED, "; ".join(filter(None, (f"stopped {self._nothing_new}", self.hint))))

    def _agree(self, name: str) -> None:
        """On a thread, in every process. No main thread passes a look until all processes have said how far they are:
        so none is past the greatest number. The main threads may wait for a collective meanwhile; nobody asks them."""
        # One that could leave at once is as good as told: the one that was told may be waiting for it.
        self._wake(signal.SIGTERM)
        with self._lock:
            looks = self._processes.gather(str(self._looks), name)
            self._agreed = max(map(int, looks)) + 1
