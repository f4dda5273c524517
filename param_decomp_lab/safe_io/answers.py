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


def ask_for_file(name: str, file: str, revision: str | None = None) -> None:
    """Asks the hub once about a file of model ``name``. A download retries six times, for half a minute, where there is
    no network.

    Raises what huggingface_hub raises, and TimeoutError, which says how to wait longer, where no answer comes.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, file, revision=revision)
    given = os.environ.get(LONGER, "")
    seconds = max(FIRST_ANSWER_S, float(given)) if given.isdecimal() else FIRST_ANSWER_S
    try:
        # The client's own limit is above ours, so that the same one always ends first.
        answer_within(seconds, lambda: get_hf_file_metadata(url, timeout=2 * seconds))
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
