"""Weights, wheels, tokenizers and token data that others made, damaged or to do harm: refused with one message."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.data import parquet_rows
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.data.spans import file_spans, find_files
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.tokenize_unit import UnitRecord
from param_decomp_lab.data.tokenizers import HuggingFaceTokenizer, load_tokenizer
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.folders import new_folder
from param_decomp_lab.harvest.state import SiteState
from param_decomp_lab.weights import gguf_file
from param_decomp_lab.weights.gguf_file import open_gguf
from param_decomp_lab.weights.safetensors_files import open_safetensors
from param_decomp_lab.weights.target_folder import TargetFolder, load_target, read_architecture
from param_decomp_lab.weights.torch_checkpoint import read_checkpoint
from tests.lab.in_time import in_time

GOLDEN = Path(__file__).parent.parent / "golden" / "llama"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "sharded_tied", tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.safetensors", "lies outside of"),
        ("/etc/passwd", "lies outside of"),
        (["a.safetensors"], "should be the name of a file"),
        ("a" * 256, "a name of more than 255 bytes"),
        ("a\0b", "null character"),
    ],
)
def test_an_index_names_files_of_its_folder(golden: Path, name: object, message: str) -> None:
    shutil.copy(next(golden.glob("*.safetensors")), golden.parent / "outside.safetensors")
    index = golden / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(places))
    with pytest.raises(UserError, match=rf"weight_map\.model\.norm\.weight: .*{message}"):
        load_target(golden)


def test_a_long_list_of_missing_files_is_a_short_message(golden: Path) -> None:
    places = {f"t{n}": f"{n}.safetensors" for n in range(1000)}
    (golden / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match="and 988 more") as raised:
        load_target(golden)
    assert len(str(raised.value)) < 1000


def test_integers_are_no_weights(golden: Path) -> None:
    for file in golden.glob("*.safetensors"):
        save_file({name: array.astype(np.int8) for name, array in load_file(file).items()}, file)
    with pytest.raises(UserError, match="is stored as I8; weights must be floating-point numbers"):
        load_target(golden)


LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 0}, "rope_theta: should be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta: should be a positive number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps: should be"),
        ({"rope_scaling": {**LLAMA_3, "factor": 0}}, r"rope_scaling\.factor: should be a positive number"),
        ({"rope_scaling": {**LLAMA_3, "low_freq_factor": 4.0}}, r"rope_scaling\.high_freq_factor: should be above"),
    ],
)
def test_numbers_of_the_rotary_embedding(golden: Path, changes: dict[str, Any], message: str) -> None:
    config = golden / "config.json"
    raw = json.loads(config.read_text())
    raw.pop("rope_parameters", None)
    config.write_text(json.dumps(raw | changes))
    with pytest.raises(UserError, match=message):
        read_architecture(golden)


def test_nan_in_the_rotary_embedding_from_wherever_it_comes() -> None:
    with pytest.raises(UnsupportedConfig, match="rope_theta"):
        LlamaConfig(20, 12, 2, 4, 2, 6, 16, rope_theta=float("nan"))


def test_a_dtype_that_is_none(golden: Path) -> None:
    for file in golden.glob("*.safetensors*"):
        file.unlink()
    raw = json.loads((golden / "config.json").read_text())
    (golden / "config.json").write_text(json.dumps(raw | {"dtype": ["x"], "torch_dtype": None}))
    with pytest.raises(UserError, match=r"config\.json: dtype is"):
        _ = TargetFolder(golden).dtype


def wheel(folder: Path, content: bytes) -> Path:
    file = folder / "model.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.gguf", content)
    return file


def unpacked_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the wheels opened from now on: how much is read of their members."""
    read, sizes = zipfile.ZipExtFile.read, [0]

    def counted(self: zipfile.ZipExtFile, n: int | None = -1) -> bytes:
        data = read(self, n)
        sizes[0] += len(data)
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    return sizes


