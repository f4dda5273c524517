"""Reads a `config.json` of Hugging Face key by key; also the keys that most families share.

What is missing, of the wrong type or not supported raises UnsupportedConfig with the key's name. A missing key means
what transformers' class of the family takes as its default. A null means what the class makes of it; for most keys that
is nothing, and it is refused. The rotary embedding's keys are in `rope_json.py`.
"""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from param_decomp_jax.targets.architecture import LARGEST, UnsupportedConfig
from param_decomp_jax.targets.transformer_config import Activation, TransformerConfig

REFUSED: Any = object()
"""Marks a key that cannot be null."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
"""Names of activations in transformers."""


class ConfigJson:
    """The keys of one file. ``title``: the family's title, for messages.

    ``default`` is what a missing key means; without one it is refused. ``null`` is what a null means.
    """

    def __init__(self, raw: Mapping[str, Any], title: str) -> None:
        self.raw, self.title = raw, title
        if raw.get("quantization_config"):
            raise UnsupportedConfig("the weights are quantized; give the folder of the unquantized model")
        if raw.get("per_layer_config"):
            raise UnsupportedConfig("per_layer_config gives layers settings of their own, which is not supported")

    def _given(self, key: str, default: Any, null: Any = REFUSED) -> Any:
        if key not in self.raw:
            if default is None:
                raise UnsupportedConfig(f"lacks the key '{key}', which a {self.title} configuration has")
            return default
        value = self.raw[key]
        return null if value is None and null is not REFUSED else value

    def spelled(self, *keys: str) -> str:
        """Returns which of several names of one setting the file has. Raises UnsupportedConfig if it has two that
        disagree."""
        found = [key for key in keys if key in self.raw]
        for other in found[1:]:
            if not same_value(self.raw[found[0]], self.raw[other]):
                raise UnsupportedConfig(
                    f"{found[0]} is {shown(self.raw[found[0]])}, but {other} is {shown(self.raw[other])}: they are two "
                    "names of one setting; keep the right one"
                )
        return found[0] if found else keys[0]

    def whole(self, key: str, default: int | None = None, null: Any = REFUSED) -> int:
        """Returns a whole number."""
        value = self._given(key, default, null)
        if type(value) is not int:
            raise UnsupportedConfig(f"{key}: should be a whole number, not {shown(value)}")
        return value

    def heads(self, key: str, default: int | None = None, null: Any = REFUSED) -> int:
        """Returns a number of heads, by which widths are divided."""
        n = self.whole(key, default, null)
        if n < 1:
            raise UnsupportedConfig(f"{key}: should be a whole number of at least 1, not {n}")
        return n

    def n_layers(self, key: str) -> int:
        """Returns a number of layers, small enough to go through them one by one."""
        n, most = self.whole(key), LARGEST["n_layers"]
        if not 1 <= n <= most:
            raise UnsupportedConfig(f"{key}: should be a whole number from 1 to {most:,}, not {n:,}")
        return n

    def head_width(self, width_key: str, heads_key: str) -> int:
        """Returns the dimensions of a head, for heads that share the whole width. Raises UnsupportedConfig if it is not
        divisible."""
        width, heads = self.whole(width_key), self.heads(heads_key)
        if width % heads:
            raise UnsupportedConfig(f"{width_key}: should be a multiple of {heads_key}, {heads}, not {width}")
        return width // heads

    def number(self, key: str, default: float, null: Any = REFUSED) -> float:
        """Returns a finite number."""
        return as_number(key, self._given(key, default, null))

    def epsilon(self, key: str, default: float) -> float:
        """Returns what a norm adds to the mean of the squares."""
        value = self.number(key, default)
        if not value >= 0:
            raise UnsupportedConfig(f"{key}: should be a number of at least 0, not {value}")
        return value

    def optional(self, key: str, default: float | None = None) -> float | None:
        """Returns a positive number, or None for a null."""
        if key not in self.raw:
            return default
        return None if self.raw[key] is None else self.positive(key, 0.0)

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise UnsupportedConfig(f"{key}: should be a positive number, not {value}")
        return value

    def flag(self, key: str, default: bool, null: Any = REFUSED) -> bool:
        value = self._given(key, default, null)
        if type(value) is not bool:
            raise UnsupportedConfig(f"{key}: should be true or false, not {shown(value)}")
        return value

    def activation(self, key: str, default: str) -> Activation:
        value = self._given(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedConfig(f"{key} is {shown(value)}; what can be loaded is {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, key: str, *values: Any) -> None:
        """Refuses all other values. A missing key counts as the first of ``values``."""
        value = self.raw.get(key, values[0])
        if value not in values:
            raise UnsupportedConfig(f"{key} is {shown(value)}; only {' or '.join(map(shown, values))} can be loaded")

    def layers(self, key: str) -> tuple[int, ...]:
        """Returns a list of layer numbers, empty if the key is missing or null."""
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise UnsupportedConfig(f"{key}: should be a list of layers' numbers, not {value!r:.60}")
        return tuple(sorted(set(value)))

    # ---- sliding windows ----

    def window(self, default: int | None = None) -> int | None:
        """Returns how far back a layer with a sliding window reads; None for a null."""
        if self.raw.get("sliding_window", default) is None:
            return None
        n = self.whole("sliding_window", default)
        if n < 1:
            raise UnsupportedConfig(f"sliding_window: should be a positive number, not {n}")
        return n

    def window_layers(self, n_layers: int, default: Collection[int]) -> tuple[int, ...]:
        """Returns the layers with a sliding window: those in ``layer_types``, else ``default``."""
        types = self.raw.get("layer_types")
        if types is None:
            return tuple(n for n in range(n_layers) if n in default)
        if not isinstance(types, list) or len(types) != n_layers or not set(map(str, types)) <= LAYER_TYPES.keys():
            raise UnsupportedConfig(f"layer_types: should say sliding_attention or full_attention of {n_layers} layers")
        return tuple(n for n, kind in enumerate(types) if LAYER_TYPES[kind])

    def sliding(self, n_layers: int, window: int | None, default: Collection[int]) -> dict[str, Any]:
        """Returns the fields of the windows in a family that reads ``layer_types``. ``default``: layers with windows if
        that key is missing."""
        layers = self.window_layers(n_layers, default)
        if layers and window is None:
            raise UnsupportedConfig(
                "sliding_window is null or off, but layers slide: leave out sliding_attention in layer_types, or give "
                "sliding_window a number"
            )
        return {"window": window, "window_layers": layers} if layers else {}

    def all_or_none(self, n_layers: int, window: int | None) -> dict[str, Any]:
        """Returns the fields of the windows in a family in which all layers have a window, or none. transformers does
        not read ``layer_types`` there; a file in which that key says otherwise is refused."""
        every = () if window is None else tuple(range(n_layers))
        if self.window_layers(n_layers, every) != every:
            what = "no layer of it slides" if window is None else f"all layers of it slide, by {window}"
            raise UnsupportedConfig(f"layer_types: as transformers reads a {self.title}, {what}")
        return {} if window is None else {"window": window, "window_layers": every}


LAYER_TYPES = {"sliding_attention": True, "full_attention": False, "attention": False}
"""Whether a layer has a sliding window, by its name in ``layer_types``. The last is an old name."""


def same_value(a: Any, b: Any) -> bool:
    """Returns whether two values of JSON are the same: 1 and 1.0 are, 1 and true are not."""
    return bool(a == b) and (type(a) is bool) == (type(b) is bool)


def shown(value: Any) -> str:
    """Returns a value as the file has it, for messages."""
    return "null" if value is None else f"{value!r:.60}"


def as_number(key: str, value: Any) -> float:
    """Returns a finite number from JSON."""
    if type(value) not in (int, float):
        raise UnsupportedConfig(f"{key}: should be a number, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise UnsupportedConfig(f"{key}: the number is too large") from error
    if not isfinite(number):
        raise UnsupportedConfig(f"{key}: should be a positive number, not {number}")
    return number


# ---- writing ----


def common_keys(config: TransformerConfig, model_class: str, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
    """Returns the keys that most families share."""
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
"""The longest sequence that the classes of Llama, OLMo 2 and GPT-NeoX assume if a file does not give one."""


def activation_name(activation: Activation) -> str:
    """Returns the name of an activation in transformers."""
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation)


def layer_types(config: TransformerConfig) -> list[str]:
    """Returns the kind of window of each layer, as transformers 5 writes it."""
    return ["sliding_attention" if n in config.window_layers else "full_attention" for n in range(config.n_layers)]
