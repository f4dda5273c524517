"""Llama: RMSNorm, rotary embedding (with the Llama-3.1 scaling), grouped-query attention, SwiGLU.

Matrices are kept for multiplication from the right (``x @ W``) and stacked over layers. Files are those of Hugging
Face's ``LlamaForCausalLM``, ``config.json`` in the layouts of transformers 4 and 5.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from param_decomp_jax.attention import attend
from param_decomp_jax.fused_kl import Head
from param_decomp_jax.memory import PLAIN, MemoryPolicy
from param_decomp_jax.mesh import gather
from param_decomp_jax.numerics import matmul_wide, rms_norm
from param_decomp_jax.remat import named
from param_decomp_jax.rotary import frequencies, rotate
from param_decomp_jax.sites import Matrix, Sites
from param_decomp_jax.targets.architecture import Architecture, Tensors, TokenInputs, UnsupportedConfig
from param_decomp_jax.targets.base import LayerLinears, Weights
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.plain_linears import FROZEN, UNTOUCHED

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven matrices of a layer, in order of application."""

_READS = {
    "q_proj": "attn_in", "k_proj": "attn_in", "v_proj": "attn_in", "o_proj": "attn_out",
    "gate_proj": "mlp_in", "up_proj": "mlp_in", "down_proj": "mlp_hidden",
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """The frequency scaling of Llama 3.1 (Hugging Face's ``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig(Architecture):
    """Architecture, with the meanings of Hugging Face's ``config.json``.

    ``max_positions``: longest sequence, None where a run's folder from before it was kept does not say.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    # No part of what the network computes: two that differ in it are the same target.
    max_positions: int | None = field(default=None, compare=False)

    name = "llama"
    title = "Llama"
    model_classes = ("LlamaForCausalLM",)
    prefix = "model."
    # A tied head is often stored too, and old files hold the rotary frequencies.
    unread_tensors = ("lm_head.weight", "*rotary_emb.inv_freq")

    @property
    def inputs(self) -> TokenInputs:
        return TokenInputs(self.vocab_size, self.max_positions)

    def matrix_shape(self, kind: str) -> tuple[int, int]:
        """``(d_in, d_out)`` of one of the seven matrices."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "q_proj": (self.d_model, q),
            "k_proj": (self.d_model, kv),
            "v_proj": (self.d_model, kv),
            "o_proj": (q, self.d_model),
            "gate_proj": (self.d_model, self.d_mlp),
            "up_proj": (self.d_model, self.d_mlp),
            "down_proj": (self.d_mlp, self.d_model),
        }[kind]

    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(
            Matrix(module_name(layer, kind), layer, kind, _READS[kind], *self.matrix_shape(kind))
            for layer in range(self.n_layers)
            for kind in KINDS
        )

    def weight_shapes(self) -> dict[str, Any]:
        d, n = self.d_model, self.n_layers
        layers = {kind: (n, *self.matrix_shape(kind)) for kind in KINDS}
        shapes: dict[str, Any] = {
            "embed": (self.vocab_size, d),
            "layers": {"input_norm": (n, d), "post_norm": (n, d), **layers},
            "norm": (d,),
        }
        if not self.tied:
            shapes["head"] = (d, self.vocab_size)
        return shapes

    def tensors(self) -> dict[str, Any]:
        def stacked(module: Callable[[int], str], transposed: bool) -> Tensors:
            return Tensors(tuple(f"model.{module(n)}.weight" for n in range(self.n_layers)), True, transposed)

        layers = {kind: stacked(partial(module_name, kind=kind), True) for kind in KINDS}
        layers["input_norm"] = stacked(lambda n: f"layers.{n}.input_layernorm", False)
        layers["post_norm"] = stacked(lambda n: f"layers.{n}.post_attention_layernorm", False)
        tensors: dict[str, Any] = {
            "embed": Tensors(("model.embed_tokens.weight",)),
            "layers": layers,
            "norm": Tensors(("model.norm.weight",)),
        }
        if not self.tied:
            tensors["head"] = Tensors(("lm_head.weight",), transposed=True)
        return tensors

    def target(self, sites: Sites, memory: MemoryPolicy = PLAIN, compute_dtype: Any = jnp.float32) -> "Llama":
        return Llama(self, sites, memory, compute_dtype)

    def describe(self) -> str:
        width = f"{self.n_layers} layers of width {self.d_model:,}, MLP {self.d_mlp:,}"
        return f"Llama, {width}, {self.n_heads} heads ({self.n_kv_heads} kv), vocabulary {self.vocab_size:,}"

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        """Refused: biases, another activation than SiLU, another rotary scaling than ``llama3``, quantized weights."""
        _refuse_variants(raw)
        try:
            n_heads, d_model = _whole(raw, "num_attention_heads"), _whole(raw, "hidden_size")
            theta, scaling = _rope(raw)
            return cls(
                vocab_size=_whole(raw, "vocab_size"),
                d_model=d_model,
                n_layers=_whole(raw, "num_hidden_layers"),
                n_heads=n_heads,
                n_kv_heads=_whole(raw, "num_key_value_heads", n_heads),
                head_dim=_whole(raw, "head_dim", d_model // n_heads),
                d_mlp=_whole(raw, "intermediate_size"),
                rms_norm_eps=_number(raw.get("rms_norm_eps", DEFAULT_EPS)),
                rope_theta=theta,
                rope_scaling=scaling,
                tied=bool(raw.get("tie_word_embeddings", False)),
                max_positions=_whole(raw, "max_position_embeddings", DEFAULT_POSITIONS),
            )
        except KeyError as error:
            raise UnsupportedConfig(f"lacks the key {error}, which a Llama configuration has") from error
        except UnsupportedConfig:
            raise
        except ZeroDivisionError as error:
            raise UnsupportedConfig("num_attention_heads: should be a whole number of at least 1, not 0") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise UnsupportedConfig(f"holds a value of the wrong type: {error}") from error

    def __post_init__(self) -> None:
        """Raises UnsupportedConfig for numbers with which the rotary embedding or the norms give NaN or nonsense."""
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise UnsupportedConfig(f"rope_theta: should be a positive number, not {self.rope_theta}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise UnsupportedConfig(f"rms_norm_eps: should be a number of at least 0, not {self.rms_norm_eps}")
        if self.rope_scaling is None:
            return
        for name, value in asdict(self.rope_scaling).items():
            if not (math.isfinite(value) and value > 0):
                raise UnsupportedConfig(f"rope_scaling.{name}: should be a positive number, not {value}")
        low, high = self.rope_scaling.low_freq_factor, self.rope_scaling.high_freq_factor
        if low >= high:
            raise UnsupportedConfig(
                f"rope_scaling.high_freq_factor: should be above low_freq_factor, {low}, not {high}"
            )

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        """For transformers 4 and 5 alike."""
        scaling = {"rope_type": "llama3", **asdict(self.rope_scaling)} if self.rope_scaling else None
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_mlp,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": DEFAULT_POSITIONS if self.max_positions is None else self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})},
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "dtype": dtype,
        }

    @classmethod
    def from_fields(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        scaling = raw.get("rope_scaling")
        return cls(**{**raw, "rope_scaling": scaling and RopeScaling(**scaling)})


DEFAULT_THETA, DEFAULT_EPS, DEFAULT_POSITIONS = 10_000.0, 1e-6, 2048
"""What transformers' LlamaConfig means where ``config.json`` says nothing."""


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key, False):
            raise UnsupportedConfig(f"{key} is true; only Llamas without biases can be loaded")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedConfig(f"hidden_act is {activation!r}; only 'silu' can be loaded")
    if raw.get("quantization_config"):
        raise UnsupportedConfig("the weights are quantized; give the folder of the unquantized model")


