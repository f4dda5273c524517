"""Llama: RMSNorm, rotary embedding, grouped heads, SwiGLU. Also SmolLM, Yi, and any other model of type ``llama``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from param_decomp_jax.nn.rotary import Llama3Scaling
from param_decomp_jax.targets.config_json import DEFAULT_POSITIONS, REFUSED, ConfigJson, common_keys
from param_decomp_jax.targets.rope_json import read_rope, rope_keys
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION, MLP, TransformerConfig

NAMES = {
    "embed": "model.embed_tokens",
    "input_norm": "model.layers.{}.input_layernorm",
    "q_proj": "model.layers.{}.self_attn.q_proj",
    "k_proj": "model.layers.{}.self_attn.k_proj",
    "v_proj": "model.layers.{}.self_attn.v_proj",
    "o_proj": "model.layers.{}.self_attn.o_proj",
    "post_norm": "model.layers.{}.post_attention_layernorm",
    "gate_proj": "model.layers.{}.mlp.gate_proj",
    "up_proj": "model.layers.{}.mlp.up_proj",
    "down_proj": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
DEFAULT_EPS = 1e-6


class LlamaConfig(Family):
    """Hugging Face's ``LlamaForCausalLM``. Refused: quantized weights, rotary scalings other than linear, llama3 and
    yarn."""

    name = "llama"
    title = "Llama"
    model_classes = ("LlamaForCausalLM",)
    prefix = "model."
    # Old files hold the rotary frequencies.
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = NAMES

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        c = ConfigJson(raw, cls.title)
        c.head_width("hidden_size", "num_attention_heads")  # transformers requires this, whatever head_dim is
        fields = llama_fields(c, DEFAULTS, even_head_dim(c))
        c.all_or_none(fields["n_layers"], None)
        biases = ATTENTION * c.flag("attention_bias", False) + MLP * c.flag("mlp_bias", False)
        return cls(**fields, biases=biases)

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        biased = {"attention_bias": "o_proj" in self.biases, "mlp_bias": "up_proj" in self.biases}
        return llama_keys(self, "LlamaForCausalLM", dtype, eos_token_id) | biased


module_name = LlamaConfig.module_name


@dataclass(frozen=True)
class Defaults:
    """What transformers' class of a family takes for a key that a file lacks. ``kv_heads``: None means as many as
    heads. ``null_kv_heads``: whether a null is allowed there, which means as many as heads."""

    positions: int
    kv_heads: int | None = None
    null_kv_heads: bool = True
    eps: float = DEFAULT_EPS
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")


DEFAULTS = Defaults(positions=DEFAULT_POSITIONS)


def llama_fields(c: ConfigJson, defaults: Defaults, head_dim: int) -> dict[str, Any]:
    """Returns the fields whose keys are Llama's. ``head_dim``: the dimensions of a head, which each family reads in its
    own way."""
    n_heads = c.heads("num_attention_heads")
    kv_heads = n_heads if defaults.kv_heads is None else defaults.kv_heads
    longest = c.whole("max_position_embeddings", defaults.positions)
    rope = read_rope(c, longest)
    return {
        "vocab_size": c.whole("vocab_size"),
        "d_model": c.whole("hidden_size"),
        "n_layers": c.n_layers("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": c.heads("num_key_value_heads", kv_heads, n_heads if defaults.null_kv_heads else REFUSED),
        "head_dim": head_dim,
        "d_mlp": c.whole("intermediate_size"),
        "norm_eps": c.epsilon("rms_norm_eps", defaults.eps),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "tied": c.flag("tie_word_embeddings", defaults.tied),
        "max_positions": longest,
        "activation": c.activation(*defaults.activation),
    }


def even_head_dim(c: ConfigJson, nullable: bool = True) -> int:
    """Returns the dimensions of a head: an equal share of the width, unless the file says otherwise. ``nullable``:
    whether a null counts as a missing key; it does not if the network knows the key but the family's class does not."""
    even = c.whole("hidden_size") // c.heads("num_attention_heads")
    return c.whole("head_dim", even, null=even if nullable else REFUSED)


def llama_keys(config: TransformerConfig, model_class: str, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
    """Returns the keys that `llama_fields` reads."""
    return {
        **common_keys(config, model_class, dtype, eos_token_id),
        **rope_keys(config),
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
    }


_LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_mlp=14_336,
    norm_eps=1e-5, rope_theta=500_000.0, max_positions=8192,
)  # fmt: skip
_LLAMA_3_1_8B = replace(_LLAMA_3_8B, max_positions=131_072, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
_LLAMA_3_1_70B = replace(_LLAMA_3_1_8B, d_model=8192, n_layers=80, n_heads=64, d_mlp=28_672)
_LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128_256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_mlp=8192,
    norm_eps=1e-5, rope_theta=500_000.0, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192), tied=True,
    max_positions=131_072,
)  # fmt: skip
_LLAMA_3_2_3B = replace(_LLAMA_3_2_1B, d_model=3072, n_layers=28, n_heads=24, head_dim=128)
_SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_mlp=1536,
    norm_eps=1e-5, rope_theta=100_000.0, tied=True, max_positions=8192,
)  # fmt: skip

LlamaConfig.published = {
    f"{name}{suffix}": config
    for name, config in {
        "meta-llama/Meta-Llama-3-8B": _LLAMA_3_8B,
        "meta-llama/Meta-Llama-3.1-8B": _LLAMA_3_1_8B,
        "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
        "meta-llama/Llama-3.1-70B": _LLAMA_3_1_70B,
        "meta-llama/Llama-3.2-1B": _LLAMA_3_2_1B,
        "meta-llama/Llama-3.2-3B": _LLAMA_3_2_3B,
        "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    }.items()
    for suffix in ("", "-Instruct")
}
"""From their public ``config.json``."""
