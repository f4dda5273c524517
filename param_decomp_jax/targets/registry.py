"""The architectures that can be decomposed. A new one is a file of this folder and a line here."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.architecture import Architecture, UnsupportedConfig, check_sizes
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig

ARCHITECTURES: dict[str, type[Architecture]] = {
    kind.name: kind
    for kind in (
        LlamaConfig,
        GPTConfig,
        TMSConfig,
        ResidMLPConfig,
    )
}


def read_config(raw: Mapping[str, Any]) -> Architecture:
    """The architecture that a `config.json` describes. UnsupportedConfig for an unknown one, or for what it refuses."""
    name = raw.get("model_type", raw.get("architecture"))
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedConfig(f"model_type is {name!r}; what can be loaded is {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name].from_config(raw)
    check_sizes(architecture)
    return architecture


def find_published(hub_id: str) -> Architecture | None:
    """The sizes of a published model, None for one that no architecture lists."""
    for kind in ARCHITECTURES.values():
        if hub_id in kind.published:
            return kind.published[hub_id]
    return None
