"""Tokenizing text in units: formats, processes, parts of a job, kills, limits. All ways give the same bytes."""

import errno
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_lab.data import plan as plan_module
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.plan import Settings
from param_decomp_lab.data.records import TEXT, BadRecord, Column
from param_decomp_lab.data.spans import file_spans
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.tokenize import file_units, make_plan, tokenize, tokenize_files
from param_decomp_lab.data.unfinished import Unfinished
from param_decomp_lab.errors import CannotWrite, UserError
from tests.cases import slow_but
from tests.lab.tiny_run import pd_here

SMALL = 1 << 14
"""Bytes of a unit in these tests."""


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(plan_module, "UNIT_BYTES", SMALL)


@pytest.fixture
def corpus(tmp_path):
    """Some 200 KB in three files, whose lines say where they are from."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, n in (("a", 3000), ("b", 40), ("c", 4000)):
        (folder / f"{name}.txt").write_text("".join(f"<{name}.{i:05d} {'x' * (i % 37)}>\n" for i in range(n)))
    return folder


def contents(folder):
    """Hashes of all files, by name."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def text_of(folder):
    data = TokenData(folder)
    return bytes(data.rows(range(len(data))).ravel().astype(np.uint8)).decode()


def planned(inputs, fmt=None, tokenizer="bytes", **options):
    options = {"seq_len": 32, "eval_fraction": 0.2} | options
    return make_plan(file_units(inputs, fmt), Settings(**options), tokenizer, ())


