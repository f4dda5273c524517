"""Mistral: a Llama whose attention may read only a sliding window."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson
from param_decomp_jax.targets.llama import NAMES, llama_fields, llama_keys
from param_decomp_jax.targets.transformer import Family


class MistralConfig(Family):
    """Hugging Face's ``MistralForCausalLM``. Refused: quantized weights."""

    name = "mistral"
    title = "Mistral"
    model_classes = ("MistralForCausalLM",)
    prefix = "model."
    unread_tensors = ("lm_head.weight", "*rotary_emb.inv_freq")
    names = NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "MistralConfig":
        c, own = ConfigJson(raw, cls.title), llama_fields(raw, cls.title)
        if raw.get("num_key_value_heads") is None and "num_key_value_heads" not in raw:
            own["n_kv_heads"] = 8  # transformers' default, not the number of heads
        # A file without the key has transformers' default; null means no window.
        window = c.whole("sliding_window") if raw.get("sliding_window", 0) else None
        if "sliding_window" not in raw:
            window = 4096
        layers = () if window is None else c.window_layers(own["n_layers"], range(own["n_layers"]))
        return cls(**own, window=window, window_layers=layers)

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return llama_keys(self, "MistralForCausalLM", dtype, eos_token_id) | {"sliding_window": self.window}


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
