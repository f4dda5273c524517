"""BOS: rows, prompts and graphs of tokenizers that put it before every text; notes where data and target disagree."""

import io
import json
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from param_decomp_lab import load_run
from param_decomp_lab.config import load_config
from param_decomp_lab.data import plan as plan_module
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.plan import Settings
from param_decomp_lab.data.records import Column
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.token_writer import before_document, cut_rows
from param_decomp_lab.data.tokenize import file_units, make_plan, tokenize, tokenize_documents
from param_decomp_lab.data.tokenizers import chosen_bos, load_tokenizer
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.data_file import DATA_FILE, read_data
from param_decomp_lab.setup import set_up
from param_decomp_lab.setup.named_text import named_text
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests.lab.tiny_run import LIGHT, SEQ_LEN, Tiny, pd_here

BOS, EOS = 1, 2
POST: dict[str, Any] = {
    "none": None,
    "template": processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", BOS)]),
    "with its end": processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B", [("<s>", BOS), ("</s>", EOS)]),
    "end alone": processors.TemplateProcessing("$A </s>", "$A </s> $B", [("</s>", EOS)]),
    "roberta": processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)),
    "in a sequence": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", BOS)]),
        ]
    ),
    "byte level": processors.ByteLevel(trim_offsets=False),
}


def save_tokenizer(folder: Path, post: str = "template", **config: Any) -> Path:
    """A tokenizer of characters in the manner of Llama 2, with `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = ["<unk>", "<s>", "</s>", "▁", "\n", *string.digits, *string.ascii_letters, *string.punctuation]
    made = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    if POST[post] is not None:
        made.post_processor = POST[post]
    made.save(str(folder / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizers") / "llama")


def rows_of(folder: Path) -> np.ndarray:
    data = TokenData(folder)
    return data.rows(range(len(data)))


def refuse_wrong_rows(rows: np.ndarray) -> None:
    """Every row begins with BOS, each separator is followed by it, and no two stand side by side."""
    assert (rows[:, 0] == BOS).all()
    assert (rows[:, 1:][rows[:, :-1] == EOS] == BOS).all()
    assert not ((rows[:, 1:] == BOS) & (rows[:, :-1] == BOS)).any()


@pytest.mark.parametrize("add", [None, True, False])
@pytest.mark.parametrize("post", POST)
def test_the_default_is_what_transformers_does(tmp_path: Path, post: str, add: bool | None) -> None:
    """Whose version 5 goes by the post-processor alone."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = save_tokenizer(tmp_path, post, **({} if add is None else {"add_bos_token": add}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos == BOS
    for theirs in (AutoTokenizer, PreTrainedTokenizerFast):
        first = theirs.from_pretrained(folder)("text").input_ids[0]
        assert chosen_bos(tokenizer, None) == (BOS if first == BOS else None)
    assert (chosen_bos(tokenizer, True), chosen_bos(tokenizer, False)) == (BOS, None)


def test_which_token_is_bos(tmp_path: Path) -> None:
    """What the post-processor puts first, else what the settings name, else a usual name; else there is none."""
    folder = save_tokenizer(tmp_path, "template", bos_token="a")
    assert load_tokenizer(folder).bos == BOS
    named = save_tokenizer(tmp_path, "none", bos_token={"content": "a"})
    assert load_tokenizer(named).bos == load_tokenizer(named).encode(["a"])[0][-1]
    (named / "tokenizer_config.json").unlink()
    assert load_tokenizer(named).bos == BOS
    words = Tokenizer(models.WordLevel({"<s>": 0, "word": 1}))  # without an unknown token: refuses other texts
    words.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    words.save(str(tmp_path / "words.json"))
    assert not load_tokenizer(tmp_path / "words.json").adds_bos
    odd = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}))
    odd.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 70_000)])
    odd.save(str(tmp_path / "odd.json"))
    assert not load_tokenizer(tmp_path / "odd.json").adds_bos
    assert load_tokenizer("bytes").bos is None


TEXTS = st.lists(st.text("ab \n", max_size=12).map(lambda text: text or "c"), min_size=2, max_size=12)


