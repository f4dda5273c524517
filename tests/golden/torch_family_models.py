"""LlamaSimpleMLP and GPT2 of the PyTorch project, written from their definitions in plain torch: functions of a
configuration and a state dict, of any floating type. ``make_family_fixtures.py`` makes golden models of them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]


def llama_simple_mlp_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the state dict; ``lm_head.weight`` is ``wte.weight`` and not among them."""
    d, hidden = c["n_embd"], c["n_intermediate"]
    d_kv = d // (c["n_head"] // c["n_key_value_heads"])
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (c["vocab_size"], d), "ln_f.weight": (d,)}
    for layer in (f"h.{n}" for n in range(c["n_layer"])):
        shapes |= {f"{layer}.rms_1.weight": (d,), f"{layer}.rms_2.weight": (d,)}
        for name, out in {"q_proj": d, "k_proj": d_kv, "v_proj": d_kv, "o_proj": d}.items():
            shapes[f"{layer}.attn.{name}.weight"] = (out, d)
            if c["attn_bias"]:
                shapes[f"{layer}.attn.{name}.bias"] = (out,)
        for name, shape in {"c_fc": (hidden, d), "down_proj": (d, hidden)}.items():
            shapes[f"{layer}.mlp.{name}.weight"] = shape
            if c["mlp_bias"]:
                shapes[f"{layer}.mlp.{name}.bias"] = shape[:1]
    return shapes


