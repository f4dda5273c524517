"""`load_run`: from a run's folder to what it learned, and nothing else of its checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from param_decomp_jax.mesh import MeshShape, make_mesh
from param_decomp_jax.step import Problem
from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.checkpoints.store import Checkpoints, Learned
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.yaml_io import parse_yaml
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening.run import Run
from param_decomp_lab.opening.target import architecture_of, bytes_of_weights, with_target
from param_decomp_lab.run_folder.folder import CONFIG_FILE, saved_config
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.programs import learned_shapes


def load_run(
    folder: str | Path, step: int | None = None, *, devices: int | None = None, target: str | Path | None = None
) -> Run:
    """Opens the run in ``folder`` for reading, whether it has ended or still goes on.

    Reads the item ``learned`` of the checkpoint (components and CI function), whatever devices saved it. The target's
    weights are read when something needs them: components, sites and metrics can be had without.

    ``step``: of the checkpoint; None is the newest. ``devices``: over how many the arrays are split; None is one, or
    all of this machine where one could not hold them. ``target``: folder with the target's weights, if they are not
    where they were when the run was made.

    Raises UserError: no run, no checkpoint or not this one, a checkpoint that cannot be read, a `config.yaml` that says
    another method than the checkpoint was made with, a target whose shapes nothing tells.
    """
    found = find_checkpoint(Path(folder), step, None if target is None else Path(target))
    size = _bytes(learned_shapes(found.problem, make_mesh(MeshShape())))
    mesh = mesh_for(size + bytes_of_weights(found.config, found.architecture), devices)
    checkpoints = Checkpoints(found.folder)
    try:
        learned = checkpoints.restore_learned(found.step, learned_shapes(found.problem, mesh))
    except UserError as error:
        others = ", ".join(str(other) for other in checkpoints.steps() if other != found.step)
        raise UserError(f"{error}{f'; open another one with its step ({others})' if others else ''}") from error
    return Run(found.folder, found.config, found.step, found.architecture, found.problem, mesh, learned)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to be read, and what was decomposed."""

    folder: Path
    config: RunConfig
    step: int
    architecture: Architecture
    problem: Problem


def find_checkpoint(folder: Path, step: int | None = None, target: Path | None = None) -> FoundCheckpoint:
    """What `load_run` opens, before any array is read. UserError as there."""
    folder = folder.expanduser()
    config = saved_config(folder)
    if target is not None:
        config = with_target(config, target)
    checkpoints = Checkpoints(folder)
    at = _chosen_step(folder, checkpoints.steps(), step)
    where = f"{folder}: the checkpoint of step {at}"
    made_with = RunConfig.from_mapping(parse_yaml(checkpoints.configuration(at), where), where)
    _refuse_another_method(config, made_with, where)
    architecture = architecture_of(folder, config)
    return FoundCheckpoint(folder, config, at, architecture, make_problem(config, architecture, folder))


def _chosen_step(folder: Path, steps: Sequence[int], step: int | None) -> int:
    """The step asked for, or the newest. UserError where there is none."""
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
    """So many devices of this machine, over which everything is split. None: one, or all where ``size`` bytes would
    fill more than half of one. UserError for more than there are."""
    here = jax.local_devices()
    if devices is None:
        limit = (here[0].memory_stats() or {}).get("bytes_limit")
        devices = 1 if limit is None or 2 * size <= limit else len(here)
    if not 1 <= devices <= len(here):
        raise UserError(f"devices: {devices}, but this machine has {len(here)} ({here[0].platform})")
    return make_mesh(MeshShape(fsdp=devices), here)


def _bytes(shapes: Learned) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
