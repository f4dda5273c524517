"""A server of OpenAI's wire format on loopback, for the real client: strict about requests, in trouble as asked.

    with openai_server(answer) as server:
        pd_here("label", run, "--base-url", server.address, …)

``answer`` gets the messages of a request and gives the text of the answer. `Server.troubles` are what happens to the
next requests instead, in order.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-a-key-that-nobody-may-see"
MODEL = "judge-1"
Messages = list[dict[str, str]]
ALLOWED = {"model", "messages", "max_tokens", "temperature"}


@dataclass(frozen=True)
class Trouble:
    """``status``: of an error. ``body``: sent as it is, instead of an answer. ``wait``: seconds before the answer.
    ``breaks``: the connection breaks off in the middle of the answer. ``drips``: seconds for which the answer comes
    little by little, without an end."""

    status: int = 200
    retry_after: str = ""
    body: str | None = None
    wait: float = 0.0
    breaks: bool = False
    drips: float = 0.0


@dataclass(frozen=True)
class Seen:
    """A request. ``cost``: in tokens of the prompt and of the answer, as was said to the client."""

    messages: Messages
    time: float
    status: int
    usage: tuple[int, int]


class Server(ThreadingHTTPServer):
    """``seen``: requests, in the order in which they were answered. ``wrong``: what was wrong with any. ``delay``:
    seconds before each answer. ``together``: as many requests have to be there at a time before the first is answered,
    or half a minute goes by. ``busiest``: most requests at a time. ``arrived``: how many came, answered or not."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Messages], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.troubles: list[Trouble] = []
        self.seen: list[Seen] = []
        self.wrong: list[str] = []
        self.delay = 0.0
        self.together = 1
        self.arrived = self.busy = self.busiest = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections of clients that were killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        """Of requests that were answered."""
        return [json.dumps(seen.messages) for seen in self.seen if seen.status == 200]

    def tokens(self) -> tuple[int, int]:
        """All that somebody would pay for."""
        return sum(seen.usage[0] for seen in self.seen), sum(seen.usage[1] for seen in self.seen)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed
            self.close_connection = True
            return
        with server.lock:
            server.arrived += 1
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
            trouble = server.troubles.pop(0) if server.troubles else Trouble()
        try:
            self._answer(trouble, body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with server.lock:
                server.busy -= 1

    def _answer(self, trouble: Trouble, body: bytes) -> None:
        server = self.server
        wrong = self._what_is_wrong(body)
        if wrong:
            server.wrong.append(wrong)
            self._send(400, {"error": {"message": wrong, "type": "invalid_request_error"}})
            return
        request = json.loads(body)
        time.sleep(server.delay + trouble.wait)
        deadline = time.monotonic() + 30
        while server.busiest < server.together and time.monotonic() < deadline:
            time.sleep(0.01)
        if trouble.status != 200:
            message = f"in trouble; you sent {self.headers['Authorization']}"  # as some servers do
            error = {"error": {"message": message, "type": "server_error"}}
            self._note(request["messages"], trouble.status, (0, 0))
            self._send(trouble.status, error, {"Retry-After": trouble.retry_after} if trouble.retry_after else {})
            return
        prompt = sum(len(message["content"].encode()) for message in request["messages"]) // 3
        text = server.answer(request["messages"])
        usage = prompt, min(request["max_tokens"], 10)
        answer = {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": request["model"],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)},
        }  # fmt: skip
        self._note(request["messages"], 200, usage)
        if trouble.breaks or trouble.drips:
            self._break(json.dumps(answer).encode(), trouble.drips)
        else:
            self._send(200, answer if trouble.body is None else trouble.body)

    def _what_is_wrong(self, body: bytes) -> str:
        if self.path != "/v1/chat/completions":
            return f"no such path: {self.path}"
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return "no such key"
        try:
            request = json.loads(body)
        except ValueError:
            return "no JSON"
        if not isinstance(request, dict) or set(request) - ALLOWED or not {"model", "messages"} <= set(request):
            return f"keys: {sorted(request)}"
        if request["model"] != MODEL or type(request.get("max_tokens")) is not int or request["max_tokens"] < 1:
            return "model or max_tokens"
        for message in request["messages"] or [None]:
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                return "messages"
            if message["role"] not in ("system", "user") or not isinstance(message["content"], str):
                return "a message"
        return ""

    def _note(self, messages: Messages, status: int, usage: tuple[int, int]) -> None:
        with self.server.lock:
            self.server.seen.append(Seen(messages, time.monotonic(), status, usage))

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _break(self, data: bytes, drips: float) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        until = time.monotonic() + drips
        while time.monotonic() < until:
            self.wfile.write(b" ")
            time.sleep(0.05)
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None: ...


@contextmanager
def openai_server(answer: Callable[[Messages], str]) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