@given(
    lines=st.lists(st.text(alphabet="aé\r ", max_size=12), min_size=1, max_size=40),
    ends=st.booleans(),
    span_bytes=st.integers(1, 60),
    kind=st.sampled_from(["text", "json"]),
)
@settings(max_examples=60)
def test_spans_are_the_file_however_it_is_cut(tmp_path_factory, lines, ends, span_bytes, kind):
    file = tmp_path_factory.mktemp("spans") / "file"
    records = lines if kind == "text" else [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    file.write_bytes(("\n".join(records) + "\n" * ends).encode())
    documents = [d for span in file_spans([file], kind, span_bytes) for d in span.documents(Column("text"))]
    if kind == "json":
        assert [d.content for d in documents] == lines
    else:
        assert "".join(piece for d in documents for piece in d.pieces()) == "\n".join(lines) + "\n" * ends
        assert [d.begins for d in documents] == [True] + [False] * (len(documents) - 1)


def test_units_lose_no_text(small_units, corpus, tmp_path):
    plan = planned([corpus])
    assert len(plan.units) > 8
    meta = tokenize(plan, tmp_path / "out")
    lines = {s: set(re.findall(r"<\w\.\d{5} x*>", text_of(tmp_path / "out" / s))) for s in ("train", "eval")}
    assert not lines["train"] & lines["eval"]
    assert len(lines["train"] | lines["eval"]) > 7040 - 40  # but for those at the ends of pieces' rows
    tokens = meta.train.tokens + meta.eval.tokens + meta.train.dropped_tokens + meta.eval.dropped_tokens
    assert tokens >= sum(file.stat().st_size for file in corpus.iterdir())
    assert max(meta.train.dropped_tokens, meta.eval.dropped_tokens) < 32
    assert DataMeta.read(tmp_path / "out") == meta


def test_small_shares_of_units_are_put_together(small_units, corpus, tmp_path):
    """No unit has a row of held-out text, and all of them together have."""
    (corpus / "d.txt").write_text("".join(f"{n}\n" for n in range(60_000)))
    meta = tokenize(planned([corpus], seq_len=20_000, eval_fraction=0.3), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out" / "eval").iterdir()] == ["part-tail.arrow"]
    assert meta.eval.rows >= 1
    data = TokenData(tmp_path / "out" / "eval")
    assert len(data) == meta.eval.rows


@pytest.mark.parametrize("tokens", slow_but([60_000], [None, 60_000]))
def test_processes_and_parts_change_no_byte(small_units, corpus, tmp_path, tokens):
    plan = planned([corpus], tokens=tokens)
    whole = tokenize(plan, tmp_path / "whole")
    assert (whole.train.tokens == 60_000 // 32 * 32) == (tokens is not None)
    assert tokenize(plan, tmp_path / "several", processes=2) == whole
    for number in (2, 0, 3, 1):
        assert not (tmp_path / "parts").exists()
        made = tokenize(plan, tmp_path / "parts", part=(number, 4))
    assert made == whole
    assert tokenize(plan, tmp_path / "parts", part=(2, 4)) == whole  # one that is started again finds it made
    assert contents(tmp_path / "whole") == contents(tmp_path / "several") == contents(tmp_path / "parts")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "parts", "several", "whole"]


def test_parts_of_other_plans_are_not_mixed(small_units, corpus, tmp_path):
    tokenize(planned([corpus]), tmp_path / "out", part=(0, 2))
    with pytest.raises(UserError, match=r"begun with another plan \(seq_len: 32, now 64\); .*--overwrite"):
        tokenize(planned([corpus], seq_len=64), tmp_path / "out", part=(1, 2))
    (corpus / "c.txt").write_text("other")
    with pytest.raises(UserError, match=r"begun with another plan \(the text\)"):
        tokenize(planned([corpus]), tmp_path / "out", part=(1, 2))
    assert not (tmp_path / "out").exists()
    meta = tokenize(planned([corpus], seq_len=64), tmp_path / "out", overwrite=True)
    assert meta.seq_len == TokenData(tmp_path / "out" / "train").seq_len == 64


def test_a_failed_unit_keeps_what_is_done(small_units, corpus, tmp_path):
    whole = tokenize(planned([corpus]), tmp_path / "whole")
    bad, good = corpus / "c.txt", (corpus / "c.txt").read_bytes()
    changed = bad.stat().st_mtime_ns
    bad.write_bytes(good[:-100] + b"\xff" * 100)
    with pytest.raises(UserError, match=r"c\.txt is not UTF-8"):
        tokenize(planned([corpus]), tmp_path / "out", processes=2)
    assert len(Unfinished(tmp_path / ".out.unfinished", tmp_path / "out").done()) > 3
    bad.write_bytes(good)
    os.utime(bad, ns=(changed, changed))
    with pytest.raises(UserError, match="another plan"):  # the broken file had another time
        tokenize(planned([corpus]), tmp_path / "out")
    assert tokenize(planned([corpus]), tmp_path / "out", overwrite=True) == whole


@pytest.mark.parametrize("call", ["mkdir", "touch", "write_text"])
def test_a_full_disk_at_the_start_leaves_nothing(corpus, tmp_path, monkeypatch, call):
    """A race with a full disk (seed 35, tokenize, 5) left an empty folder of unfinished work behind. What was begun
    before stays."""
    plan = planned([corpus])
    real = getattr(Path, call)

    def full(path, *arguments, **options):
        if ".out.unfinished" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, full)
        with pytest.raises(CannotWrite, match=r"cannot write .*out: No space left on device; free some space"):
            tokenize(plan, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_what_is_taken_away_is_no_part_of_a_result(small_units, corpus, tmp_path):
    tokenize(planned([corpus]), tmp_path / "out", part=(0, 2))
    next((tmp_path / ".out.unfinished" / "data" / "train").iterdir()).unlink()
    with pytest.raises(CannotWrite, match=r"had been written, is gone; remove .*\.out\.unfinished and start again"):
        tokenize(planned([corpus]), tmp_path / "out", part=(1, 2))
    assert not (tmp_path / "out").exists()


KILLED = """
import sys
from param_decomp_lab.data import plan
plan.UNIT_BYTES = int(sys.argv.pop(1))
from param_decomp_lab.cli import main
if __name__ == "__main__":
    main()
"""


def run(*words, unit_bytes=SMALL, **options):
    command = [sys.executable, "-c", KILLED, str(unit_bytes), "data", "tokenize", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def kill_and_go_on(corpus, tmp_path, kills, seed, processes, unit_bytes):
    """Kills the command when ever more units are done, until it has ended; returns how often it was killed."""
    words = [corpus, "--out", tmp_path / "killed", "--seq-len", 32, "--processes", processes]
    undisturbed = run(*words[:2], tmp_path / "whole", *words[3:], unit_bytes=unit_bytes)
    assert undisturbed.wait() == 0, undisturbed.stdout.read()
    work, randomly = Unfinished(tmp_path / ".killed.unfinished", tmp_path / "killed"), random.Random(seed)
    done: set[int] = set()
    for number in range(kills):
        process = run(*words, unit_bytes=unit_bytes)
        wanted = len(done) + randomly.randrange(1, 4)
        while process.poll() is None and len(work.done()) < wanted:
            time.sleep(0.005)
        time.sleep(randomly.random() * 0.05)
        if process.poll() is not None:
            return number
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert done <= work.done()
        done = work.done()
        times = {number: work.record_file(number).stat().st_mtime_ns for number in done}
    process = run(*words, unit_bytes=unit_bytes)
    process.wait()
    assert process.returncode == 0, process.stdout.read()
    assert times
    assert contents(tmp_path / "whole") == contents(tmp_path / "killed")
    assert not work.folder.exists()
    return kills


@pytest.mark.slow
def test_killed_and_gone_on_with_the_bytes_are_the_same(corpus, tmp_path):
    assert kill_and_go_on(corpus, tmp_path, kills=2, seed=0, processes=1, unit_bytes=SMALL // 4) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_ten_times(corpus, tmp_path, seed):
    for name in "defghij":
        (corpus / f"{name}.txt").write_text("".join(f"<{name}.{i:05d} {'y' * (i % 37)}>\n" for i in range(9000)))
    assert kill_and_go_on(corpus, tmp_path, kills=10, seed=seed, processes=2, unit_bytes=SMALL) == 10


def test_a_process_whose_first_is_killed_ends_too(corpus, tmp_path):
    process = run(corpus, "--out", tmp_path / "out", "--seq-len", 32, "--processes", 2, unit_bytes=1 << 9)
    work = Unfinished(tmp_path / ".out.unfinished", tmp_path / "out")
    while not work.done():
        assert process.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.wait()
    gone = time.monotonic() + 60
    while any(Path(f"/proc/{child}/cmdline").exists() and is_running(child) for child in children):
        assert time.monotonic() < gone
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def table(file, **columns):
    pq.write_table(pa.table(columns), file, row_group_size=3)


def test_the_same_text_in_every_format(tmp_path):
    texts = [f"document {n}\nof é {n * n}\n" * 5 for n in range(40)]
    lines = "".join(json.dumps({"n": n, "story": text}) + "\n" for n, text in enumerate(texts)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.json").write_text(json.dumps([{"story": text} for text in texts], indent=1))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:900]) + gzip.compress(lines[900:]))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as out:
        out.write(lines)
    (tmp_path / "named").write_bytes(lines)
    table(tmp_path / "a.parquet", n=range(40), story=texts)
    table(tmp_path / "large.parquet", story=pa.array(texts, pa.large_string()))
    (tmp_path / "texts").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "texts" / f"{n:02d}.txt").write_text(text)
    found = {}
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "large.parquet", "texts", "named"):
        plan = planned([tmp_path / name], "json" if name == "named" else None, column=Column("story"))
        meta = tokenize(plan, tmp_path / "out", overwrite=True)
        assert meta.documents == 40
        found[name] = meta.sha256
    assert len(set(found.values())) == 1, found


def test_parquet_is_cut_at_row_groups(small_units, tmp_path):
    texts = [f"{n:06d} {'text ' * 1000}" for n in range(40)]
    table(tmp_path / "a.parquet", text=texts)
    plan = planned([tmp_path / "a.parquet"])
    assert 4 < len(plan.units) < 14
    tokenize(plan, tmp_path / "out", processes=1)
    both = text_of(tmp_path / "out" / "train") + text_of(tmp_path / "out" / "eval")
    assert len(set(re.findall(r"\d{6}", both))) > 37


def test_token_ids_are_taken_as_they_are(tmp_path):
    rows = np.arange(60 * 33, dtype=np.int64).reshape(60, 33) % 5000
    table(tmp_path / "ids.parquet", input_ids=rows.tolist())
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows))
    column = Column("input_ids", tokenized=True)
    hashes = set()
    for name in ("ids.parquet", "ids.jsonl"):
        plan = planned([tmp_path / name], tokenizer=None, column=column, row_starts=True)
        meta = tokenize(plan, tmp_path / "out", overwrite=True)
        hashes.add(meta.sha256)
        assert (meta.tokenizer, meta.separator, meta.vocab_size) == ("none", None, 1 + rows[:, :32].max())
        found = [TokenData(tmp_path / "out" / split) for split in ("train", "eval")]
        got = {tuple(row) for data in found for row in data.rows(range(len(data)))}
        assert got == {tuple(row[:32]) for row in rows}
    assert len(hashes) == 1
    meta = tokenize(planned([tmp_path / "ids.parquet"], tokenizer=None, column=column), tmp_path / "joined")
    assert meta.train.tokens + meta.train.dropped_tokens + meta.eval.tokens + meta.eval.dropped_tokens == rows.size
    plan = planned([tmp_path / "ids.parquet"], tokenizer=None, column=column, row_starts=True, seq_len=64)
    with pytest.raises(UserError, match="a row of 33 token ids, fewer than the 64 of --seq-len"):
        tokenize(plan, tmp_path / "long")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a\.jsonl, line 2: text should be text, not a number"),
        ("a.jsonl", b'{"body": "a"}\n', r"line 1: has no column text \(it has: body\); choose with --column"),
        ("a.jsonl", b'{"text": [1, 2]}\n', r"not a list; if it holds token ids, say so \(--tokenized\)"),
        ("a.jsonl", b'{"text": "a"\n', "line 1: not valid JSON"),
        ("a.json", b'[{"text": "a"}, 7]', r"a\.json: entry 1 should be an object, not a number"),
        ("a.jsonl.gz", b"no gzip", r"cannot read .*a\.jsonl\.gz"),
        ("a.jsonl.zst", b"no zstd at all", r"cannot read .*a\.jsonl\.zst"),
        ("a.parquet", b"PAR1", r"a\.parquet is not a whole Parquet file"),
        ("a.txt", b"\xff\xfe", r"a\.txt is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        tokenize_files([tmp_path / name], tmp_path / "out", seq_len=4)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_byte_order_mark_is_left_out(tmp_path, size):
    """Of a text, of lines and of a list of JSON, compressed too, however they are cut; inside it is a character."""
    documents = ["the first\nwith lines\n", "\ufeffa second one, with a mark of its own\n"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    for name, content in {
        "a.txt": documents[0], "b.jsonl": lines, "c.json": json.dumps([{"text": text} for text in documents]),
        "d.jsonl.gz": lines, "empty.txt": "",
    }.items():  # fmt: skip
        marked, plain = (tmp_path / which / name for which in ("marked", "plain"))
        for file, text in ((marked, "\ufeff" + content), (plain, content)):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes((gzip.compress if name.endswith(".gz") else bytes)(text.encode()))
        texts = []
        for file in (marked, plain):
            found = [document for span in file_spans([file], None, size) for document in span.documents(TEXT)]
            texts.append("".join("".join(document.content) for document in found))
        assert texts[0] == texts[1] == ("" if name == "empty.txt" else "".join(documents[: 1 + (name != "a.txt")])), (
            name
        )


BAD_LINES = {
    2: (b'{"text": 3}', "text should be text, not a number"),
    5: (b'{"text": "a', "not valid JSON"),
    6: (b'{"text": "\xff"}', "is not UTF-8 text"),
    9: (b'{"body": "a"}', "has no column text"),
    10: (b"[1]", "should be"),
}


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_records_are_left_out_and_named(small_units, tmp_path, processes):
    """The rest is as if they had not been there."""
    good = [json.dumps({"text": f"document {n}\n" * 30}).encode() for n in range(80)]
    lines = list(good)
    for number, (line, _) in BAD_LINES.items():
        lines.insert(number - 1, line)
    table(tmp_path / "c.parquet", text=pa.array(["a text\n" * 40, None, "another\n" * 40, None]))
    for folder, of in (("bad", lines), ("good", good)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(b"\n".join(of) + b"\n")
    shutil.copy(tmp_path / "c.parquet", tmp_path / "bad")
    table(tmp_path / "good" / "c.parquet", text=pa.array(["a text\n" * 40, "another\n" * 40]))
    plan = planned([tmp_path / "bad"], seq_len=16, skip_bad_records=True)
    meta = tokenize(plan, tmp_path / "out", processes=processes)
    want = tokenize(planned([tmp_path / "good"], seq_len=16), tmp_path / "want")
    assert (meta.documents, meta.skipped_records) == (want.documents, len(BAD_LINES) + 2)
    assert len(plan.units) > 1
    assert meta.train.tokens + meta.eval.tokens == want.train.tokens + want.eval.tokens
    assert DataMeta.read(tmp_path / "out") == meta
    for said, words in zip(meta.skipped, [*(words for _, words in BAD_LINES.values()), "row 2", "row 4"], strict=True):
        assert words in said
        assert str(tmp_path / "bad") in said
    with pytest.raises(BadRecord, match="line 2"):
        tokenize(planned([tmp_path / "bad"], seq_len=16), tmp_path / "none")


def test_skipping_on_the_command_line(tmp_path):
    pairs = (f'{{"text": "some text of a few words, {n}"}}\n{{"text": null}}\n' for n in range(20))
    (tmp_path / "a.jsonl").write_text("".join(pairs))
    command = ("data", "tokenize", tmp_path / "a.jsonl", "--seq-len", 8, "--out", tmp_path / "out", "--processes", 1)
    refused = pd_here(*command)
    assert refused.status == 2
    assert "a.jsonl, line 2: text should be text, not" in refused.err.replace("\n", " ")
    assert "--skip-bad-records" in refused.err
    done = pd_here(*command, "--skip-bad-records")
    assert done.status == 0, done
    assert "20 documents were read, and 20 records left out" in done.out
    assert done.out.count("a.jsonl, line") == 5
    assert len(json.loads((tmp_path / "out" / "meta.json").read_text())["skipped"]) == 20


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["a", None]), "text is missing in row 2"),
        (pa.array([1, 2]), "text has type int64; it should be text"),
        (pa.array([[1], [2]]), r"it should be text; if it holds token ids, say so \(--tokenized\)"),
    ],
)
def test_columns_that_hold_no_text(tmp_path, column, message):
    table(tmp_path / "a.parquet", text=column)
    with pytest.raises(UserError, match=message):
        tokenize_files([tmp_path / "a.parquet"], tmp_path / "out", seq_len=4)


