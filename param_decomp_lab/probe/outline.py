"""Builds the outline (shapes and shardings) of a run from its configuration, on devices that need not exist."""

import jax
from jax.sharding import Mesh

from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_jax.sharding.placement import with_shardings
from param_decomp_jax.targets.architecture import FeatureInputs, is_shape
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import LanguageModelFile, ToyFile
from param_decomp_lab.data.sources import BatchShapes, TokenShapes
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.base import Outline
from param_decomp_lab.setup.known_target import KnownTarget, UnknownTarget, find_target
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.toys import EVAL, TRAIN, feature_source
from param_decomp_lab.weights.target_folder import weight_shardings


def known_target(resolved: ResolvedConfig) -> KnownTarget:
    """The target's shapes. UserError where neither a file nor a published name tells them."""
    target = find_target(resolved)
    if isinstance(target, UnknownTarget):
        raise UserError(target.reason)
    return target


def mesh_shape(config: RunConfig) -> MeshShape:
    m = config.wrapper.mesh
    return MeshShape(m.replica, m.fsdp, m.tensor, m.nodes)


def outline_on(config: RunConfig, target: KnownTarget, mesh: Mesh) -> Outline:
    """What the programs of the run are compiled from, on ``mesh``."""
    method = config.method
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, target.dtype), target.architecture.weight_shapes(), is_leaf=is_shape
    )
    held_out = None if method.eval is None else _batches(config, target, method.eval.batch_size, EVAL, mesh)
    return Outline(
        problem=target.problem,
        mesh=mesh,
        weights=with_shardings(shapes, weight_shardings(mesh, target.problem.target)),
        leading=target.leading,
        train=_batches(config, target, method.pd.batch_size, TRAIN, mesh),
        eval=held_out,
    )


def _batches(config: RunConfig, target: KnownTarget, rows: int, purpose: int, mesh: Mesh) -> BatchShapes:
    if isinstance(config.method, LanguageModelFile):
        return TokenShapes(rows, config.method.data.max_seq_len, mesh)
    assert isinstance(config.method, ToyFile)
    assert isinstance(target.architecture.inputs, FeatureInputs)
    return feature_source(config.method, target.architecture.inputs, rows, purpose, mesh)
