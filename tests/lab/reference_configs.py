"""What transformers computes for a `config.json`: its config class reads the file, and what its modeling file makes of
the configuration is written down here, from transformers 5.23. Written without a look at our own readers.

``python -m tests.golden.check_drawn_logits`` holds this, and ours, against the logits of the models themselves.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers

CLASSES = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "ministral": "MinistralConfig", "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config", "qwen3_moe": "Qwen3MoeConfig", "olmo2": "Olmo2Config", "olmoe": "OlmoeConfig",
    "gemma2": "Gemma2Config", "gpt2": "GPT2Config", "gpt_neox": "GPTNeoXConfig", "starcoder2": "Starcoder2Config",
}  # fmt: skip
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip
ATTENTION, GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


class NoNetwork(Exception):
    """transformers raises an error, when it reads the file or when it computes."""


class NotDescribed(Exception):
    """transformers computes something that `Network` cannot say, and that we are to refuse."""


@dataclass(frozen=True)
class Network:
    """Everything in a `config.json` that decides the logits.

    ``frequencies``: of the rotary embedding, radians per position, None without one. ``windows``, ``scales`` (of the
    scores) and ``has_experts`` by layer. ``d_mlp``: of the layers without experts, None if there are none. ``experts``:
    their number, how many a token takes, their width, whether weights are normalised.
    """

    sizes: Mapping[str, int]
    eps: float
    tied: bool
    activation: str
    frequencies: tuple[float, ...] | None
    factor: float
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    biases: frozenset[str]
    d_mlp: int | None
    has_experts: tuple[bool, ...]
    experts: tuple[int, int, int, bool] | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    clip: float | None = None
    embed_scale: float = 1.0
    parallel: bool = False
    causal: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


def read(raw: Mapping[str, Any]) -> Network:
    """The network of a `config.json`. NoNetwork where transformers computes none, NotDescribed for another kind."""
    name = raw["model_type"]
    if name == "mistral" and "layer_types" in raw:  # as AutoConfig does
        name = "ministral"
    given = copy.deepcopy({key: value for key, value in raw.items() if key != "model_type"})
    try:
        config = getattr(transformers, CLASSES[name])(**given)
    except Exception as error:  # of many kinds: the classes check in several ways
        raise NoNetwork(f"{type(error).__name__}: {error}") from error
    try:
        return {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(name, _decoder)(config, name)
    except (TypeError, KeyError, ZeroDivisionError, AttributeError) as error:  # as torch would, of a null
        raise NoNetwork(f"{type(error).__name__}: {error}") from error


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise NoNetwork(why)


def _decoder(config: Any, name: str) -> Network:
    heads, hidden, n = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    if name in ("mistral", "starcoder2"):
        head_dim = getattr(config, "head_dim", None) or hidden // heads
    else:
        head_dim = getattr(config, "head_dim", hidden // heads)
    _need(head_dim is not None, "head_dim is null")
    kv = config.num_key_value_heads
    _need(heads % kv == 0, "groups of heads")
    if name == "olmoe":
        _need(heads * head_dim == hidden, "the norm of the queries has another width")
    frequencies, factor = _rope(config)
    _need(2 * len(frequencies) == head_dim, "cos and sin have another width than a head")

    has_experts, experts = (False,) * n, None
    if name == "qwen3_moe":
        has_experts = tuple(
            i not in config.mlp_only_layers and config.num_experts > 0 and (i + 1) % config.decoder_sparse_step == 0
            for i in range(n)
        )
        experts = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob
    elif name == "olmoe":
        has_experts = (True,) * n
        experts = config.num_experts, config.num_experts_per_tok, config.intermediate_size, config.norm_topk_prob
    if not any(has_experts):
        experts = None
    if experts is not None:
        _need(experts[1] <= experts[0], "more experts a token than there are")

    biases: frozenset[str] = frozenset()
    if name == "starcoder2":
        biases = frozenset((*ATTENTION, *GATED[1:])) if config.use_bias else biases
    elif name == "qwen2":
        biases = frozenset(ATTENTION[:3])
    elif name not in ("mistral", "ministral"):
        biases = frozenset(ATTENTION) if config.attention_bias else biases
    if name == "llama" and config.mlp_bias:
        biases |= frozenset(GATED)

    is_gemma = name == "gemma2"
    activation = config.hidden_activation if is_gemma else config.hidden_act
    return Network(
        sizes=_sizes(config, kv, head_dim),
        eps=config.norm_epsilon if name == "starcoder2" else config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        activation=ACTIVATIONS.get(activation, activation),
        frequencies=frequencies,
        factor=factor,
        windows=_windows(config, name),
        scales=((config.query_pre_attn_scalar if is_gemma else head_dim) ** -0.5,) * n,
        biases=biases,
        d_mlp=None if all(has_experts) else config.intermediate_size,
        has_experts=has_experts,
        experts=experts,
        attention_cap=config.attn_logit_softcapping if is_gemma else None,
        logit_cap=config.final_logit_softcapping if is_gemma else None,
        clip=config.clip_qkv if name == "olmoe" else None,
        embed_scale=hidden**0.5 if is_gemma else 1.0,
        causal=not (is_gemma and config.use_bidirectional_attention),
    )


def _sizes(config: Any, kv_heads: int, head_dim: int) -> dict[str, int]:
    """In the names that every class knows, GPT-2's too (`attribute_map`)."""
    return {
        "vocab": config.vocab_size,
        "d_model": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "positions": config.max_position_embeddings,
    }