def test_a_wheel_that_unpacks_to_more_than_weights_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "SMALL_BYTES", 1 << 20)
    sizes = unpacked_bytes(monkeypatch)
    with pytest.raises(UserError, match="unpacks to more than"), open_gguf(wheel(tmp_path, b"GGUF" + bytes(8 << 20))):
        pass
    assert sizes[0] <= 3 << 20


def test_a_wheel_without_a_gguf_in_its_member_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = unpacked_bytes(monkeypatch)
    with pytest.raises(UserError, match="is not a GGUF file"), open_gguf(wheel(tmp_path, bytes(8 << 20))):
        pass
    assert sizes[0] <= 1 << 20


def test_an_encrypted_wheel(tmp_path: Path) -> None:
    file = wheel(tmp_path, b"GGUF" + bytes(100))
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x03\x04") + 6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be unpacked .*encrypted"), open_gguf(file):
        pass


def test_a_wheel_with_a_damaged_stream(tmp_path: Path) -> None:
    file = wheel(tmp_path, b"GGUF" + np.random.default_rng(0).bytes(300))
    content = bytearray(file.read_bytes())
    content[42] ^= 0xFF  # in the first block's header
    file.write_bytes(content)
    with pytest.raises(UserError, match="damaged wheel"), open_gguf(file):
        pass


def tokenizer(folder: Path, vocab: dict[str, int], settings: str | None = None) -> Path:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(settings)
    return folder


def test_a_tokenizer_that_its_library_panics_at(tmp_path: Path) -> None:
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "x" * 9,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(UserError, match="is not a Hugging Face tokenizer file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ({"a": 0, "b": 4_000_000_000}, "the token 'b' has the id 4000000000; at most 16777215"),
        ({}, "its vocabulary is empty"),
    ],
)
def test_vocabularies(tmp_path: Path, vocab: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tokenizer(tokenizer(tmp_path, vocab))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[]", "should be an object"),
        ("{", "not valid JSON"),
        ('{"eos_token": 3}', "eos_token should be a text, not 3"),
        ('{"bos_token": {"content": ["a"]}}', "bos_token should be a text"),
        ("[" * 100_000, "nested more than 100 levels"),
    ],
)
def test_settings_of_a_tokenizer(tmp_path: Path, settings: str, message: str) -> None:
    found = load_tokenizer(tokenizer(tmp_path, {"a": 0}, settings))
    assert isinstance(found, HuggingFaceTokenizer)
    with pytest.raises(UserError, match=rf"tokenizer_config\.json.*{message}"):
        _ = found.separator


SPLIT = {"rows": 2, "tokens": 8, "dropped_tokens": 0, "shards": 1, "unigram_entropy": 1.0}
META = {
    "tokenizer": "bytes", "vocab_size": 256, "separator": 0, "seq_len": 4, "seed": 0, "eval_fraction": 0.5,
    "sources": [], "documents": 1, "train": SPLIT, "eval": SPLIT, "sha256": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": "x"}, {"seq_len": -1}, {"seed": True}, {"tokenizer": 3}, {"train": {**SPLIT, "tokens": "8"}}],
)
def test_a_description_of_data_with_words_where_numbers_are_due(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "meta.json").write_text(json.dumps(META))
    assert DataMeta.read(tmp_path).seq_len == 4
    (tmp_path / "meta.json").write_text(json.dumps(META | change))
    with pytest.raises(UserError, match=r"meta\.json is damaged"):
        DataMeta.read(tmp_path)


def rows(ids: list[list[int]]) -> pa.Array:
    return pa.array(ids, pa.list_(pa.int32()))


def shard(folder: Path, table: pa.Table) -> Path:
    pq.write_table(table, folder / "a.parquet")
    return folder


