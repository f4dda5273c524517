"""GGUF files of tiny Llamas, written with the library `gguf` as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from param_decomp_jax.targets.llama import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=288, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=64, norm_eps=1e-5,
    rope_theta=5000.0, tied=True,
)  # fmt: skip
UNIGRAMS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the", "Ġ a", "1 2", "Ġ 3", "Ġ Ġ", "ĠĠ ĠĠ", "e e", "Ã ©"]
CONTROL, USER_DEFINED, NORMAL, UNUSED = 3, 4, 1, 5
SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<tool>": USER_DEFINED}
TOKENS = [*SPECIAL, *UNIGRAMS, *(merge.replace(" ", "") for merge in MERGES)]
KINDS = [*SPECIAL.values(), *[NORMAL] * (len(UNIGRAMS) + len(MERGES))]
Tensors = dict[str, np.ndarray]


def interleaved(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp wants them: 2i and 2i + 1 of a head are i and i + half of Hugging Face's."""
    half = rows.shape[0] // n_heads // 2
    order = [head * 2 * half + second * half + i for head in range(n_heads) for i in range(half) for second in (0, 1)]
    return rows[order]


def tensors(config: LlamaConfig, weights: Any) -> Tensors:
    """The tensors of a GGUF with these weights (in our layout), in fp32."""
    layers = {key: np.asarray(value) for key, value in weights["layers"].items()}
    found = {"token_embd.weight": np.asarray(weights["embed"]), "output_norm.weight": np.asarray(weights["norm"])}
    if not config.tied:
        found["output.weight"] = np.asarray(weights["head"]).T
    names = {
        "o_proj": "attn_output", "v_proj": "attn_v", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
        "down_proj": "ffn_down", "input_norm": "attn_norm", "post_norm": "ffn_norm",
    }  # fmt: skip
    for n in range(config.n_layers):
        found |= {f"blk.{n}.{name}.weight": layers[key][n].T for key, name in names.items()}
        found[f"blk.{n}.attn_q.weight"] = interleaved(layers["q_proj"][n].T, config.n_heads)
        found[f"blk.{n}.attn_k.weight"] = interleaved(layers["k_proj"][n].T, config.n_kv_heads)
    return found


def metadata(config: LlamaConfig) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for such a model."""
    return {
        "llama.block_count": config.n_layers,
        "llama.context_length": 512,
        "llama.embedding_length": config.d_model,
        "llama.feed_forward_length": config.d_mlp,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def write(
    path: Path, keys: dict[str, Any], values: Tensors, *, storage: str = "F32", architecture: str = "llama"
) -> Path:
    """``keys`` with None are left out. ``storage``: of the matrices; vectors are fp32."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    kind = GGMLQuantizationType[storage]
    for name, value in values.items():
        if value.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(value, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
