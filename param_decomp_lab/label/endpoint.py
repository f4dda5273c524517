"""Talks to a model through an endpoint with OpenAI's wire format. It sends single requests and never retries, because
each request may cost money and counts towards the cap.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

from param_decomp_lab.errors import UserError
from param_decomp_lab.label.money import Message, Prices, most_tokens
from param_decomp_lab.safe_io.json_text import parse_json
from param_decomp_lab.safe_io.printable import printable

ANSWER_BYTES = 1 << 20
"""The largest answer in bytes."""
ERROR_CHARACTERS = 500
SHORTEST_KEY = 8
"""Shorter keys, such as `none`, are not secrets, and texts are not searched for them."""
FREE = (429, 503)
"""Status codes with which the server says that it has done no work, besides other 4xx. Other server errors may come
after the work.
"""
AGAIN = (408, 409, 429)
MOST_TOKENS = 1 << 40


@dataclass(frozen=True)
class Reply:
    """The result of a request.

    ``kind``: ``answer``; ``malformed``, not an answer in the wire format; ``again``, the server is busy, failing or
    cannot be reached; ``refused``, and a retry would be refused, too. ``text``: the answer, or what was wrong.
    ``usage``: tokens of the prompt and of the answer, if the server reports them. ``free``: no work was done, and
    nothing is charged. ``status``: the HTTP status. ``retry_after``: seconds, if the server gives them.
    """

    kind: Literal["answer", "malformed", "again", "refused"]
    text: str
    usage: tuple[int, int] | None = None
    free: bool = False
    status: int | None = None
    retry_after: float | None = None


@dataclass(frozen=True)
class Endpoint:
    """A model's endpoint. ``max_tokens``: the most tokens of an answer. ``timeout``: seconds for a whole answer.
    ``temperature``: None for the server's default.
    """

    address: str
    model: str
    prices: Prices
    max_tokens: int
    timeout: float = 120.0
    temperature: float | None = None
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.address)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.username or parts.password or parts.query or parts.fragment:
            raise UserError(
                "--base-url should be an address such as https://api.openai.com/v1 or http://localhost:8000/v1, "
                "without a name, a password or a query: keys come from the environment"
            )
        if not self.model or len(self.model) > 300 or printable(self.model) != self.model:
            raise UserError("--model should be the name of a model, as its server knows it")
        if not 0 < self.timeout <= 86_400:
            raise UserError(f"--timeout should be seconds, at most a day, not {self.timeout:g}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise UserError(f"--temperature should be from 0 to 2, not {self.temperature:g}")
        for option, price in (("--price-in", self.prices.input), ("--price-out", self.prices.output)):
            if not 0 <= price < 1e6:
                raise UserError(f"{option} should be dollars per million tokens, from 0 up, not {price}")

    def largest_cost(self, messages: Sequence[Message]) -> int:
        """Returns the largest cost of a request, in billionths of a dollar."""
        return self.prices.cost(most_tokens(messages), self.max_tokens)

    def cost(self, reply: Reply, largest: int) -> int:
        """Returns the cost of a request that could have cost ``largest``, which it is if the server does not report
        usage.
        """
        if reply.free:
            return 0
        return largest if reply.usage is None else self.prices.cost(*reply.usage)

    def without_key(self, text: str) -> str:
        """Removes the key from the server's text, which may repeat what was sent."""
        return text.replace(self.key, "[key]") if len(self.key) >= SHORTEST_KEY else text

    def client(self) -> Any:
        """Returns the client, which the caller must close. Raises UserError if it is not installed."""
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as error:
            raise UserError("asking a model needs the package `openai`: pip install 'param-decomp[label]'") from error
        # A redirected request would be sent twice, and paid for twice.
        http = DefaultAsyncHttpxClient(follow_redirects=False, timeout=self.timeout)
        return AsyncOpenAI(api_key=self.key, base_url=self.address, max_retries=0, http_client=http)

    async def send(self, client: Any, messages: Sequence[Message]) -> Reply:
        """Sends one request and returns its result."""
        import openai

        extra = {} if self.temperature is None else {"temperature": self.temperature}
        # OpenAI's newer models refuse the older name, which is the one that other servers know.
        limit = "max_completion_tokens" if urlsplit(self.address).hostname == "api.openai.com" else "max_tokens"
        try:
            async with (
                asyncio.timeout(self.timeout),  # for the whole answer: the client's own is between packets
                client.chat.completions.with_streaming_response.create(
                    model=self.model, messages=list(messages), **{limit: self.max_tokens}, **extra
                ) as response,
            ):
                body = bytearray()
                async for part in response.iter_bytes():
                    body += part
                    if len(body) > ANSWER_BYTES:
                        return Reply("malformed", f"an answer of more than {ANSWER_BYTES:,} bytes")
        except openai.APIStatusError as error:
            return self._refused(error.status_code, str(error), error.response.headers)
        except (openai.APITimeoutError, TimeoutError):
            return Reply("again", f"no answer within {self.timeout:g} s")
        except openai.APIConnectionError as error:
            return Reply("again", self._shown(f"no connection: {error.__cause__ or error}"))
        except Exception as error:
            # Raised, by whichever library reads it, for a body that breaks off. An error of ours would show at once.
            if type(error).__module__.partition(".")[0] not in ("httpx2", "httpx", "httpcore2", "httpcore", "ssl"):
                raise
            return Reply("again", self._shown(f"the connection broke: {type(error).__name__} {error}"))
        return self._read(body.decode(errors="replace"))

    def _refused(self, status: int, message: str, headers: Any) -> Reply:
        free = status < 500 or status in FREE
        kind: Literal["again", "refused"] = "again" if status in AGAIN or status >= 500 else "refused"
        wait = _seconds(headers.get("retry-after", ""))
        return Reply(kind, self._shown(message), free=free, status=status, retry_after=wait)

    def _read(self, body: str) -> Reply:
        try:
            answer = parse_json(body, "the answer", dict)
        except UserError as error:
            return Reply("malformed", self._shown(str(error)))
        usage = _usage(answer.get("usage"))
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str) or not text.strip():
            return Reply("malformed", "an answer without content", usage)
        return Reply("answer", self.without_key(text), usage)

    def _shown(self, message: str) -> str:
        return printable(self.without_key(message), ERROR_CHARACTERS)


def read_key(name: str) -> str:
    """Returns the key in the environment variable ``name``. Raises UserError, without showing the value, if it is
    missing or cannot be a key.
    """
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {name} holds no key; set it, or name another with --key-env (a server that "
            f"needs no key: {name}=none)"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"the environment variable {name} holds no key: it has spaces or other characters in it")
    return key


def _usage(given: Any) -> tuple[int, int] | None:
    match given:
        case {"prompt_tokens": int(prompt), "completion_tokens": int(completion)} if (
            0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS
        ):
            return prompt, completion
    return None


def _seconds(header: str) -> float | None:
    """Returns the seconds of a Retry-After header: a number, or a date."""
    with suppress(ValueError):
        seconds = float(header)
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    with suppress(ValueError, TypeError):
        then = parsedate_to_datetime(header)
        return max(0.0, (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - time.time())
    return None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
