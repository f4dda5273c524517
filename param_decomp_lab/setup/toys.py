"""A toy model to decompose: its folder or recipe, and its features drawn on the devices."""

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from param_decomp_jax.placement import replicate
from param_decomp_jax.step import Problem
from param_decomp_jax.targets import resid_mlp, tms
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.config.method_schema import EvalConfig, ToyFile
from param_decomp_lab.config.metric_schema import IdentityCIError
from param_decomp_lab.data.sources import FeatureSource
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.toys import ensure_target
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup.base import Setup, build_mesh, check_site_patterns
from param_decomp_lab.setup.sites import build_sites
from param_decomp_lab.weights.toys import ToyConfig, load_toy

TRAIN, EVAL = 0, 1
"""Purposes of drawn batches: the two never share a draw."""


def set_up_toy(config: RunConfig, console: Console, processes: Processes = ALONE) -> Setup:
    """Target, weights, data and mesh of a toy run; the target is trained first if its recipe has made none yet."""
    method = config.method
    assert isinstance(method, ToyFile)
    mesh = build_mesh(config)
    folder = processes.in_turn(lambda: toy_folder(config, console))
    architecture, weights = load_toy(folder)
    problem = toy_problem(config, architecture, folder)
    size = method.pd.batch_size
    evaluated = None
    if method.eval is not None:
        evaluated = toy_source(method, architecture, method.eval.batch_size, EVAL, mesh)
    return Setup(
        problem=problem,
        weights=replicate(weights, mesh),
        mesh=mesh,
        leading=(size,),
        train=toy_source(method, architecture, size, TRAIN, mesh),
        eval=evaluated,
    )


def toy_problem(config: RunConfig, architecture: ToyConfig, origin: Path) -> Problem:
    """The decomposition of a toy of this architecture. ``origin``: folder or recipe that it comes from, for errors."""
    method, spec = config.method, decomposition(config)
    dtype = jnp.dtype(spec.compute_dtype)
    target: tms.TMS | resid_mlp.ResidMLP
    if isinstance(architecture, tms.TMSConfig):
        _check_experiment(config, "tms", origin)
        target = tms.TMS(architecture, build_sites(method.pd, tms.matrices(architecture)), spec.memory, dtype)
    else:
        _check_experiment(config, "resid_mlp", origin)
        sites = build_sites(method.pd, resid_mlp.matrices(architecture))
        target = resid_mlp.ResidMLP(architecture, sites, spec.memory, dtype)
    if method.eval is not None:
        check_site_patterns(method.eval, target.sites)
        _check_features(method.eval, architecture.n_features)
    return Problem(spec, target)


def toy_folder(config: RunConfig, console: Console) -> Path:
    """The folder with the toy's weights: the wrapper's, or that of its recipe, trained now if it is not there."""
    source = config.wrapper.target
    if source is None:
        assert isinstance(config.method, ToyFile)
        raise UserError(
            f"target.run_path: '{config.method.target.run_path}' is on a tracking server, which is not asked; give "
            "target: {pretrain: <recipe YAML>} or target: {folder: <path>} in the wrapper"
        )
    if source.folder is not None:
        return source.folder
    assert source.pretrain is not None
    return ensure_target(source.pretrain, console)


def toy_source(method: ToyFile, architecture: ToyConfig, size: int, purpose: int, mesh: Mesh) -> FeatureSource:
    """Batches of ``size`` inputs that the schema's `data` describes; of two purposes they share no draw."""
    low = 0.0 if isinstance(architecture, tms.TMSConfig) else -1.0
    data = method.data
    features = SparseFeatures(architecture.n_features, data.feature_probability, low, data.data_generation_type)
    return FeatureSource(features, size, method.pd.seed, purpose, mesh)


def _check_experiment(config: RunConfig, found: str, origin: Path) -> None:
    if config.experiment != found:
        raise UserError(f"{origin}: the target's architecture is {found}, but the experiment is {config.experiment}")


def _check_features(settings: EvalConfig, n_features: int) -> None:
    for n, metric in enumerate(settings.metrics):
        for i, pattern in enumerate(metric.identity_ci or () if isinstance(metric, IdentityCIError) else ()):
            if pattern.n_features != n_features:
                where = f"eval.metrics.{n}.identity_ci.{i}.n_features"
                raise UserError(f"{where}: is {pattern.n_features}, but the target has {n_features} features")
