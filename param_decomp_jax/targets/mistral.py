"""Mistral: a Llama whose attention may read only a sliding window."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson, layer_types
from param_decomp_jax.targets.llama import NAMES, Defaults, even_head_dim, llama_fields, llama_keys
from param_decomp_jax.targets.transformer import Family

DEFAULTS = Defaults(positions=131_072, kv_heads=8, null_kv_heads=False)


class MistralConfig(Family):
    """Hugging Face's ``MistralForCausalLM``. Refused: quantized weights."""

    name = "mistral"
    title = "Mistral"
    model_classes = ("MistralForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "MistralConfig":
        c = ConfigJson(raw, cls.title)
        own = llama_fields(c, DEFAULTS, even_head_dim(c))
        window = c.window(4096)
        # With layer_types, transformers treats the model as a Ministral, in which they decide for each layer.
        return cls(**own, **c.sliding(own["n_layers"], window, () if window is None else range(own["n_layers"])))

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        keys = llama_keys(self, "MistralForCausalLM", dtype, eos_token_id) | {"sliding_window": self.window}
        some = 0 < len(self.window_layers) < self.n_layers
        return keys | ({"layer_types": layer_types(self)} if some else {})


MistralConfig.published = {
    "mistralai/Mistral-7B-v0.1": MistralConfig.from_config(
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        }
    )
}
"""From their public ``config.json``."""
