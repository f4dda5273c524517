"""From the files that transformers 5 writes to those of published models: keys of the configuration as they were then,
and tensors that were saved besides the weights.
"""

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def old_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Configurations before transformers 5: ``rope_theta`` and ``rope_scaling`` in place of ``rope_parameters``,
    ``torch_dtype`` in place of ``dtype``, no ``layer_types``, ``num_experts`` in place of ``num_local_experts``."""
    parameters = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types", "dtype")}
    old |= {"torch_dtype": "float32", "transformers_version": "4.46.0", "rope_theta": parameters.pop("rope_theta")}
    old["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    if "num_local_experts" in old:
        old["num_experts"] = old.pop("num_local_experts")
    return old


def old_linear_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The oldest form, ``type`` in place of ``rope_type``, and no ``head_dim``."""
    old = old_rope(config)
    old["rope_scaling"] = {"type": "linear", "factor": config["rope_parameters"]["factor"]}
    del old["head_dim"]
    return old


def old_gpt_neox(config: dict[str, Any]) -> dict[str, Any]:
    parameters = config["rope_parameters"]
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    return old | {
        "rotary_pct": parameters["partial_rotary_factor"],
        "rotary_emb_base": parameters["rope_theta"],
        "torch_dtype": "float32",
        "transformers_version": "4.24.0",
    }


def old_gemma2(config: dict[str, Any]) -> dict[str, Any]:
    left_out = ("tie_word_embeddings", "use_bidirectional_attention")
    old = {key: value for key, value in old_rope(config).items() if key not in left_out}
    return old | {"hidden_act": config["hidden_activation"], "cache_implementation": "hybrid"}


def old_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    old = {key: value for key, value in config.items() if key not in ("dtype", "tie_word_embeddings")}
    return old | {"n_ctx": config["n_positions"], "task_specific_params": {}, "transformers_version": "4.20.0"}


def llama_inverse_frequencies(tensors: Tensors) -> Tensors:
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": 100.0 ** -(torch.arange(2) / 2) for n in range(3)}
    return tensors | frequencies


def gpt2_published(tensors: Tensors) -> Tensors:
    """No prefix, and the causal mask beside the weights of each layer."""
    mask = torch.ones(24, 24).tril()[None, None]
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return plain | {f"h.{n}.attn.bias": mask.clone() for n in range(3)}


def pythia_published(tensors: Tensors) -> Tensors:
    """The causal mask, what it is filled with, and the rotary frequencies beside the weights of each layer."""
    extra = {
        "bias": torch.ones(32, 32, dtype=torch.bool).tril()[None, None],
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": 100.0 ** -(torch.arange(2) / 2),
    }
    layers = {f"gpt_neox.layers.{n}.attention.{name}": extra[name].clone() for n in range(3) for name in extra}
    return tensors | layers
