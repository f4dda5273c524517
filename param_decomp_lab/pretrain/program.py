"""The jitted functions of a pretraining: the step, the evaluation, and the step to be compiled with no weight there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.targets.base import Weights
from param_decomp_lab.pretrain.models import LanguageModel, language_model
from param_decomp_lab.pretrain.optimizer import make_optimizer
from param_decomp_lab.pretrain.recipe import PretrainRecipe

Step = Callable[[Weights, optax.OptState, Any, Any], tuple[Weights, optax.OptState, Array]]

_DROPOUT = 1 << 20
"""Folded into the seed's key, beyond the numbers that initial weights fold in."""


def cross_entropy(
    model: LanguageModel, weights: Weights, tokens: Int[Array, "B T"], key: PRNGKeyArray | None = None
) -> Float[Array, ""]:
    """Mean next-token cross-entropy in nats over the T - 1 positions that have a next token."""
    return _of_next_tokens(model.logits(weights, tokens, key), tokens)


def _of_next_tokens(logits: Float[Array, "B T vocab"], tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))


def make_step(recipe: PretrainRecipe, model: LanguageModel, optimizer: optax.GradientTransformation) -> Step:
    """The jitted ``step(weights, opt_state, tokens, k)``, which reuses the buffers of the weights and moments.

    ``tokens``: the batch ``[B, T]`` of step number ``k``, an int32 scalar. What is dropped depends on the recipe's
    seed, on ``k`` and on the micro-batch. Returns new weights and moments, and the cross-entropy.
    """

    def step(
        weights: Weights, opt_state: optax.OptState, tokens: Array, k: Array
    ) -> tuple[Weights, optax.OptState, Array]:
        of_step = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), _DROPOUT), k)

        def of_part(tokens: Array, number: Any) -> tuple[Array, Weights]:
            key = jax.random.fold_in(of_step, number)

            def loss(weights: Weights) -> tuple[Array, Array]:
                logits, penalty = model.logits_and_penalty(weights, tokens, key)
                found = _of_next_tokens(logits, tokens)
                return found + penalty, found

            (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
            return found, gradients

        loss, gradients = _mean_over_parts(of_part, tokens, recipe.micro_batches)
        updates, opt_state = optimizer.update(gradients, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_evaluation(recipe: PretrainRecipe, model: LanguageModel) -> Callable[[Weights, Any], Array]:
    """The jitted cross-entropy of weights on a batch ``[B, T]``, nothing dropped."""

    def evaluate(weights: Weights, tokens: Array) -> Array:
        loss: Array = _mean_over_parts(
            lambda part, _: cross_entropy(model, weights, part), tokens, recipe.micro_batches
        )
        return loss

    return jax.jit(evaluate)


def _mean_over_parts(of_part: Callable[[Array, Any], Any], tokens: Int[Array, "B T"], n_parts: int) -> Any:
    """Mean of what ``of_part(rows, number)`` gives for ``n_parts`` parts of the batch, one after the other."""
    if n_parts == 1:
        return of_part(tokens, 0)
    parts = tokens.reshape(n_parts, -1, tokens.shape[1]), jnp.arange(n_parts, dtype=jnp.int32)
    shapes = jax.eval_shape(of_part, *jax.tree.map(lambda x: x[0], parts))

    def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_part(*part)), None

    total, _ = lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), parts)
    return jax.tree.map(lambda x: x / n_parts, total)


def step_program(
    recipe: PretrainRecipe, seq_len: int, vocab_size: int | None = None, sharding: jax.sharding.Sharding | None = None
) -> tuple[Step, tuple[Any, ...]]:
    """The step that `pd pretrain` would run, and its arguments as `jax.ShapeDtypeStruct`: no weight is ever made.

    ``seq_len``, ``vocab_size``: of the data; None for a vocabulary that the recipe says. ``sharding``: of every
    argument, on a device that need not be here (`param_decomp_aot.compile`). Raises UserError as `language_model`.
    """
    model = language_model(recipe, seq_len, vocab_size)
    optimizer = make_optimizer(recipe.optimizer, recipe.steps, model.spared)
    weights = jax.eval_shape(lambda: model.init(jax.random.key(recipe.seed)))
    opt_state = jax.eval_shape(optimizer.init, weights)
    tokens = jax.ShapeDtypeStruct((recipe.batch_size, seq_len), jnp.int32)
    arguments = weights, opt_state, tokens, jax.ShapeDtypeStruct((), jnp.int32)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return make_step(recipe, model, optimizer), placed