def _whole(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The whole number at ``key``; ``default`` where the key is missing or null. KeyError without a default."""
    value = raw[key] if default is None else raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise UnsupportedConfig(f"{key}: should be a whole number, not {value!r:.60}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(f"{value} is no number")
    return float(value)


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """``rope_theta`` and the scaling: beside each other (transformers 4), or both in ``rope_parameters`` (5)."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = DEFAULT_THETA if theta is None else _number(theta)
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return theta, None
        case "llama3":
            return theta, RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
            )
        case other:
            raise UnsupportedConfig(f"the rotary scaling {other!r} is not supported; only 'default' and 'llama3' are")


def module_name(layer: int, kind: str) -> str:
    """Hugging Face's module name without ``model.``: ``layers.18.mlp.up_proj``."""
    return f"layers.{layer}.{'self_attn' if kind in KINDS[:4] else 'mlp'}.{kind}"


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angular frequencies ``[head_dim / 2]`` in radians per position; scaled as Llama 3.1 does when configured."""
    plain = frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling is None:
        return plain
    s = config.rope_scaling
    # Turns over the original context: many turns stay as they are, few are stretched by `factor`, smooth in between.
    turns = s.original_max_position_embeddings * plain / (2 * np.pi)
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / s.factor


@dataclass(frozen=True)
class Llama(Decoder):
    """A Llama as a target."""

    writes_residual = frozenset({"o_proj", "down_proj"})

    architecture: LlamaConfig

    def embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        return self.look_up(weights["embed"], tokens)

    def layer(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B T d"]:
        config = self.architecture
        B, T, _ = x.shape
        h = rms_norm(x, config.rms_norm_eps, w["input_norm"])
        q = linear("q_proj", h, w["q_proj"]).reshape(B, T, config.n_heads, config.head_dim)
        k = linear("k_proj", h, w["k_proj"]).reshape(B, T, config.n_kv_heads, config.head_dim)
        v = linear("v_proj", h, w["v_proj"]).reshape(B, T, config.n_kv_heads, config.head_dim)
        turning = rotary_frequencies(config)
        q, k = rotate(q, turning), rotate(k, turning)
        attended = named(attend(q, k, v, True, self.memory.attention), "attention").reshape(B, T, -1)
        x = x + linear("o_proj", attended, w["o_proj"])
        h = rms_norm(x, config.rms_norm_eps, w["post_norm"])
        hidden = jax.nn.silu(linear("gate_proj", h, w["gate_proj"])) * linear("up_proj", h, w["up_proj"])
        return x + linear("down_proj", hidden, w["down_proj"])

    def head(self, weights: Weights, dtype: Any) -> Head:
        matrix = (
            gather(weights["embed"], FROZEN, dtype).T
            if self.architecture.tied
            else gather(weights["head"], FROZEN, dtype)
        )
        return Head(self._logits, matrix, weights["norm"])

    def _logits(self, head: Float[Array, "d vocab"], norm: Float[Array, " d"], hidden: Float[Array, "*n d"]) -> Array:
        return matmul_wide(rms_norm(hidden, self.architecture.rms_norm_eps, norm), head)


def language_logits(
    weights: Weights, config: LlamaConfig, tokens: Int[Array, "B T"], memory: MemoryPolicy = PLAIN, dtype: Any = None
) -> Float[Array, "B T vocab"]:
    """Logits in fp32 of the network as it stands, no site decomposed. ``dtype``: of activations; None for the
    weights'."""
    model = Llama(config, Sites(()), memory, weights["embed"].dtype if dtype is None else dtype)
    return model.logits(weights, model.forward(weights, tokens, UNTOUCHED).output)


_LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_mlp=14_336,
    rms_norm_eps=1e-5, rope_theta=500_000.0, max_positions=8192,
)  # fmt: skip
_LLAMA_3_1_8B = replace(_LLAMA_3_8B, max_positions=131_072, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
_LLAMA_3_1_70B = replace(_LLAMA_3_1_8B, d_model=8192, n_layers=80, n_heads=64, d_mlp=28_672)
_LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128_256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_mlp=8192,
    rms_norm_eps=1e-5, rope_theta=500_000.0, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), tied=True,
    max_positions=131_072,
)  # fmt: skip
_LLAMA_3_2_3B = replace(_LLAMA_3_2_1B, d_model=3072, n_layers=28, n_heads=24, head_dim=128)
_SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_mlp=1536,
    rms_norm_eps=1e-5, rope_theta=100_000.0, tied=True, max_positions=8192,
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
