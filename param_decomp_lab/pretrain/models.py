"""What the pretrainer needs of an architecture, and what it trains: decoders of any family, and its own GPT."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.sharding.memory import INTERMEDIATES, MemoryPolicy
from param_decomp_jax.targets.architecture import UnsupportedConfig, is_shape
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.gpt import GPTComputation, GPTConfig, gpt_logits
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_jax.targets.transformer_config import TransformerConfig
from param_decomp_lab.data.meta import DataMeta
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.balance import logits_and_imbalance
from param_decomp_lab.pretrain.recipe import FamilyRecipe, GPTRecipe, PretrainRecipe
from param_decomp_lab.weights.target_folder import save_target

_LAYERS_RECOMPUTED = frozenset(INTERMEDIATES) - {"layers", "attention", "site_outputs", "attack_outputs"}
"""What a model saves whose layers keep their input alone."""


def random_weights(
    key: PRNGKeyArray, config: TransformerConfig | GPTConfig, std: float, into_residual: Sequence[str]
) -> Weights:
    """Random fp32 weights: N(0, std²), the matrices ``into_residual`` times 1/√(2·n_layers); biases 0, norms 1 (0 where
    they are one less than the scale)."""
    flat, structure = jax.tree_util.tree_flatten_with_path(config.weight_shapes(), is_leaf=is_shape)

    def leaf(number: int, name: str, shape: tuple[int, ...]) -> Array:
        if "bias" in name:
            return jnp.zeros(shape, jnp.float32)
        if "norm" in name:
            is_scale = not (isinstance(config, TransformerConfig) and config.norm == "rms_plus_one")
            return jnp.full(shape, float(is_scale), jnp.float32)
        scale = std / math.sqrt(2 * config.n_layers) if name in into_residual else std
        return scale * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)

    return jax.tree.unflatten(
        structure, [leaf(number, path[-1].key, shape) for number, (path, shape) in enumerate(flat)]
    )


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

    def logits_and_penalty(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "B T vocab"], Float[Array, ""] | float]:
        """In training: the logits, and what is added to the cross-entropy."""
        ...

    def save(self, folder: Path, weights: Weights, data: DataMeta) -> None:
        """``config.json`` and ``model.safetensors``, of a model trained on ``data``."""
        ...


@dataclass(frozen=True)
class TransformerModel:
    """A decoder of any family; nothing is dropped. ``std``: of its initial matrices. ``balance``: coefficient of the
    load-balancing loss of experts."""

    config: TransformerConfig
    memory: MemoryPolicy
    dtype: Any
    std: float
    balance: float = 0.0
    spared: tuple[str, ...] = ("norm", "bias")

    def init(self, key: PRNGKeyArray) -> Weights:
        def scaled(path: tuple[Any, ...], x: Array) -> Array:
            return x if "norm" in path[-1].key else x * (self.std / 0.02)

        # In two steps: from one, seeds would give other last bits than in folders that are there.
        usual = random_weights(key, self.config, 0.02, ("o_proj", "down_proj", "experts.down_proj"))
        return jax.tree_util.tree_map_with_path(scaled, usual)

    def logits(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray | None
    ) -> Float[Array, "B T vocab"]:
        return language_logits(weights, self.config, tokens, self.memory, self.dtype)

    def logits_and_penalty(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "B T vocab"], Float[Array, ""] | float]:
        if not self.balance:
            return self.logits(weights, tokens, key), 0.0
        logits, imbalance = logits_and_imbalance(weights, self.config, tokens, self.memory, self.dtype)
        return logits, self.balance * imbalance

    def save(self, folder: Path, weights: Weights, data: DataMeta) -> None:
        config = replace(self.config, max_positions=data.seq_len)
        save_target(folder, config, weights, eos_token_id=data.separator)


@dataclass(frozen=True)
class GPTModel:
    """``std``: of the initial matrices."""

    config: GPTConfig
    how: GPTComputation
    std: float
    spared: tuple[str, ...] = ("norm", "bias")

    def init(self, key: PRNGKeyArray) -> Weights:
        return random_weights(key, self.config, self.std, ("mlp_out", "o_proj"))

    def logits(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray | None
    ) -> Float[Array, "B T vocab"]:
        return gpt_logits(weights, self.config, tokens, self.how, key)

    def logits_and_penalty(
        self, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray
    ) -> tuple[Float[Array, "B T vocab"], Float[Array, ""] | float]:
        return self.logits(weights, tokens, key), 0.0

    def save(self, folder: Path, weights: Weights, data: DataMeta) -> None:
        save_target(folder, self.config, weights)


def language_model(recipe: PretrainRecipe, seq_len: int, vocab_size: int | None) -> LanguageModel:
    """The model of ``recipe`` for rows of ``seq_len`` tokens out of ``vocab_size`` (None: the recipe says how many).

    Raises UserError: the recipe's vocabulary is too small for the data, or neither says how large it is.
    """
    dtype = jnp.dtype(recipe.dtype)
    if isinstance(recipe.model, GPTRecipe):
        how = GPTComputation(dtype, jnp.dtype(recipe.softmax_dtype), recipe.recomputed, recipe.layers)
        return GPTModel(recipe.model.config(seq_len, vocab_size), how, recipe.model.init_std)
    if vocab_size is None:
        raise UserError("the vocabulary comes from the data; say how large it is")
    save = _LAYERS_RECOMPUTED if recipe.recomputed else frozenset(INTERMEDIATES)
    memory = MemoryPolicy(save=save, layers=recipe.layers)
    if isinstance(recipe.model, FamilyRecipe):
        try:
            config = recipe.model.family(vocab_size, seq_len)
        except UnsupportedConfig as error:
            raise UserError(f"model.config: {error}") from error
        balance = recipe.model.router_aux_loss_coef
        return TransformerModel(config, memory, dtype, recipe.model.init_std, balance)
    return TransformerModel(recipe.model.config(vocab_size), memory, dtype, recipe.model.init_std)
