"""Holds what a run works with, and makes the parts that do not depend on the kind of target."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.state import State, init_state
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import with_shardings
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.config.method_schema import EvalConfig
from param_decomp_lab.data.sources import BatchShapes, BatchSource
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.errors import UserError
from param_decomp_lab.metrics import Metric
from param_decomp_lab.schema.site_names import matches_module


@dataclass(frozen=True)
class Outline:
    """What a run's programs are compiled from, without arrays or data.

    ``weights``: shapes with shardings. ``train``, ``eval``: shapes of their batches; eval is None without an
    evaluation. ``leading``: leading axes of a training batch, and of its activations.
    """

    problem: Problem
    mesh: Mesh
    weights: Any
    leading: tuple[int, ...]
    train: BatchShapes
    eval: BatchShapes | None

    @cached_property
    def state(self) -> State:
        """Returns the shapes and shardings of the train state."""
        spec = self.problem.decomposition
        shapes = jax.eval_shape(partial(init_state, spec, self.problem.target.sites, self.leading))
        return with_shardings(shapes, state_shardings(self.mesh, spec, shapes))


@dataclass(frozen=True)
class Setup:
    """What a run works with. ``train``, ``eval``: return the batch of a step (or of an evaluation's number); eval is
    None without an evaluation.

    ``leading``: leading axes of a training batch, and of its activations. ``text``: turns token ids into text; None for
    a toy or without a tokenizer on this machine.
    """

    problem: Problem
    weights: Weights
    mesh: Mesh
    leading: tuple[int, ...]
    train: BatchSource
    eval: BatchSource | None
    text: TokenText | None = None

    @cached_property
    def outline(self) -> Outline:
        """Returns the same setup without its arrays."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.weights)
        return Outline(self.problem, self.mesh, shapes, self.leading, self.train, self.eval)


def build_mesh(shape: MeshShape) -> Mesh:
    """Builds a mesh of this shape. Raises UserError if there are too few devices, or a process
    would have none of them.
    """
    if shape.n_devices > jax.device_count():
        raise UserError(
            f"mesh: replica {shape.replica} x fsdp {shape.fsdp} x tensor {shape.tensor} needs {shape.n_devices} "
            f"devices, {_devices_there()}"
        )
    mesh = make_mesh(shape)
    used = {device.process_index for device in mesh.devices.flat}
    if len(used) < jax.process_count():
        raise UserError(
            f"mesh: takes {shape.n_devices} devices, those of {len(used)} processes, but {_devices_there()}; start "
            "fewer processes, or take more devices"
        )
    return mesh


def _devices_there() -> str:
    found, kind, processes = jax.device_count(), jax.default_backend(), jax.process_count()
    if processes == 1:
        return f"this machine has {found} ({kind})"
    return f"{processes} processes have {found} together ({kind})"


def check_site_patterns(settings: EvalConfig, sites: Sites) -> None:
    """Raises UserError for a pattern of `eval.metrics` that matches none of the sites."""
    names = [site.name for site in sites.all]
    for n, metric in enumerate(settings.metrics):
        for key, patterns in metric.patterns() if isinstance(metric, Metric) else ():
            if not any(matches_module(pattern, name) for pattern in patterns for name in names):
                where = f"eval.metrics.{n}.{key}"
                raise UserError(f"{where}: {', '.join(patterns)} matches none of the sites ({', '.join(names)})")
