"""GPT-2: learned positions, LayerNorm, biases everywhere, queries, keys and values in one matrix."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson
from param_decomp_jax.targets.transformer import Family

BIASES = ("qkv_proj", "o_proj", "up_proj", "down_proj")
NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "input_norm": "transformer.h.{}.ln_1",
    "qkv_proj": "transformer.h.{}.attn.c_attn",
    "o_proj": "transformer.h.{}.attn.c_proj",
    "post_norm": "transformer.h.{}.ln_2",
    "up_proj": "transformer.h.{}.mlp.c_fc",
    "down_proj": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


class GPT2Config(Family):
    """Hugging Face's ``GPT2LMHeadModel``, whose files keep matrices as they are used. Refused: quantized weights, cross
    attention."""

    name = "gpt2"
    title = "GPT-2"
    model_classes = ("GPT2LMHeadModel", "GPT2")
    published_dtype = "float32"
    prefix = "transformer."
    # Old files hold the masks of attention.
    unread_tensors = ("*.attn.bias", "*.attn.masked_bias")
    names = NAMES
    transposed = False

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "GPT2Config":
        c = ConfigJson(raw, cls.title)
        c.only("add_cross_attention", False)
        width_key, heads_key = c.spelled("n_embd", "hidden_size"), c.spelled("n_head", "num_attention_heads")
        n_heads, d_model, head_dim = c.heads(heads_key), c.whole(width_key), c.head_width(width_key, heads_key)
        n_layers = c.n_layers(c.spelled("n_layer", "num_hidden_layers"))
        positions = c.whole(c.spelled("n_positions", "max_position_embeddings"), 1024)
        c.all_or_none(n_layers, None)
        return cls(
            vocab_size=c.whole("vocab_size"),
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=head_dim,
            d_mlp=c.whole("n_inner", 4 * d_model, null=4 * d_model),
            norm_eps=c.epsilon("layer_norm_epsilon", 1e-5),
            rope_theta=None,
            learned_positions=positions,
            max_positions=positions,
            tied=c.flag("tie_word_embeddings", True),
            norm="layer",
            biases=BIASES,
            fused="blocks",
            query_scale=None if c.flag("scale_attn_weights", True) else 1.0,
            scale_by_layer=c.flag("scale_attn_by_inverse_layer_idx", False),
            activation=c.activation("activation_function", "gelu_new"),
            gated=False,
        )

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.name,
            "vocab_size": self.vocab_size,
            "n_embd": self.d_model,
            "n_layer": self.n_layers,
            "n_head": self.n_heads,
            "n_inner": self.d_mlp,
            "n_positions": self.learned_positions,
            "layer_norm_epsilon": self.norm_eps,
            "activation_function": {"gelu_tanh": "gelu_new"}.get(self.activation, self.activation),
            "scale_attn_weights": self.query_scale is None,
            "scale_attn_by_inverse_layer_idx": self.scale_by_layer,
            "tie_word_embeddings": self.tied,
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "dtype": dtype,
        }


GPT2Config.published = {
    f"{owner}gpt2{size}": GPT2Config.from_config(
        {"vocab_size": 50_257, "n_embd": d_model, "n_layer": n_layers, "n_head": n_heads, "n_positions": 1024}
    )
    for size, d_model, n_layers, n_heads in (
        ("", 768, 12, 12), ("-medium", 1024, 24, 16), ("-large", 1280, 36, 20), ("-xl", 1600, 48, 25),
    )
    for owner in ("", "openai-community/")
}  # fmt: skip
"""From their public ``config.json``."""
