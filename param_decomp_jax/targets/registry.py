"""The architectures that can be decomposed. A new one is a file of this folder and a line here."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.architecture import Architecture, UnsupportedConfig, check_sizes
from param_decomp_jax.targets.gemma2 import Gemma2Config
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.gpt2 import GPT2Config
from param_decomp_jax.targets.gpt_neox import GPTNeoXConfig
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_jax.targets.llama_simple_mlp import LlamaSimpleMLPConfig
from param_decomp_jax.targets.mistral import MistralConfig
from param_decomp_jax.targets.olmo2 import Olmo2Config
from param_decomp_jax.targets.olmoe import OlmoeConfig
from param_decomp_jax.targets.qwen2 import Qwen2Config
from param_decomp_jax.targets.qwen3 import Qwen3Config
from param_decomp_jax.targets.qwen3_moe import Qwen3MoeConfig
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.starcoder2 import Starcoder2Config
from param_decomp_jax.targets.tms import TMSConfig

ARCHITECTURES: dict[str, type[Architecture]] = {
    kind.name: kind
    for kind in (
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
        OlmoeConfig,
        Olmo2Config,
        Gemma2Config,
        GPT2Config,
        GPTNeoXConfig,
        Starcoder2Config,
        LlamaSimpleMLPConfig,
        GPTConfig,
        TMSConfig,
        ResidMLPConfig,
    )
}


def read_config(raw: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a `config.json` describes. Raises UnsupportedConfig for an unknown one, or for what
    it refuses."""
    name = raw.get("model_type", raw.get("architecture"))
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedConfig(f"model_type is {name!r}; what can be loaded is {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name].from_config(raw)
    check_sizes(architecture)
    return architecture


def find_published(name: str) -> Architecture | None:
    """Returns the sizes of a published model by its hub id or its run; None if no architecture lists it."""
    for kind in ARCHITECTURES.values():
        if name in kind.published:
            return kind.published[name]
    return None