def llama_simple_mlp(c: Config, w: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, vocab] of tokens [B, T]."""
    x = w["wte.weight"][tokens]
    for n in range(c["n_layer"]):
        layer = f"h.{n}"
        h = rms_norm(x, w[f"{layer}.rms_1.weight"])
        q, k, v = (heads(linear(w, f"{layer}.attn.{name}", h), c) for name in ("q_proj", "k_proj", "v_proj"))
        repeats = c["n_head"] // c["n_key_value_heads"]
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (rotate(k, c), v))
        x = x + linear(w, f"{layer}.attn.o_proj", causal_attention(rotate(q, c), k, v))
        h = linear(w, f"{layer}.mlp.c_fc", rms_norm(x, w[f"{layer}.rms_2.weight"]))
        x = x + linear(w, f"{layer}.mlp.down_proj", F.gelu(h, approximate="tanh"))
    return rms_norm(x, w["ln_f.weight"]) @ w["wte.weight"].T


def torch_gpt2_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    d = c["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (c["vocab_size"], d), "wpe.weight": (c["block_size"], d)}
    norms = [f"h.{n}.{name}" for n in range(c["n_layer"]) for name in ("ln_1", "ln_2")]
    for name in (*norms, "ln_f"):
        shapes |= {f"{name}.weight": (d,), f"{name}.bias": (d,)}
    matrices = {"attn.c_attn": (3 * d, d), "attn.c_proj": (d, d), "mlp.c_fc": (4 * d, d), "mlp.c_proj": (d, 4 * d)}
    for n in range(c["n_layer"]):
        for name, shape in matrices.items():
            shapes |= {f"h.{n}.{name}.weight": shape, f"h.{n}.{name}.bias": shape[:1]}
    return shapes


def torch_gpt2(c: Config, w: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, vocab] of tokens [B, T]."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (c["n_embd"],), w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for n in range(c["n_layer"]):
        layer = f"h.{n}"
        qkv = linear(w, f"{layer}.attn.c_attn", norm(f"{layer}.ln_1", x))
        q, k, v = (heads(t, c) for t in qkv.split(c["n_embd"], dim=-1))
        x = x + linear(w, f"{layer}.attn.c_proj", causal_attention(q, k, v))
        h = F.gelu(linear(w, f"{layer}.mlp.c_fc", norm(f"{layer}.ln_2", x)), approximate="tanh")
        x = x + linear(w, f"{layer}.mlp.c_proj", h)
    return norm("ln_f", x) @ w["wte.weight"].T


def linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def heads(x: torch.Tensor, c: Config) -> torch.Tensor:
    """[B, T, heads * head_dim] to [B, heads, T, head_dim]."""
    return x.unflatten(-1, (-1, c["n_embd"] // c["n_head"])).transpose(1, 2)


def rotate(x: torch.Tensor, c: Config) -> torch.Tensor:
    """Rotary positions on the first ``rotary_dim`` entries of each head; x [B, heads, T, head_dim]."""
    size = c["rotary_dim"]
    wavelengths = c["rotary_base"] ** (torch.arange(0, size, 2, dtype=x.dtype) / size)
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / wavelengths  # [T, size / 2]
    cos, sin = angles.cos(), angles.sin()
    rotated = x.clone()
    if c["rotary_adjacent_pairs"]:
        first, second = slice(0, size, 2), slice(1, size, 2)
    else:
        first, second = slice(0, size // 2), slice(size // 2, size)
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All [B, heads, T, head_dim]; gives [B, T, heads * head_dim]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def without_biases(w: Tensors) -> Tensors:
    """Without the biases of matrices; norms keep theirs."""
    return {name: tensor for name, tensor in w.items() if not name.endswith(("proj.bias", "c_attn.bias", "c_fc.bias"))}


def swap_key_heads(w: Tensors) -> Tensors:
    keys = ("k_proj.weight", "v_proj.weight")
    return {name: t.roll(t.shape[0] // 2, 0) if name.endswith(keys) else t for name, t in w.items()}


@dataclass(frozen=True)
class TorchModel:
    config: Config
    shapes: Callable[[Config], dict[str, tuple[int, ...]]]
    forward: Callable[[Config, Tensors, torch.Tensor], torch.Tensor]
    # What takes a special thing away: other values in the configuration, or other tensors.
    without: Mapping[str, Config | Callable[[Tensors], Tensors]]
    # Whether the head's tensor is written beside the embedding, which it is.
    head: bool
    # The name of a further folder with the state dict as torch writes it, or the model's own if it has no other form.
    checkpoint: str | None = None
    safetensors: bool = True


SIMPLE = {
    "model_type": "llama_simple_mlp",
    "block_size": 32,
    "vocab_size": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 16,
    "n_intermediate": 28,
    "mlp_bias": False,
    "attn_bias": False,
    "rotary_adjacent_pairs": False,
    "rotary_dim": 4,
    "rotary_base": 10000,
    "n_ctx": 32,
    "n_key_value_heads": 2,
    "use_grouped_query_attention": True,
    "flash_attention": True,
}
GPT2 = {"block_size": 24, "vocab_size": 48, "n_layer": 3, "n_head": 4, "n_embd": 16}
SIMPLE_FUNCTIONS = (llama_simple_mlp_shapes, llama_simple_mlp)

TORCH_MODELS: dict[str, TorchModel] = {
    "llama_simple_mlp_half": TorchModel(
        SIMPLE,
        *SIMPLE_FUNCTIONS,
        {"pairs": {"rotary_adjacent_pairs": True}, "base": {"rotary_base": 100}, "groups": swap_key_heads},
        head=True,
    ),
    "llama_simple_mlp_adjacent": TorchModel(
        SIMPLE | {"rotary_adjacent_pairs": True},
        *SIMPLE_FUNCTIONS,
        {"pairs": {"rotary_adjacent_pairs": False}, "base": {"rotary_base": 100}, "groups": swap_key_heads},
        head=False,
        checkpoint="llama_simple_mlp_torch",
    ),
    "llama_simple_mlp_biases": TorchModel(
        SIMPLE
        | {"mlp_bias": True, "attn_bias": True, "n_head": 2, "n_key_value_heads": 1}
        | {"rotary_dim": 4, "rotary_base": 100, "rotary_adjacent_pairs": True},
        *SIMPLE_FUNCTIONS,
        {"biases": without_biases, "part of the head": {"rotary_dim": 8}, "pairs": {"rotary_adjacent_pairs": False}},
        head=False,
    ),
    "torch_gpt2": TorchModel(
        GPT2,
        torch_gpt2_shapes,
        torch_gpt2,
        {"biases": without_biases, "positions": lambda w: w | {"wpe.weight": torch.zeros_like(w["wpe.weight"])}},
        head=True,
        checkpoint="torch_gpt2",
        safetensors=False,
    ),
}
