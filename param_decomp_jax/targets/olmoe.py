"""OLMoE: experts in every layer, queries and keys normalised over all heads, and clipped if the file says so."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson
from param_decomp_jax.targets.llama import Defaults, llama_fields, llama_keys
from param_decomp_jax.targets.qwen3 import QWEN3_NAMES
from param_decomp_jax.targets.qwen3_moe import EXPERT_NAMES, expert_keys, n_experts
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION, Experts

DEFAULTS = Defaults(positions=4096, eps=1e-5)


class OlmoeConfig(Family):
    """Hugging Face's ``OlmoeForCausalLM``. Refused: quantized weights."""

    name = "olmoe"
    title = "OLMoE"
    model_classes = ("OlmoeForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = QWEN3_NAMES | EXPERT_NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "OlmoeConfig":
        c = ConfigJson(raw, cls.title)
        even = c.head_width("hidden_size", "num_attention_heads")
        c.only("head_dim", even)  # the norms of queries and keys have that width
        c.only("sliding_window", None)  # only some of transformers' attention implementations read it
        own = llama_fields(c, DEFAULTS, even) | c.all_or_none(c.n_layers("num_hidden_layers"), None)
        experts = Experts(
            n=n_experts(c, 64),
            per_token=c.whole("num_experts_per_tok", 8),
            d_mlp=c.whole("intermediate_size"),
            normalised=c.flag("norm_topk_prob", False),
        )
        biases = ATTENTION if c.flag("attention_bias", False) else ()
        return cls(**own, qk_norm="all", clip=c.optional("clip_qkv"), experts=experts, biases=biases)

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        assert self.experts is not None
        keys = llama_keys(self, "OlmoeForCausalLM", dtype, eos_token_id) | expert_keys(self.experts)
        del keys["moe_intermediate_size"]
        return keys | {"clip_qkv": self.clip, "attention_bias": bool(self.biases)}


OlmoeConfig.published = {
    "allenai/OLMoE-1B-7B-0924": OlmoeConfig.from_config(
        {
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        }
    )
}
"""From their public ``config.json``."""
