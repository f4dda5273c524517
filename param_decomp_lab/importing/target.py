"""Finds the target of an imported decomposition: made from the checkpoint's own tensors, or found elsewhere and
compared with them.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.config.wrapper import TargetSource
from param_decomp_lab.errors import UserError
from param_decomp_lab.importing.run_files import RunFiles
from param_decomp_lab.importing.tensors import TARGET, State
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.paths import checked_path
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.setup.target_source import fetch_target, target_source
from param_decomp_lab.weights.import_torch import architecture_of, checked_tensors, refuse_missing
from param_decomp_lab.weights.safetensors_files import SINGLE_FILE, SafetensorsFolder, missing_files, save_tensors
from param_decomp_lab.weights.target_folder import CONFIG_FILE, TargetFolder, stored_name
from param_decomp_lab.weights.torch_files import settings_files, tokenizer_files
from param_decomp_lab.weights.torch_models import Kind, convert, convert_tensors, find_settings

KINDS: dict[str, Kind] = {"tms": "tms", "resid_mlp": "resid_mlp", "LlamaSimpleMLP": "llama_simple_mlp", "GPT2": "gpt2"}
"""Models of the PyTorch project, by a run's experiment or the class that its file names."""
FOLDER = "target"
"""The subfolder of a run with the target that was made from the checkpoint."""


@dataclass(frozen=True)
class FoundTarget:
    """A target. ``config``: the run's, which names the target. ``origin``: the source of its weights, in words.
    ``own``: the target to write into the run folder; None for a target that is elsewhere.
    """

    config: RunConfig
    architecture: Architecture
    origin: str
    own: "OwnTarget | None" = None


