"""The load-balancing loss of experts in a pretraining."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.balance import imbalance
from param_decomp_lab.pretrain.models import TransformerModel
from param_decomp_lab.pretrain.recipe import read_recipe
from tests.core import tiny
from tests.core.test_experts import CONFIG
from tests.lab.tiny_run import ROOT

COEFFICIENT = 0.25


def test_imbalance() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5, 4)).astype(np.float32)
    chosen = np.argsort(-logits, axis=-1)[..., :2]
    likely = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean((0, 1))
    taken = np.bincount(chosen.ravel(), minlength=4) / chosen.size
    assert imbalance(jnp.asarray(logits), jnp.asarray(chosen)) == pytest.approx(4 * taken @ likely, rel=1e-6)
    one = jnp.zeros((3, 5, 4)).at[..., 2].set(50.0)
    assert imbalance(one, jnp.full((3, 5, 1), 2)) == pytest.approx(4)
    assert imbalance(jnp.zeros((4, 1, 4)), jnp.arange(4)[:, None, None]) == pytest.approx(1)


@pytest.mark.slow
def test_penalty_of_a_model() -> None:
    """The mean over the layers with experts; the logits are those without it, and routers have a gradient of it."""
    experts = dataclasses.replace(CONFIG.experts, dense_layers=(0,))  # type: ignore[type-var]
    config = dataclasses.replace(CONFIG, n_layers=3, experts=experts)
    model = TransformerModel(config, PLAIN, jnp.float32, 0.02, COEFFICIENT)
    weights, tokens, key = tiny.weights(config), jnp.asarray(tiny.TOKENS), jax.random.key(0)

    def penalty(weights: tiny.Tree) -> tuple[jax.Array, jax.Array]:
        logits, found = model.logits_and_penalty(weights, tokens, key)
        return jnp.asarray(found), logits

    (found, logits), gradients = jax.jit(jax.value_and_grad(penalty, has_aux=True))(weights)
    np.testing.assert_allclose(logits, language_logits(weights, config, tokens), atol=1e-5)
    assert COEFFICIENT < found < COEFFICIENT * experts.n
    assert (np.abs(gradients["experts"]["router"]).max((1, 2)) > 0).all()
    # All experts are equally likely: 1, whichever are taken.
    even = weights | {"experts": weights["experts"] | {"router": jnp.zeros_like(weights["experts"]["router"])}}
    assert model.logits_and_penalty(even, tokens, key)[1] == pytest.approx(COEFFICIENT)


def test_refused_without_experts(tmp_path) -> None:
    recipe = (ROOT / "configs" / "families" / "gpt2_pretrain.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.replace("init_std:", "router_aux_loss_coef: 0.01\n  init_std:"))
    with pytest.raises(UserError, match=r"model.*router_aux_loss_coef.* is of experts, and this model has none"):
        read_recipe(file)
