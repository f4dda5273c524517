"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and optionally sliding windows in its upper
layers."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson, layer_types
from param_decomp_jax.targets.llama import NAMES, Defaults, even_head_dim, llama_fields, llama_keys
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import SLICES, TransformerConfig

DEFAULTS = Defaults(positions=32_768, kv_heads=32)


class Qwen2Config(Family):
    """Hugging Face's ``Qwen2ForCausalLM``. Refused: quantized weights."""

    name = "qwen2"
    title = "Qwen2"
    model_classes = ("Qwen2ForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Qwen2Config":
        c = ConfigJson(raw, cls.title)
        return cls(**llama_fields(c, DEFAULTS, even_head_dim(c, nullable=False)), **window_fields(c), biases=SLICES)

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return llama_keys(self, "Qwen2ForCausalLM", dtype, eos_token_id) | window_keys(self)


def window_fields(c: ConfigJson) -> dict[str, Any]:
    """Returns the fields of the windows: layers from ``max_window_layers`` on have one if ``use_sliding_window`` is
    set."""
    window, first = optional_window(c), c.whole("max_window_layers", 28)
    n_layers = c.n_layers("num_hidden_layers")
    return c.sliding(n_layers, window, () if window is None else range(max(first, 0), n_layers))


def optional_window(c: ConfigJson) -> int | None:
    """Returns how far back layers with a window read; None unless ``use_sliding_window`` is set."""
    return c.window(4096) if c.flag("use_sliding_window", False) else None


def window_keys(config: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that `window_fields` reads."""
    first = min(config.window_layers, default=config.n_layers)
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": first,
        "layer_types": layer_types(config),
    }


Qwen2Config.published = {
    f"Qwen/Qwen2.5-{size}": Qwen2Config.from_config(
        {
            "vocab_size": vocab_size,
            "hidden_size": d_model,
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "intermediate_size": d_mlp,
            "max_position_embeddings": longest,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": tied,
        }
    )
    for size, vocab_size, d_model, n_layers, n_heads, n_kv_heads, d_mlp, longest, tied in (
        ("0.5B", 151_936, 896, 24, 14, 2, 4864, 32_768, True),
        ("1.5B", 151_936, 1536, 28, 12, 2, 8960, 131_072, True),
        ("7B", 152_064, 3584, 28, 28, 4, 18_944, 131_072, False),
    )
}
"""From their public ``config.json``."""
