"""Waits a limited time for servers that may not answer."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
FIRST_ANSWER_S = 3.0
"""How long the first request to a hub may take. Short, so that a missing network is reported at once."""
ANSWER_S = 30.0
"""How long a request may take for which the hub must first collect its answer."""
LONGER = "HF_HUB_ETAG_TIMEOUT"
"""The environment variable of huggingface_hub that lengthens the wait on slow networks, in seconds."""


def ask_for_file(name: str, file: str, revision: str | None = None) -> None:
    """Asks the hub once about a file of model ``name``. Without a network, a download would retry six times, for half a
    minute.

    Raises what huggingface_hub raises, and TimeoutError if no answer comes; its message says how to wait longer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, file, revision=revision)
    given = os.environ.get(LONGER, "")
    seconds = max(FIRST_ANSWER_S, float(given)) if given.isdecimal() else FIRST_ANSWER_S
    try:
        # The client's own limit is longer, so that ours always expires first.
        answer_within(seconds, lambda: get_hf_file_metadata(url, timeout=2 * seconds))
    except TimeoutError as error:
        raise TimeoutError(f"{error} ({LONGER} sets how long is waited for an answer)") from None


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Returns or raises what ``ask`` does; TimeoutError if it takes longer than ``seconds``.

    ``ask`` runs in its own thread, which is abandoned on a timeout, because no client limits the time of a DNS lookup.
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
