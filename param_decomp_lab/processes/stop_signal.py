"""Stops a run on a signal, without losing work and in all processes at the same place."""

import atexit
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from param_decomp_lab.processes.group import ALONE, Broadcast, Processes

NUMBERS = (signal.SIGTERM, signal.SIGINT)
STOPPED = 75
"""Exit status of a run that was asked to stop and has saved its state."""
PATIENCE_S = 5.0
"""Time for the main thread to exit by itself while ending it would lose nothing."""
LAST_PATIENCE_S = 60.0
"""The same time while it is exiting: it closes files, and other processes may be writing the report."""


class StopSignal:
    """Set by SIGTERM or by the first Ctrl-C; the second Ctrl-C interrupts at once.

    A run exits in one of two ways, both with status 75:

    - In order: the main thread checks by calling this object, gets True, saves its state and exits.
    - At once, from a thread, while there is nothing new to save (`may_leave`): the main thread may be compiling,
      loading or waiting for another process, which Python cannot interrupt. It is given some seconds to exit in order.

    With several processes the signal may reach any one of them. To exit in order, all must get True from the same check
    on, since a process that stopped earlier would leave the others waiting in a collective. They must therefore check
    equally often: once at each place where they could stop. A check costs no communication: the process that gets the
    signal notifies all; a thread in each process then blocks the checks of its main thread while they agree on a number
    of checks that none has reached yet. (JAX's `reached_preemption_sync_point` works like this too, but handles SIGTERM
    only and takes it away from Python.) Exiting at once needs no agreement: a step needs all processes, so if one has
    started no step since the last save, none has finished one.
    """

    def __init__(self) -> None:
        self.requested = False
        self.hint = ""
        """What the user can do next; part of the message printed when exiting at once."""
        self._listening = self._interrupted = False
        self._notified_at: float | None = None
        self._processes = ALONE
        self._lock = threading.Lock()
        self._checks = 0
        self._agreed: int | None = None
        self._broadcast: Broadcast | None = None
        self._reader, self._writer = socket.socketpair()
        # Before anything has started there is nothing to save.
        self._nothing_new: str | None = "while starting; there was nothing to save"
        self._since, self._patience = time.monotonic(), PATIENCE_S

    @property
    def is_listening(self) -> bool:
        return self._listening

    def __call__(self) -> bool:
        """Checks once whether to stop here."""
        if self._processes.count == 1:
            return self.requested
        with self._lock:
            self._checks += 1
            return self._agreed is not None and self._checks >= self._agreed

    def may_leave(self, where: str, patience: float = PATIENCE_S) -> None:
        """Declares that everything is saved, so that from now on ending this process loses nothing.

        ``where``: completes the message "stopped …". ``patience``: seconds for the main thread to exit in order.
        """
        with self._lock:
            self._nothing_new, self._since, self._patience = where, time.monotonic(), patience

    def must_save(self) -> None:
        """Declares that there is something to save, so that from now on the process must not be ended at once."""
        with self._lock:  # held by a thread that is ending the process: the main thread waits here
            self._nothing_new = None

    @contextmanager
    def listening(self) -> Iterator["StopSignal"]:
        """Handles signals within the block, which must run in the main thread."""
        assert not self._listening, "listens once"
        self._listening = True
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        before = {number: signal.getsignal(number) for number in NUMBERS}
        wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._take_signals()
        watcher = threading.Thread(target=self._watch, name="listens for signals", daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            # Only Python's own shutdown remains; interrupted there, a finished run would count as failed.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
            self._writer.close()
            watcher.join()
            self._reader.close()

    @contextmanager
    def among(self, processes: Processes) -> Iterator[None]:
        """Within the block, a signal to any of ``processes`` stops all of them."""
        self._take_signals()  # jax.distributed may have replaced the handlers set earlier
        if processes.count == 1:
            yield
            return
        name = processes.turn()
        broadcast = Broadcast(processes, processes.turn(), lambda message: self._agree(name))
        with self._lock:
            self._processes, self._broadcast = processes, broadcast
        if self.requested:
            broadcast.send("stop")
        try:
            yield
            processes.gather("")  # another process may still have checks left, and need this one to agree
        finally:
            broadcast.close()

    def _take_signals(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted = self.requested = True
        self._wake(number)  # other code may have replaced our wakeup descriptor

    def _wake(self, number: int) -> None:
        with suppress(BlockingIOError):  # full: the reader will wake anyway
            self._writer.send(bytes([number]))

    def _watch(self) -> None:
        """Reads signals from the descriptor, on a thread: handlers run only when the main thread is in Python."""
        while True:
            if select.select([self._reader], [], [], None if self._notified_at is None else 0.1)[0]:
                numbers = self._reader.recv(64)
                if not numbers:
                    return
                if self._notified_at is None and any(number in numbers for number in NUMBERS):
                    self._notified_at = time.monotonic()
                    self.requested = True
                    with self._lock:
                        broadcast = self._broadcast
                    if broadcast is not None:
                        with suppress(RuntimeError):  # the others are gone: JAX ends this one
                            broadcast.send("stop")
            self._leave_if_due()

    def _leave_if_due(self) -> None:
        with self._lock:
            if self._nothing_new is None or self._notified_at is None:
                return
            if time.monotonic() - max(self._notified_at, self._since) < self._patience:
                return
            self._processes.end(STOPPED, "; ".join(filter(None, (f"stopped {self._nothing_new}", self.hint))))

    def _agree(self, name: str) -> None:
        """Agrees with the other processes on the check from which all stop; runs on a thread in every process.

        No main thread passes a check until all processes have sent their number of checks, so none is beyond the
        largest. The main threads may be waiting in a collective meanwhile; they take no part.
        """
        # Treat this process as signalled too: the signalled one may be waiting for it to exit.
        self._wake(signal.SIGTERM)
        with self._lock:
            checks = self._processes.gather(str(self._checks), name)
            self._agreed = max(map(int, checks)) + 1
