"""For what must never wait for ever."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 30.0
"""Long, so that no busy machine fails; what waits for a pipe waits for ever."""


def in_time(work: Callable[[], T], what: str) -> T:
    """What ``work`` returns or raises, in another thread; AssertionError, which names ``what``, if it takes too long.

    The thread is left behind then, and does not keep the process from its end.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"{what}: still waiting after {LIMIT_S:.0f} s"
    if errors:
        raise errors[0]
    return results[0]
