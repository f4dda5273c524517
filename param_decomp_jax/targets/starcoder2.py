"""StarCoder2: LayerNorm, rotary embedding, grouped heads, a window in every layer, an MLP of two matrices."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson, common_keys
from param_decomp_jax.targets.llama import NAMES, even_head_dim
from param_decomp_jax.targets.rope_json import read_rope, rope_keys
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION

STARCODER2_NAMES = NAMES | {"up_proj": "model.layers.{}.mlp.c_fc", "down_proj": "model.layers.{}.mlp.c_proj"}
BIASES = (*ATTENTION, "up_proj", "down_proj")
DEFAULT_KV_HEADS, DEFAULT_POSITIONS = 2, 4096
"""The defaults of transformers' Starcoder2Config."""


class Starcoder2Config(Family):
    """Hugging Face's ``Starcoder2ForCausalLM``. Refused: quantized weights."""

    name = "starcoder2"
    title = "StarCoder2"
    model_classes = ("Starcoder2ForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = STARCODER2_NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Starcoder2Config":
        c = ConfigJson(raw, cls.title)
        n_heads, d_model, n_layers = (
            c.heads("num_attention_heads"),
            c.whole("hidden_size"),
            c.n_layers("num_hidden_layers"),
        )
        longest = c.whole("max_position_embeddings", DEFAULT_POSITIONS)
        rope = read_rope(c, longest)
        return cls(
            vocab_size=c.whole("vocab_size"),
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=c.heads("num_key_value_heads", DEFAULT_KV_HEADS),
            head_dim=even_head_dim(c),
            d_mlp=c.whole("intermediate_size"),
            norm_eps=c.epsilon("norm_epsilon", 1e-5),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            tied=c.flag("tie_word_embeddings", True),
            max_positions=longest,
            norm="layer",
            biases=BIASES if c.flag("use_bias", True) else (),
            **c.all_or_none(n_layers, c.window()),
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
