"""Several training steps as one program, so that a small model is not bound by what starts its steps."""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from param_decomp_jax.state import State
from param_decomp_jax.step import Problem, training_step
from param_decomp_jax.targets.base import Weights


@runtime_checkable
class BatchOf(Protocol):
    """The batch of a training step, inside the program: taken from what the host handed over, or drawn there."""

    def __call__(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        """``inputs``: one dispatch's, as handed over. ``row``: number of the step within the dispatch."""
        ...


def metric_names(problem: Problem, state: State, weights: Weights, batch: jax.ShapeDtypeStruct) -> list[str]:
    """Names of a step's metrics, in the order in which `training_steps` gives them. Arguments may be abstract."""
    _, metrics = jax.eval_shape(partial(training_step, problem), state, weights, batch)
    return sorted(metrics)


def training_steps(
    problem: Problem,
    batch_of: BatchOf,
    size: int,
    state: State,
    weights: Weights,
    inputs: Any,
    n: Int[Array, ""],
) -> tuple[State, Float[Array, "size metrics"]]:
    """``n`` ≤ ``size`` training steps, and a row of metrics for each of the ``n`` (see `metric_names`).

    The count is dynamic: one program serves them all, and what comes out does not depend on how steps were grouped.
    """

    def one(state: State, row: Int[Array, ""]) -> tuple[State, Float[Array, " metrics"]]:
        state, metrics = training_step(problem, state, weights, batch_of(inputs, row, state.step))
        # The step is compiled apart from the rows it fills, whose number must not show in the last bit.
        state, metrics = lax.optimization_barrier((state, metrics))
        return state, jnp.stack([metrics[name] for name in sorted(metrics)])

    _, values = jax.eval_shape(one, state, jnp.zeros((), jnp.int32))

    def body(row: Int[Array, ""], carry: tuple[State, Array]) -> tuple[State, Array]:
        state, rows = carry
        state, values = one(state, row)
        return state, lax.dynamic_update_slice(rows, values[None], (row, 0))

    rows = jnp.zeros((size, *values.shape), values.dtype)
    # Bounds of one dtype whatever x64 says.
    return lax.fori_loop(jnp.zeros((), n.dtype), n, body, (state, rows))
