"""As much of the Hugging Face hub as its clients need: models and data sets with revisions, in memory, on loopback.

The real clients work against it, `huggingface_hub` and `datasets`. It can ask for a token, lack what it is asked for,
break off in the middle of a file, and remembers what it was asked, tokens included.

    with hub_server() as hub:
        first = hub.commit("somebody/tiny", {"config.json": b"{}", "model.safetensors": weights})
        hub.commit("somebody/texts", {"train.jsonl": lines}, kind="dataset")
        hub.tag("somebody/tiny", "v1", first)
        subprocess.run(command, env=os.environ | hub.environment(tmp_path))   # or hub.use(monkeypatch, tmp_path)

`point_clients` does the same for an address where nothing listens: no network.
"""

import hashlib
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal["model", "dataset"]
Files = Mapping[str, bytes]
LARGE = (".safetensors", ".bin", ".parquet", ".gguf")
"""Files that the hub keeps in its large storage: a request is sent on to another host, without the token."""


@dataclass
class Repository:
    """``commits``: files by commit, whose newest is last. ``refs``: commits by branch or tag. ``tokens``: those that
    may read its files; None: everybody. ``hidden``: without a token it is not even known to be there."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tokens: frozenset[str] | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Request:
    """``token``: that of the Authorization header. ``range``: the Range header. ``host``: as the client named it."""

    method: str
    path: str
    token: str | None
    range: str | None
    host: str
    status: int


@dataclass(frozen=True)
class Failure(Exception):
    """An answer that is an error, with the headers by which clients tell one from another."""

    status: HTTPStatus
    code: str
    message: str


class Hub(ThreadingHTTPServer):
    """``breaks``: by the name of a file, how many bytes of it are sent in each of the next answers before the
    connection breaks off; when they are used up, it is sent whole. ``stall``: it does not break off, but stays open
    without a word, and ``stalled`` is set. ``chunked``: large files are said to be had by chunks (Xet) too, which
    nobody here has. ``known``: tokens that the hub has issued."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.repositories: dict[tuple[Kind, str], Repository] = {}
        self.known: set[str] = set()
        self.breaks: dict[str, list[int]] = {}
        self.chunked = False
        self.stall = False
        self.stalled = threading.Event()
        self.requests: list[Request] = []
        self.lock = threading.Lock()

    # What a test arranges.

    def commit(self, name: str, files: Files, kind: Kind = "model", branch: str = "main") -> str:
        """Adds files to a branch, whose earlier ones stay, and returns the commit; makes what is not there yet."""
        repository = self.repositories.setdefault((kind, name), Repository())
        before = repository.commits.get(repository.refs.get(branch, ""), {})
        now = {**before, **files}
        text = json.dumps([name, branch, len(repository.commits), sorted(now)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        repository.commits[sha], repository.refs[branch] = now, sha
        return sha

    def tag(self, name: str, tag: str, commit: str, kind: Kind = "model") -> None:
        """Gives a commit a name."""
        self.repositories[kind, name].refs[tag] = commit

    def gate(self, name: str, *tokens: str, kind: Kind = "model", hidden: bool = False) -> None:
        """Files are only for the owners of these tokens. ``hidden``: a private repository."""
        repository = self.repositories[kind, name]
        repository.tokens, repository.hidden = frozenset(tokens), hidden
        self.known |= repository.tokens

    # How clients are sent here.

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that is to use this hub, with an empty cache and no token."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", **isolated(home)}

    def use(self, monkeypatch: Any, home: Path) -> None:
        """Sends this process's clients here, with a cache below ``home``. Both read their environment when they are
        imported, so that changing it is not enough."""
        point_clients(monkeypatch, self.url, home)

    # What a test looks at.

    def asked(self, method: str, ending: str) -> list[Request]:
        """The requests so far of this method and this ending of the path."""
        return [request for request in self.requests if request.method == method and request.path.endswith(ending)]

    @property
    def tokens(self) -> set[str | None]:
        """All tokens that clients have sent, None where there was none."""
        return {request.token for request in self.requests}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that has gone
            super().handle_error(request, client_address)

    # Answers.

    def repository(self, kind: Kind, name: str, token: str | None) -> Repository:
        """Raises Failure for one that is not there, or not for the owner of the token."""
        if token is not None and token not in self.known:
            raise Failure(HTTPStatus.UNAUTHORIZED, "", "Invalid credentials in Authorization header")
        found = self.repositories.get((kind, name))
        hidden = found is not None and found.hidden and token not in (found.tokens or ())
        if found is None or hidden:
            # As the real one does: a stranger cannot tell a private repository from a missing one.
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.NOT_FOUND
            raise Failure(status, "RepoNotFound", "Repository not found")
        return found

    def files(self, repository: Repository, revision: str) -> tuple[str, Files]:
        """The commit that a branch, a tag or a commit means, and its files."""
        commit = repository.refs.get(revision.removeprefix("refs/heads/"), revision)
        if commit not in repository.commits:
            raise Failure(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._body = self.rfile.read(length)
        kind, found, token = self.headers.get("Authorization", "").partition(" ")
        self._token = token if found and kind == "Bearer" else None
        try:
            self._route(urlsplit(self.path).path)
        except Failure as failure:
            headers = {"X-Error-Message": failure.message} | ({"X-Error-Code": failure.code} if failure.code else {})
            self._send(failure.status, json.dumps({"error": failure.message}).encode(), headers)

    def _route(self, path: str) -> None:
        patterns = {
            r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/([^/]+))?": self._info,
            r"/api/(model|dataset)s/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?": self._tree,
            r"/api/(model|dataset)s/([^/]+/[^/]+)/paths-info/([^/]+)": self._paths_info,
            r"/api/(model|dataset)s/([^/]+/[^/]+)/refs": self._refs,
            r"/(?:(dataset)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self._resolve,
            r"/large-storage/(.+)": self._large,
        }
        for pattern, answer in patterns.items():
            found = re.fullmatch(pattern, path)
            if found is not None:
                answer(*(part if part is None else unquote(part) for part in found.groups()))
                return
        raise Failure(HTTPStatus.NOT_FOUND, "", f"no such page: {path}")

    def _info(self, kind: Kind, name: str, revision: str | None) -> None:
        repository = self.server.repository(kind, name, self._token)
        commit, files = self.server.files(repository, revision or "main")
        gated = "manual" if repository.tokens is not None and not repository.hidden else False
        date = "2026-01-01T00:00:00.000Z"
        self._send_json({
            "_id": "0", "id": name, "author": name.partition("/")[0], "sha": commit, "private": repository.hidden,
            "gated": gated, "disabled": False, "downloads": 0, "likes": 0, "tags": [], "lastModified": date,
            "createdAt": date, "siblings": [{"rfilename": path, "size": len(files[path])} for path in sorted(files)],
        })  # fmt: skip

    def _tree(self, kind: Kind, name: str, revision: str, folder: str | None) -> None:
        _, files = self.server.files(self.server.repository(kind, name, self._token), revision)
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in sorted(files) if path.startswith(prefix)]
        if folder and not inside:
            raise Failure(HTTPStatus.NOT_FOUND, "EntryNotFound", f"{folder} does not exist")
        query = parse_qs(urlsplit(self.path).query)
        if query.get("recursive", ["false"])[0].lower() in ("false", "0"):
            inside = list(dict.fromkeys(prefix + path.removeprefix(prefix).partition("/")[0] for path in inside))
        else:
            inside = sorted({*inside, *(folder for path in inside for folder in _folders(path, prefix))})
        self._send_json([_entry(path, files) for path in inside])

    def _paths_info(self, kind: Kind, name: str, revision: str) -> None:
        _, files = self.server.files(self.server.repository(kind, name, self._token), revision)
        is_json = "json" in self.headers.get("Content-Type", "")
        paths = json.loads(self._body)["paths"] if is_json else parse_qs(self._body.decode()).get("paths", [])
        there = (path for path in paths if any(file == path or file.startswith(f"{path}/") for file in files))
        self._send_json([_entry(path, files) for path in there])

    def _refs(self, kind: Kind, name: str) -> None:
        refs = self.server.repository(kind, name, self._token).refs
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in refs.items()]
        self._send_json({"branches": branches, "tags": [], "converts": []})

    def _resolve(self, kind: Kind | None, name: str, revision: str, path: str) -> None:
        repository = self.server.repository(kind or "model", name, self._token)
        commit, files = self.server.files(repository, revision)
        if repository.tokens is not None and self._token not in repository.tokens:
            status = HTTPStatus.UNAUTHORIZED if self._token is None else HTTPStatus.FORBIDDEN
            raise Failure(status, "GatedRepo", f"Access to {name} is restricted: ask for access to it")
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path not in files:
            # Clients remember by the commit that a file is missing.
            self._send(HTTPStatus.NOT_FOUND, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        content = files[path]
        if not path.endswith(LARGE):
            self._send_file(content, path, headers | {"ETag": f'"{_git_hash(content)}"'})
            return
        sha256 = hashlib.sha256(content).hexdigest()
        large = {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        if self.server.chunked:
            large |= {"X-Xet-Hash": sha256, "X-Xet-Refresh-Route": f"{self.server.url}/xet-read-token"}
        where = f"http://localhost:{self.server.port}/large-storage/{kind or 'model'}/{name}/{commit}/{path}"
        self._send(HTTPStatus.FOUND, b"", headers | large | {"Location": where})

    def _large(self, place: str) -> None:
        kind, owner, name, commit, path = place.split("/", 4)
        content = self.server.repositories["dataset" if kind == "dataset" else "model", f"{owner}/{name}"].commits[
            commit
        ][path]
        self._send_file(content, path, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"})

    def _send_file(self, content: bytes, path: str, headers: dict[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(HTTPStatus.OK, content, headers, path)
            return
        start, stop = int(wanted[1]), min(int(wanted[2] or len(content) - 1) + 1, len(content))
        if start >= len(content):
            range_ = {"Content-Range": f"bytes */{len(content)}"}
            self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", headers | range_)
            return
        range_ = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._send(HTTPStatus.PARTIAL_CONTENT, content[start:stop], headers | range_, path)

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str], path: str = "") -> None:
        """``path``: of the file that is sent, which may break off."""
        with self.server.lock:
            host = self.headers.get("Host", "")
            asked = Request(
                self.command, urlsplit(self.path).path, self._token, self.headers.get("Range"), host, status
            )
            self.server.requests.append(asked)
            breaks = self.server.breaks.get(path, [])
            sent = breaks.pop(0) if breaks and self.command == "GET" else None
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        if sent is not None and sent < len(content):
            self.wfile.flush()
            if self.server.stall:
                self.server.stalled.set()
                self.rfile.read()  # until the client is gone
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _folders(path: str, below: str) -> Iterator[str]:
    """The folders that a path goes through, below another one."""
    parts = path.removeprefix(below).split("/")
    return (below + "/".join(parts[:n]) for n in range(1, len(parts)))


def _entry(path: str, files: Files) -> dict[str, Any]:
    """What a listing says of a file or a folder."""
    if path not in files:
        return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
    content = files[path]
    entry: dict[str, Any] = {"type": "file", "oid": _git_hash(content), "size": len(content), "path": path}
    if path.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
    return entry


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def isolated(home: Path) -> dict[str, str]:
    """Environment in which the clients keep everything below ``home``, have no token and tell nobody."""
    return {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_TOKEN": "",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "NO_PROXY": "127.0.0.1,localhost",
    }


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def point_clients(monkeypatch: Any, url: str, home: Path) -> None:
    """Sends the clients of this process to ``url``, with caches below ``home`` and no token."""
    from huggingface_hub import constants, hf_api, hf_file_system

    for name, value in {"HF_ENDPOINT": url, **isolated(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is lost where a connection breaks off
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    hf_file_system.HfFileSystem.clear_instance_cache()
    if "datasets" in sys.modules:
        from datasets import config

        monkeypatch.setattr(config, "HF_ENDPOINT", url)
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", home / "datasets")
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(config, "HF_UPDATE_DOWNLOAD_COUNTS", False)


@contextmanager
def hub_server(port: int = 0) -> Iterator[Hub]:
    """A hub that listens within the block."""
    with Hub(port) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
