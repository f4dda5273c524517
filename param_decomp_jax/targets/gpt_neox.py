"""GPT-NeoX, including Pythia: parallel attention and MLP, a rotary part of each head, and one matrix that has queries,
keys and values head by head."""

from collections.abc import Mapping
from typing import Any, ClassVar

from param_decomp_jax.targets.config_json import DEFAULT_POSITIONS, ConfigJson, common_keys
from param_decomp_jax.targets.rope_json import read_rope, rope_keys
from param_decomp_jax.targets.transformer import Family

BIASES = ("qkv_proj", "o_proj", "up_proj", "down_proj")
NAMES = {
    "embed": "gpt_neox.embed_in",
    "input_norm": "gpt_neox.layers.{}.input_layernorm",
    "qkv_proj": "gpt_neox.layers.{}.attention.query_key_value",
    "o_proj": "gpt_neox.layers.{}.attention.dense",
    "post_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "up_proj": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "down_proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}


class GPTNeoXConfig(Family):
    """Hugging Face's ``GPTNeoXForCausalLM``. Refused: quantized weights."""

    name = "gpt_neox"
    title = "GPT-NeoX"
    model_classes = ("GPTNeoXForCausalLM",)
    published_dtype = "float16"
    prefix = "gpt_neox."
    # The published files hold the masks of attention and the rotary frequencies.
    unread_tensors = ("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq")
    other_names: ClassVar[Mapping[str, str]] = {"embed_out.weight": "lm_head.weight"}
    names = NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "GPTNeoXConfig":
        c = ConfigJson(raw, cls.title)
        n_heads, d_model = c.heads("num_attention_heads"), c.whole("hidden_size")
        head_dim = c.head_width("hidden_size", "num_attention_heads")
        c.only("head_dim", head_dim, None)  # the rotary embedding would take another
        longest = c.whole("max_position_embeddings", DEFAULT_POSITIONS)
        rope = read_rope(c, longest, theta_key="rotary_emb_base", share=0.25)
        c.all_or_none(c.n_layers("num_hidden_layers"), None)
        attention_biases = BIASES[:2] if c.flag("attention_bias", True) else ()
        return cls(
            vocab_size=c.whole("vocab_size"),
            d_model=d_model,
            n_layers=c.n_layers("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=head_dim,
            d_mlp=c.whole("intermediate_size"),
            norm_eps=c.epsilon("layer_norm_eps", 1e-5),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            tied=c.flag("tie_word_embeddings", False),
            max_positions=longest,
            norm="layer",
            parallel=c.flag("use_parallel_residual", True),
            rotary_dim=int(head_dim * rope.share),
            biases=(*attention_biases, *BIASES[2:]),
            fused="heads",
            activation=c.activation("hidden_act", "gelu"),
            gated=False,
        )

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        return {
            **common_keys(self, "GPTNeoXForCausalLM", dtype, eos_token_id),
            **rope_keys(self, "rotary_emb_base"),
            "rotary_pct": self.turning / self.head_dim,
            "layer_norm_eps": self.norm_eps,
            "use_parallel_residual": self.parallel,
            "attention_bias": "qkv_proj" in self.biases,
        }


GPTNeoXConfig.published = {
    f"EleutherAI/pythia-{size}": GPTNeoXConfig.from_config(
        {
            "vocab_size": 50_432 if size == "6.9b" else 50_304,
            "hidden_size": d_model,
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "intermediate_size": 4 * d_model,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10_000,
        }
    )
    for size, d_model, n_layers, n_heads in (
        ("70m", 512, 6, 8), ("160m", 768, 12, 12), ("410m", 1024, 24, 16), ("1b", 2048, 16, 8),
        ("1.4b", 2048, 24, 16), ("2.8b", 2560, 32, 32), ("6.9b", 4096, 32, 32),
    )
}  # fmt: skip
"""From their public ``config.json``."""
