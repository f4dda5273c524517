"""`pd weights import-torch`: converts a checkpoint of torch to a folder that can be decomposed.

The source is either a Hugging Face folder with `pytorch_model.bin`, of any architecture, or a model of the PyTorch
project (`torch_models.py`) with the file of settings that its training left beside the checkpoint.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture, UnsupportedConfig
from param_decomp_jax.targets.registry import read_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.safe_io.files import LISTING_BYTES
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.paths import path_within
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.weights.dtypes import DTYPES, Dtype
from param_decomp_lab.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, save_tensors
from param_decomp_lab.weights.target_folder import CONFIG_FILE, read_architecture, stored_name, tensor_shapes
from param_decomp_lab.weights.torch_checkpoint import needs_torch, read_checkpoint, require_torch
from param_decomp_lab.weights.torch_files import newest_checkpoint, settings_files, tokenizer_files
from param_decomp_lab.weights.torch_models import TorchSettings, convert, find_settings, strip_wrappers

SOURCE_FILE = "torch.json"
"""The file that says where a folder came from, which also marks folders of this command."""
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LEFT_OUT = ("*.rotary_emb.inv_freq",)
"""Tensors in old files of Hugging Face that follow from the configuration."""


@dataclass(frozen=True)
class TorchFiles:
    """Files of one model. ``settings``: those of a model of the PyTorch project; None for one of Hugging Face, which
    has a `config.json`. ``checkpoints``: several only for a model of Hugging Face.
    """

    folder: Path
    settings: TorchSettings | None
    checkpoints: tuple[Path, ...]

    def config(self) -> dict[str, Any]:
        """Returns the `config.json` of the model."""
        if self.settings is not None:
            return self.settings.config()
        return read_json(self.folder / CONFIG_FILE, "the target's configuration", dict)

    def architecture(self) -> Architecture:
        """Returns the architecture, read without the weights. Raises UserError for one that cannot be loaded."""
        return architecture_of(self.config(), str(self.folder) if self.settings is None else self.settings.where)


def find_files(source: Path, settings: Path | None = None) -> TorchFiles:
    """Finds the needed files of ``source``, a checkpoint or the folder with it. ``settings``: the settings file, if it
    is elsewhere.

    Raises UserError if there is nothing, no checkpoint, several without an order, or no settings of a known model.
    """
    if not source.exists():
        raise UserError(f"{source}: there is no such checkpoint and no such folder")
    folder = source if source.is_dir() else source.parent
    # Beside a checkpoint, and in a folder such as checkpoints/; not everything below, which may be a home folder.
    patterns = ("*", "*/*") if source.is_dir() else ("*",)
    paths = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    of_hugging_face = CONFIG_FILE in names and (PICKLE in names or PICKLE_INDEX in names)
    if of_hugging_face and settings is None and (source.is_dir() or source.name == PICKLE):
        return TorchFiles(folder, None, _hugging_face_parts(folder))
    checkpoint = folder / newest_checkpoint(names, str(folder)) if source.is_dir() else source
    looked = [settings] if settings is not None else [folder / name for name in settings_files(names)]
    for file in looked:
        found = find_settings(read_mapping(file, "the settings of a model"), str(file))
        if found is not None:
            return TorchFiles(folder, found, (checkpoint,))
    where = ", ".join(str(file.name) for file in looked) or "no file of settings"
    raise UserError(
        f"{folder}: the settings of the model are not there (looked at {where}); name the YAML that has them, such as "
        "model_config.yaml, with --config"
    )


def _hugging_face_parts(folder: Path) -> tuple[Path, ...]:
    if (folder / PICKLE).is_file():
        return (folder / PICKLE,)
    index = folder / PICKLE_INDEX
    places = read_json(index, "the index of a checkpoint", dict, LISTING_BYTES).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} is not an index of a checkpoint (no weight_map): download it again")
    parts = {path_within(folder, name, f"{index}: weight_map.{key}") for key, name in places.items()}
    return tuple(sorted(parts))


def import_torch(
    source: Path,
    out: Path,
    console: Console,
    *,
    settings: Path | None = None,
    dtype: Dtype | None = None,
    overwrite: bool = False,
) -> Architecture:
    """Makes the folder ``out`` from a checkpoint, or from the folder with it: `config.json`, safetensors, the tokenizer
    if there is one, and `torch.json`, which names its source. Returns the architecture.

    ``dtype``: of the weights; None keeps each tensor's own. ``out`` appears only when it is complete. Raises UserError
    as `find_files` and `read_checkpoint` do, for weights that do not match the settings, and if ``out`` is not empty
    (unless ``overwrite``, and this command made it) or not writable.
    """
    refuse_existing(out, marker=SOURCE_FILE, overwrite=overwrite)  # before any work is done
    files = find_files(source, settings)
    for checkpoint in files.checkpoints:
        if needs_torch(checkpoint):
            require_torch(str(checkpoint))
    config, architecture = files.config(), files.architecture()
    with new_folder(out, marker=SOURCE_FILE, overwrite=overwrite) as folder:
        parts, count = [SINGLE_FILE], len(files.checkpoints)
        if count > 1:
            parts = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        places: dict[str, str] = {}
        for part, checkpoint in zip(parts, files.checkpoints, strict=True):
            console.print(f"reading {checkpoint}", soft_wrap=True, highlight=False)
            state = strip_wrappers(read_checkpoint(checkpoint))
            if files.settings is not None:
                config, state = convert(files.settings, state)
                architecture = architecture_of(config, files.settings.where)
            tensors = checked_tensors(architecture, state, str(checkpoint))
            tensors = {name: _cast(array, dtype) for name, array in tensors.items()}
            save_tensors(tensors, folder / part, {"format": "pt"})
            places |= dict.fromkeys(tensors, part)
        refuse_missing(architecture, places, str(files.checkpoints[-1]))
        if count > 1:
            (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2) + "\n")
        if dtype is not None and "model_type" in config:  # a toy's has only sizes
            config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        for name in tokenizer_files(path.name for path in files.folder.iterdir()):
            shutil.copyfile(files.folder / name, folder / name)
        (folder / SOURCE_FILE).write_text(json.dumps(_origin(files), indent=2) + "\n")
        return read_architecture(folder)


def checked_tensors(architecture: Architecture, state: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Returns the tensors of ``state`` that the architecture reads. ``where``: their place, for errors.

    If two tensors should be one matrix, both are kept only if they differ; `target_folder.py` then reads both.

    Raises UserError for a name or a shape that it does not have, and for tensors of other than floating-point numbers.
    """
    shapes, prefix, tied = tensor_shapes(architecture), architecture.prefix, architecture.tied_tensors
    shapes |= {} if tied is None else {tied[1]: shapes[tied[0]]}
    shapes |= {other: shapes[name] for name, other in architecture.other_names.items() if name in shapes}
    short = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    tensors = {}
    for name, array in state.items():
        shape = shapes.get(name, short.get(name))
        if shape is None:
            if any(fnmatchcase(name, pattern) for pattern in (*architecture.unread_tensors, *LEFT_OUT)):
                continue
            raise UserError(
                f"{where}: {printable(name, 200)} has no place in the {architecture.title} of its settings; the two do "
                "not belong together"
            )
        if array.shape != shape:
            raise UserError(
                f"{where}: {name} has shape {list(array.shape)}, the settings imply {list(shape)}; the two do not "
                "belong together"
            )
        if array.dtype.kind not in "fV":  # V: bfloat16
            raise UserError(f"{where}: {name} holds {array.dtype}; weights must be floating-point numbers")
        tensors[name] = array
    if tied is not None:
        first, second = (stored_name(architecture, name, frozenset(tensors)) for name in tied)
        if first in tensors and second in tensors and np.array_equal(tensors[first], tensors[second]):
            del tensors[second]
    return tensors


