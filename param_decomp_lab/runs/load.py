"""Opens a run folder: finds its checkpoint, and reads the components and the CI function from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import Mesh

from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.folder import CONFIG_FILE, saved_config
from param_decomp_lab.runs.opened import OpenedRun
from param_decomp_lab.runs.target import count_weight_bytes, find_architecture, with_target
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.programs import learned_shapes
from param_decomp_lab.setup.resolved import ResolvedConfig

Opened = TypeVar("Opened", bound=OpenedRun)


def open_run(
    kind: type[Opened],
    folder: str | Path,
    step: int | None = None,
    devices: int | None = None,
    target: str | Path | None = None,
) -> Opened:
    """Opens the run in ``folder`` as a ``kind`` of opened run. Arguments and errors are those of `load_run`."""
    found = find_checkpoint(Path(folder), step, None if target is None else Path(target))
    size = _bytes(learned_shapes(found.problem, make_mesh(MeshShape())))
    mesh = mesh_for(size + count_weight_bytes(found.resolved, found.architecture), devices)
    checkpoints = Checkpoints(found.folder)
    try:
        learned = checkpoints.restore_learned(found.step, learned_shapes(found.problem, mesh))
    except UserError as error:
        others = ", ".join(str(other) for other in checkpoints.steps() if other != found.step)
        raise UserError(f"{error}{f'; to open another one, give its step ({others})' if others else ''}") from error
    return kind(found.folder, found.resolved, found.step, found.architecture, found.problem, mesh, learned)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to read, with the run's configuration, architecture and decomposition problem."""

    folder: Path
    resolved: ResolvedConfig
    step: int
    architecture: Architecture
    problem: Problem


def find_checkpoint(folder: Path, step: int | None = None, target: Path | None = None) -> FoundCheckpoint:
    """Returns the checkpoint that `open_run` would open. Reads no arrays; raises UserError like `open_run`."""
    folder = folder.expanduser()
    config = saved_config(folder)
    if target is not None:
        config = with_target(config, target)
    checkpoints = Checkpoints(folder)
    at = _chosen_step(folder, checkpoints.steps(), step)
    where = f"{folder}: the checkpoint of step {at}"
    made_with = RunConfig.from_mapping(parse_yaml(checkpoints.configuration(at), where), where)
    _refuse_another_method(config, made_with, where)
    resolved = ResolvedConfig(config)
    architecture = find_architecture(folder, resolved)
    return FoundCheckpoint(folder, resolved, at, architecture, make_problem(resolved, architecture, folder))


def _chosen_step(folder: Path, steps: Sequence[int], step: int | None) -> int:
    """``step``, or the newest of ``steps``. Raises UserError if there is no such checkpoint."""
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UserError(f"{folder} has no checkpoint of step {step}; it has those of {', '.join(map(str, steps))}")
    return step


def _refuse_another_method(config: RunConfig, made_with: RunConfig, where: str) -> None:
    changes = [line for line in difference(made_with, config) if line.startswith("pd.")]
    if changes:
        lines = "\n  ".join(changes)
        raise UserError(f"{where} was made with another method than {CONFIG_FILE} says:\n  {lines}")


def mesh_for(size: int, devices: int | None) -> Mesh:
    """A mesh of ``devices`` devices of this machine, over which arrays are sharded.

    None: one device, or all of them if ``size`` bytes would fill more than half of one. Raises UserError if there are
    fewer devices.
    """
    here = jax.local_devices()
    if devices is None:
        limit = (here[0].memory_stats() or {}).get("bytes_limit")
        devices = 1 if limit is None or 2 * size <= limit else len(here)
    if not 1 <= devices <= len(here):
        raise UserError(f"devices: {devices}, but this machine has {len(here)} ({here[0].platform})")
    return make_mesh(MeshShape(fsdp=devices), here)


def _bytes(shapes: Learned) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
