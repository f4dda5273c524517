"""Several training steps in one program, so that dispatching steps does not limit the speed of a small model."""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from param_decomp_jax.method.state import State
from param_decomp_jax.method.step import Problem, training_step
from param_decomp_jax.targets.base import Weights


@runtime_checkable
class BatchFunction(Protocol):
    """Returns the batch of a training step inside the program: a part of the dispatch's inputs, or drawn in the
    program."""

    def __call__(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        """Returns the batch. ``inputs``: the inputs of the whole dispatch. ``row``: the number of the step within the
        dispatch."""
        ...


class MetricRows(eqx.Module):
    """The metrics of several steps: one row per step, one column per name."""

    names: tuple[str, ...] = eqx.field(static=True)
    values: Float[Array, "*rows metrics"]


def training_steps(
    problem: Problem,
    make_batch: BatchFunction,
    size: int,
    state: State,
    weights: Weights,
    inputs: Any,
    n: Int[Array, ""],
) -> tuple[State, MetricRows]:
    """Takes ``n`` ≤ ``size`` training steps, and returns their metrics in the first ``n`` of ``size`` rows.

    ``n`` is dynamic: one program serves every count, and results do not depend on how steps are grouped. A program for
    one step has no loop, because in a loop a GPU's host waits in every iteration.
    """

    # Inlined into the loop's body, but traced only once for both its shapes and the body.
    @partial(jax.jit, inline=True)
    def one_step(state: State, weights: Weights, inputs: Any, row: Int[Array, ""]) -> tuple[State, MetricRows]:
        state, metrics = training_step(problem, state, weights, make_batch(inputs, row, state.step))
        # Keeps the number of rows out of the step's compilation, because it must not change a result in the last bit.
        state, metrics = lax.optimization_barrier((state, metrics))
        names = tuple(sorted(metrics))
        return state, MetricRows(names, jnp.stack([metrics[name] for name in names]))

    # Both bounds have one dtype, with x64 or without.
    zero = jnp.zeros((), n.dtype)
    if size == 1:
        state, row = one_step(state, weights, inputs, zero)
        return state, MetricRows(row.names, row.values[None])
    _, row_shape = jax.eval_shape(one_step, state, weights, inputs, zero)

    def body(row: Int[Array, ""], carry: tuple[State, Array]) -> tuple[State, Array]:
        state, rows = carry
        state, new = one_step(state, weights, inputs, row)
        return state, lax.dynamic_update_slice(rows, new.values[None], (row, 0))

    rows = jnp.zeros((size, *row_shape.values.shape), row_shape.values.dtype)
    state, rows = lax.fori_loop(zero, n, body, (state, rows))
    return state, MetricRows(row_shape.names, rows)