@dataclass(frozen=True)
class OwnTarget:
    """A target made from a checkpoint. ``config``: its `config.json`. ``beside``: the folder that may have its
    tokenizer.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    beside: Path

    def write(self, run_folder: Path) -> None:
        """Writes the target into the run folder. Raises OSError."""
        folder = run_folder / FOLDER
        folder.mkdir()
        tensors = {name: np.ascontiguousarray(array) for name, array in self.tensors.items()}
        save_tensors(tensors, folder / SINGLE_FILE, {"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n")
        for name in tokenizer_files(path.name for path in self.beside.iterdir()):
            shutil.copyfile(self.beside / name, folder / name)


def find_target(
    given: str | None, config: RunConfig, files: RunFiles, state: State, out: Path, console: Console
) -> FoundTarget:
    """Finds the target of the run ``config``.

    ``given``: a folder, a name on the hub, a run path, or a file with the settings of the model (`config.json`, or a
    YAML of the PyTorch project); None: the settings beside the checkpoint, or else what the configuration names. With
    settings alone, the weights are the checkpoint's. ``state``: the checkpoint's. ``out``: the run folder to be made.

    Raises UserError for a target that is missing or differs from the checkpoint's, and CannotFetch.
    """
    weights = {name.removeprefix(TARGET): array for name, array in state.items() if name.startswith(TARGET)}
    settings = _settings(given, files)
    if settings is not None:
        return _from_checkpoint(settings, config, files, weights, out)
    config = config if given is None else _naming(config, given)
    try:
        source = target_source(config)
        folder = fetch_target(source, console)
        found = TargetFolder(folder)
        architecture = found.architecture
    except UserError as error:
        raise UserError(
            f"{error}\n{files.source}: the target of the run was not found; give with --target its folder, its name on "
            "the Hugging Face hub, or the file with its settings (config.json, model_config.yaml)"
        ) from error
    _refuse_another(folder, architecture, config, weights, files.checkpoint)
    return FoundTarget(config, architecture, str(source))


def _settings(given: str | None, files: RunFiles) -> Path | None:
    """Returns the file with the settings of the model."""
    if given is None:
        names = [path.name for path in files.folder.iterdir()]
        candidates = [files.folder / name for name in (*settings_files(names), CONFIG_FILE) if name in names]
        return next((file for file in candidates if file.name == CONFIG_FILE or _of_a_model(file)), None)
    file = checked_path(given, "--target")
    return file if file.suffix in (".json", ".yaml", ".yml") and file.is_file() else None


def _of_a_model(file: Path) -> bool:
    return find_settings(read_mapping(file, "the settings of a model"), str(file)) is not None


def _from_checkpoint(settings: Path, config: RunConfig, files: RunFiles, weights: State, out: Path) -> FoundTarget:
    where = str(files.checkpoint)
    if not weights:
        raise UserError(
            f"{where}: holds no weights of the target; give a folder with them, or a name on the hub, with --target"
        )
    if settings.suffix == ".json":
        raw, tensors = read_json(settings, "the target's configuration", dict), dict(weights)
    else:
        found = find_settings(read_mapping(settings, "the settings of a model"), str(settings))
        if found is None:
            raise UserError(f"--target: {settings} has no settings of a model of the PyTorch project")
        raw, tensors = convert(found, weights)
    architecture = architecture_of(raw, str(settings))
    tensors = checked_tensors(architecture, tensors, where)
    refuse_missing(architecture, tensors, where)
    own, config = OwnTarget(raw, tensors, settings.parent), _in_folder(config, out / FOLDER)
    return FoundTarget(config, architecture, f"the checkpoint, with {settings}", own)


def _in_folder(config: RunConfig, folder: Path) -> RunConfig:
    source = TargetSource(folder=folder.absolute())
    return replace(config, wrapper=config.wrapper.model_copy(update={"target": source}))


def _naming(config: RunConfig, given: str) -> RunConfig:
    """Returns the configuration with the target that the user gives."""
    folder = checked_path(given, "--target")
    if (folder / CONFIG_FILE).is_file() and not missing_files(folder):
        return _in_folder(config, folder)
    target = config.method.target
    if isinstance(config.method, LanguageModelFile):
        of_torch = folder.exists() or given.startswith(("wandb:", "https:"))
        kind = {"kind": "pretrained", "run_path": given} if of_torch else {"kind": "hf", "model_name": given}
        named: dict[str, Any] = {"spec": {**kind, "model_class": config.method.target.spec.model_class}}
    else:
        named = {"run_path": given}
    raw = config.method.model_dump(mode="json")
    raw["target"] = target.model_dump(mode="json") | named
    return RunConfig.from_mapping({"wrapper": config.wrapper.model_dump(mode="json"), "torch": raw}, "--target")


def _refuse_another(
    folder: Path, architecture: Architecture, config: RunConfig, weights: State, checkpoint: Path
) -> None:
    """Raises UserError, with the differences, unless the weights in ``folder`` equal those in the checkpoint, if it has
    them.
    """
    if not weights:
        return
    where = str(checkpoint)
    kind = KINDS.get(_class(config))
    ours = dict(weights) if kind is None else convert_tensors(kind, weights, {}, where)
    tensors = checked_tensors(architecture, ours, where)
    with SafetensorsFolder(folder) as stored:
        lines = list(_differences(stored, architecture, tensors))
    if lines:
        told = "\n  ".join(first_few(lines))
        raise UserError(f"{folder}: its weights are not those that {checkpoint} decomposes:\n  {told}")


def _class(config: RunConfig) -> str:
    method = config.method
    return (
        method.target.spec.model_class.rpartition(".")[2]
        if isinstance(method, LanguageModelFile)
        else config.experiment
    )


def _differences(stored: SafetensorsFolder, architecture: Architecture, tensors: State) -> Iterator[str]:
    for name, theirs in tensors.items():
        there = stored_name(architecture, name, stored.names)
        if there not in stored.names:
            continue  # the second of two tensors that are one matrix
        ours = stored.read(there, tuple(slice(0, size) for size in theirs.shape))
        narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
        a, b = (x.astype(narrow).astype(np.float64) for x in (ours, theirs))
        if a.shape != b.shape:
            yield f"{there}: has shape {list(a.shape)} there, and {list(b.shape)} in the checkpoint"
        elif not np.array_equal(a, b):
            yield f"{there}: differs by up to {np.abs(a - b).max():.3g}, of values up to {np.abs(b).max():.3g}"
