"""Converts the settings and state dicts of models of the PyTorch project to the names, shapes and layouts of our
folders.

Arrays are NumPy's; nothing here needs torch. A `nn.Linear` keeps ``[d_out, d_in]`` and computes ``x Wᵀ``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import numpy as np

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import printable

Kind = Literal["tms", "resid_mlp", "llama_simple_mlp", "gpt2"]
State = Mapping[str, np.ndarray]
Settings = Mapping[str, Any]

_KEYS: dict[Kind, frozenset[str]] = {
    "tms": frozenset({"n_features", "n_hidden"}),
    "resid_mlp": frozenset({"n_features", "d_embed", "d_mlp", "n_layers"}),
    "llama_simple_mlp": frozenset({"n_embd", "n_layer", "n_head", "vocab_size", "n_intermediate"}),
    "gpt2": frozenset({"n_embd", "n_layer", "n_head", "vocab_size", "block_size"}),
}
"""Keys that identify the settings of a model; the first match counts."""
_TITLES: dict[Kind, str] = {
    "tms": "TMS", "resid_mlp": "ResidMLP", "llama_simple_mlp": "LlamaSimpleMLP", "gpt2": "GPT2"
}  # fmt: skip
_DEPTH = 4
"""Levels of a settings file at which those of the model are searched."""
_SIMPLE_KEYS = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_intermediate", "mlp_bias", "attn_bias", "n_ctx",
    "rotary_adjacent_pairs", "rotary_dim", "rotary_base", "n_key_value_heads", "use_grouped_query_attention",
)  # fmt: skip
_BUFFERS = ("*.rotary_sin", "*.rotary_cos", "*.attn.bias", "*.attn.masked_bias")
"""Tables beside the weights of a model that follow from its settings."""


@dataclass(frozen=True)
class TorchSettings:
    """Settings of a model of the PyTorch project, as its training writes them. ``where``: that file, for errors."""

    kind: Kind
    raw: Settings
    where: str

    def config(self) -> dict[str, Any]:
        """Returns the `config.json` of the same model. Raises UserError for what our architectures do not have."""
        return {"tms": _tms, "resid_mlp": _resid_mlp, "llama_simple_mlp": _simple, "gpt2": _gpt2}[self.kind](self)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key; ``default`` if it is absent or null."""
        value = self.raw.get(key)
        return default if value is None else value


def find_settings(raw: Settings, where: str) -> TorchSettings | None:
    """Returns the settings of a model in a settings file, at its top or within a section; None without any.

    Raises UserError for an unsupported model of the PyTorch project.
    """
    level: list[Settings] = [raw]
    for _ in range(_DEPTH):
        for section in level:
            for kind, keys in _KEYS.items():
                if section.keys() >= keys:
                    return TorchSettings(_named_kind(section, kind, where), section, where)
        level = [value for section in level for value in section.values() if isinstance(value, Mapping)]
    return None


def _named_kind(section: Settings, kind: Kind, where: str) -> Kind:
    """Returns the kind that ``model_type`` names, if given."""
    given = section.get("model_type")
    if given is None:
        return kind
    for known in get_args(Kind):
        if str(given).replace("_", "").lower() == known.replace("_", ""):
            found: Kind = known
            return found
    raise UserError(
        f"{where}: model_type: is {printable(repr(given), 80)}; of the PyTorch project's models "
        f"{', '.join(_TITLES.values())} can be imported"
    )


def _tms(settings: TorchSettings) -> dict[str, Any]:
    sizes = {key: settings.raw[key] for key in ("n_features", "n_hidden")}
    return {"architecture": "tms", **sizes, "n_hidden_layers": settings.get("n_hidden_layers", 0)}


def _resid_mlp(settings: TorchSettings) -> dict[str, Any]:
    sizes = {key: settings.raw[key] for key in ("n_features", "d_embed", "d_mlp", "n_layers")}
    biases = {key: settings.get(key, False) for key in ("in_bias", "out_bias")}
    return {"architecture": "resid_mlp", **sizes, "activation": settings.get("act_fn_name", "gelu"), **biases}


