"""The target of an opened run: its architecture from the run folder, its weights when first needed."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from param_decomp_jax.targets.architecture import Architecture, is_shape
from param_decomp_jax.targets.base import Target
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.wrapper import TargetSource
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.target_file import read_target
from param_decomp_lab.setup.known_target import UnknownTarget, find_target
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.target_source import PretrainedToy, Source, fetch_target, target_folder
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.weights.recorded_target import read_as_recorded
from param_decomp_lab.weights.target_folder import TargetFolder, read_weights, weight_shardings


def with_target(config: RunConfig, folder: Path) -> RunConfig:
    """Returns ``config`` with the target's weights in another folder."""
    source = TargetSource(folder=folder.expanduser().absolute())
    return replace(config, wrapper=config.wrapper.model_copy(update={"target": source}))


def find_architecture(run_folder: Path, resolved: ResolvedConfig) -> Architecture:
    """Returns the target's architecture, from `target.json` or, for runs older than that file, from the target itself.

    Raises UserError if neither is available.
    """
    known = read_target(run_folder)
    if known is not None:
        return known
    found = find_target(resolved)
    if isinstance(found, UnknownTarget):
        raise UserError(
            f"{run_folder} does not record its target's architecture, and the target was not found: {found.reason}"
        )
    return found.architecture


def count_weight_bytes(resolved: ResolvedConfig, architecture: Architecture) -> int:
    """Approximate size of the target's weights; a language model without ``weights_dtype`` is taken to be bfloat16."""
    size = 4 if resolved.weights_dtype == "float32" else 2
    return size * sum(map(prod, jax.tree.leaves(architecture.weight_shapes(), is_leaf=is_shape)))


def weights_folder(source: Source) -> Path:
    """The folder of the target's weights. Raises UserError if it is missing; nothing is downloaded or trained."""
    if isinstance(source, PretrainedToy) and source.cached() is None:
        raise UserError(
            f"the target of {source.title} is not in {source.read().out}: {source.how_to_train}, or give its folder "
            "(load_run(…, target=FOLDER))"
        )
    folder = target_folder(source)
    if not folder.is_dir():
        raise UserError(f"the target's folder {folder} does not exist; give another (load_run(…, target=FOLDER))")
    return folder


def load_weights(resolved: ResolvedConfig, target: Target, mesh: Mesh) -> Any:
    """Returns the target's weights on the mesh, fetched if a server has them. Raises UserError if they are missing or
    belong to another target, and CannotFetch.
    """
    if not isinstance(resolved.target, PretrainedToy):
        fetch_target(resolved.target, PlainConsole(stderr=True))
    folder = weights_folder(resolved.target)
    architecture = read_as_recorded(TargetFolder(folder), target.architecture)
    return read_weights(folder, architecture, resolved.weights_dtype, weight_shardings(mesh, target))
