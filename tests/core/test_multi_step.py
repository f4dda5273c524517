"""Several steps as one program: how they are grouped changes nothing, and the state's buffers are reused."""

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.schedules import Knot, Knots, Schedule
from param_decomp_jax.method import multi_step as program_module
from param_decomp_jax.method.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.method.losses import Faithfulness
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.multi_step import training_steps
from param_decomp_jax.method.recon import AllSites, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.step import training_step
from tests.core import tiny, toys

ATTACK = PersistentAttack(AdamAscent(Schedule(0.05)), BroadcastAcrossBatch(), n_warmup_steps=1, start_frac=0.5)
PROBLEM = tiny.problem(
    (
        Reconstruction("Stochastic", 1.0, AllSites(), UniformKSubset(), Stochastic()),
        Reconstruction("Persistent", 0.5, AllSites(), Everywhere(), ATTACK),
        Faithfulness("Faithful", Knots(1.0, (Knot(0.0, 1.0), Knot(0.5, 0.5, "hold"), Knot(1.0, 0.0, "cosine")))),
    ),
    toys.target(toys.SPARSE, toys.EVERY_MATRIX),
    ci=tiny.SHARED,
)
WEIGHTS, LEADING = toys.weights(toys.SPARSE), (toys.ROWS,)
SIZE, N = 4, 9


def batches() -> np.ndarray:
    return np.stack([toys.features(toys.SPARSE, seed=n) for n in range(N)])


def from_host(inputs: Any, row: Any, step: Any) -> Any:
    return inputs[row]


@pytest.fixture(scope="module")
def program() -> Any:
    state = tiny.ruffled_state(PROBLEM, step=0, leading=LEADING)
    inputs = jnp.zeros((SIZE, *batches().shape[1:]))
    steps = jax.jit(partial(training_steps, PROBLEM, from_host, SIZE), donate_argnums=0)
    with mock.patch.object(program_module, "training_step", wraps=training_step) as step:
        lowered = steps.lower(state, WEIGHTS, inputs, np.int32(1))
    assert step.call_count == 1, "tracing it takes half as long as compiling it"
    return lowered.compile()


def test_one_step_needs_no_loop() -> None:
    """A GPU's host waits in every round of a loop whose count is known at run time alone."""
    state = tiny.ruffled_state(PROBLEM, step=0, leading=LEADING)
    loops = {}
    for size in (1, 2):
        inputs = jnp.zeros((size, *batches().shape[1:]))
        program = jax.jit(partial(training_steps, PROBLEM, from_host, size))
        loops[size] = program.lower(state, WEIGHTS, inputs, np.int32(1)).as_text().count("stablehlo.while")
    assert loops[1] == loops[2] - 1


def run(program: Any, groups: list[int]) -> tuple[Any, tuple[str, ...], np.ndarray]:
    """State, names of the metrics, and rows after the ``N`` steps, taken in these groups."""
    state, features = tiny.ruffled_state(PROBLEM, step=0, leading=LEADING), batches()
    done, rows = 0, []
    for n in groups:
        inputs = np.zeros((SIZE, *features.shape[1:]), np.float32)
        inputs[:n] = features[done : done + n]
        state, found = program(state, WEIGHTS, jnp.asarray(inputs), np.int32(n))
        assert found.values.shape[0] == SIZE
        assert not np.any(found.values[n:]), "rows of steps that were not taken are empty"
        rows.append(np.asarray(found.values[:n]))
        done += n
    assert done == N
    return jax.device_get(state), found.names, np.concatenate(rows)


def test_grouping_changes_no_bit(program: Any) -> None:
    one, _, values = run(program, [1] * N)
    assert one.step == N
    for groups in ([4, 4, 1], [2, 3, 4]):
        other, _, of_other = run(program, groups)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(values, of_other)


@pytest.mark.slow
def test_rows_bear_the_metrics_of_their_steps(program: Any) -> None:
    """Against the step alone; the learning rate tells the steps apart."""
    _, names, values = run(program, [4, 4, 1])
    state = tiny.ruffled_state(PROBLEM, step=0, leading=LEADING)
    step = jax.jit(partial(training_step, PROBLEM))
    for row, features in zip(values, batches(), strict=True):
        state, metrics = step(state, WEIGHTS, jnp.asarray(features))
        assert sorted(metrics) == list(names)
        np.testing.assert_allclose(row, [metrics[name] for name in names], rtol=1e-5)


def test_every_byte_of_the_state_is_aliased(program: Any) -> None:
    state = tiny.ruffled_state(PROBLEM, leading=LEADING)
    assert program.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(state))
