"""Several processes as one run: what they agree on, and that none is left waiting for one that has failed.

Everything said here goes through the key-value store that JAX's coordination service keeps in process 0, never through
the devices: it costs no device time, and it is heard while the devices, or a process's main thread, wait for another.
"""

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from param_decomp_lab.errors import CannotWrite, NonFiniteLoss, UserError

T = TypeVar("T")

FOREVER_MS = 10**9
"""Eleven days: others may take long to compile. A process that dies is noticed by JAX's heartbeats instead."""
GRACE_S = 5.0
"""For a process to end by itself after another one failed (closing its files), before it is ended."""
LAST_WORDS_S = 2.0
"""From a process's saying that it goes to its having gone, on a machine that is busy."""


class Refused(UserError):
    """A user's mistake that every process knows of: each leaves by itself, with status 2."""


class RefusedElsewhere(SystemExit):
    """The same in a process that leaves the message to process 0."""


class Processes:
    """The processes of a run, seen from one of them: ``number`` of ``count``.

    Every process must make the same calls in the same order. ``client``: JAX's, of the coordination service; None for a
    process alone, for which every method is trivial.
    """

    def __init__(self, number: int = 0, count: int = 1, client: Any = None) -> None:
        assert 0 <= number < count
        assert (count == 1) == (client is None)
        self.number, self.count, self.client = number, count, client
        self._turns = itertools.count()
        self._failures: _Failures | None = None
        self.last_acts: list[Callable[[int], None]] = []
        """What is still done where this process is ended by force, given its status; quick, from any thread."""

    @property
    def first(self) -> bool:
        """Whether this is process 0, which does everything that is to be done once: files, wandb, the terminal."""
        return self.number == 0

    def end(self, status: int, why: str) -> NoReturn:
        """Ends all processes of the run at once, from any thread; what the main threads do is not finished.

        ``why``: what is to be told. Of several processes this needs `failing_together` around them.
        """
        if self.count > 1:
            assert self._failures is not None
            self._failures.end(status, why)
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # a progress bar hides it
        print(f"{show_cursor}{why}", flush=True)
        self.act_last(status)
        os._exit(status)

    def act_last(self, status: int) -> None:
        """Before this process is ended by force."""
        for act in self.last_acts:
            act(status)

    def turn(self) -> str:
        """A name that is new, and the same in every process."""
        return f"param_decomp/{next(self._turns)}"

    def gather(self, value: str, name: str | None = None) -> list[str]:
        """The value of every process, by number. ``name``: for those who are not in step with the main thread."""
        if self.count == 1:
            return [value]
        name = name or self.turn()
        self.client.key_value_set(f"{name}/{self.number}", value)
        self.client.wait_at_barrier(name, FOREVER_MS)
        found = {int(key.rpartition("/")[2]): said for key, said in self.client.key_value_dir_get(f"{name}/")}
        return [found[number] for number in range(self.count)]

    def from_first(self, value: str) -> str:
        """The value that process 0 gave."""
        return self.gather(value)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that every process runs. A `UserError` in one of them stops all: process 0 raises it, as `Refused`,
        the others leave in silence with the same status."""
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
        said = self.gather("" if refusal is None else str(refusal) or "refused")
        who = next((number for number, reason in enumerate(said) if reason), None)
        if who is None:
            return
        if not self.first:
            raise RefusedElsewhere(2)
        raise Refused(said[0] if who == 0 else f"process {who} of {self.count}: {said[who]}") from refusal

    def in_turn(self, action: Callable[[], T]) -> T:
        """What ``action`` gives: done by process 0 first, then by the others, who find done what need be done once."""
        if not self.first:
            with self.together():
                pass
            return action()
        with self.together():
            return action()


ALONE = Processes()


class News:
    """Something that any process may say, at any time, and that all of them hear on a thread.

    ``heard`` is called once in every process with the first thing said; from `close` on, nothing is heard.
    """

    def __init__(self, processes: Processes, name: str, heard: Callable[[str], None]) -> None:
        assert processes.count > 1
        self._processes, self._name, self._heard = processes, name, heard
        self._thread = threading.Thread(target=self._listen, name=f"listens for {name}", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """``text``: not empty."""
        for number in range(self._processes.count):
            self._processes.client.key_value_set(f"{self._name}/{number}", text, allow_overwrite=True)

    def close(self) -> None:
        # What a process says to itself alone: that there is nothing more to hear.
        own = f"{self._name}/{self._processes.number}"
        self._processes.client.key_value_set(own, "", allow_overwrite=True)
        self._thread.join(GRACE_S)

    def _listen(self) -> None:
        try:
            said = self._processes.client.blocking_key_value_get(f"{self._name}/{self._processes.number}", FOREVER_MS)
            if said:
                self._heard(said)
        except RuntimeError:
            pass  # another process has died: JAX ends this one


@contextmanager
def failing_together(processes: Processes) -> Iterator[None]:
    """A run's whole work. If it fails in one process, that one says why and all end, with its status.

    Without this the others would wait for it in a collective, and it for them on its way out: JAX gives up after five
    minutes. They are ended by force, since Python cannot interrupt a thread that waits for a device.
    """
    if processes.count == 1:
        yield
        return
    processes._failures = failures = _Failures(processes)
    try:
        yield
    except (Refused, RefusedElsewhere):
        failures.none()
        raise
    except BaseException as error:
        failures.leave(error)
    failures.none()


class _Failures:
    def __init__(self, processes: Processes) -> None:
        self._processes, self._name, self._end = processes, processes.turn(), processes.turn()
        self._own = False
        self._news = News(processes, self._name, self._heard)

    def none(self) -> None:
        """Returns when all processes are done; a failure in the last one is still heard by all."""
        self._processes.gather("", self._end)
        self._news.close()

    def leave(self, error: BaseException) -> NoReturn:
        who = f"process {self._processes.number} of {self._processes.count}"
        status = 2 if isinstance(error, UserError) else 1
        self._say(status, f"{who} failed")
        _tell(who, error)
        self._end_all(status, f"{who} failed")

    def end(self, status: int, why: str) -> NoReturn:
        who = f"process {self._processes.number} of {self._processes.count}"
        self._say(status, f"{who} {why}")
        print(f"{who} {why}", file=sys.stderr)
        self._end_all(status, f"{who} {why}")

    def _say(self, status: int, what: str) -> None:
        """That this process is the first to go; if it is not, it follows the one that was."""
        self._own = True
        key = f"{self._name} first"
        try:
            self._processes.client.key_value_set(key, f"{status} {what}")
        except Exception:
            # Another one failed before and says why; what happened here may be no more than its echo.
            self._follow(self._processes.client.key_value_try_get(key))

    def _end_all(self, status: int, what: str) -> NoReturn:
        self._news.say(f"{status} {what}")
        self._end_with(status)

    def _heard(self, said: str) -> None:
        time.sleep(GRACE_S)
        if not self._own:
            self._follow(said)

    def _follow(self, said: str) -> NoReturn:
        status, _, what = said.partition(" ")
        print(f"process {self._processes.number}: ended, because {what}", file=sys.stderr)
        self._end_with(int(status))

    def _end_with(self, status: int) -> NoReturn:
        """Ends this process at once. Process 0 does its last acts before any is gone, for who started them may kill all
        as soon as one is (`srun --kill-on-bad-exit`). It goes last: with it goes the service, whose loss aborts who
        uses it."""
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

        processes.act_last(status)
        if processes.first:
            processes.client.key_value_set(noted, "yes", allow_overwrite=True)
            all(wait_for(f"{gone}/{number}") for number in range(1, processes.count))
            time.sleep(LAST_WORDS_S)
        else:
            wait_for(noted)
            processes.client.key_value_set(f"{gone}/{processes.number}", "yes", allow_overwrite=True)
        os._exit(status)


def _tell(who: str, error: BaseException) -> None:
    if isinstance(error, UserError | NonFiniteLoss | CannotWrite):
        print(f"error: {who}: {error}", file=sys.stderr)
    else:
        print(f"{who} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
