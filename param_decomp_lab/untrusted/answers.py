"""Answers from servers that may give none."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
FIRST_ANSWER_S = 3.0
"""How long a hub is waited for at first: whoever has no network learns of it in a moment."""
ANSWER_S = 30.0
"""How long it is waited for where it must gather what it answers."""
LONGER = "HF_HUB_ETAG_TIMEOUT"
"""The variable of huggingface_hub by which those whose network is slow have it wait longer, in seconds."""


def first_answer(ask: Callable[[float], T]) -> T:
    """What ``ask`` returns or raises; TimeoutError, which says how to wait longer, if it takes too long. It is called
    with a limit of seconds for its client, above that time: what ends first is always the same."""
    given = os.environ.get(LONGER, "")
    seconds = max(FIRST_ANSWER_S, float(given)) if given.isdecimal() else FIRST_ANSWER_S
    try:
        return answer_within(seconds, lambda: ask(2 * seconds))
    except TimeoutError as error:
        raise TimeoutError(f"{error} ({LONGER} sets how long is waited for an answer)") from None


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """What ``ask`` returns or raises; TimeoutError if it takes longer.

    It runs in a thread of its own, which is left behind then: no client bounds how long a name is looked up.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise error if answer.done() else TimeoutError(f"no answer within {seconds:g} s") from None
