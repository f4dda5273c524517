"""A toy model to decompose: its folder or recipe, and its features drawn on the devices."""

from pathlib import Path

from jax.sharding import Mesh
from rich.console import Console

from param_decomp_jax.targets.architecture import FeatureInputs
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_lab.config.method_schema import ToyFile
from param_decomp_lab.data.sources import FeatureSource
from param_decomp_lab.pretrain.toys import ensure_target
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup.base import Setup, build_mesh
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.target_source import fetch_target
from param_decomp_lab.weights.target_folder import read_architecture, read_weights, weight_shardings

TRAIN, EVAL, HARVEST = 0, 1, 2
"""Purposes of drawn batches: no two share a draw."""


def set_up_toy(resolved: ResolvedConfig, console: Console, processes: Processes = ALONE) -> Setup:
    """Target, weights, data and mesh of a toy run; the target is trained first if its recipe has made none yet."""
    config = resolved.config
    method = config.method
    assert isinstance(method, ToyFile)
    mesh = build_mesh(config)
    folder = toy_folder(resolved, console, processes)
    architecture = read_architecture(folder)
    problem = make_problem(resolved, architecture, folder)
    assert isinstance(architecture.inputs, FeatureInputs)
    weights = read_weights(folder, architecture, "float32", weight_shardings(mesh, problem.target))
    size = method.pd.batch_size
    evaluated = None
    if method.eval is not None:
        evaluated = feature_source(method, architecture.inputs, method.eval.batch_size, EVAL, mesh)
    return Setup(
        problem=problem,
        weights=weights,
        mesh=mesh,
        leading=(size,),
        train=feature_source(method, architecture.inputs, size, TRAIN, mesh),
        eval=evaluated,
    )


def toy_folder(resolved: ResolvedConfig, console: Console, processes: Processes = ALONE) -> Path:
    """The folder with the toy's weights; those of a recipe are trained now if they are not there, those of a run of the
    PyTorch project fetched."""
    source = resolved.config.wrapper.target
    recipe = None if source is None else source.pretrain
    if recipe is not None:
        return processes.in_turn(lambda: ensure_target(recipe, console))
    return fetch_target(resolved.target, console, processes)


def feature_source(method: ToyFile, inputs: FeatureInputs, size: int, purpose: int, mesh: Mesh) -> FeatureSource:
    """Batches of ``size`` inputs that the schema's `data` describes; of two purposes they share no draw."""
    data = method.data
    features = SparseFeatures(inputs.n_features, data.feature_probability, inputs.low, data.data_generation_type)
    return FeatureSource(features, size, method.pd.seed, purpose, mesh)
