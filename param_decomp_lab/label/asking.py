"""Asks a model questions, several at a time, each until it has an answer, and never beyond the cap."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.label.endpoint import Endpoint, Reply
from param_decomp_lab.label.ledger import Ledger, Question, Status
from param_decomp_lab.ui.numbers import duration

TRIES = 6
"""The number of requests for one question while the server is busy or failing."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Waits before a question is asked again. They double each time, and are random so that not all questions return at
once.
"""
LONGEST_RETRY_AFTER_S = 600.0
POLL_S = 0.05
HOPELESS = (401, 403, 404)
"""Status codes of refusals that do not depend on the question."""

Ended = Literal["done", "stopped", "cap"]
Take = Callable[[Question, Any], None]
"""Called with each question and its parsed answer; None for one that failed."""


@dataclass
class Counts:
    """Numbers of questions and requests. ``asked``: questions that were answered now. ``known``: those already
    answered. ``failed``: those without a usable answer. ``requests``: requests sent now.
    """

    asked: int = 0
    known: int = 0
    failed: int = 0
    requests: int = 0


class Asker:
    """Asks questions. ``stop``: whether to end in order: no more requests are sent, and those in flight are awaited.
    ``retry_failed``: whether to repeat questions that failed before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        ledger: Ledger,
        parallel: int,
        stop: Callable[[], bool] = lambda: False,
        retry_failed: bool = False,
    ) -> None:
        self._endpoint, self._ledger, self._parallel = endpoint, ledger, parallel
        self._stop, self._retry_failed = stop, retry_failed
        self.counts = Counts()
        self.in_flight = 0
        self._failure: Exception | None = None
        self._full = False
        self._paused_until = 0.0
        self._last_answer = 0.0

    def ask(self, questions: Iterable[Question], take: Take) -> Ended:
        """Asks all questions. Raises CannotFetch if the server does not answer, UserError if it refuses, and whatever
        ``take`` raises; answers received by then are kept.
        """
        return asyncio.run(self._ask_all(iter(questions), take))

    async def _ask_all(self, questions: Any, take: Take) -> Ended:
        client = self._endpoint.client()
        remaining = itertools.chain(questions)

        async def work() -> None:
            while not self._ending():
                question = next(remaining, None)
                if question is None:
                    return
                await self._answer(client, question, take)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._parallel):
                    group.create_task(work())
        except* Exception as several:
            raise several.exceptions[0] from None
        finally:
            await client.close()
        if self._failure is not None:
            raise self._failure
        return "stopped" if self._stop() else "cap" if self._full else "done"

    def _ending(self) -> bool:
        return self._full or self._failure is not None or self._stop()

    async def _answer(self, client: Any, question: Question, take: Take) -> None:
        key = question.key(self._endpoint.model)
        before = self._ledger.asked(key)
        if before.answer is not None:
            self.counts.known += 1
            take(question, question.parse(before.answer))
            await asyncio.sleep(0)
            return
        malformed = 0 if self._retry_failed else before.malformed
        if before.failed and not self._retry_failed:
            self.counts.failed += 1
            take(question, None)
            await asyncio.sleep(0)
            return
        began = time.monotonic()
        for tries in itertools.count(1):
            reply, answer, status = await self._request(client, question, key, tries, malformed, began)
            if reply is None:
                return
            match status:
                case "answered":
                    self._last_answer = time.monotonic()
                    self.counts.asked += 1
                    take(question, answer)
                    return
                case "failed":
                    self.counts.failed += 1
                    take(question, None)
                    return
                case "malformed":
                    malformed += 1
                case _:
                    if self._failure is not None or not await self._wait(reply, tries):
                        return

    async def _request(
        self, client: Any, question: Question, key: str, tries: int, malformed: int, began: float
    ) -> tuple[Reply | None, Any, Status]:
        """Sends one request and records its result. The reply is None if nothing was sent."""
        number = await self._reserve(question, key)
        if number is None:
            return None, None, "again"
        sent = time.monotonic()
        self.in_flight += 1
        self.counts.requests += 1
        try:
            reply = await self._endpoint.send(client, question.messages)
        finally:
            self.in_flight -= 1
        status, answer = self._judge(question, reply, tries, malformed, began)
        largest = self._endpoint.largest_cost(question.messages)
        self._ledger.settle(number, status, reply, self._endpoint, largest, time.monotonic() - sent)
        return reply, answer, status

    def _judge(self, question: Question, reply: Reply, tries: int, malformed: int, began: float) -> tuple[Status, Any]:
        if reply.kind == "answer":
            try:
                return "answered", question.parse(reply.text)
            except ValueError:
                return "failed" if malformed else "malformed", None
        if reply.kind == "malformed":
            return "failed" if malformed else "malformed", None
        others_succeed = self._last_answer > began
        if reply.kind == "refused":
            if others_succeed and reply.status not in HOPELESS:
                return "failed", None  # caused by this question
            self._failure = UserError(
                f"{self._endpoint.address} refuses requests to {self._endpoint.model}: {reply.text}"
            )
        elif (reply.retry_after or 0) > LONGEST_RETRY_AFTER_S:
            self._failure = CannotFetch(
                f"{self._endpoint.address} asks to wait {duration(reply.retry_after or 0)} ({reply.text}); then run "
                "the same command again to continue"
            )
        elif tries >= TRIES:
            if others_succeed:
                return "failed", None
            self._failure = CannotFetch(
                f"{self._endpoint.address} has not answered in {TRIES} tries: {reply.text}; run the same command "
                "again to continue"
            )
        return "again", None

    async def _reserve(self, question: Question, key: str) -> int | None:
        """Reserves a request and returns its number; None if no request may be sent."""
        while not self._ending():
            if (
                number := None if self._is_paused() else self._ledger.reserve(question, key, self._endpoint)
            ) is not None:
                return number
            if not self._is_paused() and self.in_flight == 0:
                self._full = True
            else:  # requests in flight may cost less than reserved
                await asyncio.sleep(POLL_S)
        return None

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    async def _wait(self, reply: Reply, tries: int) -> bool:
        """Waits before the next try; returns whether there should be one. If a server says when to return, all
        questions wait until then.
        """
        if reply.retry_after is not None:
            wait = reply.retry_after
            self._paused_until = max(self._paused_until, time.monotonic() + wait)
        else:
            wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tries - 1)) * random.uniform(0.5, 1)
        until = time.monotonic() + wait
        while (left := until - time.monotonic()) > 0 and not self._ending():
            await asyncio.sleep(min(left, POLL_S))
        return not self._ending()
