"""Qwen 3: a Llama whose queries and keys are normalised head by head."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson
from param_decomp_jax.targets.llama import NAMES, Defaults, llama_fields, llama_keys
from param_decomp_jax.targets.qwen2 import window_fields, window_keys
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION, TransformerConfig

QWEN3_NAMES = NAMES | {
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
}
DEFAULTS, DEFAULT_HEAD_DIM = Defaults(positions=32_768, kv_heads=32), 128


class Qwen3Config(Family):
    """Hugging Face's ``Qwen3ForCausalLM``. Refused: quantized weights."""

    name = "qwen3"
    title = "Qwen3"
    model_classes = ("Qwen3ForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = QWEN3_NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Qwen3Config":
        c = ConfigJson(raw, cls.title)
        head_dim = c.whole("head_dim", DEFAULT_HEAD_DIM)
        return cls(**llama_fields(c, DEFAULTS, head_dim), **window_fields(c), **qwen3_fields(c))

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return qwen3_keys(self, "Qwen3ForCausalLM", dtype, eos_token_id)


def qwen3_fields(c: ConfigJson) -> dict[str, Any]:
    """Returns the fields that Qwen 3 has besides Llama's, with and without experts."""
    return {"qk_norm": "head", "biases": ATTENTION if c.flag("attention_bias", False) else ()}


def qwen3_keys(config: TransformerConfig, model_class: str, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
    """Returns the keys that `qwen3_fields` reads."""
    keys = llama_keys(config, model_class, dtype, eos_token_id) | window_keys(config)
    return keys | {"attention_bias": bool(config.biases)}


Qwen3Config.published = {
    f"Qwen/Qwen3-{size}": Qwen3Config.from_config(
        {
            "vocab_size": 151_936,
            "hidden_size": d_model,
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": d_mlp,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": tied,
        }
    )
    for size, d_model, n_layers, n_heads, d_mlp, tied in (
        ("0.6B", 1024, 28, 16, 3072, True), ("1.7B", 2048, 28, 16, 6144, True),
        ("4B", 2560, 36, 32, 9728, True), ("8B", 4096, 36, 32, 12_288, False),
    )
}  # fmt: skip
"""From their public ``config.json``."""
