"""What the pretrainer needs of an architecture, and the two it trains: Llama and GPT."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.memory import INTERMEDIATES, MemoryPolicy
from param_decomp_jax.sites import Sites
from param_decomp_jax.targets import llama
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.gpt import Computation, GPTConfig, gpt_logits, init_weights
from param_decomp_jax.targets.llama import Llama, LlamaConfig
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.recipe import GPTRecipe, PretrainRecipe
from param_decomp_lab.weights.target_folder import save_target

_LAYERS_RECOMPUTED = frozenset(INTERMEDIATES) - {"layers", "attention", "site_outputs", "attack_outputs"}
"""What a Llama saves whose layers keep their input alone."""


class LanguageModel(Protocol):
    """An architecture, and how a recipe would have it computed."""

    @property
    def spared(self) -> tuple[str, ...]:
        """What is in the names of the weights that are not decayed."""
        ...

    def init(self, key: PRNGKeyArray) -> Weights:
        """Random fp32 weights."""
        ...

    def logits(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray | None
    ) -> Float[Array, "B T vocab"]:
        """Next-token logits in fp32. ``key``: of what is dropped in training, None in an evaluation."""
        ...

    def save(self, folder: Path, weights: Weights, data: DataMeta) -> None:
        """``config.json`` and ``model.safetensors``, of a model trained on ``data``."""
        ...


@dataclass(frozen=True)
class LlamaModel:
    """Nothing of a Llama is dropped. ``std``: of its initial matrices."""

    config: LlamaConfig
    memory: MemoryPolicy
    dtype: Any
    std: float
    spared: tuple[str, ...] = ("norm",)

    def init(self, key: PRNGKeyArray) -> Weights:
        def scaled(path: tuple[Any, ...], x: Array) -> Array:
            return x if "norm" in path[-1].key else x * (self.std / 0.02)

        return jax.tree_util.tree_map_with_path(scaled, llama.init_weights(key, self.config))

    def logits(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray | None
    ) -> Float[Array, "B T vocab"]:
        model = Llama(self.config, Sites(()), self.memory, self.dtype)
        return model.logits(weights, model.forward(weights, tokens, UNTOUCHED).output)

    def save(self, folder: Path, weights: Weights, data: DataMeta) -> None:
        config = replace(self.config, max_positions=data.seq_len)
        save_target(folder, config, weights, eos_token_id=data.separator)


@dataclass(frozen=True)
class GPTModel:
    """``std``: of the initial matrices."""

    config: GPTConfig
    how: Computation
    std: float
    spared: tuple[str, ...] = ("norm", "bias")

    def init(self, key: PRNGKeyArray) -> Weights:
        return init_weights(key, self.config, self.std)

    def logits(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray | None
    ) -> Float[Array, "B T vocab"]:
        return gpt_logits(weights, self.config, tokens, self.how, key)

    def save(self, folder: Path, weights: Weights, data: DataMeta) -> None:
        save_target(folder, self.config, weights)


def language_model(recipe: PretrainRecipe, seq_len: int, vocab_size: int | None) -> LanguageModel:
    """The model of ``recipe`` for rows of ``seq_len`` tokens out of ``vocab_size`` (None: the recipe says how many).

    Raises UserError: the recipe's vocabulary is too small for the data, or neither says how large it is.
    """
    dtype = jnp.dtype(recipe.dtype)
    if isinstance(recipe.model, GPTRecipe):
        how = Computation(dtype, jnp.dtype(recipe.softmax_dtype), recipe.recomputed, recipe.layers)
        return GPTModel(recipe.model.config(seq_len, vocab_size), how, recipe.model.init_std)
    if vocab_size is None:
        raise UserError("the vocabulary of a Llama comes from its data; say how large it is")
    save = _LAYERS_RECOMPUTED if recipe.recomputed else frozenset(INTERMEDIATES)
    memory = MemoryPolicy(save=save, layers=recipe.layers)
    return LlamaModel(recipe.model.config(vocab_size), memory, dtype, recipe.model.init_std)
