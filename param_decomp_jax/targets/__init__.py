"""The networks that are decomposed: one file per architecture, found through `registry.py`."""

from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, TokenInputs, UnsupportedConfig
from param_decomp_jax.targets.base import Linears, Target, Weights, choose_sites
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.features import FeatureTarget, SparseFeatures
from param_decomp_jax.targets.plain_linears import PlainLinears
from param_decomp_jax.targets.points import Point
from param_decomp_jax.targets.registry import ARCHITECTURES, find_published, read_config
from param_decomp_jax.targets.transformer import Family, Transformer
from param_decomp_jax.targets.transformer_config import TransformerConfig

__all__ = [
    "ARCHITECTURES", "Architecture", "Decoder", "Family", "FeatureInputs", "FeatureTarget", "Linears",
    "PlainLinears", "Point", "SparseFeatures", "Target", "TokenInputs", "Transformer", "TransformerConfig",
    "UnsupportedConfig", "Weights", "choose_sites", "find_published", "read_config",
]  # fmt: skip
