"""Data sets by name: tokenized by `pd data tokenize`, or by the run whose schema file names them."""

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from param_decomp_lab.config import load_config
from param_decomp_lab.data import hub_text
from param_decomp_lab.data.hub_text import HubDataset
from param_decomp_lab.data.hub_tokenizer import fetch_tokenizer
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.safe_io import answers
from param_decomp_lab.setup.named_text import named_text
from tests.lab.hub_server import hub_server, point_clients, silent_server
from tests.lab.in_time import in_time
from tests.lab.tiny_run import LIGHT, pd_here

pytest.importorskip("datasets")

CARD = """---
configs:
- {config_name: default, data_files: [{split: train, path: "train*.jsonl"}, {split: validation, path: held.jsonl}]}
- {config_name: more, data_files: [{split: train, path: "more/*.jsonl"}]}
---
"""


def lines(*texts):
    return "".join(json.dumps({"story": text}) + "\n" for text in texts).encode()


def parquet(**columns):
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def stories(who, n=40):
    return [f"{who} {i} told story {i * i} of the {who}.\n" * 4 for i in range(n)]


FILES = {
    "README.md": CARD.encode(),
    "train-0.jsonl": lines(*stories("cat")),
    "train-1.jsonl": lines(*stories("dog")),
    "held.jsonl": lines(*stories("owl")),
    "more/a.jsonl": lines(*stories("elk")),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server() as server:
        server.use(monkeypatch, tmp_path / "home")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        server.commit("somebody/stories", FILES, kind="dataset")
        yield server


def text_of(folder):
    data = TokenData(folder)
    return bytes(data.rows(range(len(data))).ravel().astype(np.uint8)).decode()


@pytest.mark.slow
def test_a_data_set_by_name(hub, tmp_path):
    words = ["data", "tokenize", "--dataset", "somebody/stories", "--column", "story", "--seq-len", "32"]
    words += ["--processes", "1", "--overwrite", "--out", str(tmp_path / "out")]
    train, held = tmp_path / "out" / "train", tmp_path / "out" / "eval"
    assert pd_here(*words, "--eval-split", "validation").status == 0
    assert "cat 0 told" in text_of(train)
    assert "dog 39 told" in text_of(train)
    assert "owl" not in text_of(train)
    assert set(text_of(held).split()) >= {"owl", "39"}
    commit = hub.repositories["dataset", "somebody/stories"].refs["main"]
    assert commit in DataMeta.read(tmp_path / "out").sources[0]
    assert pd_here(*words, "--config", "more").status == 0
    assert "elk" in text_of(train) + text_of(held)
    assert pd_here(*words, "--data-files", "train-1.jsonl").status == 0
    assert "cat" not in text_of(train)
    assert pd_here(*words, "--split", "train[:3]", "--eval-fraction", "0.4", "--seq-len", "8").status == 0
    assert "cat 3" not in text_of(train) + text_of(held)
    assert "cat 2" in text_of(train) + text_of(held)
    hub.commit("somebody/stories", {"train-0.jsonl": lines(*stories("new"))}, kind="dataset")
    assert pd_here(*words, "--revision", commit).status == 0
    assert "new" not in text_of(train)
    assert pd_here(*words).status == 0
    assert "new" in text_of(train)
    rows = parquet(ids=[list(range(n, n + 20)) for n in range(40)])
    hub.commit("somebody/rows", {"data/train-00000-of-00001.parquet": rows}, "dataset")
    words[3], words[5], words[7] = "somebody/rows", "ids", "10"
    assert pd_here(*words, "--tokenized", "--row-starts").status == 0
    found = TokenData(train).rows(range(38))
    np.testing.assert_array_equal(found, found[:, :1] + np.arange(10))


@pytest.mark.slow
def test_several_processes_and_broken_connections_change_no_byte(tmp_path):
    files = {f"train-{n}.jsonl": lines(*stories(f"cat{n}", 400)) for n in range(6)}
    with hub_server() as server:
        server.commit("somebody/stories", FILES | files, kind="dataset")
        environment = os.environ | server.environment(tmp_path / "home")
        command = [sys.executable, "-m", "param_decomp_lab", "data", "tokenize", "--dataset", "somebody/stories"]
        command += ["--column", "story", "--seq-len", "32", "--out"]
        for out, processes in (("one", "1"), ("several", "3")):
            server.breaks["train-2.jsonl"] = [1000]
            words = [*command, str(tmp_path / out), "--processes", processes]
            ended = subprocess.run(words, env=environment, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr
            assert not server.breaks["train-2.jsonl"]
    one, several = (DataMeta.read(tmp_path / out) for out in ("one", "several"))
    assert one == several
    assert one.documents == 6 * 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "dev"], "the data set somebody/stories: "),
        (["--config", "other"], "the data set somebody/stories: "),
        (["--column", "text"], "has no column text (it has: story); choose with --column"),
        (["--revision", "v9"], "the data set somebody/stories has no revision v9"),
        (["--dataset", "somebody/nothing"], "the data set somebody/nothing is not on http"),
        (["--dataset", "a/b/c"], "is neither a folder nor a name on the Hugging Face hub"),
        (["--tokenizer", "somebody/stories"], "the tokenizer somebody/stories (no file or folder here"),
    ],
)
def test_what_the_hub_does_not_have(hub, tmp_path, options, message):
    words = ["data", "tokenize", "--dataset", "somebody/stories", "--column", "story", "--out", str(tmp_path / "out")]
    outcome = pd_here(*words, "--processes", "1", *options)
    assert outcome.status == 2, outcome
    assert message in outcome.err
    assert not (tmp_path / "out").exists()


