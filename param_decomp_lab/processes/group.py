"""Runs several processes as one: exchanges values between them, and ends all of them when one fails.

All messages go through the key-value store of JAX's coordination service in process 0, never through the devices:
messages take no device time, and arrive even while the devices or the main thread of a process wait for another one.
"""

import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from param_decomp_lab.errors import CannotFetch, CannotWrite, NonFiniteLoss, UserError
from param_decomp_lab.folders import boot_id

T = TypeVar("T")

FOREVER_MS = 10**9
"""Eleven days, since other processes may compile for a long time. JAX's heartbeats detect a process that dies."""
GRACE_S = 5.0
"""Time for a process to exit by itself (closing its files) after another one failed, before it is killed."""
EXIT_MARGIN_S = 2.0
"""Time from a process announcing its exit to its exit, on a busy machine."""


class Refused(UserError):
    """A user's mistake that all processes know: each exits by itself, with status 2."""


class RefusedElsewhere(SystemExit):
    """Exit with status 2 in a process other than process 0, which prints the message."""


class Processes:
    """The processes of a run, as seen by process ``number`` of ``count``.

    Every process must make the same calls in the same order. ``client``: JAX's client of the coordination service; None
    for a single process, where every method is trivial.
    """

    def __init__(self, number: int = 0, count: int = 1, client: Any = None) -> None:
        assert 0 <= number < count
        assert (count == 1) == (client is None)
        self.number, self.count, self.client = number, count, client
        self._turns = itertools.count()
        self._failures: _Failures | None = None
        self.exit_hooks: list[Callable[[int], None]] = []
        """Called with the exit status before this process is ended by force, from any thread; must be quick."""

    @property
    def first(self) -> bool:
        """Whether this is process 0, which does everything that happens once per run: files, wandb, the terminal."""
        return self.number == 0

    def end(self, status: int, why: str) -> NoReturn:
        """Ends all processes of the run at once, from any thread, whatever their main threads are doing.

        ``why``: the message to print. With several processes this must run inside `propagate_failures`.
        """
        if self.count > 1:
            assert self._failures is not None
            self._failures.end(status, why)
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # a progress bar hides it
        print(f"{show_cursor}{why}", flush=True)
        self.run_exit_hooks(status)
        os._exit(status)

    def run_exit_hooks(self, status: int) -> None:
        """Calls the exit hooks; for use before this process is ended by force."""
        for act in self.exit_hooks:
            act(status)

    def turn(self) -> str:
        """Returns a new name, the same in every process."""
        return f"param_decomp/{next(self._turns)}"

    def gather(self, value: str, name: str | None = None) -> list[str]:
        """Returns the values of all processes, in their order. ``name``: required off the main thread."""
        if self.count == 1:
            return [value]
        name = name or self.turn()
        self.client.key_value_set(f"{name}/{self.number}", value)
        self.client.wait_at_barrier(name, FOREVER_MS)
        found = {int(key.rpartition("/")[2]): text for key, text in self.client.key_value_dir_get(f"{name}/")}
        return [found[number] for number in range(self.count)]

    def from_first(self, value: str) -> str:
        """Returns the value that process 0 passed."""
        return self.gather(value)[0]

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """A block that every process runs. A `UserError` in one of them stops all: process 0 raises it as `Refused`,
        the others exit silently with the same status."""
        if self.count == 1:
            yield
            return
        refusal: UserError | None = None
        try:
            yield
        except Refused:
            raise
        except UserError as error:
            refusal = error
        reasons = self.gather("" if refusal is None else str(refusal) or "refused")
        who = next((number for number, reason in enumerate(reasons) if reason), None)
        if who is None:
            return
        if not self.first:
            raise RefusedElsewhere(2)
        raise Refused(reasons[0] if who == 0 else f"process {who} of {self.count}: {reasons[who]}") from refusal

    def in_turn(self, action: Callable[[], T]) -> T:
        """Runs ``action`` in process 0 first, then in the others, and returns its result. The other processes then find
        work that is needed only once (such as training a target) already done.
        """
        if not self.first:
            with self.sharing_errors():
                pass
            return action()
        with self.sharing_errors():
            return action()

    def once_per_node(self, action: Callable[[], T]) -> T:
        """Runs ``action`` in process 0, then in the first process of every other node, then in the rest, and returns
        its result. The other processes then find work that is needed once per disk (such as fetching weights) already
        done, whether or not the nodes share a disk.
        """
        if self.count == 1:
            return action()
        nodes = self.gather(f"{socket.gethostname()} {boot_id()}")
        first = nodes.index(nodes[self.number]) == self.number
        turn = 0 if self.first else 1 if first else 2
        for now in range(3):
            with self.sharing_errors():
                if now == turn:
                    result = action()
        return result


ALONE = Processes()


