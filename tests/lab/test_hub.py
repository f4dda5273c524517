"""Targets by their names on a hub: what is fetched, what is said where that is not possible, and what no one may read.

Against `hub_server.py`, with the real client.
"""

import io
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file, save_file

from param_decomp_lab import load_run
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.weights import hub_download
from param_decomp_lab.weights.hub import HubModel, Offline
from param_decomp_lab.weights.target_folder import load_target
from tests.lab.hub_server import Hub, hub_server, point_clients, silent_server
from tests.lab.in_time import in_time
from tests.lab.several import run
from tests.lab.tiny_run import LIGHT, PD, ROOT, Tiny, pd_here

NAME, TOKEN = "somebody/tiny", "hf_secretsecretsecret"
JUNK = {
    "pytorch_model.bin": b"\0" * 50, "model.gguf": b"\0" * 50, "tf_model.h5": b"\0" * 50, "README.md": b"-",
    "onnx/model.safetensors": b"\0" * 50, "original/consolidated.00.pth": b"\0" * 50,
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as server:
        server.use(monkeypatch, tmp_path / "home")
        yield server


@pytest.fixture(scope="module")
def files(tiny: Tiny) -> dict[str, bytes]:
    """The tiny Llama in two safetensors files with an index, a tokenizer, and much that nobody needs."""
    target = tiny.folder / "target"
    arrays = load_file(target / "model.safetensors")
    names = sorted(arrays)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    content = dict(JUNK)
    for file, part in parts.items():
        save_file({name: arrays[name] for name in part}, tiny.folder / "part", {"format": "pt"})
        content[file] = (tiny.folder / "part").read_bytes()
    places = {name: file for file, part in parts.items() for name in part}
    content["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    content["config.json"] = (target / "config.json").read_bytes()
    content["tokenizer.json"] = b"{}"
    return content


def fetch(name: str = NAME, revision: str | None = None) -> Path:
    return HubModel(name, revision).fetch(Console(quiet=True))


def refusal(action: Callable[[], object], kind: type[Exception] = UserError) -> str:
    """What the message says; it has the token nowhere."""
    with pytest.raises(kind) as caught:
        action()
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def downloaded(hub: Hub) -> list[str]:
    """Files that were sent, whole or in part."""
    return [
        Path(r.path).name
        for r in hub.requests
        if r.method == "GET" and r.status in (200, 206) and "/api/" not in r.path
    ]


def test_only_what_is_needed_is_fetched_once(hub: Hub, files: dict[str, bytes], tiny: Tiny) -> None:
    hub.commit(NAME, files)
    folder = fetch()
    needed = sorted(files.keys() - JUNK.keys())
    assert sorted(downloaded(hub)) == needed == sorted(path.name for path in folder.rglob("*"))
    here, there = load_target(folder)[1], load_target(tiny.folder / "target")[1]
    assert np.array_equal(here["layers"]["up_proj"], there["layers"]["up_proj"])
    hub.requests.clear()
    assert fetch() == folder
    assert HubModel(NAME).cached() == folder
    assert not hub.requests


def test_revisions(hub: Hub, files: dict[str, bytes]) -> None:
    first = hub.commit(NAME, files)
    hub.tag(NAME, "v1", first)
    second = hub.commit(NAME, {"tokenizer.json": b'{"new": 1}'})
    found = {revision: fetch(revision=revision) for revision in (None, "v1", first, "main")}
    assert {revision: folder.name for revision, folder in found.items()} == {
        None: second, "v1": first, first: first, "main": second
    }  # fmt: skip
    assert (found["v1"] / "tokenizer.json").read_bytes() == b"{}"
    assert downloaded(hub).count("model-00001-of-00002.safetensors") == 1, "the same content is fetched once"
    said = refusal(lambda: fetch(revision="v9"))
    assert re.search("target.revision: somebody/tiny has no revision 'v9'", said)


def test_gated(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(NAME, files)
    hub.gate(NAME, TOKEN)
    hub.known.add(f"{TOKEN}other")
    assert re.search(f"only for those .* ask for access at {hub.url}/{NAME} and give .* HF_TOKEN", refusal(fetch))
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}other")
    assert "the token that was sent has no access to it: ask for access at" in refusal(fetch)
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}unknown")
    assert "the hub does not know the token that was sent" in refusal(fetch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch().is_dir()
    assert TOKEN in hub.tokens


def test_not_there(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no somebody/tiny on http" in refusal(fetch)
    assert "it is private and needs a token" in refusal(fetch)
    hub.known.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "the token that was sent may not see it" in refusal(fetch)
    assert "neither a folder nor the name of a model" in refusal(lambda: fetch("a/b/c"))
    assert "target: {revision: …}" in refusal(lambda: fetch("somebody/tiny@v1"))
    hub.commit("somebody/pickled", {"config.json": b"{}", "pytorch_model.bin": b"\0"})
    assert "`hf download somebody/pickled`" in refusal(lambda: fetch("somebody/pickled"))
    assert "`pd weights import-torch FOLDER --out OUT`" in refusal(lambda: fetch("somebody/pickled"))
    hub.commit("somebody/texts", {"README.md": b""})
    assert "has no config.json" in refusal(lambda: fetch("somebody/texts"))
    hub.commit("somebody/quantised", {"config.json": b"{}", "a.gguf": b"\0"})
    assert "`pd weights import-gguf`" in refusal(lambda: fetch("somebody/quantised"))
    hub.commit("somebody/part", {n: c for n, c in files.items() if n != "model-00002-of-00002.safetensors"})
    assert "lacks model-00002-of-00002.safetensors, which its model.safetensors.index.json lists" in refusal(
        lambda: fetch("somebody/part")
    )
    evil = {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "../../../x"}}'}
    hub.commit("somebody/evil", evil)
    assert "lies outside of" in refusal(lambda: fetch("somebody/evil"))


def test_what_was_interrupted_is_gone_on_with(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """First a connection that breaks once, then one that does not come back, and a start at another time."""
    monkeypatch.setattr(hub_download, "LARGE_BYTES", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    content = np.random.default_rng(0).bytes(100_000)
    hub.commit(NAME, {"config.json": b"{}", "model.safetensors": content})
    hub.known.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.breaks["model.safetensors"] = [30_000, 20_000, *[0] * 6]
    said = refusal(fetch, CannotFetch)
    assert re.search(r"could not be fetched from http://127.0.0.1:\d+: .*what has arrived is kept: start again", said)
    assert (fetch() / "model.safetensors").read_bytes() == content
    ranges = [request.range for request in hub.requests if "large-storage" in request.path and request.method == "GET"]
    assert ranges == [None, "bytes=30000-", *["bytes=50000-"] * 7]
    assert "".join(capfd.readouterr()) == "", "the client's warnings show addresses that need no token"
    # The host of large files gets no token, also where a download is gone on with.
    assert {request.token for request in hub.requests if "large-storage" in request.path} == {None}


@pytest.mark.parametrize("disabled", [True, False])
def test_chunks_that_cannot_be_had(hub: Hub, monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    """A large file is fetched as a whole where its chunks (Xet) may not be asked for, and where that fails."""
    monkeypatch.setattr(hub_download, "LARGE_BYTES", 1000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", disabled)
    failure = RuntimeError("Task error: CAS Client Error: error sending request for url (http://127.0.0.1:9/x?secret)")
    chunks = mock.Mock(side_effect=failure)
    monkeypatch.setattr("huggingface_hub.file_download.xet_get", chunks)
    content, hub.chunked = np.random.default_rng(0).bytes(50_000), True
    hub.commit(NAME, {"config.json": b"{}", "model.safetensors": content})
    console = Console(record=True, width=200, file=io.StringIO())
    assert (HubModel(NAME).fetch(console) / "model.safetensors").read_bytes() == content
    said = "its chunks could not be fetched (Task error: CAS Client Error: error sending request for url); it is"
    assert (said in console.export_text(clear=False)) == (not disabled)
    assert "secret" not in console.export_text()
    assert chunks.call_count == (not disabled)


@pytest.mark.slow
def test_a_killed_process_is_gone_on_with(wrapper: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a file of 64 MB; the next process asks for the rest of that file, and for no other."""
    content = np.random.default_rng(0).bytes(64_000_000)
    part = {"a.safetensors": content[:20_000_000], "b.safetensors": content}
    index = {"weight_map": {name: name for name in part}}
    with hub_server() as hub:
        hub.commit(NAME, {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **part})
        hub.breaks["b.safetensors"], hub.stall = [45_000_000], True
        environment = os.environ | hub.environment(tmp_path / "home")
        command = [*PD, "weights", "fetch", str(wrapper)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as first:
            assert hub.stalled.wait(60)
            until(lambda: any(path.stat().st_size >= 40_000_000 for path in (tmp_path / "home").rglob("*.partial")))
            first.kill()
        hub.stall = False
        hub.requests.clear()
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
        ranges = [request.range for request in hub.requests if "large-storage" in request.path]
    assert len(ranges) == 1
    assert re.fullmatch(r"bytes=4\d{7}-", ranges[0] or ""), "what arrived is not asked for again"
    assert (Path(second.stdout.splitlines()[-1]) / "b.safetensors").read_bytes() == content
    assert "of which" in second.stdout


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_arrives_damaged_is_not_kept(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub_download, "LARGE_BYTES", 1000)
    content = np.random.default_rng(0).bytes(50_000)
    hub.commit(NAME, {"config.json": b"{}", "model.safetensors": content})
    fetch()
    (blob,) = (path for path in tmp_path.rglob("blobs/*") if path.stat().st_size == 50_000)
    blob.rename(blob.with_name(f"{blob.name}.partial")).write_bytes(b"\0" * 10_000)
    assert "model.safetensors arrived damaged and was removed: start again" in refusal(fetch, CannotFetch)
    assert (fetch() / "model.safetensors").read_bytes() == content


def test_offline_and_no_network(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.commit(NAME, files)
    folder = fetch()
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch() == folder
    assert "HF_HUB_OFFLINE is set; fetch it where there is a network (`pd weights fetch`)" in refusal(
        lambda: fetch("somebody/other"), Offline
    )
    assert not hub.requests
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    assert fetch() == folder
    assert "somebody/other could not be fetched from http://127.0.0.1:9: " in refusal(
        lambda: fetch("somebody/other"), CannotFetch
    )
    assert "refused" in refusal(HubModel("somebody/other").fetch_config, CannotFetch)
    monkeypatch.setattr("param_decomp_lab.weights.hub.ANSWER_S", 0.2)
    monkeypatch.setattr("param_decomp_lab.safe_io.answers.FIRST_ANSWER_S", 0.2)
    with silent_server() as url:
        point_clients(monkeypatch, url, tmp_path / "home")
        for ask in (lambda: fetch("somebody/other"), HubModel("somebody/other").fetch_config):
            said = refusal(lambda ask=ask: in_time(ask, "a hub that does not answer"), CannotFetch)
            assert "no answer within 0.2 s" in said


def test_a_cache_that_cannot_be_written(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.commit(NAME, files)
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert re.search(r"cannot write .*file.*: Not a directory; choose another place with HF_HOME", refusal(fetch))


def test_the_password_of_a_mirror_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_clients(monkeypatch, f"http://me:{TOKEN}@127.0.0.1:9", tmp_path)
    assert "could not be fetched from http://127.0.0.1:9: " in refusal(fetch, CannotFetch)


def test_progress_without_a_terminal(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "LARGE_BYTES", 1000)
    hub.commit(NAME, files)
    console = Console(record=True, width=200, file=io.StringIO())
    HubModel(NAME).fetch(console)
    lines = console.export_text().splitlines()
    assert len(lines) == 4, "the small files, then the weights"
    assert re.fullmatch(r"downloading somebody/tiny: 3[\d.]+.KiB", lines[2])
    assert re.fullmatch(r"downloading somebody/tiny: done in \d+ s", lines[-1])


# ---- in a run ----


@pytest.fixture
def wrapper(tiny: Tiny, tmp_path: Path) -> Path:
    """The tiny run, of the model on the hub."""
    raw = yaml.safe_load(tiny.config.read_text())
    del raw["target"]
    raw["data"] = {key: str(tiny.folder / path) for key, path in raw["data"].items()}
    method = yaml.safe_load((tiny.folder / "torch.yaml").read_text())
    method["target"]["spec"]["model_name"] = NAME
    (tmp_path / "torch.yaml").write_text(yaml.safe_dump(method))
    (tmp_path / "wrapper.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "wrapper.yaml"


def sets(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


@pytest.mark.slow
def test_a_run_fetches_its_target_and_keeps_no_token(
    hub: Hub, files: dict[str, bytes], wrapper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.tag(NAME, "v1", hub.commit(NAME, files))
    hub.gate(NAME, TOKEN)
    refused = pd_here("train", wrapper, *sets(*LIGHT, f"out_dir={tmp_path / 'runs'}"))
    assert (refused.status, refused.err.count("\n")) == (2, 1), refused
    assert "target.spec.model_name: somebody/tiny is only for those whom its owner has given access" in refused.err
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    runs = sets(*LIGHT, f"out_dir={tmp_path / 'runs'}", "run_id=p-00000001", "target.revision=v1")
    trained = pd_here("train", wrapper, *runs)
    assert trained.status == 0, trained
    assert load_run(tmp_path / "runs" / "p-00000001").weights is not None
    assert TOKEN in hub.tokens
    said = trained.out + trained.err
    kept = b"".join(path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert TOKEN not in said
    assert TOKEN.encode() not in kept
    assert b"revision: v1" in kept


def test_a_check_asks_for_the_configuration_alone(hub: Hub, files: dict[str, bytes], wrapper: Path) -> None:
    hub.commit(NAME, files)
    checked = pd_here("check", wrapper)
    assert checked.status == 0, checked
    said = " ".join(checked.out.split())
    assert "layers.0-1.mlp.up_proj" in said
    assert "not on this machine: the target's weights: the weights of somebody/tiny: not in the local" in said
    assert downloaded(hub) == ["config.json"]
    hub.requests.clear()
    assert pd_here("check", wrapper).status == 0
    assert not hub.requests
    fetched = pd_here("weights", "fetch", wrapper)
    assert fetched.status == 0, fetched
    assert (Path(fetched.out.splitlines()[-1]) / "model-00001-of-00002.safetensors").is_file()
    assert "not on this machine" not in pd_here("check", wrapper).out
    nowhere = pd_here("weights", "fetch", wrapper, *sets("target.folder=nowhere"))
    assert nowhere.status == 2
    assert "nowhere is a local folder that does not exist; there is nothing to fetch" in nowhere.err
    recipe = pd_here("weights", "fetch", ROOT / "configs" / "toys" / "tms_5-2.yaml")
    assert recipe.status == 2
    assert "target.pretrain: a recipe makes the target; train it with `pd pretrain" in recipe.err


def test_a_check_without_a_network(wrapper: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    checked = pd_here("check", wrapper)
    assert checked.status == 0, checked
    said = " ".join(checked.out.split())
    assert "not on this machine: the target, so its sites are not checked: target.spec.model_name: somebody/" in said
    probed = pd_here("probe", wrapper)
    assert probed.status == 2
    assert "could not be fetched from http://127.0.0.1:9" in probed.err


@pytest.mark.slow
def test_several_processes_fetch_once(hub: Hub, files: dict[str, bytes], wrapper: Path, tmp_path: Path) -> None:
    """Two processes of one run; a refusal is told once."""
    hub.commit(NAME, files)
    hub.gate(NAME, TOKEN)
    train = [*PD, "train", str(wrapper), *sets(*LIGHT, f"out_dir={tmp_path / 'runs'}", "mesh={fsdp: 2}")]
    environment = {**hub.environment(tmp_path / "home"), "WANDB_MODE": "disabled"}
    refused = run(train, 2, 1, environment)
    assert [process.status for process in refused] == [2, 2], refused
    assert sum("is only for those whom its owner has given access" in process.text for process in refused) == 1
    trained = run(train, 2, 1, {**environment, "HF_TOKEN": TOKEN})
    assert [process.status for process in trained] == [0, 0], trained
    assert sorted(downloaded(hub)) == sorted(files.keys() - JUNK.keys())


@pytest.mark.slow
def test_unrelated_processes_at_once(hub: Hub, files: dict[str, bytes], wrapper: Path, tmp_path: Path) -> None:
    """Runs that start together, as those of a sweep: one fetches, the others wait and find it."""
    weights = np.random.default_rng(0).bytes(40_000_000)
    hub.commit(NAME, {**files, "model-00002-of-00002.safetensors": weights})
    environment = os.environ | hub.environment(tmp_path / "home")
    command = [*PD, "weights", "fetch", str(wrapper)]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate()[0].splitlines()[-1] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(folders) == 1
    assert (Path(folders.pop()) / "model-00002-of-00002.safetensors").read_bytes() == weights
    assert sorted(downloaded(hub)) == sorted(files.keys() - JUNK.keys())