def test_gated_and_the_token(hub, tmp_path, monkeypatch):
    hub.gate("somebody/stories", "hf_right", kind="dataset")
    words = ["data", "tokenize", "--dataset", "somebody/stories", "--column", "story", "--out", str(tmp_path / "out")]
    outcome = pd_here(*words, "--seq-len", "32", "--processes", "1")
    assert outcome.status == 2
    assert "only for those whom its owner has given access" in outcome.err
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    outcome = pd_here(*words, "--seq-len", "32", "--processes", "1")
    assert outcome.status == 0, outcome
    assert "hf_right" not in outcome.out + outcome.err


def test_no_network(monkeypatch, tmp_path):
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(CannotFetch, match=r"the data set a/b could not be read from http://127.*what is done is kept"):
        HubDataset("a/b").pinned()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the data set a/b is not on this machine, and HF_HUB_OFFLINE is set"):
        HubDataset("a/b").pinned()


def test_a_tokenizer_that_is_nowhere_is_said_at_once(monkeypatch, tmp_path):
    """Within 5 seconds, with what was looked for. It waited half a minute without a network, and for ever for a server
    that does not answer."""
    (tmp_path / "text.txt").write_text("a b\n")
    words = ("data", "tokenize", tmp_path / "text.txt", "--tokenizer", "nothing", "--seq-len", "8", "--out")
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    began = time.perf_counter()
    outcome = pd_here(*words, tmp_path / "rows")
    assert time.perf_counter() - began < 5
    assert outcome.status == 1  # as whatever is worth a second try
    said = " ".join(outcome.err.split())
    assert "the tokenizer nothing (no file or folder here, and not in the local Hugging Face cache) could not" in said
    assert "read from http://127.0.0.1:9: " in said
    assert not (tmp_path / "rows").exists()
    assert answers.FIRST_ANSWER_S < 5
    monkeypatch.setattr(answers, "FIRST_ANSWER_S", 0.2)
    monkeypatch.setattr(hub_text, "ANSWER_S", 0.2)
    with silent_server() as url:
        point_clients(monkeypatch, url, tmp_path / "home")
        with pytest.raises(CannotFetch, match=r"read from .*: no answer within 0\.2 s \(HF_HUB_ETAG_TIMEOUT sets"):
            in_time(lambda: fetch_tokenizer("nothing"), "a tokenizer")
        with pytest.raises(CannotFetch, match=r"read from .*: no answer within 0\.2 s"):
            in_time(HubDataset("a/b").pinned, "a data set")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
        with pytest.raises(CannotFetch, match=r"no answer within 1 s|timed out"):
            in_time(lambda: fetch_tokenizer("nothing"), "a tokenizer")