def _windows(config: Any, name: str) -> tuple[int | None, ...]:
    n = config.num_hidden_layers
    if name in ("llama", "olmo2", "olmoe"):
        return (None,) * n
    window = config.sliding_window
    if name in ("mistral", "starcoder2", "qwen3_moe"):  # which do not look at layer_types
        return (window,) * n
    _need(set(config.layer_types) <= {"sliding_attention", "full_attention"}, "a mask of another kind")
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    always = name in ("ministral", "gemma2")  # which make the mask even if no layer uses it
    _need(window is not None or not (always or any(slides)), "a sliding mask without a window")
    return tuple(window if one else None for one in slides)


def _gpt2(config: Any, name: str) -> Network:
    heads, hidden, n = config.n_head, config.n_embd, config.n_layer
    _need(hidden % heads == 0, "heads do not share the width evenly")
    _need(not config.add_cross_attention, "cross attention")
    head_dim = hidden // heads
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    return Network(
        sizes=_sizes(config, heads, head_dim),
        eps=config.layer_norm_epsilon,
        tied=config.tie_word_embeddings,
        activation=ACTIVATIONS.get(config.activation_function, config.activation_function),
        frequencies=None,
        factor=1.0,
        windows=(None,) * n,
        scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(n)),
        biases=frozenset({"qkv_proj", "o_proj", "up_proj", "down_proj"}),
        d_mlp=config.n_inner if config.n_inner is not None else 4 * hidden,
        has_experts=(False,) * n,
    )


def _gpt_neox(config: Any, name: str) -> Network:
    heads, hidden, n = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    head_dim = hidden // heads
    frequencies, factor = _rope(config)
    _need(2 * len(frequencies) <= head_dim, "turns more than a head")
    return Network(
        sizes=_sizes(config, heads, head_dim),
        eps=config.layer_norm_eps,
        tied=config.tie_word_embeddings,
        activation=ACTIVATIONS.get(config.hidden_act, config.hidden_act),
        frequencies=frequencies,
        factor=factor,
        windows=(None,) * n,
        scales=(head_dim**-0.5,) * n,
        biases=frozenset({"up_proj", "down_proj"} | ({"qkv_proj", "o_proj"} if config.attention_bias else set())),
        d_mlp=config.intermediate_size,
        has_experts=(False,) * n,
        parallel=config.use_parallel_residual,
    )


# ---- modeling_rope_utils.py ----


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Frequencies, and the factor of cos and sin."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        partial = config.rope_parameters.get("partial_rotary_factor", 1.0) if config.model_type == "gpt_neox" else 1.0
        return _inverse(config.rope_parameters["rope_theta"], int(_head_dim(config) * partial)), 1.0
    # Each of transformers' functions calls this again, once keys that are not fields of the class are attributes.
    config.standardize_rope_params()
    rope = config.rope_parameters
    head_dim = _head_dim(config)
    if kind == "yarn":  # whose function alone does not take a null for no key
        head_dim = getattr(config, "head_dim", head_dim)
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    plain = np.array(_inverse(rope["rope_theta"], dim))
    if kind == "linear":
        return tuple(plain / rope["factor"]), 1.0
    if kind == "llama3":
        return tuple(_llama3(plain, rope)), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, dim, config.max_position_embeddings)
    if kind in ("dynamic", "longrope", "proportional"):
        raise NotDescribed(f"rotary frequencies of the type {kind}")
    raise NoNetwork(f"no rotary frequencies of the type {kind}")


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _inverse(base: float, dim: int) -> tuple[float, ...]:
    return tuple(1.0 / base ** (i / dim) for i in range(0, dim, 2))


def _llama3(plain: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    scaled = np.where(wavelength > context / low, plain / factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    medium = ~(wavelength < context / high) & ~(wavelength > context / low)
    return np.where(medium, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(plain: np.ndarray, rope: Mapping[str, Any], dim: int, longest: int) -> tuple[tuple[float, ...], float]:
    factor, base, original = rope["factor"], rope["rope_theta"], rope["original_max_position_embeddings"]
    if factor is None:
        factor = longest / original

    def magnitude(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        m, m_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = magnitude(factor, m) / magnitude(factor, m_all) if m and m_all else magnitude(factor)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return tuple(plain / factor * ramp + plain * (1 - ramp)), attention
