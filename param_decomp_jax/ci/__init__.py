"""Causal importance: from clean activations to one logit per component and position, and to λ and υ (section 3).

A CI function has two parts. ``features`` sees the clean inputs of many sites at once (None for a layerwise function);
``logits`` is one site's head on them. So a head can run where its mask is used, or all heads at once.
"""

from dataclasses import dataclass, replace

from jaxtyping import PRNGKeyArray

from param_decomp_jax.ci.chunkwise import (
    ChunkwiseTransformer,
    InputPatterns,
    UnfitGroups,
    init_chunkwise,
    runs_of_groups,
    stacks_read,
)
from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.ci.global_mlp import GlobalMLP, init_global_mlp
from param_decomp_jax.ci.layerwise import LayerwiseMLP, init_layerwise
from param_decomp_jax.ci.outputs import (
    CIOutputs,
    ImportanceReader,
    LazyLogits,
    Logits,
    StackFeatures,
    SumComponents,
    Summarise,
    per_component,
    per_position,
    run_ci_function,
)
from param_decomp_jax.ci.readout import with_readout
from param_decomp_jax.ci.squash import Squashing, squashings
from param_decomp_jax.ci.taps import Reads, ResidualInputs, Taps, UnfitTaps, all_layers, tap_points
from param_decomp_jax.ci.transformer import GlobalTransformer, init_transformer
from param_decomp_jax.decomposition.sites import Sites

__all__ = [
    "CIConfig", "CIFunction", "CIOutputs", "ChunkwiseTransformer", "ComponentReadout", "FunctionConfig", "GlobalMLP",
    "GlobalTransformer", "ImportanceReader", "InputPatterns", "LayerwiseMLP", "LazyLogits", "Logits", "Reads",
    "ResidualInputs", "Squashing", "StackFeatures", "SumComponents", "Summarise", "Taps", "UnfitGroups", "UnfitTaps",
    "groups_with_taps", "init_ci", "longest_row", "per_component", "per_position", "run_ci_function", "squashings",
    "stacks_read", "tap_points", "taps_of_groups", "with_residual_width", "without_readout",
]  # fmt: skip

FunctionConfig = LayerwiseMLP | GlobalMLP | GlobalTransformer | ChunkwiseTransformer


@dataclass(frozen=True)
class ComponentReadout:
    """A CI function with a component readout (C7)."""

    function: FunctionConfig


CIConfig = FunctionConfig | ComponentReadout


def without_readout(config: CIConfig) -> FunctionConfig:
    """Returns the configuration of the CI function itself."""
    return config.function if isinstance(config, ComponentReadout) else config


def groups_with_taps(config: CIConfig, sites: Sites) -> list[tuple[Taps, list[int]]]:
    """Returns the taps of each group's function with the group's layers (C10). A global function is one group; empty
    without taps."""
    match without_readout(config):
        case ChunkwiseTransformer(layers_per_chunk=n, taps=Taps() as taps):
            return [(taps, layers) for run in runs_of_groups(sites, n) for layers in run.layers_of_groups()]
        case GlobalMLP(taps=Taps() as taps) | GlobalTransformer(taps=Taps() as taps):
            return [(taps, all_layers(sites))]
        case _:
            return []


def taps_of_groups(config: CIConfig, sites: Sites) -> list[tuple[int, ...]]:
    """Returns the residual streams that each group's function reads (C10). A global function is one group; empty
    without taps.

    Raises UnfitTaps for a group that reads none.
    """
    return [taps.boundaries(layers) for taps, layers in groups_with_taps(config, sites)]


def with_residual_width(config: CIConfig, width: int | None) -> CIConfig:
    """Returns the configuration for a target whose residual stream has this width."""
    function = without_readout(config)
    if not isinstance(function, LayerwiseMLP) and function.taps is not None:
        function = replace(function, taps=replace(function.taps, width=width))
    return ComponentReadout(function) if isinstance(config, ComponentReadout) else function


def longest_row(config: CIConfig) -> int | None:
    """Returns the most tokens that a CI function takes in a row; None without a limit."""
    match without_readout(config):
        case GlobalTransformer(max_len=longest) | ChunkwiseTransformer(GlobalTransformer(max_len=longest)):
            return longest
        case LayerwiseMLP() | GlobalMLP():
            return None


def init_ci(config: CIConfig, key: PRNGKeyArray, sites: Sites) -> CIFunction:
    """Returns a CI function with fresh weights."""
    match config:
        case LayerwiseMLP():
            return init_layerwise(config, key, sites)
        case GlobalMLP():
            return init_global_mlp(config, key, sites)
        case GlobalTransformer():
            return init_transformer(config, key, sites)
        case ChunkwiseTransformer():
            return init_chunkwise(config, key, sites)
        case ComponentReadout(function):
            return with_readout(init_ci(function, key, sites), sites)
