"""The step reuses the buffers of the state it is given: fails when donation is dropped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.method.adversary import AdamAscent, PerBatchPerPosition, PersistentAttack
from param_decomp_jax.method.losses import Faithfulness
from param_decomp_jax.method.recon import AllSites, Reconstruction
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.state import State
from param_decomp_jax.method.step import training_step
from tests.core import tiny

ATTACK = PersistentAttack(AdamAscent(Schedule(0.05)), PerBatchPerPosition(), n_warmup_steps=1)
PROBLEM = tiny.problem(
    (Reconstruction("PersistentPGDReconLoss", 0.5, AllSites(), Everywhere(), ATTACK), Faithfulness("Faithful", 1.0))
)


def n_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def pointers(state: State) -> set[int]:
    return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}


@pytest.fixture(scope="module")
def compiled() -> Any:
    step = jax.jit(training_step, static_argnums=0, donate_argnums=1)
    return step.lower(PROBLEM, tiny.ruffled_state(PROBLEM), tiny.weights(), jnp.asarray(tiny.TOKENS)).compile()


@pytest.mark.slow
def test_every_byte_of_the_state_is_aliased(compiled: Any) -> None:
    assert compiled.memory_analysis().alias_size_in_bytes == n_bytes(tiny.ruffled_state(PROBLEM))


@pytest.mark.slow
def test_buffers_are_reused(compiled: Any) -> None:
    # Copies that XLA makes: it does not reuse the memory of NumPy's arrays.
    state = jax.jit(lambda: tiny.ruffled_state(PROBLEM))()
    weights, tokens = tiny.weights(), jnp.asarray(tiny.TOKENS)
    held, known = jax.tree.leaves(state), pointers(state)
    assert len(known) == len(held)
    for _ in range(3):
        new, _ = compiled(state, weights, tokens)
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        assert pointers(new) == known
        state = new
    assert not any(x.is_deleted() for x in jax.tree.leaves((weights, tokens)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