def refuse_missing(architecture: Architecture, names: Iterable[str], where: str) -> None:
    """Raises UserError unless there is a tensor for everything that the architecture reads."""
    there, tied = frozenset(names), architecture.tied_tensors
    missing = [name for name in tensor_shapes(architecture) if stored_name(architecture, name, there) not in there]
    if tied is not None and stored_name(architecture, tied[1], there) in there:
        missing = [name for name in missing if name != tied[0]]
    if missing:
        raise UserError(
            f"{where}: has no {missing[0]} ({len(missing)} such), which the settings imply; the two do not belong "
            "together, or a file is missing"
        )


def _cast(array: np.ndarray, dtype: Dtype | None) -> np.ndarray:
    return np.ascontiguousarray(array if dtype is None else array.astype(DTYPES[dtype]))


def architecture_of(config: Mapping[str, Any], where: str) -> Architecture:
    try:
        return read_config(config)
    except UnsupportedConfig as error:
        raise UserError(f"{where}: {error}") from error


def _origin(files: TorchFiles) -> dict[str, Any]:
    digests = {}
    for checkpoint in files.checkpoints:
        with checkpoint.open("rb") as opened:
            digests[checkpoint.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    settings = CONFIG_FILE if files.settings is None else Path(files.settings.where).name
    return {"settings": settings, "checkpoints": digests}
