"""LlamaSimpleMLP of the PyTorch project: a small Llama with an MLP of two matrices."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.config_json import ConfigJson
from param_decomp_jax.targets.rope_json import DEFAULT_THETA
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION

NAMES = {
    "embed": "wte",
    "input_norm": "h.{}.rms_1",
    "q_proj": "h.{}.attn.q_proj",
    "k_proj": "h.{}.attn.k_proj",
    "v_proj": "h.{}.attn.v_proj",
    "o_proj": "h.{}.attn.o_proj",
    "post_norm": "h.{}.rms_2",
    "up_proj": "h.{}.mlp.c_fc",
    "down_proj": "h.{}.mlp.down_proj",
    "norm": "ln_f",
    "head": "lm_head",
}
NORM_EPS = 1e-6


class LlamaSimpleMLPConfig(Family):
    """A configuration with its own keys, under ``model_type: llama_simple_mlp``; the head is tied. Refused: ungrouped
    attention."""

    name = "llama_simple_mlp"
    title = "LlamaSimpleMLP"
    published_dtype = "float32"
    model_classes = ("LlamaSimpleMLP",)
    # Files also hold the tables of the rotary embedding and the mask.
    unread_tensors = ("*.rotary_sin", "*.rotary_cos", "*.attn.bias")
    names = NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "LlamaSimpleMLPConfig":
        c = ConfigJson(raw, cls.title)
        n_heads, d_model = c.heads("n_head"), c.whole("n_embd")
        head_dim, longest = d_model // n_heads, c.whole("block_size", 1024, null=1024)
        grouped = c.flag("use_grouped_query_attention", True, null=True)
        biased = c.flag("attn_bias", False, null=False), c.flag("mlp_bias", False, null=False)
        if not grouped:
            raise UnsupportedConfig("use_grouped_query_attention is False; only the grouped form can be loaded")
        return cls(
            vocab_size=c.whole("vocab_size"),
            d_model=d_model,
            n_layers=c.n_layers("n_layer"),
            n_heads=n_heads,
            n_kv_heads=c.heads("n_key_value_heads"),
            head_dim=head_dim,
            d_mlp=c.whole("n_intermediate"),
            norm_eps=NORM_EPS,
            rope_theta=c.number("rotary_base", DEFAULT_THETA, null=DEFAULT_THETA),
            tied=True,
            max_positions=c.whole("n_ctx", longest, null=longest),
            rotary_dim=c.whole("rotary_dim", head_dim, null=head_dim),
            rotary_pairs="adjacent" if c.flag("rotary_adjacent_pairs", False, null=False) else "half",
            biases=ATTENTION * biased[0] + ("up_proj", "down_proj") * biased[1],
            activation="gelu_tanh",
            gated=False,
        )

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return {
            "model_type": self.name,
            "vocab_size": self.vocab_size,
            "block_size": self.max_positions,
            "n_ctx": self.max_positions,
            "n_layer": self.n_layers,
            "n_head": self.n_heads,
            "n_key_value_heads": self.n_kv_heads,
            "use_grouped_query_attention": True,
            "n_embd": self.d_model,
            "n_intermediate": self.d_mlp,
            "mlp_bias": "up_proj" in self.biases,
            "attn_bias": "q_proj" in self.biases,
            "rotary_adjacent_pairs": self.rotary_pairs == "adjacent",
            "rotary_dim": self.turning,
            "rotary_base": self.rope_theta,
            "eos_token_id": eos_token_id,
            "dtype": dtype,
        }


LlamaSimpleMLPConfig.published = {
    "wandb:goodfire/spd/t-9d2b8f02": LlamaSimpleMLPConfig.from_config(
        {"vocab_size": 50_277, "block_size": 512, "n_layer": 4, "n_head": 6, "n_key_value_heads": 6, "n_embd": 768,
         "n_intermediate": 3072}
    ),
}  # fmt: skip
"""The four-layer model trained on the Pile, by its training run. The PyTorch project published its decomposition."""
