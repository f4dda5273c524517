"""StarCoder2: LayerNorm, rotary embedding, grouped heads, a window in every layer, an MLP of two matrices."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson, common_keys, rope_keys
from param_decomp_jax.targets.llama import NAMES
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION

STARCODER2_NAMES = NAMES | {"up_proj": "model.layers.{}.mlp.c_fc", "down_proj": "model.layers.{}.mlp.c_proj"}
BIASES = (*ATTENTION, "up_proj", "down_proj")
DEFAULT_KV_HEADS, DEFAULT_POSITIONS = 2, 4096
"""What transformers' Starcoder2Config means where the keys are missing."""


class Starcoder2Config(Family):
    """Hugging Face's ``Starcoder2ForCausalLM``. Refused: quantized weights."""

    name = "starcoder2"
    title = "StarCoder2"
    model_classes = ("Starcoder2ForCausalLM",)
    prefix = "model."
    # A tied head is often stored too.
    unread_tensors = ("lm_head.weight", "*rotary_emb.inv_freq")
    names = STARCODER2_NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Starcoder2Config":
        c = ConfigJson(raw, cls.title)
        n_heads, d_model, n_layers = (
            c.heads("num_attention_heads"),
            c.whole("hidden_size"),
            c.whole("num_hidden_layers"),
        )
        longest = c.whole("max_position_embeddings", DEFAULT_POSITIONS)
        window = None if raw.get("sliding_window") is None else c.whole("sliding_window")
        return cls(
            vocab_size=c.whole("vocab_size"),
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=c.whole("num_key_value_heads", DEFAULT_KV_HEADS),
            head_dim=c.whole("head_dim", d_model // n_heads),
            d_mlp=c.whole("intermediate_size"),
            norm_eps=c.epsilon("norm_epsilon", 1e-5),
            rope_theta=c.theta(),
            rope_scaling=c.rope_scaling(longest),
            tied=c.flag("tie_word_embeddings", True),
            max_positions=longest,
            norm="layer",
            biases=BIASES if c.flag("use_bias", True) else (),
            window=window,
            # transformers does not read layer_types here: all layers slide.
            window_layers=() if window is None else tuple(range(n_layers)),
            activation=c.activation("hidden_act", "gelu_pytorch_tanh"),
            gated=False,
        )

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return {
            **common_keys(self, "Starcoder2ForCausalLM", dtype, eos_token_id),
            **rope_keys(self),
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "norm_epsilon": self.norm_eps,
            "use_bias": bool(self.biases),
            "sliding_window": self.window,
        }
