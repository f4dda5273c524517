"""Text to tokens to batches: splits that cannot overlap, batches that are functions of (seed, step), bad input."""

import json
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from param_decomp_lab.data.batches import Batches, epoch_order
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.pieces import PIECE_CHARS, Document, choose_eval
from param_decomp_lab.data.row_range import RowRange
from param_decomp_lab.data.spans import find_files
from param_decomp_lab.data.stdlib_text import stdlib_documents
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.token_writer import unigram_entropy
from param_decomp_lab.data.tokenize import tokenize_documents, tokenize_files
from param_decomp_lab.errors import UserError


def numbered(n, words=30):
    """Documents in which every line says where it is from."""
    return [Document(f"d{i}", "".join(f"<{i}.{j}>\n" for j in range(words))) for i in range(n)]


def all_tokens(folder):
    data = TokenData(folder)
    return data.rows(range(len(data))).ravel()


def all_bytes(folder):
    return bytes(all_tokens(folder).astype(np.uint8))


def rows_data(tmp_path, n_rows, seq_len=4, name="rows"):
    """Rows whose first token is their number."""
    folder = tmp_path / name
    folder.mkdir()
    ids = np.repeat(np.arange(n_rows), seq_len).astype(np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(ids), seq_len)
    pq.write_table(pa.table({"input_ids": column}), folder / "part-0.parquet", row_group_size=3)
    return TokenData(folder)


@pytest.fixture
def hf_tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|end|>", *alphabet, "Ġt", "he", "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return folder


def test_bytes_round_trip_with_separators(tmp_path):
    meta = tokenize_documents(numbered(40), tmp_path / "out", seq_len=16, eval_fraction=0.2, sources=("test",))
    for split, counts in (("train", meta.train), ("eval", meta.eval)):
        tokens = all_tokens(tmp_path / "out" / split)
        assert len(tokens) == counts.tokens == 16 * counts.rows
        documents = all_bytes(tmp_path / "out" / split).decode().split("\0")
        assert documents[0] == ""
        whole = {d.content for d in numbered(40)}
        assert all(text in whole for text in documents[1:-1])
        assert counts.unigram_entropy == pytest.approx(unigram_entropy(np.bincount(tokens, minlength=256)))
    assert DataMeta.read(tmp_path / "out") == meta
    assert meta.vocab_size == 256
    assert meta.separator == 0


def test_no_text_is_in_both_splits_even_when_repeated(tmp_path):
    long = Document("long", "".join(f"long line {i:05d}\n" for i in range(20_000)))
    documents = [*numbered(20), long, *numbered(20), long]
    meta = tokenize_documents(documents, tmp_path / "out", seq_len=32, eval_fraction=0.3, sources=())
    lines = {
        split: set(re.findall(r"<\d+\.\d+>|long line \d{5}", all_bytes(tmp_path / "out" / split).decode()))
        for split in ("train", "eval")
    }
    assert lines["train"] & lines["eval"] == set()
    assert len(lines["train"] | lines["eval"]) > 20_500  # all of them, but for the tails
    total = meta.train.tokens + meta.eval.tokens
    assert meta.eval.tokens / total == pytest.approx(0.3, abs=0.05)


def test_pieces_of_a_split_that_follow_each_other_have_no_separator(tmp_path):
    text = "".join(f"line {i}\n" for i in range(20_000))
    tokenize_documents([Document("a", text)], tmp_path / "out", seq_len=8, eval_fraction=0.01, sources=())
    assert len(list(Document("a", text).pieces())) > 10
    zeros = {split: all_bytes(tmp_path / "out" / split).count(0) for split in ("train", "eval")}
    assert zeros["eval"] == 1
    assert zeros["train"] <= 2  # before, and after the stretch held out if it is not at an end


@given(st.text(alphabet="ab\n", max_size=200).map(lambda s: s * 400), st.booleans())
@settings(max_examples=20)
def test_pieces_are_the_text(text, end):
    pieces = list(Document("x", text + end * "\n").pieces())
    assert "".join(pieces) == text + end * "\n"
    assert all(0 < len(piece) <= PIECE_CHARS for piece in pieces)


@given(st.dictionaries(st.binary(min_size=2, max_size=2), st.integers(1, 100), min_size=2), st.floats(0.01, 0.99))
def test_eval_gets_something_and_never_all(lengths, fraction):
    chosen = choose_eval(lengths, fraction)
    assert 0 < len(chosen) < len(lengths)


