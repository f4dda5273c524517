"""Finds the target of a configuration without its weights: from its config.json, its recipe, or its published name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.architecture import Architecture
from param_decomp_jax.targets.registry import ARCHITECTURES, find_published
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import HubSpec, LanguageModelFile
from param_decomp_lab.errors import CannotFetch, Errors, UserError
from param_decomp_lab.pretrain.toys import is_trained
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.schema.spelling import nearest
from param_decomp_lab.setup.problem import make_problem, misfits
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.target_source import PretrainedToy, Source
from param_decomp_lab.ui.descriptions import shown_path
from param_decomp_lab.weights.dtypes import DTYPES
from param_decomp_lab.weights.hub import Offline
from param_decomp_lab.weights.safetensors_files import missing_files
from param_decomp_lab.weights.target_folder import CONFIG_FILE, TargetFolder, read_architecture
from param_decomp_lab.weights.torch_run import TorchRun


@dataclass(frozen=True)
class KnownTarget:
    """A target without its weights. ``origin``: where the architecture was read. ``missing``: what a run needs that is
    not on this machine. ``dtype``: of the frozen weights on the devices. ``notes``: what a user should know about its
    files.
    """

    architecture: Architecture
    problem: Problem
    origin: str
    dtype: np.dtype[Any]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnknownTarget:
    """A target of unknown shapes. ``reason``: why they are unknown, and what would help. ``elsewhere``: whether it is
    on a server from which a run would fetch it.
    """

    reason: str
    elsewhere: bool = False


def find_target(resolved: ResolvedConfig) -> KnownTarget | UnknownTarget:
    """Returns the target and the decomposition's sites. Raises UserError for a pattern, a tie or a metric that does not
    fit it.
    """
    found, wanted = _architecture(resolved), resolved.weights_dtype
    if isinstance(found, UnknownTarget):
        return found
    dtype = found.stored if wanted is None else DTYPES[wanted]
    problem = make_problem(resolved, found.architecture, found.origin)
    return KnownTarget(found.architecture, problem, found.origin, dtype, found.missing, found.notes)


def target_mistakes(config: RunConfig) -> list[str]:
    """Lists what does not fit the target, in a configuration of which some parts could not be read."""
    errors = Errors()
    with errors:
        found = _architecture(ResolvedConfig(config))
        if not isinstance(found, UnknownTarget):
            errors.lines += misfits(config, found.architecture, found.origin)
        elif not found.elsewhere:
            errors.lines.append(found.reason)
    return errors.lines


def _architecture(resolved: ResolvedConfig) -> "FoundArchitecture | UnknownTarget":
    if isinstance(resolved.config.method, LanguageModelFile):
        return _language_architecture(resolved.target, resolved.config.method)
    return _toy_architecture(resolved.target)


class FoundArchitecture(NamedTuple):
    """An architecture and its source. ``stored``: the dtype of the weights. ``origin``: where the architecture was
    read. ``missing``, ``notes``: as in `KnownTarget`.
    """

    architecture: Architecture
    stored: np.dtype[Any]
    origin: str
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _language_architecture(source: Source, method: LanguageModelFile) -> FoundArchitecture | UnknownTarget:
    if isinstance(source, Path):
        if source.is_dir():
            lacks = missing_files(source)
            missing = (f"the target's weights: no {lacks[0]} in {shown_path(source)}",) if lacks else ()
            return _in_folder(source, missing)
        reason = f"target.folder: {source} is not there; give the folder of a model (its {CONFIG_FILE} is enough)"
        return _published_on_hub(method, "the wrapper's target.folder") or UnknownTarget(reason)
    if isinstance(source, TorchRun):
        _refuse_unknown_class(method)
        found = _torch_run(source)
        return found if isinstance(found, FoundArchitecture) else _published(str(source), source.missing()) or found
    if isinstance(source, PretrainedToy):  # in a file where this is one of the mistakes
        return UnknownTarget(f"{source.where}: {source.missing()}")
    folder = source.cached_config()
    if folder is None:
        _refuse_unknown_class(method)
        published = _published_on_hub(method, "the local Hugging Face cache") if source.revision is None else None
        if published is not None:
            return published
        try:
            folder = source.fetch_config()
        except (CannotFetch, Offline) as error:
            return UnknownTarget(str(error), elsewhere=True)
    missing = () if source.cached() else (f"the target's weights: {source.missing()}",)
    return _in_folder(folder, missing)


def _refuse_unknown_class(method: LanguageModelFile) -> None:
    """Raises UserError for a class that no architecture has, even if the model is not on this machine."""
    given = method.target.spec.model_class
    known = [name for kind in ARCHITECTURES.values() for name in kind.model_classes]
    if given.rpartition(".")[2] not in known:
        raise UserError(f"target.spec.model_class: is {printable(given, 200)}; {nearest(given, known)}")


def _in_folder(folder: Path, missing: tuple[str, ...]) -> FoundArchitecture:
    files = TargetFolder(folder)
    architecture = files.architecture
    notes = files.head_notes(architecture)
    return FoundArchitecture(architecture, files.dtype, shown_path(folder / CONFIG_FILE), missing, notes)


def _published_on_hub(method: LanguageModelFile, where: str) -> FoundArchitecture | None:
    """Returns the published architecture of a hub model. ``where``: the place where its weights were looked for."""
    spec = method.target.spec
    return _published(spec.model_name, f"{spec.model_name} is not in {where}") if isinstance(spec, HubSpec) else None


def _published(name: str, lacks: str) -> FoundArchitecture | None:
    """Returns a model whose sizes an architecture lists under this name."""
    found = find_published(name)
    if found is None:
        return None
    missing = f"the target's weights: {lacks}"
    return FoundArchitecture(found, np.dtype(found.published_dtype), "its published configuration", (missing,))


def _toy_architecture(source: Source) -> FoundArchitecture | UnknownTarget:
    dtype = DTYPES["float32"]
    if isinstance(source, PretrainedToy):
        recipe = source.read()
        made = (
            f"made already in {recipe.out}" if is_trained(recipe) else f"to be trained first ({recipe.steps:,} steps)"
        )
        return FoundArchitecture(recipe.model.config(), dtype, f"{source.title}, {made}", ())
    if isinstance(source, TorchRun):
        found = _torch_run(source)
        return found if isinstance(found, UnknownTarget) else found._replace(stored=dtype, notes=())
    assert isinstance(source, Path)
    if source.is_dir():
        return FoundArchitecture(read_architecture(source), dtype, shown_path(source / CONFIG_FILE), ())
    return UnknownTarget(f"target.folder: {source} is not there; give the folder of a toy, or target: {{pretrain: …}}")


def _torch_run(source: TorchRun) -> FoundArchitecture | UnknownTarget:
    folder = source.cached()
    if folder is not None:
        return _in_folder(folder, ())
    architecture = source.architecture()
    if architecture is None:
        return UnknownTarget(f"{source.where}: {source.missing()}", elsewhere=True)
    missing = f"the target's weights: {source.missing()}"
    return FoundArchitecture(architecture, DTYPES["float32"], str(source), (missing,))
