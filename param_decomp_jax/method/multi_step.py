"""Several training steps in one program, so that a small model's speed is not bound by dispatching its steps."""

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
    """Gives the batch of a training step inside the program: a part of the dispatch's inputs, or drawn there."""

    def __call__(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        """``inputs``: those of the whole dispatch. ``row``: number of the step within the dispatch."""
        ...


class MetricRows(eqx.Module):
    """Metrics of several steps: a row for each, a column for each name."""

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
    """``n`` ≤ ``size`` training steps, and their metrics in the first ``n`` of ``size`` rows.

    The count is dynamic: one program serves all of them, and results do not depend on how steps were grouped. A
    program for one step has no loop, in which a GPU's host waits in every round.
    """

    # Compiled into the loop's body as if written there, but traced once for its shapes and for the body together.
    @partial(jax.jit, inline=True)
    def one_step(state: State, weights: Weights, inputs: Any, row: Int[Array, ""]) -> tuple[State, MetricRows]:
        state, metrics = training_step(problem, state, weights, make_batch(inputs, row, state.step))
        # Keeps the rows' number out of the step's compilation: it must not change a result in the last bit.
        state, metrics = lax.optimization_barrier((state, metrics))
        names = tuple(sorted(metrics))
        return state, MetricRows(names, jnp.stack([metrics[name] for name in names]))

    # Bounds of one dtype whatever x64 says.
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
