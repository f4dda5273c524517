"""`pd data tokenize --bpe`: a tokenizer that is trained on the text."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from param_decomp_lab.data import bpe as bpe_module
from param_decomp_lab.data.bpe import TEXT_BOUNDARY, train_bpe
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.plan import Settings, TokenizePlan
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.tokenize import file_units, make_plan
from param_decomp_lab.data.tokenize_unit import training_text
from param_decomp_lab.data.tokenizers import BYTES
from tests.lab.tiny_run import pd_here

WORDS = ("import", "return", "object", "è", "list", "value")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents, each of which has words that no other one has."""
    folder = tmp_path_factory.mktemp("corpus")
    drawn = np.random.default_rng(0)
    for number in range(40):
        own = "".join(drawn.choice(list("abcdefgh"), 12))
        text = " ".join(drawn.choice([*WORDS, own], 60)) + "\n"
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    words = ("data", "tokenize", corpus, "--bpe", "300", "--seq-len", "16", "--eval-fraction", "0.3")
    told = pd_here(*words, "--out", folder)
    assert told.status == 0, told.err
    assert "vocabulary 300" in told.out
    assert "each begins with BOS (token 0)" in " ".join(told.out.split())
    return folder


def plan_of(corpus: Path) -> TokenizePlan:
    return make_plan(file_units([corpus]), Settings(seq_len=16, eval_fraction=0.3), BYTES, ("corpus",))


def test_rows_hold_the_text_and_begin_with_bos(corpus: Path, made: Path) -> None:
    text, meta = TokenText(made), DataMeta.read(made)
    assert (meta.vocab_size, meta.bos, meta.separator) == (300, 0, 0)
    assert text.tokens([0]) == [TEXT_BOUNDARY]
    assert len(text.ids(" import")) == 1
    data = TokenData(made / "train")
    rows = data.rows(range(len(data)))
    assert (rows[:, 0] == 0).all()
    read = Tokenizer.from_file(str(made / "tokenizer.json")).decode(rows[rows != 0].tolist())
    whole = "".join(training_text(plan_of(corpus)))
    assert whole.startswith(read)
    assert len(whole) - len(read) < 200


def test_transformers_reads_it(made: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(made), TokenText(made, DataMeta.read(made).bos)
    for text in ("import the è list", "def f(x):\n    return x\n", ""):
        assert theirs(text)["input_ids"] == ours.prompt(text)
        assert theirs.decode(ours.ids(text)) == text
    assert theirs.bos_token == theirs.eos_token == TEXT_BOUNDARY


def test_held_out_text_is_not_read(corpus: Path, made: Path, tmp_path: Path) -> None:
    training = list(training_text(plan_of(corpus)))
    assert 0 < len(training) < 40
    train_bpe(iter(training), 300, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()
    train_bpe([file.read_text(encoding="utf-8") for file in sorted(corpus.iterdir())], 300, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (made / "tokenizer.json").read_bytes()


def test_the_beginning_of_long_text_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bpe_module, "TRAINED_ON", 100)
    read = list[int]()

    def texts() -> Iterator[str]:
        for number in range(10):
            read.append(number)
            yield "forty characters, or so, in each of them"

    train_bpe(texts(), 260, tmp_path)
    assert read == [0, 1, 2, 3]  # the last ends it, and is not used


def test_little_text_gives_fewer_tokens(tmp_path: Path) -> None:
    train_bpe(["ab ab"], 1000, tmp_path)
    assert 257 < TokenText(tmp_path).tokenizer.vocab_size < 270


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bpe", "200"), "--bpe should be between 257 .* it is 200"),
        (("--bpe", "99999999"), "--bpe should be between 257 .* it is 99,999,999"),
        (("--bpe", "300", "--tokenizer", "bytes"), "--bpe trains a tokenizer, and --tokenizer names an existing one"),
        (("--bpe", "300", "--tokenized"), "--bpe trains a tokenizer, and --tokenized takes token ids"),
    ],
)  # fmt: skip
def test_what_is_refused(corpus: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    told = pd_here("data", "tokenize", corpus, "--seq-len", "16", "--out", tmp_path / "out", *words)
    assert told.status == 2
    assert re.search(message, " ".join(told.err.split()))
    assert not (tmp_path / "out").exists()


def test_a_bad_record_is_named(tmp_path: Path) -> None:
    lines = [f'{{"text": "import list {number}"}}' for number in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]) + "\n")
    words = ("data", "tokenize", tmp_path / "a.jsonl", "--bpe", "270", "--seq-len", "4", "--out", tmp_path / "out")
    told = pd_here(*words)
    assert told.status == 2
    assert "a.jsonl" in told.err
    assert "--skip-bad-records" in told.err
    assert pd_here(*words, "--skip-bad-records").status == 0
