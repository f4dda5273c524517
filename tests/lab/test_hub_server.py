"""The hub that tests use, with the real clients: what it is asked and what it answers are as with the real one."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.lab.hub_server import Hub, hub_server, point_clients

WEIGHTS = bytes(range(256)) * 400
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "onnx/model.bin": b"\0" * 100}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as server:
        server.use(monkeypatch, tmp_path / "home")
        yield server


def test_a_snapshot_of_each_revision(hub: Hub) -> None:
    first = hub.commit("somebody/tiny", FILES)
    hub.tag("somebody/tiny", "v1", first)
    second = hub.commit("somebody/tiny", {"config.json": b'{"new": 1}'})
    hub.commit("somebody/tiny", {"config.json": b'{"branch": 1}'}, branch="other")
    for revision, expected in {None: b'{"new": 1}', "main": b'{"new": 1}', "v1": b"{}", "other": b'{"branch": 1}',
                               first: b"{}", second: b'{"new": 1}'}.items():  # fmt: skip
        folder = Path(snapshot_download("somebody/tiny", revision=revision, allow_patterns=["config.json"]))
        assert (folder / "config.json").read_bytes() == expected
        assert not (folder / "model.safetensors").exists()
    folder = Path(snapshot_download("somebody/tiny"))
    assert {path: (folder / path).read_bytes() for path in FILES} == {**FILES, "config.json": b'{"new": 1}'}


def test_what_is_not_there(hub: Hub) -> None:
    hub.commit("somebody/tiny", FILES)
    with pytest.raises(RepositoryNotFoundError):
        snapshot_download("somebody/other")
    with pytest.raises(RevisionNotFoundError):
        snapshot_download("somebody/tiny", revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("somebody/tiny", "tokenizer.json")


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download("somebody/tiny")


def test_the_api(hub: Hub) -> None:
    commit = hub.commit("somebody/tiny", FILES)
    api = HfApi()
    assert api.model_info("somebody/tiny").sha == commit
    assert api.list_repo_files("somebody/tiny") == sorted(FILES)
    assert [entry.path for entry in api.list_repo_tree("somebody/tiny")] == ["config.json", "model.safetensors", "onnx"]
    info = api.get_paths_info("somebody/tiny", ["model.safetensors", "onnx", "nothing"])
    assert [entry.path for entry in info] == ["model.safetensors", "onnx"]
    assert info[0].size == len(WEIGHTS)  # type: ignore[union-attr]
    assert [branch.name for branch in api.list_repo_refs("somebody/tiny").branches] == ["main"]


def test_gated_files_need_the_right_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("somebody/gated", FILES)
    hub.gate("somebody/gated", "hf_right")
    hub.known.add("hf_other")
    with pytest.raises(GatedRepoError):
        hf_hub_download("somebody/gated", "config.json")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(GatedRepoError):
        hf_hub_download("somebody/gated", "config.json")
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi().model_info("somebody/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    folder = Path(snapshot_download("somebody/gated"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.tokens == {None, "hf_other", "hf_unknown", "hf_right"}
    # The large storage is another host, to which the client does not send its token.
    assert {request.token for request in hub.requests if "large-storage" in request.path} == {None}


def test_a_private_repository_is_as_good_as_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("somebody/private", FILES)
    hub.gate("somebody/private", "hf_right", hidden=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("somebody/private")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert HfApi().model_info("somebody/private").private


def test_a_connection_that_breaks_is_gone_on_with(hub: Hub) -> None:
    hub.commit("somebody/tiny", FILES)
    hub.breaks["model.safetensors"] = [30_000]
    assert Path(hf_hub_download("somebody/tiny", "model.safetensors")).read_bytes() == WEIGHTS
    large = [request for request in hub.requests if request.method == "GET" and "large-storage" in request.path]
    assert [request.range for request in large] == [None, "bytes=30000-"]
    assert [request.status for request in large] == [200, 206]


def test_ranges(hub: Hub) -> None:
    hub.commit("somebody/tiny", FILES)
    url = f"{hub.url}/somebody/tiny/resolve/main/config.json"
    with urlopen(Request(url, headers={"Range": "bytes=1-1"})) as answer:
        assert (answer.status, answer.read()) == (206, b"}")
    with pytest.raises(HTTPError, match="416"):
        urlopen(Request(url, headers={"Range": "bytes=2-"}))


def test_offline_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("somebody/tiny", FILES)
    snapshot_download("somebody/tiny")
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert (Path(snapshot_download("somebody/tiny")) / "model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download("somebody/other")
    assert not hub.requests


READ_DATA_SETS = """
import json, sys
from datasets import load_dataset

def texts(rows): return [row["text"] for row in rows]

name, first = "somebody/texts", sys.argv[1]
print(json.dumps({
    "all": texts(load_dataset(name, split="train")),
    "streamed": texts(load_dataset(name, split="train", streaming=True)),
    "config": texts(load_dataset(name, "more", split="train", streaming=True)),
    "first": texts(load_dataset(name, split="train", streaming=True, revision=first)),
    "tag": texts(load_dataset(name, split="train", streaming=True, revision="v1")),
    "files": texts(load_dataset(name, data_files="more/*.jsonl", split="train", streaming=True)),
    "splits": list(load_dataset(name)),
    "parquet": texts(load_dataset("somebody/rows", split="train", streaming=True)),
}))
"""
CARD = """---
configs:
- {config_name: default, data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]}
- {config_name: more, data_files: [{split: train, path: "more/*.jsonl"}]}
---
"""


@pytest.mark.slow
def test_data_sets_by_name(tmp_path: Path) -> None:
    pytest.importorskip("datasets")

    def lines(*texts: str) -> bytes:
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": ["x", "y"]}), parquet)
    files = {"README.md": CARD.encode(), "train.jsonl": lines("a"), "test.jsonl": lines("t"),
             "more/part.jsonl": lines("p", "q")}  # fmt: skip
    with hub_server() as hub:
        first = hub.commit("somebody/texts", files, kind="dataset")
        hub.tag("somebody/texts", "v1", first, kind="dataset")
        hub.commit("somebody/rows", {"data/train-00000-of-00001.parquet": parquet.getvalue()}, kind="dataset")
        hub.commit("somebody/texts", {"train.jsonl": lines("a", "b", "c")}, kind="dataset")
        environment = os.environ | hub.environment(tmp_path) | {"HF_TOKEN": "hf_any"}
        hub.known.add("hf_any")
        read = subprocess.run(
            [sys.executable, "-c", READ_DATA_SETS, first], env=environment, capture_output=True, text=True
        )
        assert not read.returncode, read.stderr
        assert json.loads(read.stdout.splitlines()[-1]) == {
            "all": ["a", "b", "c"], "streamed": ["a", "b", "c"], "config": ["p", "q"], "first": ["a"], "tag": ["a"],
            "files": ["p", "q"], "splits": ["train", "test"], "parquet": ["x", "y"],
        }  # fmt: skip
        assert "hf_any" in hub.tokens
