"""The toy models, small enough to compile in seconds: weights, inputs and targets."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from param_decomp_jax.decomposition.sites import PRE_IDENTITY
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.resid_mlp import ResidMLP, ResidMLPConfig
from param_decomp_jax.targets.tms import TMS, TMSConfig

Config = TMSConfig | ResidMLPConfig

ROWS = 6
SPARSE = TMSConfig(n_features=5, n_hidden=3, n_hidden_layers=2)
TIED = (("linear1", "linear2"),)
EVERY_MATRIX = {"linear1": 4, "hidden_layers.0": 3, "hidden_layers.1": 3, "linear2": 4}
"""Of `SPARSE`, with C; the hidden layers form a stack of two."""

EVERY_LAYER = {f"layers.{n}.{kind}": C for n in range(3) for kind, C in (("mlp_in", 4), ("mlp_out", 3))}
"""Of a `residual` network, with C; one stack of three per kind."""


def residual(activation: Any = "relu", *biases: str) -> ResidMLPConfig:
    """Three layers; ``biases``: `in_bias`, `out_bias` or both."""
    return ResidMLPConfig(5, 6, 4, 3, activation, **dict.fromkeys(biases, True))


def target(config: Config, chosen: Mapping[str, int], tied: tuple[tuple[str, str], ...] = ()) -> TMS | ResidMLP:
    if isinstance(config, TMSConfig):
        return TMS(config, choose_sites(config.matrices(), chosen, tied))
    return ResidMLP(config, choose_sites(config.matrices(), chosen, tied))


def with_identities(chosen: Mapping[str, int], C: int) -> dict[str, int]:
    """The chosen sites, and an identity before each."""
    return {**chosen, **{name + PRE_IDENTITY: C for name in chosen}}


def weights(config: Config, seed: int = 0) -> Any:
    """fp32 weights at which every path matters. ``linear2`` is not ``linear1`` transposed: no tie asks for it."""
    rng = np.random.default_rng(seed)
    shapes = config.weight_shapes()

    def leaf(path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
        name, noise = path[-1].key, rng.normal(size=shape)
        if name == "embed":
            return (noise / np.linalg.norm(noise, axis=-1, keepdims=True)).astype(np.float32)
        return (0.3 * noise if len(shape) < 2 or "bias" in name else 1.4 * noise / shape[-2] ** 0.5).astype(np.float32)

    return jax.device_put(jax.tree_util.tree_map_with_path(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple)))


def features(config: Config, rows: int = ROWS, seed: int = 7) -> np.ndarray:
    """fp32 feature vectors, about half of the features active."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, (rows, config.n_features))
    return (values * (rng.uniform(size=values.shape) < 0.5)).astype(np.float32)
