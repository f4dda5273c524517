"""The load-balancing loss of mixtures of experts, without which a router soon takes the same few everywhere."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import PlainLayer, PlainLinears, frozen_axes
from param_decomp_jax.targets.transformer import Transformer
from param_decomp_jax.targets.transformer_config import TransformerConfig

IMBALANCE = "imbalance"
"""Record name of a layer's `imbalance`."""


def imbalance(logits: Float[Array, "*n experts"], chosen: Int[Array, "*n k"]) -> Float[Array, ""]:
    """The load-balancing loss of the Switch Transformer (Fedus et al. 2022): ``E Σ_e f_e p_e``.

    ``f_e`` is the share of all choices that expert e gets, ``p_e`` the mean of its probability. 1 where all are equal,
    and at most E. Only ``p_e`` has a gradient.
    """
    n_experts = logits.shape[-1]
    taken = jnp.mean(chosen.reshape(-1, 1) == jnp.arange(n_experts), axis=0, dtype=jnp.float32)
    likely = jnp.mean(jax.nn.softmax(logits).reshape(-1, n_experts), axis=0)
    return n_experts * jnp.sum(taken * likely)


class _Layer(PlainLayer):
    def choose(self, logits: Float[Array, "*n experts"], k: int) -> Int[Array, "*n k"]:
        chosen = super().choose(logits, k)
        self.records[IMBALANCE] = imbalance(logits, chosen)
        return chosen


@dataclass(frozen=True)
class _Linears(PlainLinears):
    def layer(self, first: int, stop: int, slice_: Any) -> PlainLayer:
        return _Layer(frozen_axes(self.memory))


def logits_and_imbalance(
    weights: Weights, config: TransformerConfig, tokens: Int[Array, "B T"], memory: MemoryPolicy, dtype: Any
) -> tuple[Float[Array, "B T vocab"], Float[Array, ""]]:
    """As `language_logits`, with the mean of `imbalance` over the layers with experts."""
    model = Transformer(config, Sites(()), memory, dtype)
    forward = model.forward(weights, tokens, _Linears(Sites(())))
    layers = [records[IMBALANCE] for records in forward.records.values() if IMBALANCE in records]
    return model.logits(weights, forward.output), jnp.mean(jnp.concatenate(layers))
