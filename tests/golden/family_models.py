"""The tiny models of ``make_family_fixtures.py``: for each its configuration, with every special thing of the family
switched on, and how each of these things is switched off, by which the script sees that it matters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from published_forms import (
    Tensors,
    gpt2_published,
    llama_inverse_frequencies,
    old_gemma2,
    old_gpt2,
    old_gpt_neox,
    old_linear_rope,
    old_rope,
    pythia_published,
)
from switched_off import (
    identity,
    no_embedding_scale,
    norm_per_head,
    plain_norm_weight,
    swap_key_heads,
    untied,
    zero,
)

# What takes a special thing away: other values in the configuration, or a change of the finished model.
Without = Mapping[str, Any] | Callable[[torch.nn.Module], None]

COMMON = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
LLAMA_LIKE = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ONE_KEY_HEAD = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
MSCALE, BETAS = {"mscale": 1.5, "mscale_all_dim": 0.6}, {"beta_fast": 2.0, "beta_slow": 0.5}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
GPT2 = {"n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 4}


@dataclass(frozen=True)
class Family:
    config: type[transformers.PreTrainedConfig]
    settings: Mapping[str, Any]
    without: Mapping[str, Without]
    # From the file that transformers 5 writes to the file that published models have.
    published: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda config: config)
    # From the tensors that transformers writes to those of published models.
    tensors: Callable[[Tensors], Tensors] = field(default=lambda tensors: tensors)
    seed: int = 0


def rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def yarn(**more: Any) -> dict[str, Any]:
    return rope(20.0, "yarn", factor=4.0, original_max_position_embeddings=16, **more)


def windows(size: int) -> dict[str, Without]:
    """A window that is one too short or too long must show as well."""
    return {f"a window of {other}": {"sliding_window": other} for other in (size - 1, size + 1)}


FAMILIES: dict[str, Family] = {
    "llama_linear": Family(
        transformers.LlamaConfig,
        LLAMA_LIKE | rope(100.0, "linear", factor=4.0) | {"tie_word_embeddings": False},
        {"scaling": rope(100.0), "groups": swap_key_heads},
        published=old_linear_rope,
        tensors=llama_inverse_frequencies,
    ),
    # A small base and few original positions, so that the ramp lies inside the frequencies.
    "llama_yarn": Family(
        transformers.LlamaConfig,
        LLAMA_LIKE | ONE_KEY_HEAD | yarn(),
        {
            "scaling": rope(20.0),
            "ramp": rope(20.0, "linear", factor=4.0),
            "attention factor": yarn(attention_factor=1.0),
        },
        published=old_rope,
    ),
    "llama_yarn_mscale": Family(
        transformers.LlamaConfig,
        LLAMA_LIKE | ONE_KEY_HEAD | yarn(**MSCALE, **BETAS, truncate=False),
        {
            "mscale": yarn(**BETAS, truncate=False),
            "betas": yarn(**MSCALE, truncate=False),
            "no truncation": yarn(**MSCALE, **BETAS),
        },
        published=old_rope,
    ),
    "llama_biases": Family(
        transformers.LlamaConfig,
        LLAMA_LIKE | rope(100.0) | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {
            "attention bias": {"attention_bias": False},
            "bias of o_proj": zero("o_proj.bias"),
            "MLP bias": {"mlp_bias": False},
        },
        published=old_rope,
    ),
    "mistral": Family(
        transformers.MistralConfig,
        LLAMA_LIKE | rope(100.0) | {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": False},
        {"window": {"sliding_window": None}, "groups": swap_key_heads, **windows(8)},
        published=old_rope,
    ),
    "qwen2": Family(
        transformers.Qwen2Config,
        LLAMA_LIKE
        | rope(100.0)
        | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {
            "biases": zero("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            "tied": untied,
            "window": {"use_sliding_window": False},
            "first layer without a window": {"max_window_layers": 0},
            "second layer with a window": {"max_window_layers": 2},
            **windows(8),
        },
        published=old_rope,
    ),
    "qwen3": Family(
        transformers.Qwen3Config,
        LLAMA_LIKE | rope(100.0) | {"head_dim": 8, "tie_word_embeddings": False},
        {"norm of q": identity("q_norm"), "norm of k": identity("k_norm"), "groups": swap_key_heads},
        published=old_rope,
    ),
    "gpt2": Family(
        transformers.GPT2Config,
        GPT2 | {"n_inner": 32, "activation_function": "gelu_new"},
        {
            "positions": zero("wpe.weight"),
            "biases": zero("c_attn.bias", "c_proj.bias", "c_fc.bias"),
            "tied": untied,
            "gelu: tanh": {"activation_function": "gelu"},
        },
        published=old_gpt2,
    ),
    "gpt2_variant": Family(
        transformers.GPT2Config,
        GPT2
        | {
            "n_inner": None,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
        {
            "1 / layer": {"scale_attn_by_inverse_layer_idx": False},
            "no 1 / sqrt(head)": {"scale_attn_weights": True},
            "relu": {"activation_function": "gelu"},
        },
        published=old_gpt2,
        tensors=gpt2_published,
    ),
    "gpt_neox": Family(
        transformers.GPTNeoXConfig,
        {
            "hidden_size": 32,
            "intermediate_size": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
        }
        | rope(100.0, partial_rotary_factor=0.25),
        {
            "parallel": {"use_parallel_residual": False},
            "part of the head": rope(100.0, partial_rotary_factor=1.0),
            "biases": zero("query_key_value.bias", "dense.bias"),
            "gelu: exact": {"hidden_act": "gelu_new"},
        },
        published=old_gpt_neox,
        tensors=pythia_published,
    ),
    "gpt_neox_sequential": Family(
        transformers.GPTNeoXConfig,
        {
            "hidden_size": 16,
            "intermediate_size": 28,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": False,
        }
        | rope(100.0, partial_rotary_factor=0.5),
        {
            "sequential": {"use_parallel_residual": True},
            "part of the head": rope(100.0, partial_rotary_factor=1.0),
            "bias of the MLP": zero("dense_h_to_4h.bias", "dense_4h_to_h.bias"),
            "gelu: tanh": {"hidden_act": "gelu"},
        },
        published=old_gpt_neox,
    ),
    "starcoder2": Family(
        transformers.Starcoder2Config,
        LLAMA_LIKE
        | rope(100.0)
        | {
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-2,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
        {
            "biases of q, k, v": zero("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            "bias of o_proj": zero("o_proj.bias"),
            "biases of the MLP": zero("c_fc.bias", "c_proj.bias"),
            "biases of the norms": zero("layernorm.bias", "model.norm.bias"),
            "epsilon of the norms": {"norm_epsilon": 1e-5},
            "groups": swap_key_heads,
            "tied": untied,
            "window": {"sliding_window": None},
            "gelu: tanh": {"hidden_act": "gelu"},
            **windows(8),
        },
        published=old_rope,
    ),
    "gemma2": Family(
        transformers.Gemma2Config,
        LLAMA_LIKE
        | rope(100.0)
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        {
            "cap of the scores": {"attn_logit_softcapping": None},
            "cap of the logits": {"final_logit_softcapping": None},
            "window": {"layer_types": ["full_attention"] * 3},
            "middle layer without a window": {"layer_types": ["sliding_attention"] * 3},
            "scale of the queries": {"query_pre_attn_scalar": 8},
            "scale of the embedding": no_embedding_scale,
            "1 + weight": plain_norm_weight,
            "norm after attention": identity("post_attention_layernorm"),
            "norm before the MLP": identity("pre_feedforward_layernorm"),
            "norm after the MLP": identity("post_feedforward_layernorm"),
            "groups": swap_key_heads,
            "tied": untied,
            "gelu: tanh": {"hidden_activation": "gelu"},
            **windows(8),
        },
        published=old_gemma2,
        seed=1,
    ),
    "olmo2": Family(
        transformers.Olmo2Config,
        LLAMA_LIKE | rope(100.0) | {"tie_word_embeddings": False},
        {
            "norm after attention": identity("post_attention_layernorm"),
            "norm after the MLP": identity("post_feedforward_layernorm"),
            "norm of q": identity("q_norm"),
            "norm of k": identity("k_norm"),
            "norms of q and k over all heads": norm_per_head,
            "groups": swap_key_heads,
        },
        published=old_rope,
    ),
    "qwen3_moe": Family(
        transformers.Qwen3MoeConfig,
        LLAMA_LIKE
        | rope(100.0)
        | EXPERTS
        | {"head_dim": 8, "moe_intermediate_size": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
        {
            "weights of the chosen add to 1": {"norm_topk_prob": False},
            "two experts": {"num_experts_per_tok": 1},
            "router": zero("mlp.gate.weight"),
            "dense layer": zero("layers.1.mlp.down_proj.weight"),
            "norm of q": identity("q_norm"),
            "norm of k": identity("k_norm"),
        },
        published=old_rope,
    ),
    "qwen3_moe_step": Family(
        transformers.Qwen3MoeConfig,
        LLAMA_LIKE
        | rope(100.0)
        | EXPERTS
        | {"num_experts": 4, "head_dim": 8, "moe_intermediate_size": 8, "norm_topk_prob": True}
        | {"decoder_sparse_step": 2},
        {"router": zero("layers.1.mlp.gate.weight"), "dense layers": zero("mlp.down_proj.weight")},
        published=old_rope,
    ),
    "qwen3_moe_all": Family(
        transformers.Qwen3MoeConfig,
        LLAMA_LIKE | rope(100.0) | EXPERTS | {"head_dim": 4, "moe_intermediate_size": 8, "norm_topk_prob": False},
        {"weights as they are": {"norm_topk_prob": True}, "router": zero("mlp.gate.weight")},
        published=old_rope,
    ),
    "olmoe": Family(
        transformers.OlmoeConfig,
        LLAMA_LIKE | rope(100.0) | EXPERTS | {"intermediate_size": 8, "norm_topk_prob": False, "clip_qkv": 0.8},
        {
            "clipping": {"clip_qkv": None},
            "weights as they are": {"norm_topk_prob": True},
            "router": zero("mlp.gate.weight"),
            "norm of q": identity("q_norm"),
            "norm of k": identity("k_norm"),
            "norms of q and k over all heads": norm_per_head,
            "groups": swap_key_heads,
        },
        published=old_rope,
    ),
}
