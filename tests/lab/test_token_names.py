"""Names of token ids: distinct, fit to be shown, and the same wherever a token is shown."""

import io
import json
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from param_decomp_lab import load_run
from param_decomp_lab.browse.pages import by_sign, by_third
from param_decomp_lab.browse.server import make_app
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.tokenize import tokenize_files
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.show import show_graph
from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.plan import HarvestRequest
from param_decomp_lab.label.naming import label_question
from param_decomp_lab.label.texts import Texts
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.console import PlainConsole
from tests.lab.tiny_run import SITES, Tiny, pd_here

GPT2 = decoders.ByteLevel()
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def names_of(tokenizer: Tokenizer, folder: Path, ids: Any) -> list[str]:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenText(folder).tokens(ids)


def bpe(pieces: list[str], decoder: Any, added: tuple[str, ...] = ()) -> Tokenizer:
    return with_parts(models.BPE(numbered(pieces), []), decoder, added)


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(pieces)}


def with_parts(model: Any, decoder: Any, added: tuple[str, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


# ---- by kind of tokenizer ----


def test_bytes(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one two three four " * 20)
    (text / "b.txt").write_text("five six seven eight " * 20)
    tokenize_files([text], tmp_path / "data", seq_len=8, eval_fraction=0.5)
    found = TokenText(tmp_path / "data")
    names = found.tokens(range(400))
    assert names[ord("a")] == "a"
    assert [names[i] for i in (0, 9, 10, 32, 127, 128, 0xE6)] == ["␀", "␉", "↵", " ", "␡", "\\x80", "\\xe6"]
    assert names[256:] == [f"[{i}]" for i in range(256, 400)]
    assert len(set(names)) == 400
    whole = "日本é\n"
    assert found.text([*found.ids(whole), 300, 0xE6]) == "日本é↵[300]\\xe6"


def test_byte_level_bpe(tmp_path: Path) -> None:
    pieces = ["a", "Ġa", "æ", "æĹ", "æĹ¥", "Ċ", "ĉ", "Âł", "æĹ¥æ", "\\xe6", "[40]", "[3]", "âĨµ", "ï¿½", "Â«", "Ā"]
    names = names_of(bpe(pieces, GPT2, ("<s>", "é", " a", "[17]")), tmp_path, range(22))
    assert names == [
        *("a", " a", "\\xe6", "\\xe6\\x97", "日", "↵", "␉", "\\u00a0", "日\\xe6"),
        *("\\xe6[9]", "[40][10]", "[3]", "↵[12]", "�", "«", "␀"),
        *("<s>", "é", " a[18]", "[17]", "[20]", "[21]"),
    ]


def test_text_that_falls_back_to_bytes(tmp_path: Path) -> None:
    """A byte that is also an ordinary token leaves it the name; a line break that is a byte alone keeps its own."""
    pieces = ["<unk>", "<s>", "<0x0A>", "<0x41>", "<0xE6>", "<0xe7>", "A", "▁A", "▁", "▁▁", "日"]
    tokenizer = bpe(pieces, LLAMA, (" A", "\n\n", "<0x42>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert names_of(tokenizer, tmp_path, range(15)) == [
        *("<unk>", "<s>", "↵", "\\x41", "\\xe6", "\\xe7", "A", " A", " ", "  ", "日"),
        *(" A[11]", "↵↵", "B", "[14]"),
    ]


def test_word_pieces_and_unigrams(tmp_path: Path) -> None:
    words = ["[UNK]", ",", "##,", "a", "##a", "##", "<s>"]
    found = names_of(with_parts(models.WordPiece(numbered(words)), decoders.WordPiece()), tmp_path, range(8))
    assert found == [" [UNK]", ",", ",[2]", " a", "a", "##", " <s>", "[7]"]
    unigrams = [(piece, -1.0) for piece in ("<unk>", "▁a", "a", "a", "▁", "<0x0A>")]
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = with_parts(models.Unigram(unigrams, 0, True), decoder)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert names_of(tokenizer, tmp_path, range(7)) == ["<unk>", " a", "a", "a[3]", " ", "↵", "[6]"]


def test_long_tokens_show_both_ends(tmp_path: Path) -> None:
    pieces = ["-" * 100, "-" * 101, "-" * 102, "-" * 50 + "a" + "-" * 51]
    names = names_of(bpe(pieces, GPT2), tmp_path, range(4))
    assert names[0] == pieces[0]
    assert len(set(names)) == 4
    assert all(name.startswith("-" * 30) and "more characters" in name and len(name) < 120 for name in names[1:])


def test_tokens_that_the_library_cannot_decode_are_as_in_the_vocabulary(tmp_path: Path) -> None:
    """The vocabulary has no word that others could be decoded after, and the library panics at `b`."""
    tokenizer = with_parts(models.WordLevel({"b": 0, "bc": 1}, "none"), decoders.Strip("b", 1, 1))
    assert names_of(tokenizer, tmp_path, range(3)) == ["b", "c", "[2]"]


ODD = (
    *("a", "A", " a", "▁a", "Ġa", "▁", "Ġ", " ", "##", "##a", "<s>", "\\xe6", "\\x41", "\\u00a0", "\u00a0", "Âł", "æ"),
    *("æĹ", "æĹ¥", "日", "é", "Ã©", "Ċ", "\n", "↵", "\t", "␉", "ĉ", "\x1b[2J", "\u202e", "\u200b", "ï¿½", "�", "</w>"),
    *("<0x41>", "<0x0A>", "<0xE6>", "<0xZZ>", "[0]", "[3]", "[3][2]", "[12]", "[300]", "<s>[3]", "a[5]", "\\xe6[4]"),
    *("[01]", "[9999999999999999999999]", "-" * 101, "-" * 102, "\\x61", "[3][3]", "\x85", "\\u0085", "\u3164"),
)
DECODERS: tuple[Callable[[], Any], ...] = (
    *(lambda: GPT2, lambda: LLAMA, decoders.WordPiece, decoders.Metaspace, decoders.BPEDecoder, decoders.ByteFallback),
    *(lambda: None, decoders.CTC, lambda: decoders.Strip(" ", 1, 0), lambda: decoders.Replace("a", "")),
)
TEXTS = st.lists(st.one_of(st.sampled_from(ODD), st.text("aĠ▁æ\\x[]0163e«\n", max_size=4)), max_size=25)


@given(TEXTS, TEXTS, st.sampled_from(DECODERS), st.sampled_from(("bpe", "words", "unigrams")), st.randoms())
@settings(max_examples=150)
def test_names_are_distinct(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], added: list[str], decoder: Any, kind: str, random: Any
) -> None:
    vocabulary = dict(zip(dict.fromkeys(["a", *pieces]), random.sample(range(40), 40), strict=False))
    model = {
        "bpe": lambda: models.BPE(vocabulary, []),
        "words": lambda: models.WordLevel(vocabulary, "a"),
        "unigrams": lambda: models.Unigram([(piece, -1.0) for piece in ["a", *pieces]], 0, False),
    }[kind]()
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    names = names_of(with_parts(model, decoder(), tuple(added)), folder, range(400))
    assert len(set(names)) == 400
    assert all(name and printable(name) == name and "\n" not in name for name in names)
    assert TokenText(folder).tokens([7, 300]) == [names[7], names[300]]
    assert harvest_with(folder, names) == names  # a file with names gives the same


# ---- names in files ----


def harvest_with(folder: Path, texts: list[str]) -> list[str]:
    """The names that a harvest gives whose file of names has these."""
    found = object.__new__(Harvest)
    found.folder, found._file = folder, lambda name: pq.ParquetFile(folder / name)
    pq.write_table(pa.table({"text": texts}), folder / "vocabulary.parquet")
    assert found.vocabulary is not None
    names: list[str] = found.vocabulary.to_pylist()
    return names


def test_names_of_an_older_harvest_are_told_apart(tmp_path: Path) -> None:
    older = ["�", "a", "�", "", "", "\\x12c", "a\x1b", "[0]", "�[2]"]
    assert harvest_with(tmp_path, older) == ["�", "a", "�[2][2]", "[3]", "[4]", "\\x12c", "a␛", "[0]", "�[2]"]


@pytest.mark.parametrize("column", [pa.array([1, 2]), pa.array(["a", None])])
def test_a_file_without_names_is_damaged(tmp_path: Path, column: pa.Array) -> None:
    with pytest.raises(UserError, match=r"vocabulary\.parquet.*damaged"):
        harvest_with(tmp_path, column)


# ---- the same everywhere ----

# Parts of characters, texts that look like other tokens' names, marks, markup.
PIECES = {
    ord(character): piece
    for character, piece in zip(
        "\n .aeikm0123",
        ("Ċ", "æ", "æĹ", "\\xe6", "Â«", "<b>x", "[116]", "ĠÂ«bÂ»", "Ġ", "âĢ®x", "ĠĠ", "'\""),
        strict=True,
    )
}
"""Without `s` and `t`, and with ids up to `m`: all above are beyond the tokenizer."""


@pytest.fixture(scope="module")
def named(tiny: Tiny, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, harvested, with another tokenizer beside its data. The network's vocabulary has 256."""
    folder = tmp_path_factory.mktemp("named")
    data = Path(shutil.copytree(tiny.folder / "data", folder / "data"))
    vocabulary = {f"w{i}": i for i in range(ord("m") + 1) if i not in PIECES}
    tokenizer = bpe([], GPT2)
    tokenizer.model = models.BPE(vocabulary | {piece: i for i, piece in PIECES.items()}, [])
    tokenizer.save(str(data / "tokenizer.json"))
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps(meta | {"tokenizer": "tokenizer.json"}))
    run = Path(shutil.copytree(finished, folder / "runs" / finished.name))
    config = (run / "config.yaml").read_text()
    assert str(tiny.folder / "data") in config
    (run / "config.yaml").write_text(config.replace(str(tiny.folder / "data"), str(data)))
    made = harvest(load_run(run, devices=1), HarvestRequest(tokens=640, examples=4))
    assert made is not None
    return run


def test_names_are_the_same_everywhere(named: Path, tmp_path: Path) -> None:
    run = load_run(named)
    assert run.text is not None
    names = run.text.tokens(range(256))
    assert len(set(names)) == 256
    assert [names[ord(c)] for c in " .ake1st"] == [
        *("\\xe6", "\\xe6\\x97", "\\xe6[97]", "[116][107]", "«", "\\u202ex", "[115]", "[116]"),
    ]
    # Harvest.
    [folder] = find_harvests(named)
    found = Harvest(folder)
    assert found.vocabulary is not None
    assert found.vocabulary.to_pylist() == names
    assert found.names([116, 32]) == ["[116]", "\\xe6"]
    # Graph: in memory, in the terminal, and in the browser.
    ids = [ord(c) for c in "make\n 01."]  # as many as in other tests, whose programs these are
    graph = run.graph(np.asarray(ids), target=[116, 32])
    assert list(graph.tokens) == [names[i] for i in ids]
    assert graph.output_names == {116: "[116]", 32: "\\xe6"}
    terminal = io.StringIO()
    show_graph(PlainConsole(file=terminal, width=200), graph)
    assert "'\\xe6' " in terminal.getvalue()
    graph.save(named / "graphs" / "g.json")
    site = max(SITES, key=lambda name: found.summary(name).firings.max())
    c = int(found.summary(site).firings.argmax())
    with TestClient(make_app([named.parent]), base_url="http://localhost:8720") as browser:
        here = f"/{named.name}/{folder.name}"
        page = browser.get(f"{here}/graphs/g").text
        found_places = re.findall(r"<small>([^<]*)<", page.partition('id="nodes"')[2])
        places = {unescape(place).rpartition(" · ")[2] for place in found_places}
        assert places <= {f"'{names[i]}' at {k}" for k, i in enumerate(ids)}
        assert "'\\xe6' at 5" in places
        page = browser.get(f"{here}/sites/{site}/{c}").text
    contexts = [
        [unescape(span) for span in re.findall(r"<span[^>]*>(.*?)</span>", context)]
        for context in re.findall(r'<p class="context">(.*?)</p>', page)
    ]
    examples = found.examples(site, c)
    shown = [example for _, group in (*by_sign(examples), *by_third(examples)) for example in group]
    assert contexts == [[names[i] for i in example.tokens] for example in shown]
    assert "[116]" in {name for context in contexts for name in context}
    # Prompts of labels, in which `«` marks a token.
    texts = Texts(found)
    marked = [name.replace("«", "\\u00ab").replace("»", "\\u00bb") for name in names]
    assert texts.words(range(256)) == marked
    prompt = label_question(texts, (site, c)).messages[1]["content"]
    for row in found.tokens(site, c).to_pylist()[:12]:
        assert f"«{marked[row['token']]}»" in prompt
    for example in found.examples(site, c)[:1]:
        told = "".join(marked[i] for i in example.tokens)
        assert told in prompt.replace("«", "").replace("»", "")
    # Shared files.
    out = tmp_path / "graph"
    assert pd_here("share", "graph", named, "--out", out).status == 0
    shared = json.loads((out / "g.json").read_text())
    assert shared["metadata"]["prompt_tokens"] == [names[i] for i in ids]
    outputs = [node["clerp"] for node in shared["nodes"] if node["feature_type"] == "logit"]
    assert [name.partition(" (p=")[0] for name in outputs] == ['Output "[116]"', 'Output "\\xe6"']
    for file in (out / "features").rglob("*.json"):
        component = json.loads(file.read_text())
        lists = [one["tokens"] for kind in component["examples_quantiles"] for one in kind["examples"]]
        assert {name for shown in (*lists, component["top_logits"]) for name in shown} <= set(names)
    for form in ("neuronpedia", "sae-dashboard"):
        out = tmp_path / form
        outcome = pd_here("share", "components", named, "--out", out, "--for", form, "--model", "tiny")
        assert outcome.status == 0, outcome
        layer = 1 + list(SITES).index(site)
        features = json.loads((out / "tiny" / f"{layer}-pd" / "batch-0.json").read_text())["features"]
        [feature] = [f for f in features if f.get("index", f.get("feature_index")) == c]
        shown = [activation["tokens"] for activation in feature["activations"]]
        assert shown == [[names[i] for i in example.tokens] for example in examples]