def _simple(settings: TorchSettings) -> dict[str, Any]:
    given = {key: settings.raw[key] for key in _SIMPLE_KEYS if settings.raw.get(key) is not None}
    return {"model_type": "llama_simple_mlp", **given}


def _gpt2(settings: TorchSettings) -> dict[str, Any]:
    sizes = {key: settings.raw[key] for key in ("vocab_size", "n_embd", "n_layer", "n_head")}
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes,
        "n_positions": settings.get("block_size"), "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }  # fmt: skip


def strip_wrappers(state: State) -> dict[str, np.ndarray]:
    """Removes from the names of a state dict what torch's wrappers of a model (compiled, distributed) add."""
    names = [name.replace("_orig_mod.", "") for name in state]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names, state.values(), strict=True))


def convert(settings: TorchSettings, state: State) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the `config.json` and the tensors by name. ``state``: without the names of wrappers.

    Unknown names are passed on, and refused when the folder is read. Raises UserError for weights that contradict our
    architecture, such as a separate head or an unembedding that is not the embedding.
    """
    config = settings.config()
    return config, convert_tensors(settings.kind, state, config, settings.where)


def convert_tensors(kind: Kind, state: State, config: dict[str, Any], where: str) -> dict[str, np.ndarray]:
    """Returns the tensors of `convert`, and adds to ``config`` what follows from them. ``where``: their place, for
    errors.
    """
    by_kind: dict[Kind, Callable[[State, dict[str, Any], str], Iterator[tuple[str, np.ndarray]]]] = {
        "tms": _tms_tensors,
        "resid_mlp": _resid_mlp_tensors,
        "llama_simple_mlp": _simple_tensors,
        "gpt2": _gpt2_tensors,
    }
    return {name: np.ascontiguousarray(array) for name, array in by_kind[kind](state, config, where)}


def _tms_tensors(state: State, config: dict[str, Any], where: str) -> Iterator[tuple[str, np.ndarray]]:
    if "linear2.weight" not in state and "linear1.weight" in state:  # tied
        yield "linear2", state["linear1.weight"]
    for name, array in state.items():
        if name == "linear2.bias":
            yield "bias", array
        else:
            yield name.removesuffix(".weight"), array.T if name.endswith(".weight") else array


def _resid_mlp_tensors(state: State, config: dict[str, Any], where: str) -> Iterator[tuple[str, np.ndarray]]:
    embed, unembed = state.get("W_E"), state.get("W_U")
    if embed is not None and unembed is not None and not np.array_equal(unembed, embed.T):
        raise UserError(f"{where}: W_U is not the transpose of W_E, as it is in the ResidMLP that can be decomposed")
    for name, array in state.items():
        module, _, part = name.rpartition(".")
        if name == "W_U":
            continue
        if part == "bias" and module.endswith((".mlp_in", ".mlp_out")):
            layer, _, matrix = module.rpartition(".mlp_")
            yield f"{layer}.{matrix}_bias", array
        else:
            yield (module, array.T) if part == "weight" else (name, array)


def _simple_tensors(state: State, config: dict[str, Any], where: str) -> Iterator[tuple[str, np.ndarray]]:
    if not _is_tied(state):
        raise UserError(f"{where}: lm_head.weight is not wte.weight, as it is in every LlamaSimpleMLP")
    return ((name, array) for name, array in state.items() if name != "lm_head.weight" and not _is_buffer(name))


def _gpt2_tensors(state: State, config: dict[str, Any], where: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of GPT-2, which Hugging Face stores as ``[d_in, d_out]`` under ``transformer.``."""
    config["tie_word_embeddings"] = tied = _is_tied(state)
    for name, array in state.items():
        if _is_buffer(name) or (tied and name == "lm_head.weight"):
            continue
        matrix = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        yield name if name == "lm_head.weight" else f"transformer.{name}", array.T if matrix else array


def _is_tied(state: State) -> bool:
    head, embed = state.get("lm_head.weight"), state.get("wte.weight")
    return head is None or embed is None or np.array_equal(head, embed)


def _is_buffer(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _BUFFERS)