def test_a_local_folder_laid_out_like_a_data_set(tmp_path, monkeypatch):
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    for name, content in FILES.items():
        (tmp_path / "stories" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stories" / name).write_bytes(content)
    words = ["data", "tokenize", "--dataset", str(tmp_path / "stories"), "--column", "story", "--seq-len", "32"]
    outcome = pd_here(*words, "--processes", "1", "--out", str(tmp_path / "out"), "--eval-split", "validation")
    assert outcome.status == 0, outcome
    assert "owl" in text_of(tmp_path / "out" / "eval")


# ---- the schema file's own data ----


def assignments(**data):
    """`--set` of a run of the tiny model whose schema file names its data."""
    section = {"column_name": "story", "is_tokenized": "false", "max_seq_len": 16} | data
    return [*LIGHT, "data=null", *(f"data.{key}={value}" for key, value in section.items())]


def words(sets):
    return [word for text in sets for word in ("--set", text)]


@pytest.mark.slow
def test_a_run_tokenizes_what_its_schema_file_names(tiny, hub, tmp_path):
    """`pd check` says so and does nothing; `pd train` does it once; the next run, without a network, finds it."""
    sets = [*assignments(dataset_name="somebody/stories", eval_split="validation"), "pd.steps=3", f"out_dir={tmp_path}"]
    sets = [text for text in sets if text != "eval=null"] + ["eval.slow_every=8", "eval.every=4", "eval.metrics=[]"]
    checked = pd_here("check", tiny.config, *words(sets))
    assert checked.status == 0, checked
    assert "somebody/stories: split train, evaluated on validation, column story, the first" in " ".join(
        checked.out.split()
    )
    said = " ".join((checked.out + checked.err).split())
    assert "`pd train` fetches it from the Hugging Face hub and tokenizes it first" in said
    assert not hub.requests
    assert not (tmp_path / "cache").exists()
    trained = pd_here("train", tiny.config, *words(sets))
    assert trained.status == 0, trained
    assert "tokenizing somebody/stories" in trained.out
    (made,) = (tmp_path / "cache" / "param-decomp" / "tokens").iterdir()
    assert "owl" in text_of(made / "eval")
    rows = DataMeta.read(made)
    assert rows.train.rows >= 4
    hub.requests.clear()
    again = pd_here("train", tiny.config, *words(sets))
    assert again.status == 0, again
    assert "tokenizing" not in again.out
    assert not hub.requests
    assert "to be tokenized first" not in pd_here("check", tiny.config, *words(sets)).out


def text_at(tiny, tmp_path, *sets):
    found = named_text(load_config(tiny.config, sets))
    assert found is not None
    return found


def test_files_of_every_builder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_bytes(lines(*stories("cat")))
    (tmp_path / "a.parquet").write_bytes(parquet(story=stories("cat")))
    (tmp_path / "a.txt").write_text("".join(stories("cat")))
    for name, builder in (("a.jsonl", "json"), ("a.parquet", "parquet"), ("a.txt", "text")):
        column = "text" if builder == "text" else "story"
        sets = assignments(dataset_name=builder, data_files=str(tmp_path / name), column_name=column)
        text = text_at(tiny, tmp_path, *sets)
        assert not text.needs_hub
        assert len(text.missing()) == 1
        text.make(Console(quiet=True))
        assert text.is_made
        assert text.missing() == ()
        assert "cat 7 told story 49" in text_of(text.folder / "train")
        assert not list((text.folder / "eval").iterdir())  # the run has no evaluation
    # Other files, other rows: another folder.
    (tmp_path / "a.jsonl").write_bytes(lines(*stories("dog")))
    changed = text_at(tiny, tmp_path, *assignments(dataset_name="json", data_files=str(tmp_path / "a.jsonl")))
    assert not changed.is_made


def test_runs_that_begin_together_tokenize_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("param_decomp_lab.setup.named_text.WAIT_S", 0.05)
    (tmp_path / "a.jsonl").write_bytes(lines(*stories("cat")))
    text = text_at(tiny, tmp_path, *assignments(dataset_name="json", data_files=str(tmp_path / "a.jsonl")))
    work = text.folder.with_name(f".{text.folder.name}.unfinished")
    work.mkdir(parents=True)
    console = Console(file=io.StringIO())
    second = threading.Thread(target=text.make, args=(console,))
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        end = time.monotonic() + 60
        while "another run is doing it" not in console.file.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not text.is_made
    second.join()
    assert text.is_made


def test_a_part_is_held_out_where_there_is_no_split_for_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_bytes(lines(*stories("cat", 400)))
    sets = [*assignments(dataset_name="json", data_files=str(tmp_path / "a.jsonl"))]
    sets = [text for text in sets if text != "eval=null"]
    text = text_at(tiny, tmp_path, *sets)
    text.make(Console(quiet=True))
    train, held = (TokenData(text.folder / split) for split in ("train", "eval"))
    assert (len(train), len(held)) == (128, 16)  # 12 x 8 and 2 x 8 rows, rounded up
    numbers = [set(re.findall(r"cat (\d+) told", text_of(text.folder / split))) for split in ("train", "eval")]
    assert numbers[1] - numbers[0]


def test_token_ids_of_a_data_set(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.parquet").write_bytes(parquet(ids=[list(range(n, n + 20)) for n in range(60)]))
    sets = assignments(
        dataset_name="parquet", data_files=str(tmp_path / "a.parquet"), column_name="ids", is_tokenized="true",
        tokenizer_name="nobody/nothing",
    )  # fmt: skip
    text = text_at(tiny, tmp_path, *sets)
    text.make(Console(quiet=True))
    data = TokenData(text.folder / "train")
    found = data.rows(range(len(data)))
    np.testing.assert_array_equal(found, found[:, :1] + np.arange(16))


def test_what_decides_the_folder(tiny, tmp_path):
    def folder(*more, **data):
        data = {"dataset_name": "a/b", "tokenizer_name": "c/d"} | data
        return text_at(tiny, tmp_path, *assignments(**data), *more).folder

    same = folder()
    assert same == folder() == folder("pd.steps=11") == folder("pd.seed=4")
    others = [
        folder("pd.steps=100"), folder(revision="v1"), folder(column_name="x"), folder(train_split="all"),
        folder(data_files="x*"), folder(max_seq_len=8), folder(tokenizer_name="e/f"), folder(is_tokenized="true"),
    ]  # fmt: skip
    assert len({same, *others}) == len(others) + 1


def test_the_tokenizer_of_the_target_s_folder_stands_in(tiny, tmp_path):
    sets = assignments(dataset_name="a/b", tokenizer_name="tiny")
    file = tiny.folder / "target" / "tokenizer.json"
    assert text_at(tiny, tmp_path, *sets).stand_in == (file if file.is_file() else None)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    assert text_at(tiny, tmp_path, *sets, f"target={{folder: {folder}}}").stand_in == folder / "tokenizer.json"
    other = assignments(dataset_name="a/b", tokenizer_name="else")
    assert text_at(tiny, tmp_path, *other, f"target={{folder: {folder}}}").stand_in is None


def test_without_a_network_a_run_says_what_is_missing(tiny, tmp_path, monkeypatch):
    point_clients(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sets = [*assignments(dataset_name="somebody/stories"), f"out_dir={tmp_path / 'runs'}"]
    assert pd_here("check", tiny.config, *words(sets)).status == 0
    trained = pd_here("train", tiny.config, *words(sets))
    assert trained.status == 1, trained
    assert trained.err.count("error:") == 1
    assert "the data set somebody/stories could not be read from http://127.0.0.1:9" in trained.err
    assert not (tmp_path / "runs").exists()
