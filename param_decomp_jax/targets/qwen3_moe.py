"""Qwen 3 with experts: in most layers, a mixture in place of the MLP."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson
from param_decomp_jax.targets.llama import Defaults, even_head_dim, llama_fields
from param_decomp_jax.targets.qwen2 import optional_window
from param_decomp_jax.targets.qwen3 import QWEN3_NAMES, qwen3_fields, qwen3_keys
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import Experts

EXPERT_NAMES = {
    "router": "model.layers.{}.mlp.gate",
    "experts.gate_proj": "model.layers.{}.mlp.experts.{}.gate_proj",
    "experts.up_proj": "model.layers.{}.mlp.experts.{}.up_proj",
    "experts.down_proj": "model.layers.{}.mlp.experts.{}.down_proj",
}

DEFAULTS = Defaults(positions=32_768, kv_heads=4, null_kv_heads=False)


class Qwen3MoeConfig(Family):
    """Hugging Face's ``Qwen3MoeForCausalLM``. Refused: quantized weights."""

    name = "qwen3_moe"
    title = "Qwen3-MoE"
    model_classes = ("Qwen3MoeForCausalLM",)
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = QWEN3_NAMES | EXPERT_NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Qwen3MoeConfig":
        c = ConfigJson(raw, cls.title)
        own = llama_fields(c, DEFAULTS, even_head_dim(c, nullable=False)) | qwen3_fields(c)
        own |= c.all_or_none(own["n_layers"], optional_window(c))  # transformers does not read max_window_layers here
        every = c.heads("decoder_sparse_step", 1)
        dense = c.layers("mlp_only_layers")
        experts = Experts(
            n=n_experts(c, 128),
            per_token=c.whole("num_experts_per_tok", 8),
            d_mlp=c.whole("moe_intermediate_size", 768),
            normalised=c.flag("norm_topk_prob", False),
            dense_layers=tuple(n for n in range(own["n_layers"]) if n in dense or (n + 1) % every),
        )
        if experts.n < 1 or len(experts.dense_layers) == own["n_layers"]:
            return cls(**own)
        return cls(**own, experts=experts)

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        keys = qwen3_keys(self, "Qwen3MoeForCausalLM", dtype, eos_token_id)
        e = self.experts
        if e is None:
            return keys | {"num_experts": 0, "num_local_experts": 0, "mlp_only_layers": list(range(self.n_layers))}
        return keys | expert_keys(e) | {"decoder_sparse_step": 1, "mlp_only_layers": list(e.dense_layers)}


def n_experts(c: ConfigJson, default: int) -> int:
    """Returns the number of experts: published files call it ``num_experts``, transformers 5 writes
    ``num_local_experts``."""
    return c.whole(c.spelled("num_experts", "num_local_experts"), default)


def expert_keys(experts: Experts) -> dict[str, Any]:
    """Returns the keys of a mixture."""
    return {
        "num_experts": experts.n,
        "num_local_experts": experts.n,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.d_mlp,
        "norm_topk_prob": experts.normalised,
    }


Qwen3MoeConfig.published = {
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig.from_config(
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        }
    )
}
"""From their public ``config.json``."""