def test_sharding_does_not_change_the_rows(tmp_path):
    for shard in (3, 1000):
        meta = tokenize_documents(
            numbered(30), tmp_path / str(shard), seq_len=16, eval_fraction=0.2, rows_per_shard=shard, sources=()
        )
        assert meta.train.shards == -(-meta.train.rows // shard)
    few, many = (TokenData(tmp_path / n / "train") for n in ("1000", "3"))
    np.testing.assert_array_equal(few.rows(range(len(few))), many.rows(range(len(many))))


def test_hugging_face_tokenizer(tmp_path, hf_tokenizer):
    text = tmp_path / "texts"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"{i} the cat ate the hat é " * 5)
    for given_as in (hf_tokenizer, hf_tokenizer / "tokenizer.json"):
        meta = tokenize_files(
            [text], tmp_path / "out", tokenizer=given_as, seq_len=8, eval_fraction=0.2, overwrite=True
        )
        assert meta.tokenizer == "tokenizer.json"
        assert meta.vocab_size == 260
        assert meta.separator == 0
    tokens = all_tokens(tmp_path / "out" / "train")
    strings = TokenText(tmp_path / "out").tokens(tokens)
    assert len(strings) == len(tokens)
    assert " the" in strings
    assert "<|end|>" in strings
    assert "the cat ate the hat" in "".join(strings)
    TokenData(tmp_path / "out" / "train").check(meta.vocab_size)


def test_text_of_bytes_is_printable(tmp_path):
    tokenize_documents(numbered(20), tmp_path / "out", seq_len=8, eval_fraction=0.2, sources=())
    strings = TokenText(tmp_path / "out").tokens(np.arange(256))
    assert strings[ord("a")] == "a"
    assert strings[ord(" ")] == " "
    assert strings[ord("\n")] == "↵"
    assert strings[0] == "␀"
    assert strings[0xE2] == "\\xe2"
    assert all(string.isprintable() and string for string in strings)


@pytest.mark.slow
def test_stdlib_text_is_english_fixed_and_without_repeats():
    documents = stdlib_documents()
    assert documents == stdlib_documents()
    text = "\n\n".join(d.content for d in documents)
    assert 1_000_000 < len(text) < 5_000_000
    assert text.count(" the ") > 10_000
    paragraphs = [" ".join(p.split()) for d in documents for p in d.content.split("\n\n")]
    long = [p for p in paragraphs if len(p) >= 60]
    assert len(long) == len(set(long))