@given(texts=TEXTS, literal=st.sets(st.integers(0, 11)), seq_len=st.integers(2, 7), at_once=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_rows_without_bos_are_the_stream(
    llama: Path, texts: list[str], literal: set[int], seq_len: int, at_once: int
) -> None:
    """Also where texts begin with BOS themselves, and however the rows are asked for."""
    tokenizer = load_tokenizer(llama)
    pieces = tokenizer.encode([f"{'<s>' * (n in literal)}{text}" for n, text in enumerate(texts)])
    pieces = [ids[ids != 3] if ids[1:2] == [BOS] else ids for ids in pieces]  # a literal <s> comes after a space
    stream = [np.concatenate([before_document(ids, EOS, BOS), ids]) for ids in pieces]
    joined = np.concatenate(stream)
    rows, used = cut_rows(joined, seq_len, BOS)
    refuse_wrong_rows(rows)
    plain = np.concatenate([np.concatenate([[EOS], ids[ids != BOS]]) for ids in pieces])
    kept = rows[rows != BOS]
    assert kept.tolist() == plain[: len(kept)].tolist()
    assert (joined[used:] != BOS).sum() == len(plain) - len(kept)
    assert len(joined) - used < seq_len
    # In parts, as they are written.
    found, left = [], joined
    for most in (1, None):
        part, n = cut_rows(left, seq_len, BOS, multiple=at_once if most is None else 1, most=most)
        found.append(part)
        left = left[n:]
    found.append(cut_rows(left, seq_len, BOS)[0])
    assert np.concatenate(found).tolist() == rows.tolist()


def test_a_separator_that_is_bos_is_there_once() -> None:
    ids = np.asarray([5, 6], np.int32)
    assert before_document(ids, EOS, BOS).tolist() == [EOS, BOS]
    assert before_document(ids, BOS, BOS).tolist() == before_document(ids, None, BOS).tolist() == [BOS]
    assert before_document(np.asarray([BOS, 5]), EOS, BOS).tolist() == [EOS]
    assert before_document(np.asarray([BOS, 5]), BOS, BOS).tolist() == []
    assert before_document(ids, EOS, None).tolist() == [EOS]
    assert before_document(ids[:0], None, None).tolist() == []


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Some 130 KB: documents of a line, and of more than a unit."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"record {n}"}) + "\n" for n in range(1200)))
    (folder / "b.txt").write_text("".join(f"line {n} of the second\n" for n in range(4000)))
    return folder


@pytest.mark.parametrize("tokens", [None, 20_000])
def test_units_processes_and_parts(
    llama: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    monkeypatch.setattr(plan_module, "UNIT_BYTES", 1 << 14)

    def plan(bos: bool | None) -> plan_module.TokenizePlan:
        options = Settings(seq_len=32, eval_fraction=0.2, tokens=tokens)
        return make_plan(file_units([corpus]), options, llama, (), bos)

    plain, whole = tokenize(plan(False), tmp_path / "plain"), tokenize(plan(None), tmp_path / "whole")
    assert plain is not None
    assert whole is not None
    assert (plain.bos, whole.bos) == (None, BOS)
    assert len(plan(None).units) > 5
    for number in (2, 0, 1):
        made = tokenize(plan(None), tmp_path / "parts", part=(number, 3))
    assert made == whole == DataMeta.read(tmp_path / "parts")
    assert made is not None
    for split in ("train", "eval"):
        rows = rows_of(tmp_path / "whole" / split)
        refuse_wrong_rows(rows)
        assert rows.tolist() == rows_of(tmp_path / "parts" / split).tolist()
        counts = whole.train if split == "train" else whole.eval
        before = plain.train if split == "train" else plain.eval
        assert len(rows) == counts.rows
        if tokens is None:  # all of the text is there, but for the separators where units were joined
            assert counts.dropped_tokens < 32
            here, there = rows[rows > EOS], rows_of(tmp_path / "plain" / split)
            assert len(here) == pytest.approx((there > EOS).sum(), abs=64)
            assert counts.rows == pytest.approx(before.rows * 32 / 31, rel=0.1)
    if tokens is not None:
        assert whole.train.tokens == plain.train.tokens == 20_000


def test_plans_with_and_without_are_not_mixed(
    llama: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the option is absent in one of them."""
    monkeypatch.setattr(plan_module, "UNIT_BYTES", 1 << 14)
    units = file_units([corpus])
    for first, then, said in ((False, None, "bos: None, now 1"), (True, False, "bos: 1, now None")):
        tokenize(make_plan(units, Settings(seq_len=32), llama, (), first), tmp_path / "out", part=(0, 2))
        with pytest.raises(UserError, match=f"begun with another plan .*{said}"):
            tokenize(make_plan(units, Settings(seq_len=32), llama, (), then), tmp_path / "out", part=(0, 2))
        shutil.rmtree(tmp_path / ".out.unfinished")


def test_what_adds_none_is_as_before(corpus: Path, tmp_path: Path) -> None:
    """The hashes are those of the version before there was BOS."""
    tokenizer = save_tokenizer(tmp_path / "gpt", "byte level")
    for out, given_tokenizer, digest in (
        ("bytes", "bytes", "11825cb3f1530f50ea4390e6b3c8ab6f86fd2b75784df121919c15fd3e6c7278"),
        ("gpt", tokenizer, "45bf6ef056d60be271b14a3ee6d75b7042047ff5128e23a11466590177847e17"),
    ):
        plan = make_plan(file_units([corpus / "b.txt"]), Settings(seq_len=32), given_tokenizer, ())
        assert "bos" not in plan.options
        made = tokenize(plan, tmp_path / "data" / out)
        assert made is not None
        assert made.bos is None
        assert made.sha256 == digest
    assert str(Settings()) == (
        "Settings(seq_len=512, eval_fraction=0.05, seed=0, rows_per_shard=65536, tokens=None, eval_tokens=None, "
        "column=Column(name='text', tokenized=False), row_starts=False)"
    )  # which folders of named text are called by


def test_old_data_have_no_bos(llama: Path, tmp_path: Path) -> None:
    documents = [Document(str(n), f"text {n}\n" * 9) for n in range(20)]
    made = tokenize_documents(documents, tmp_path / "out", tokenizer=llama, sources=(), seq_len=8)
    assert made.bos == BOS
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta.pop("bos") == BOS
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta))
    assert DataMeta.read(tmp_path / "out").bos is None
    (tmp_path / "out" / "meta.json").write_text(json.dumps({**meta, "bos": "<s>"}))
    with pytest.raises(UserError, match="bos is '<s>'"):
        DataMeta.read(tmp_path / "out")


def test_token_ids(llama: Path, tmp_path: Path) -> None:
    """Are taken as they are, unless BOS is asked for; rows that are taken as they are never get any."""
    ids = "".join(json.dumps({"input_ids": [BOS] * (n % 2) + [5 + n % 9] * 40}) + "\n" for n in range(60))
    (tmp_path / "ids.jsonl").write_text(ids)
    settings = Settings(seq_len=8, column=Column("input_ids", tokenized=True))

    def plan(bos: bool | None, tokenizer: Path | None = llama, **more: Any) -> plan_module.TokenizePlan:
        changed = Settings(**{**vars(settings), **more})
        return make_plan(file_units([tmp_path / "ids.jsonl"]), changed, tokenizer, (), bos)

    assert plan(None).bos is None
    made = tokenize(plan(True), tmp_path / "out")
    assert made is not None
    assert made.bos == BOS
    refuse_wrong_rows(rows_of(tmp_path / "out" / "train"))
    with pytest.raises(UserError, match="bos: only a tokenizer says which token begins a text"):
        plan(True, None)
    with pytest.raises(UserError, match="bos: rows are taken as they are, so no token"):
        plan(True, row_starts=True)


def test_the_command(llama: Path, corpus: Path, tmp_path: Path) -> None:
    words = ("data", "tokenize", corpus / "b.txt", "--seq-len", "16", "--processes", "1", "--overwrite", "--out")
    told = pd_here(*words, tmp_path / "out", "--tokenizer", llama)
    assert told.status == 0, told
    refuse_wrong_rows(rows_of(tmp_path / "out" / "train"))
    assert "rows of 16 tokens, each begins with BOS (token 1), vocabulary" in told.out
    without = pd_here(*words, tmp_path / "out", "--tokenizer", llama, "--no-bos")
    assert without.status == 0, without
    assert "BOS" not in without.out
    assert not (rows_of(tmp_path / "out" / "train") == BOS).any()
    refused = pd_here(*words, tmp_path / "other", "--bos")
    assert refused.status == 2, refused
    assert "the tokenizer bytes has no token that begins a text" in refused.err
    assert not (tmp_path / "other").exists()


# ---- runs ----


@pytest.fixture(scope="module")
def target(tiny: Tiny, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with a tokenizer that puts BOS before a text."""
    folder = shutil.copytree(tiny.folder / "target", tmp_path_factory.mktemp("target") / "llama")
    for file in llama.iterdir():
        shutil.copy(file, folder)
    return folder


def sets(*assignments: str) -> list[str]:
    return [word for text in (*LIGHT, *assignments) for word in ("--set", text)]


def set_up_of(tiny: Tiny, *assignments: str) -> tuple[Any, str]:
    """The setup of a run, and what is printed before it begins."""
    said = io.StringIO()
    return set_up(
        ResolvedConfig(load_config(tiny.config, (*LIGHT, *assignments))), Console(file=said, width=1000)
    ), said.getvalue()


@pytest.fixture(scope="module")
def trained(tiny: Tiny, target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on data with BOS, and what `pd train` said."""
    folder = tmp_path_factory.mktemp("bos")
    data = folder / "data"
    made = tokenize(
        make_plan(file_units([tiny.folder / "text"]), Settings(seq_len=SEQ_LEN, eval_fraction=0.2), target, ()), data
    )
    assert made is not None
    assert made.bos == BOS
    told = pd_here(
        "train", tiny.config,
        *sets(f"data={{train: {data}/train, eval: {data}/eval}}", f"target.folder={target}", f"out_dir={folder}",
              "run_id=p-000000b0"),
    )  # fmt: skip
    assert told.status == 0, told
    return folder / "p-000000b0", told.out


def test_prompts_do_what_the_data_did(trained: tuple[Path, str]) -> None:
    folder, said = trained
    assert "BOS" not in said
    assert "<s>" not in said
    run = load_run(folder)
    assert run.text is not None
    text = run.text.ids("3 times")
    assert run.text.bos == BOS
    assert run.text.prompt("3 times") == [BOS, *text]
    assert run.text.prompt("<s>3 times").count(BOS) == 1
    graph = run.graph("3 times", target=7, threshold=-1.0)
    assert graph.tokens == ("<s>", *run.text.tokens(text))
    assert [*graph.token_ids] == [BOS, *text]
    assert run.logits("3 times").shape[0] == 1 + len(text)
    np.testing.assert_allclose(run.logits("3 times"), run.logits(np.asarray([BOS, *text])), atol=1e-6)
    # Without the data too: another machine may not have them.
    shutil.rmtree(folder.parent / "data")
    assert read_data(folder) is not None
    moved = load_run(folder)
    assert moved.text is not None
    assert moved.text.prompt("3 times") == [BOS, *text]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"bos": "<s>"}', '{"bos": -1}', '{"bos": true}'])
def test_a_damaged_data_json(tmp_path: Path, content: str) -> None:
    (tmp_path / DATA_FILE).write_text(content)
    with pytest.raises(UserError, match=DATA_FILE):
        read_data(tmp_path)
    (tmp_path / DATA_FILE).unlink()
    assert read_data(tmp_path) is None


def test_notes_where_data_and_target_disagree(tiny: Tiny, target: Path, llama: Path, tmp_path: Path) -> None:
    """From `pd check`, once; data made elsewhere are known to a run alone."""
    silent = save_tokenizer(shutil.copytree(tiny.folder / "target", tmp_path / "silent"), "none")
    documents = [Document(str(n), f"text {n}\n" * 40) for n in range(40)]
    for name, bos in (("with", True), ("without", False)):
        tokenize_documents(documents, tmp_path / name, tokenizer=llama, bos=bos, sources=(), seq_len=SEQ_LEN)
    lacks = "note: data: rows do not begin with <s>, but the target's tokenizer adds it"
    has = "note: data: rows begin with <s>, but the target's tokenizer adds no BOS"
    for data, model, note in (
        ("with", target, None), ("without", target, lacks), ("with", silent, has), ("without", silent, None),
    ):  # fmt: skip
        folders = f"data={{train: {tmp_path / data}/train, eval: {tmp_path / data}/eval}}"
        told = pd_here("check", tiny.config, *sets(folders, f"target.folder={model}"))
        assert told.status == 0, told
        said = " ".join(told.out.split())
        assert said.count("<s>") == (note is not None)
        assert note is None or note in said
    # `pd pretrain` keeps what the model was trained on, which is more than what its tokenizer does.
    shutil.copy(tmp_path / "without" / "meta.json", shutil.copytree(target, tmp_path / "pretrained"))
    folders = f"data={{train: {tmp_path}/without/train, eval: {tmp_path}/without/eval}}"
    told = pd_here("check", tiny.config, *sets(folders, f"target.folder={tmp_path}/pretrained"))
    assert "<s>" not in told.out


def test_text_that_a_run_tokenizes(
    tiny: Tiny, target: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without BOS, as ever, unless the wrapper says so; `pd check` says what that means."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "a.txt"
    text.write_text("".join(f"{n} times {n} makes {n * n}\n" for n in range(900)))
    section = (
        "data=null", "data.dataset_name=text", f"data.data_files={text}", f"data.tokenizer_name={llama}",
        "data.column_name=text", "data.is_tokenized=false", f"target.folder={target}",
        "pd.steps=2",
    )  # fmt: skip
    note = "rows do not begin with <s>, but the target's tokenizer adds it"
    plain, begun = (named_text(load_config(tiny.config, (*LIGHT, *section, *more))) for more in ((), ("bos=true",)))
    assert plain is not None
    assert begun is not None
    assert plain.folder != begun.folder
    said = [" ".join(pd_here("check", tiny.config, *sets(*section, *more)).out.split()) for more in ((), ("bos=true",))]
    assert note in said[0]
    assert "<s>" not in said[1]
    setup, told = set_up_of(tiny, *section, "bos=true")
    assert setup.text.bos == BOS
    assert "<s>" not in told
    assert begun.is_made
    assert not plain.is_made
    refuse_wrong_rows(rows_of(begun.folders.train))
    assert DataMeta.read(begun.folder).bos == BOS
    refused = pd_here("check", tiny.config, *sets(*section, "bos=true", "data.tokenizer_name=bytes"))
    assert refused.status == 2, refused
    assert "bos: the tokenizer bytes has no token that begins a text" in refused.err
    rows = pd_here("check", tiny.config, *sets("data=null", "data.data_files=x/*", "bos=true"))
    assert rows.status == 2, rows
    assert "bos: is for text that the run tokenizes" in rows.err


def test_rows_made_elsewhere(tiny: Tiny, target: Path, tmp_path: Path) -> None:
    """A run looks what they begin with."""
    ids = np.full((40, SEQ_LEN), 7, np.int32)
    ids[:, 0] = BOS

    def table() -> pa.Table:
        return pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), SEQ_LEN)})

    for split in ("train", "eval"):
        (tmp_path / split).mkdir()
        pq.write_table(table(), tmp_path / split / "part.parquet")
    folders = f"data={{train: {tmp_path}/train, eval: {tmp_path}/eval}}"
    setup, told = set_up_of(tiny, folders, f"target.folder={target}")
    assert setup.text.bos == BOS
    assert "note: data" not in told
    ids[3, 0] = 7  # one row that begins otherwise
    pq.write_table(table(), tmp_path / "train" / "part.parquet")
    setup, told = set_up_of(tiny, folders, f"target.folder={target}")
    assert setup.text.bos is None
    assert told.count("note: data: rows do not begin with <s>, but the target's tokenizer adds it") == 1
