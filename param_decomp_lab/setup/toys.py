"""Makes the batches of a toy model: features drawn on the devices."""

from jax.sharding import Mesh

from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.architecture import FeatureInputs
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_lab.config.method_schema import ToyFile
from param_decomp_lab.data.sources import FeatureSource

TRAIN, EVAL, HARVEST = 0, 1, 2
"""Purposes of drawn batches: no two share a draw."""


def feature_batches(method: ToyFile, problem: Problem, mesh: Mesh) -> tuple[FeatureSource, FeatureSource | None]:
    """Returns batches for training and for the evaluation (None without one)."""
    inputs = problem.target.architecture.inputs
    assert isinstance(inputs, FeatureInputs)
    train = feature_source(method, inputs, method.pd.batch_size, TRAIN, mesh)
    return train, None if method.eval is None else feature_source(method, inputs, method.eval.batch_size, EVAL, mesh)


def feature_source(method: ToyFile, inputs: FeatureInputs, size: int, purpose: int, mesh: Mesh) -> FeatureSource:
    """Returns batches of ``size`` inputs that the schema's `data` describes. Different purposes share no draw."""
    data = method.data
    features = SparseFeatures(inputs.n_features, data.feature_probability, inputs.low, data.data_generation_type)
    return FeatureSource(features, size, method.pd.seed, purpose, mesh)
