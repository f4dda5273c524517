"""OLMo 2: a Llama with norms after attention and MLP, and with queries and keys normalised over all heads."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import DEFAULT_POSITIONS, ConfigJson
from param_decomp_jax.targets.llama import Defaults, even_head_dim, llama_fields, llama_keys
from param_decomp_jax.targets.qwen3 import QWEN3_NAMES
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION

DEFAULTS = Defaults(positions=DEFAULT_POSITIONS, eps=1e-5)


class Olmo2Config(Family):
    """Hugging Face's ``Olmo2ForCausalLM``. Refused: quantized weights."""

    name = "olmo2"
    title = "OLMo 2"
    model_classes = ("Olmo2ForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = QWEN3_NAMES | {
        "attention_out_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
    }

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Olmo2Config":
        c = ConfigJson(raw, cls.title)
        own = llama_fields(c, DEFAULTS, even_head_dim(c, nullable=False)) | c.all_or_none(
            c.n_layers("num_hidden_layers"), None
        )
        biases = ATTENTION if c.flag("attention_bias", False) else ()
        return cls(**own, norms="after", qk_norm="all", biases=biases)

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        keys = llama_keys(self, "Olmo2ForCausalLM", dtype, eos_token_id)
        return keys | {"attention_bias": bool(self.biases)}


Olmo2Config.published = {
    "allenai/OLMo-2-1124-7B": Olmo2Config.from_config(
        {
            "vocab_size": 100_352,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11_008,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
        }
    )
}
"""From their public ``config.json``."""