def test_rows_of_length_0(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its rows hold no tokens"):
        TokenData(shard(tmp_path, pa.table({"input_ids": rows([[], []])})))


def test_the_column_twice(tmp_path: Path) -> None:
    both = pa.Table.from_arrays([rows([[1]]), rows([[2]])], ["input_ids", "input_ids"])
    with pytest.raises(UserError, match="has 2 columns input_ids"):
        TokenData(shard(tmp_path, both))


@pytest.mark.parametrize(
    "first",
    [
        {"input_ids.a": pa.array([1, 2])},
        {"x": pa.array([{"a": 1, "b": [1]}, {"a": 2, "b": [2]}]), "input_ids.list": rows([[1], [2]])},
    ],
)
def test_columns_in_front_do_not_get_around_the_vocabulary(tmp_path: Path, first: dict[str, pa.Array]) -> None:
    data = TokenData(shard(tmp_path, pa.table({**first, "input_ids": rows([[1, 2], [3, 999]])})))
    with pytest.raises(UserError, match="row 1, position 1: token id 999"):
        data.check(100)
    data.check(1000)


class Footer:
    """A footer that says other counts than the file has."""

    def __init__(self, real: Any, **says: int) -> None:
        self._real, self._says = real, says

    def __getattr__(self, name: str) -> Any:
        return self._says[name] if name in self._says else getattr(self._real, name)

    def row_group(self, n: int) -> "Footer":
        return Footer(self._real.row_group(n), **{k[6:]: v for k, v in self._says.items() if k.startswith("group_")})


@pytest.mark.parametrize("says", [{"num_rows": 7}, {"group_num_rows": -2}, {"group_num_rows": 1 << 40}])
def test_counts_of_a_footer_are_not_believed(tmp_path: Path, says: dict[str, int]) -> None:
    file = shard(tmp_path, pa.table({"input_ids": rows([[1, 2], [3, 4]])})) / "a.parquet"
    with pytest.raises(UserError, match="its footer says"):
        parquet_rows._refuse_absurd_counts(file, Footer(pq.ParquetFile(file).metadata, **says))


def test_a_flipped_bit_in_the_footer(tmp_path: Path) -> None:
    """The data are refused, or read as they are; pyarrow itself ends the process in some of these cases."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": rows([[1, 2], [3, 4]])}), file, row_group_size=1)
    whole = file.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    for at in range(len(whole) - 8 - length, len(whole) - 8):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        file.write_bytes(content)
        try:
            data = TokenData(tmp_path)
            data.check(10)
            found = data.rows(range(len(data))).tolist()
        except UserError:
            continue
        assert found == [[1, 2], [3, 4]]


def shards_replaced_by_pipes(folder: Path) -> None:
    file = folder / "a.parquet"
    pq.write_table(pa.table({"input_ids": rows([[1, 2], [3, 4]])}), file)
    data = TokenData(folder)
    pipe_instead(file)
    data.rows(range(2))


def pipe_instead(file: Path) -> Path:
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    return file


WAITS: dict[str, Callable[[Path], object]] = {
    "a shard": lambda folder: TokenData(pipe_instead(folder / "a.parquet").parent),
    "a shard that was opened": shards_replaced_by_pipes,
    "a text": lambda folder: file_spans([pipe_instead(folder / "a.parquet")], None, 1),
    "weights": lambda folder: open_safetensors(pipe_instead(folder / "model.safetensors")),
    "a checkpoint": lambda folder: read_checkpoint(pipe_instead(folder / "a.safetensors")),
    "a checkpoint of torch": lambda folder: read_checkpoint(pipe_instead(folder / "a.pth")),
    "a save of a harvest": lambda folder: SiteState.empty(1, 1, 1).load(
        pipe_instead(folder / "0.totals.firings.npy").parent, 0
    ),
    "a record of a unit": lambda folder: UnitRecord.load(pipe_instead(folder / "00000.npz")),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, what: str) -> None:
    with pytest.raises(UserError, match="not a regular file"):
        in_time(lambda: WAITS[what](tmp_path), what)


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_input_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("mine")
    with pytest.raises(UserError, match="an input is empty"):
        find_files([given])
    assert find_files(["."]) == [Path("secret.txt")]


def test_a_glob_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a glob|no such text file"):  # Python 3.13 takes ** as *
        find_files([str(tmp_path / "a**b")])


def test_a_full_disk_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "meta.json").write_text("old")

    def write() -> None:
        with new_folder(out, marker="meta.json", overwrite=True) as folder:
            (folder / "part").write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(CannotWrite, match="No space left on device"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "meta.json").read_text() == "old"