@given(n_rows=st.integers(1, 60), B=st.integers(1, 60), seed=st.integers(0, 2**64 - 1), step=st.integers(0, 1000))
def test_batches_are_functions_of_seed_and_step(n_rows, B, seed, step):
    class Rows(list):
        source = "rows"

    data = Rows(range(n_rows))
    if n_rows < B:
        with pytest.raises(UserError, match=r"less than one batch"):
            Batches(data, B, seed)
        return
    batches = Batches(data, B, seed)
    rows = batches.rows(step)
    for _ in range(3):
        batches.rows(step + 7)
    np.testing.assert_array_equal(rows, Batches(data, B, seed).rows(step))
    positions = range(step * B, step * B + B)
    np.testing.assert_array_equal(rows, [epoch_order(seed, p // n_rows, n_rows)[p % n_rows] for p in positions])
    parts = [Batches(data, B, seed, lo=lo, hi=hi).rows(step) for lo, hi in ((0, B // 2), (B // 2, B)) if lo < hi]
    np.testing.assert_array_equal(rows, np.concatenate(parts))


def test_an_epoch_takes_each_row_once(tmp_path):
    data = rows_data(tmp_path, 50)
    batches = Batches(data, 10, seed=3)
    epochs = [np.concatenate([batches[step][:, 0] for step in range(5 * e, 5 * e + 5)]) for e in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(50))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0][:10], Batches(data, 10, seed=4)[0][:, 0])
    assert batches[0].dtype == np.int32
    assert batches[0].shape == (10, 4)


def test_the_order_is_the_same_for_ever():
    """Resuming under another NumPy must not replay data: these are recorded values."""
    np.testing.assert_array_equal(epoch_order(0, 0, 8), [0, 2, 1, 5, 4, 3, 6, 7])


def test_token_ids_beyond_the_vocabulary_are_named_by_file_and_row(tmp_path):
    data = rows_data(tmp_path, 20)
    data.check(20, max_len=4)
    with pytest.raises(UserError, match=r"part-0\.parquet, row 17, position 0: token id 17 .*0 to 16"):
        data.check(17)
    with pytest.raises(UserError, match=r"rows have 4 tokens.*at most 3; tokenize with a seq_len of 3$"):
        data.check(20, max_len=3)
    with pytest.raises(UserError, match=r"a seq_len of 3, or raise attn_config.max_len$"):
        RowRange(data, 0, 10).check(20, 3, "attn_config.max_len")


def write(folder, **columns):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder


def test_bad_shards(tmp_path):
    with pytest.raises(UserError, match="no shards of tokens"):
        TokenData(tmp_path / "nowhere")
    rows_data(tmp_path, 3, name="train")
    with pytest.raises(UserError, match="train: give one of them"):
        TokenData(tmp_path)
    with pytest.raises(UserError, match=r"no column input_ids \(its columns: text\)"):
        TokenData(write(tmp_path / "text", text=["a", "b"]))
    with pytest.raises(UserError, match="must hold lists of integers"):
        TokenData(write(tmp_path / "strings", input_ids=["a", "b"]))
    with pytest.raises(UserError, match=r"row 1 of row group 0: has 2 tokens where others have 3"):
        TokenData(write(tmp_path / "ragged", input_ids=[[1, 2, 3], [1, 2], [1, 2, 3, 4]]))
    whole = write(tmp_path / "cut", input_ids=[[1, 2]] * 100) / "a.parquet"
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"a\.parquet is not a whole Parquet file"):
        TokenData(tmp_path / "cut")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_bit_that_turns_over_gives_no_other_tokens(tmp_path, kind):
    (tmp_path / "a.txt").write_text("".join(f"{n} times {n} makes {n * n}.\n" for n in range(900)))
    tokenize_files([tmp_path / "a.txt"], tmp_path / "out", seq_len=16, eval_fraction=0.2)
    file = tmp_path / "out" / "train" / "part-00000-00000.arrow"
    rows = TokenData(file).rows(range(len(TokenData(file))))
    if kind == "parquet":
        file = tmp_path / "old.parquet"
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 16)
        pq.write_table(pa.table({"input_ids": column}), file, compression="zstd", write_page_checksum=True)
    content = file.read_bytes()
    size = int.from_bytes(content[-8:-4] if kind == "parquet" else content[-10:-6], "little")
    footer = len(content) - 10 - size
    noticed = 0
    for place in range(4, footer, footer // 60):
        file.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        try:
            data = TokenData(file)
            found = data.rows(range(len(data)))
        except UserError as error:
            noticed += "damaged" in str(error) or "not a whole" in str(error)
        else:
            np.testing.assert_array_equal(found, rows)  # no byte of what is read
    assert noticed > 40


def test_tokens_that_their_statistics_deny_are_not_read(tmp_path):
    """In files of others, which have no checksums: the check against the vocabulary goes by the statistics."""
    file, ids = tmp_path / "a.parquet", np.full((50, 8), 77, np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), 8)
    pq.write_table(pa.table({"input_ids": column}), file, compression="none", use_dictionary=False)
    content = file.read_bytes()
    place = content.index(np.full(9, 77, np.int32).tobytes())
    file.write_bytes(content[: place + 3] + b"\x01" + content[place + 4 :])
    with pytest.raises(UserError, match=r"token ids 77 to 16777293, and 77 to 77 were written: it is damaged"):
        TokenData(file)


def test_plain_lists_of_int64_are_read_too(tmp_path):
    data = TokenData(write(tmp_path / "lists", input_ids=[[1, 2], [3, 2**40]]))
    np.testing.assert_array_equal(data.rows([0]), [[1, 2]])
    with pytest.raises(UserError, match="row 1, position 1"):
        data.check(50_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 1}, "seq_len must be at least 2; it is 1"),
        ({"seq_len": 1 << 63}, "seq_len must be at most 16,777,216; it is 9223372036854775808"),
        ({"seed": 10**50}, "seed must be below"),
        ({"eval_fraction": 0.0}, "eval_fraction must lie between 0 and 1"),
        ({"seq_len": 10_000}, "text is too short"),
        ({"tokenizer": "no/such/tokenizer"}, "no tokenizer at no/such/tokenizer"),
    ],
)
def test_bad_tokenize_arguments_leave_nothing_behind(tmp_path, change, message):
    settings = {"seq_len": 16, "eval_fraction": 0.2, "sources": ()} | change
    with pytest.raises(UserError, match=message):
        tokenize_documents(numbered(20), tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_replaced_only_when_asked_and_ours(tmp_path):
    out, arguments = tmp_path / "out", {"seq_len": 16, "eval_fraction": 0.2, "sources": ()}
    tokenize_documents(numbered(20), out, **arguments)
    with pytest.raises(UserError, match="not empty"):
        tokenize_documents(numbered(20), out, **arguments)
    tokenize_documents(numbered(30), out, overwrite=True, **arguments)
    assert DataMeta.read(out).documents == 30
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"no meta\.json"):
        tokenize_documents(numbered(20), home, overwrite=True, **arguments)
    with pytest.raises(UserError, match="cannot write"):
        tokenize_documents(numbered(20), home / "thesis.txt" / "out", **arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "out"]


def test_bad_text(tmp_path):
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(UserError, match=r"binary\.bin is not UTF-8"):
        tokenize_files([tmp_path], tmp_path / "out", seq_len=4)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"\*\.txt: no such text file"):
        find_files([str(tmp_path / "*.txt")])
    (tmp_path / ".hidden").write_text("x")
    assert find_files([tmp_path]) == [tmp_path / "binary.bin"]


def test_data_modules_do_not_import_jax():
    code = "import sys, param_decomp_lab.data.text, param_decomp_lab.data.batches; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
