"""Reading a `config.json` of Hugging Face key by key, and the parts of one that most families write alike.

What is missing, of the wrong type or not supported raises UnsupportedConfig with the key's name.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from math import isfinite, log
from typing import Any

from param_decomp_jax.rotary import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.transformer_config import Activation, TransformerConfig

DEFAULT_THETA = 10_000.0
"""What transformers means where ``config.json`` does not give the rotary embedding's base."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
"""Names of activations in transformers."""


class ConfigJson:
    """The keys of one file. ``title``: of the family, for messages."""

    def __init__(self, raw: Mapping[str, Any], title: str) -> None:
        self.raw, self.title = raw, title
        if raw.get("quantization_config"):
            raise UnsupportedConfig("the weights are quantized; give the folder of the unquantized model")

    def _given(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None and default is None and key not in self.raw:
            raise UnsupportedConfig(f"lacks the key '{key}', which a {self.title} configuration has")
        return default if value is None and default is not None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; ``default`` where the key is missing or null."""
        value = self._given(key, default)
        if type(value) is not int:
            raise UnsupportedConfig(f"{key}: should be a whole number, not {value!r:.60}")
        return value

    def heads(self, key: str) -> int:
        """A number of heads, by which widths are divided."""
        n = self.whole(key)
        if n < 1:
            raise UnsupportedConfig(f"{key}: should be a whole number of at least 1, not {n}")
        return n

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        return as_number(key, self._given(key, default))

    def epsilon(self, key: str, default: float) -> float:
        """What a norm adds to the mean of the squares."""
        value = self.number(key, default)
        if not value >= 0:
            raise UnsupportedConfig(f"{key}: should be a number of at least 0, not {value}")
        return value

    def optional(self, key: str) -> float | None:
        """A positive number, None where the key is missing or null."""
        if self.raw.get(key) is None:
            return None
        value = self.number(key, 0.0)
        if value <= 0:
            raise UnsupportedConfig(f"{key}: should be a positive number, not {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if type(value) is not bool:
            raise UnsupportedConfig(f"{key}: should be true or false, not {value!r:.60}")
        return value

    def activation(self, key: str, default: str) -> Activation:
        value = self._given(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedConfig(f"{key} is {value!r:.60}; what can be loaded is {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, key: str, *values: Any) -> None:
        """Refuses every other value; a missing key is one of them."""
        value = self.raw.get(key, values[0])
        if value not in values:
            raise UnsupportedConfig(f"{key} is {value!r:.60}; only {' or '.join(map(repr, values))} can be loaded")

    def layers(self, key: str) -> tuple[int, ...]:
        """A list of layers' numbers, empty where the key is missing."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise UnsupportedConfig(f"{key}: should be a list of layers' numbers, not {value!r:.60}")
        return tuple(sorted(set(value)))

    # ---- positions ----

    def rope(self) -> Mapping[str, Any]:
        """The keys of the rotary embedding, ``rope_scaling`` in transformers 4 and ``rope_parameters`` in 5."""
        found: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.raw.get(key) or {}
            if not isinstance(value, dict):
                raise UnsupportedConfig(f"{key}: should be an object, not {value!r:.60}")
            found |= value
        return found

    def theta(self, key: str = "rope_theta", default: float = DEFAULT_THETA) -> float:
        """The rotary embedding's base; ``key``: where version 4 keeps it."""
        rope = self.rope()
        value = as_number(
            "rope_theta", next((v for v in (rope.get("rope_theta"), self.raw.get(key)) if v is not None), default)
        )
        if value <= 0:
            raise UnsupportedConfig(f"rope_theta: should be a positive number, not {value}")
        return value

    def rope_scaling(self, longest: int) -> RopeScaling | None:
        """How the rotary frequencies are scaled. ``longest``: the model's longest sequence."""
        rope = self.rope()
        kind = rope.get("rope_type", rope.get("type", "default"))
        numbers = _Scaling(rope, kind)
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(numbers["factor"])
            case "llama3":
                return Llama3Scaling(
                    factor=numbers["factor"],
                    low_freq_factor=numbers["low_freq_factor"],
                    high_freq_factor=numbers["high_freq_factor"],
                    original_max_position_embeddings=int(numbers["original_max_position_embeddings"]),
                )
            case "yarn":
                return _yarn(numbers, longest)
        known = "'default', 'linear', 'llama3' and 'yarn'"
        raise UnsupportedConfig(f"the rotary scaling {kind!r:.60} is not supported; only {known} are")

    # ---- sliding windows ----

    def window_layers(self, n_layers: int, default: Collection[int]) -> tuple[int, ...]:
        """The layers that slide: as ``layer_types`` says, else ``default``."""
        types = self.raw.get("layer_types")
        if types is None:
            return tuple(n for n in range(n_layers) if n in default)
        kinds = {"sliding_attention", "full_attention"}
        if not isinstance(types, list) or len(types) != n_layers or not set(map(str, types)) <= kinds:
            raise UnsupportedConfig(f"layer_types: should say sliding_attention or full_attention of {n_layers} layers")
        return tuple(n for n, kind in enumerate(types) if kind == "sliding_attention")


class _Scaling:
    """Numbers of a rotary scaling by name, each checked as it is read."""

    def __init__(self, rope: Mapping[str, Any], kind: Any) -> None:
        self.rope, self.kind = rope, kind

    def __getitem__(self, key: str) -> float:
        if self.rope.get(key) is None:
            raise UnsupportedConfig(f"rope_scaling lacks the key '{key}', which the scaling {self.kind!r} has")
        return self.get(key, 0.0)

    def get(self, key: str, default: float) -> float:
        given = self.rope.get(key)
        value = as_number(f"rope_scaling.{key}", default if given is None else given)
        if value <= 0:
            raise UnsupportedConfig(f"rope_scaling.{key}: should be a positive number, not {value}")
        return value


def _yarn(numbers: _Scaling, longest: int) -> YarnScaling:
    factor = numbers["factor"]

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0

    rope = numbers.rope
    default = magnitude(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = magnitude(numbers["mscale"]) / magnitude(numbers["mscale_all_dim"])
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(numbers.get("original_max_position_embeddings", float(longest))),
        attention_factor=numbers.get("attention_factor", default),
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
    )


def as_number(key: str, value: Any) -> float:
    """A finite number from JSON."""
    if type(value) not in (int, float):
        raise UnsupportedConfig(f"{key}: should be a number, not {value!r:.60}")
    try:
        number = float(value)
    except OverflowError as error:
        raise UnsupportedConfig(f"{key}: the number is too large") from error
    if not isfinite(number):
        raise UnsupportedConfig(f"{key}: should be a positive number, not {number}")
    return number


# ---- writing ----


def rope_keys(config: TransformerConfig, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The rotary embedding for transformers 4 and 5 alike."""
    scaling = None if config.rope_scaling is None else asdict(config.rope_scaling)
    partial = {} if config.rotary_dim is None else {"partial_rotary_factor": config.turning / config.head_dim}
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"}), **partial}
    return {theta_key: config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def common_keys(config: TransformerConfig, model_class: str, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
    """Keys under which most families keep the same things."""
    return {
        "architectures": [model_class],
        "model_type": config.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_mlp,
        "hidden_act": activation_name(config.activation),
        "max_position_embeddings": DEFAULT_POSITIONS if config.max_positions is None else config.max_positions,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": dtype,
    }


DEFAULT_POSITIONS = 2048
"""What transformers' LlamaConfig means where ``config.json`` does not say how long sequences may be."""


def activation_name(activation: Activation) -> str:
    """Its name in transformers."""
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation)


def layer_types(config: TransformerConfig) -> list[str]:
    """Of each layer, whether it slides, as transformers 5 writes it."""
    return ["sliding_attention" if n in config.window_layers else "full_attention" for n in range(config.n_layers)]