def test_a_limit_within_a_unit(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(50_000)))
    whole = tokenize(planned([tmp_path / "a.txt"]), tmp_path / "whole")
    meta = tokenize(planned([tmp_path / "a.txt"], tokens=32_000), tmp_path / "out")
    assert meta.train.tokens == 32_000 < whole.train.tokens
    some, data = TokenData(tmp_path / "out" / "train"), TokenData(tmp_path / "whole" / "train")
    np.testing.assert_array_equal(some.rows(range(1000)), data.rows(range(1000)))


MEMORY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)),) * 2)
from param_decomp_lab.cli import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_corpus_larger_than_memory(tmp_path, ending):
    """Of 1.5 GB, with address space for 1.2 GB, of which libraries take half."""
    line = "".join(random.Random(0).choices("abcdefgh ", k=100_000))
    with open(tmp_path / f"a.{ending}", "w") as file:
        for n in range(15_000):
            file.write(f"{n} {line}\n" if ending == "txt" else json.dumps({"text": f"{n} {line}"}) + "\n")
    assert (tmp_path / f"a.{ending}").stat().st_size > 1_500_000_000
    words = ["data", "tokenize", str(tmp_path / f"a.{ending}"), "--out", str(tmp_path / "out"), "--processes", "1"]
    limit = str(1_200_000_000)
    ended = subprocess.run([sys.executable, "-c", MEMORY, limit, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert TokenData(tmp_path / "out" / "train").seq_len == 512
