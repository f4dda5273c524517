"""Builds the outline (shapes and shardings) of a run from its configuration, on devices that need not exist."""

from jax.sharding import Mesh

from param_decomp_jax.method.step import Problem
from param_decomp_lab.config.method_schema import LanguageModelFile, ToyFile
from param_decomp_lab.data.sources import BatchShapes, TokenShapes
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.base import Outline
from param_decomp_lab.setup.known_target import KnownTarget, UnknownTarget, find_target
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.toys import feature_batches
from param_decomp_lab.weights.target_folder import training_shapes, training_shardings


def known_target(resolved: ResolvedConfig) -> KnownTarget:
    """Returns the target's shapes. Raises UserError if neither a file nor a published name gives them."""
    target = find_target(resolved)
    if isinstance(target, UnknownTarget):
        raise UserError(target.reason)
    return target


def outline_on(resolved: ResolvedConfig, target: KnownTarget, mesh: Mesh) -> Outline:
    """Returns what the programs of the run are compiled from, on ``mesh``."""
    weights = training_shapes(target.architecture, target.dtype, training_shardings(mesh, target.problem.target))
    batches = _batches(resolved.config.method, target.problem, mesh)
    return Outline(target.problem, mesh, weights, resolved.leading, *batches)


def _batches(
    method: LanguageModelFile | ToyFile, problem: Problem, mesh: Mesh
) -> tuple[BatchShapes, BatchShapes | None]:
    """Returns the shapes of batches for training and for the evaluation (None without one)."""
    if isinstance(method, ToyFile):
        return feature_batches(method, problem, mesh)
    length, settings = method.data.max_seq_len, method.eval
    evaluated = None if settings is None else TokenShapes(settings.batch_size, length, mesh)
    return TokenShapes(method.pd.batch_size, length, mesh), evaluated