class Broadcast:
    """A message that any process may send at any time and that every process receives on a thread.

    ``on_message``: called once in every process, with the first message sent; not called after `close`.
    """

    def __init__(self, processes: Processes, name: str, on_message: Callable[[str], None]) -> None:
        assert processes.count > 1
        self._processes, self._name, self._on_message = processes, name, on_message
        self._thread = threading.Thread(target=self._listen, name=f"listens for {name}", daemon=True)
        self._thread.start()

    def send(self, text: str) -> None:
        """Sends ``text``, which must not be empty, to all processes."""
        for number in range(self._processes.count):
            self._processes.client.key_value_set(f"{self._name}/{number}", text, allow_overwrite=True)

    def close(self) -> None:
        # An empty message to this process alone ends its listening thread.
        own = f"{self._name}/{self._processes.number}"
        self._processes.client.key_value_set(own, "", allow_overwrite=True)
        self._thread.join(GRACE_S)

    def _listen(self) -> None:
        try:
            text = self._processes.client.blocking_key_value_get(f"{self._name}/{self._processes.number}", FOREVER_MS)
            if text:
                self._on_message(text)
        except RuntimeError:
            pass  # another process has died: JAX ends this one


@contextmanager
def propagate_failures(processes: Processes) -> Iterator[None]:
    """A block with all the work of a run. If one process fails, it prints the reason and all exit with its status.

    Otherwise the other processes would wait for it in a collective, and it would wait for them at exit, until JAX times
    out after five minutes. They are ended by force, since Python cannot interrupt a thread that waits for a device.
    """
    if processes.count == 1:
        yield
        return
    processes._failures = failures = _Failures(processes)
    try:
        yield
    except (Refused, RefusedElsewhere):
        failures.finish()
        raise
    except BaseException as error:
        failures.leave(error)
    failures.finish()


class _Failures:
    def __init__(self, processes: Processes) -> None:
        self._processes, self._name, self._end = processes, processes.turn(), processes.turn()
        self._own = False
        self._broadcast = Broadcast(processes, self._name, self._follow_later)

    def finish(self) -> None:
        """Returns when all processes are done; until then a failure in one still ends all of them."""
        self._processes.gather("", self._end)
        self._broadcast.close()

    def leave(self, error: BaseException) -> NoReturn:
        who = f"process {self._processes.number} of {self._processes.count}"
        status = 2 if isinstance(error, UserError) else 1
        self._claim(status, f"{who} failed")
        _print_error(who, error)
        self._end_all(status, f"{who} failed")

    def end(self, status: int, why: str) -> NoReturn:
        who = f"process {self._processes.number} of {self._processes.count}"
        self._claim(status, f"{who} {why}")
        print(f"{who} {why}", file=sys.stderr)
        self._end_all(status, f"{who} {why}")

    def _claim(self, status: int, what: str) -> None:
        """Records this process as the first to fail. If another one was first, exits like that one."""
        self._own = True
        key = f"{self._name} first"
        try:
            self._processes.client.key_value_set(key, f"{status} {what}")
        except Exception:
            # Another process failed first and prints why; the failure here may be a consequence.
            self._follow(self._processes.client.key_value_try_get(key))

    def _end_all(self, status: int, what: str) -> NoReturn:
        self._broadcast.send(f"{status} {what}")
        self._end_with(status)

    def _follow_later(self, message: str) -> None:
        time.sleep(GRACE_S)
        if not self._own:
            self._follow(message)

    def _follow(self, message: str) -> NoReturn:
        status, _, what = message.partition(" ")
        print(f"process {self._processes.number}: ended, because {what}", file=sys.stderr)
        self._end_with(int(status))

    def _end_with(self, status: int) -> NoReturn:
        """Ends this process at once.

        Process 0 calls its exit hooks before any process exits, since the launcher may kill all of them as soon as one
        has (`srun --kill-on-bad-exit`). It exits last, since losing its coordination service aborts the others.
        """
        processes = self._processes
        noted, gone = f"{self._name} noted", f"{self._name} gone"
        sys.stdout.flush()
        sys.stderr.flush()
        until = time.monotonic() + 4 * GRACE_S

        def wait_for(key: str) -> bool:
            left = int(1000 * max(0.001, until - time.monotonic()))
            try:
                processes.client.blocking_key_value_get(key, left)
            except Exception:
                return False
            return True

        processes.run_exit_hooks(status)
        if processes.first:
            processes.client.key_value_set(noted, "yes", allow_overwrite=True)
            all(wait_for(f"{gone}/{number}") for number in range(1, processes.count))
            time.sleep(EXIT_MARGIN_S)
        else:
            wait_for(noted)
            processes.client.key_value_set(f"{gone}/{processes.number}", "yes", allow_overwrite=True)
        os._exit(status)


def _print_error(who: str, error: BaseException) -> None:
    if isinstance(error, UserError | NonFiniteLoss | CannotFetch | CannotWrite):
        print(f"error: {who}: {error}", file=sys.stderr)
    else:
        print(f"{who} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
