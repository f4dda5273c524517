"""Llama's ``config.json``, in the layouts of transformers 4 and 5."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from param_decomp_jax.targets.llama import LlamaConfig, RopeScaling
from param_decomp_lab.errors import UserError

CONFIG_FILE = "config.json"
GPT_MODEL_TYPE = "param_decomp_gpt"
"""What the folder of a model says that `pd pretrain` made with ``architecture: gpt`` (`gpt_folder.py`)."""
# What LlamaConfig of transformers means where config.json says nothing.
DEFAULT_THETA = 10_000.0
DEFAULT_EPS = 1e-6


def read_config(folder: str | Path) -> LlamaConfig:
    """The architecture in ``folder/config.json``.

    Raises UserError: no such file, not JSON, another architecture than Llama, or a variant of it that is not
    supported (biases, another activation, another rotary scaling than ``llama3``), each by name.
    """
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"no {CONFIG_FILE} in {folder}: give a local folder in the Hugging Face layout")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): copy or download it again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file} should be a mapping, as Hugging Face writes it; it is a {type(raw).__name__}")
    _refuse_variants(file, raw)
    try:
        n_heads, d_model = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        theta, scaling = _rope(file, raw)
        return LlamaConfig(
            vocab_size=int(raw["vocab_size"]),
            d_model=d_model,
            n_layers=int(raw["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(raw.get("num_key_value_heads") or n_heads),
            head_dim=int(raw.get("head_dim") or d_model // n_heads),
            d_mlp=int(raw["intermediate_size"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", DEFAULT_EPS)),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise UserError(f"{file} lacks the key {error}, which a Llama configuration has") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} holds a value of the wrong type: {error}") from error


def _refuse_variants(file: Path, raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type == GPT_MODEL_TYPE:
        raise UserError(
            f"{file}: this is a GPT, which `pd pretrain` trains but nothing here decomposes; give the folder of a "
            "Llama (`pd pretrain` makes one with model: {architecture: llama, …})"
        )
    if model_type != "llama":
        raise UserError(f"{file}: model_type is {model_type!r}; only 'llama' can be loaded")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key, False):
            raise UserError(f"{file}: {key} is true; only Llamas without biases can be loaded")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"{file}: hidden_act is {activation!r}; only 'silu' can be loaded")
    if raw.get("quantization_config"):
        raise UserError(f"{file}: the weights are quantized; give the folder of the unquantized model")


def _rope(file: Path, raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """``rope_theta`` and the scaling: beside each other (transformers 4), or both in ``rope_parameters`` (5)."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", raw.get("rope_theta") or DEFAULT_THETA))
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
            raise UserError(f"{file}: the rotary scaling {other!r} is not supported; only 'default' and 'llama3' are")


def config_json(
    config: LlamaConfig, *, dtype: str, max_position_embeddings: int, eos_token_id: int | None = None
) -> dict[str, Any]:
    """What ``config.json`` says of ``config``, for transformers 4 and 5 alike.

    ``max_position_embeddings``: longest sequence it was trained on, which LlamaConfig does not keep.
    """
    scaling = {"rope_type": "llama3", **asdict(config.rope_scaling)} if config.rope_scaling else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_mlp,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": dtype,
    }
