"""Puts questions to a model: several at a time, each until it has an answer, never beyond the cap."""

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
"""Requests for one question while the server is busy or in trouble."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Before a question is asked again; twice as long each time, and random, so that not all come back at once."""
LONGEST_RETRY_AFTER_S = 600.0
POLL_S = 0.05
HOPELESS = (401, 403, 404)
"""Refusals that are not about the question."""

Ended = Literal["done", "stopped", "cap"]
Take = Callable[[Question, Any], None]
"""Called with each question and its parsed answer; None for one that failed."""


@dataclass
class Counts:
    """``asked``: questions that got an answer now. ``known``: those that had one. ``failed``: those without a usable
    one. ``requests``: sent now."""

    asked: int = 0
    known: int = 0
    failed: int = 0
    requests: int = 0


class Asker:
    """``stop``: whether to end in order: nothing more is sent, and what is in flight is waited for. ``retry_failed``:
    whether questions that failed before are asked again."""

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
        """Raises CannotFetch where the server does not answer, UserError where it refuses, and what ``take`` raises;
        all answers that came are kept then."""
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
        """Sends one request and writes down what came of it. No reply: nothing was sent."""
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
                return "failed", None  # something about this question
            self._failure = UserError(
                f"{self._endpoint.address} refuses requests to {self._endpoint.model}: {reply.text}"
            )
        elif (reply.retry_after or 0) > LONGEST_RETRY_AFTER_S:
            self._failure = CannotFetch(
                f"{self._endpoint.address} says to come back in {duration(reply.retry_after or 0)} ({reply.text}); "
                "the same command goes on from here"
            )
        elif tries >= TRIES:
            if others_succeed:
                return "failed", None
            self._failure = CannotFetch(
                f"{self._endpoint.address} has not answered in {TRIES} tries: {reply.text}; the same command goes on "
                "from here"
            )
        return "again", None

    async def _reserve(self, question: Question, key: str) -> int | None:
        """The number of a request that may be sent; None if none may be."""
        while not self._ending():
            if (
                number := None if self._is_paused() else self._ledger.reserve(question, key, self._endpoint)
            ) is not None:
                return number
            if not self._is_paused() and self.in_flight == 0:
                self._full = True
            else:  # what is in flight may turn out to cost less
                await asyncio.sleep(POLL_S)
        return None

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    async def _wait(self, reply: Reply, tries: int) -> bool:
        """Before the next try; whether there should be one. A server that says when to come back is left alone by all
        questions."""
        if reply.retry_after is not None:
            wait = reply.retry_after
            self._paused_until = max(self._paused_until, time.monotonic() + wait)
        else:
            wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tries - 1)) * random.uniform(0.5, 1)
        until = time.monotonic() + wait
        while (left := until - time.monotonic()) > 0 and not self._ending():
            await asyncio.sleep(min(left, POLL_S))
        return not self._ending()
