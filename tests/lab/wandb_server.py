"""As much of wandb's server as its client needs: runs with their rows and files, in memory, to be sent and fetched."""

import base64
import gzip
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

ENTITY = "somebody"
Reply = dict[str, Any]


@dataclass
class Run:
    """What the server knows of a run. ``starts``: how often a client has announced itself for it."""

    config: Reply
    group: str | None
    tags: list[str]
    lines: dict[int, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    starts: int = 0
    preempting: bool = False
    exit_code: int | None = None

    @property
    def rows(self) -> list[Reply]:
        """Of its history, as they were last written."""
        return [json.loads(self.lines[number]) for number in sorted(self.lines)]


class Server(ThreadingHTTPServer):
    """``refuse``: an HTTP status and a message that everything is answered with; None: it works. ``fetched``: the files
    that were asked for, in order. ``sizes``: of files, where others are to be claimed. ``keys``: API keys that have an
    account; None: every one."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs: dict[str, Run] = {}
        self.refuse: tuple[int, str] | None = None
        self.fetched: list[str] = []
        self.sizes: dict[str, int] = {}
        self.keys: set[str] | None = None
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """A finished run that has these files."""
        self.runs[name] = Run({}, None, [], files=files)

    def knows(self, authorization: str) -> bool:
        """Whether a request comes from somebody with an account. ``authorization``: its header."""
        key = base64.b64decode(authorization.removeprefix("Basic ")).decode().removeprefix("api:")
        return self.keys is None or key in self.keys

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to use this server."""
        return environment(self.port)

    def reply(self, path: str, request: Reply) -> Reply:
        with self.lock:
            if path == "/graphql":
                return {"data": self._graphql(request["query"], request.get("variables") or {})}
            stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
            assert stream is not None, path
            self._stream(self.runs[stream[1]], request)
            return {"exitcode": None, "limits": {}}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that has gone
            super().handle_error(request, client_address)

    def put(self, path: str, content: bytes) -> None:
        _, _, name, file = path.split("/", 3)
        with self.lock:
            self.runs[name].files[unquote(file)] = content

    def _graphql(self, query: str, given: Reply) -> Reply:
        name = given.get("name") or given.get("run")
        if "upsertBucket" in query:
            run = self.runs.get(name)
            if run is None:
                run = self.runs[name] = Run(
                    json.loads(given["config"]), given.get("groupName"), given.get("tags") or []
                )
            return {"upsertBucket": {"bucket": self._bucket(name, run), "inserted": run.starts == 0}}
        if "RunResumeStatus" in query:
            run = self.runs.get(name)
            if run is not None:
                run.starts += 1
            return {"model": {"id": "1", "name": "p", "entity": {"id": "1", "name": ENTITY},
                              "bucket": None if run is None else self._bucket(name, run)}}  # fmt: skip
        if "query Run(" in query or "query RunFiles(" in query:
            run = self.runs.get(name)
            return {"project": {"internalId": "1", "run": None if run is None else self._fetched(name, run)}}
        if "createRunFiles" in query:
            files = [
                {"name": file, "uploadUrl": f"http://127.0.0.1:{self.port}/upload/{name}/{file}"}
                for file in given["files"]
            ]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}},
                "serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "9.9.9"}}}  # fmt: skip

    def _fetched(self, name: str, run: Run) -> Reply:
        """What the client for fetching asks of a run."""
        date = "2026-01-01T00:00:00"
        nodes = [
            {"id": file, "name": file, "url": f"http://127.0.0.1:{self.port}/download/{name}/{file}", "directUrl": "",
             "sizeBytes": str(self.sizes.get(file, len(content))), "mimetype": "", "updatedAt": date, "md5": ""}
            for file, content in run.files.items()
        ]  # fmt: skip
        edges = [{"cursor": str(n), "node": node} for n, node in enumerate(nodes)]
        return {"id": name, "name": name, "displayName": name, "projectId": "1", "state": "finished", "tags": run.tags,
                "config": json.dumps(run.config), "summaryMetrics": "{}", "systemMetrics": "{}", "historyLineCount": 0,
                "user": {"name": ENTITY, "username": ENTITY}, "createdAt": date, "heartbeatAt": date,
                "fileCount": len(nodes), "files": {"edges": edges, "pageInfo": {"hasNextPage": False}}}  # fmt: skip

    def _bucket(self, name: str, run: Run) -> Reply:
        tail = [run.lines[max(run.lines)]] if run.lines else []
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": ENTITY}}
        # Without "t" in `wandbConfig` a client takes the run for one that has never been started.
        return {"id": name, "name": name, "displayName": name, "description": "", "notes": None, "sweepName": None,
                "logLineCount": 0, "historyLineCount": len(run.lines), "eventsLineCount": 0, "eventsTail": "[]",
                "historyTail": json.dumps(tail), "summaryMetrics": "{}", "config": json.dumps(run.config),
                "tags": run.tags, "wandbConfig": '{"t": 1}', "project": project}  # fmt: skip

    def _stream(self, run: Run, request: Reply) -> None:
        history = request.get("files", {}).get("wandb-history.jsonl")
        if history is not None:
            for number, line in enumerate(history["content"], start=history["offset"]):
                run.lines[number] = line
        run.preempting = run.preempting or bool(request.get("preempting"))
        if request.get("complete"):
            run.exit_code = request.get("exitcode")


def environment(port: int) -> dict[str, str]:
    """Of a process that takes what is at this port for wandb's server."""
    return {
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_MODE": "online",
        "WANDB_ERROR_REPORTING": "false",
    }


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        if self.server.refuse is not None:
            status, message = self.server.refuse
            self._send(status, {"errors": [{"message": message}]})
            return
        if not self.server.knows(self.headers.get("Authorization", "")):
            self._send(401, {"errors": [{"message": "user is not logged in"}]})
            return
        self._send(200, self.server.reply(self.path, json.loads(body)))

    def do_GET(self) -> None:
        _, _, name, file = self.path.split("/", 3)
        self.server.fetched.append(unquote(file))
        self._send_bytes(200, self.server.runs[name].files[unquote(file)])

    def do_PUT(self) -> None:
        self.server.put(self.path, self._body())
        self._send(200, {})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, status: int, reply: Reply) -> None:
        self._send_bytes(status, json.dumps(reply).encode())

    def _send_bytes(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def wandb_server(port: int = 0) -> Iterator[Server]:
    """A server that listens within the block."""
    with Server(port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
