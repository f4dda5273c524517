"""The programs of a run except its evaluation. `pd train` runs them; `pd probe` measures what they need of a device."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from param_decomp_jax.ci import init_ci
from param_decomp_jax.decomposition.components import components_axes, init_components
from param_decomp_jax.method.calibration import calibrate
from param_decomp_jax.method.initial_components import (
    moments_axes,
    no_moments,
    nonlinearity_aligned,
    output_moments,
    weighted_singular_vectors,
)
from param_decomp_jax.method.multi_step import training_steps
from param_decomp_jax.method.state import Learned, init_state
from param_decomp_jax.method.state_sharding import moments_shardings
from param_decomp_jax.method.step import Problem, warmup_step, warmup_transformation
from param_decomp_jax.sharding.mesh import whole
from param_decomp_jax.sharding.placement import shardings, with_shardings
from param_decomp_lab.setup.base import Outline


@dataclass(frozen=True)
class Program:
    """A program with its arguments. ``function``: made by `jax.jit`. ``arguments``: shapes with shardings."""

    function: Any
    arguments: tuple[Any, ...]

    def lower(self) -> Any:
        """Lowers the program to a `jax.stages.Lowered`, under the mesh in force."""
        return self.function.lower(*self.arguments)


def learned_shapes(problem: Problem, mesh: Mesh) -> Learned:
    """Returns the shapes and shardings of the learned arrays."""
    spec, sites = problem.decomposition, problem.target.sites
    key = jax.eval_shape(lambda: spec.key("init"))
    components = jax.eval_shape(partial(init_components, sites=sites), key)
    shapes = Learned(components, jax.eval_shape(partial(init_ci, spec.ci, sites=sites), key))
    axes = Learned(components_axes(shapes.components), shapes.ci.axes())
    found: Learned = with_shardings(shapes, shardings(mesh, axes, shapes))
    return found


def init_program(outline: Outline) -> Program:
    """Makes the state, with every part placed according to its sharding."""
    spec, sites = outline.problem.decomposition, outline.problem.target.sites
    init = partial(init_state, spec, sites, outline.leading)
    return Program(jax.jit(init, out_shardings=_places(outline.state)), ())


def no_second_moments_program(outline: Outline) -> Program:
    """Makes the sums that `second_moments_program` adds to."""
    moments = _second_moments(outline)
    none = partial(no_moments, outline.problem.target.sites)
    return Program(jax.jit(none, out_shardings=_places(moments)), ())


def second_moments_program(outline: Outline) -> Program:
    """``(moments, weights, batch) -> moments``, with the moments of the sites' outputs on a batch added (T6)."""
    moments = _second_moments(outline)

    def add(moments: Any, weights: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.add, moments, output_moments(outline.problem, weights, batch))

    function = jax.jit(add, donate_argnums=0, out_shardings=_places(moments))
    return Program(function, (moments, outline.weights, outline.train.batch()))


def initial_components_program(outline: Outline) -> Program:
    """``(moments, weights) -> components``: weighted singular vectors (T6)."""
    function = jax.jit(partial(_initial_components, outline.problem), out_shardings=_places(outline.state.components))
    return Program(function, (_second_moments(outline), outline.weights))


def aligned_components_program(outline: Outline) -> Program:
    """``(weights,) -> components``, aligned with nonlinearities (T9)."""
    function = jax.jit(partial(nonlinearity_aligned, outline.problem), out_shardings=_places(outline.state.components))
    return Program(function, (outline.weights,))


def warmup_moments_program(outline: Outline) -> Program:
    """``(components,) -> moments`` of their faithfulness warm-up (T3)."""
    components = outline.state.components
    optimizer = warmup_transformation(outline.problem)
    where = moments_shardings(outline.mesh, optimizer, components)
    return Program(jax.jit(optimizer.init, out_shardings=where), (components,))


def warmup_program(outline: Outline) -> Program:
    """``(components, moments, weights, n) -> (components, moments, faithfulness)`` after ``n`` warm-up steps."""
    components = outline.state.components
    # The placement is the same from the first dispatch on; otherwise the second dispatch would compile another program.
    optimizer = warmup_transformation(outline.problem)
    moments = jax.eval_shape(optimizer.init, components)
    moments = with_shardings(moments, moments_shardings(outline.mesh, optimizer, components))
    steps = jax.jit(
        partial(_warmup_steps, outline.problem),
        donate_argnums=(0, 1),
        out_shardings=(_places(components), _places(moments), whole(outline.mesh)),
    )
    return Program(steps, (components, moments, outline.weights, _COUNT))


def calibration_program(outline: Outline) -> Program:
    """``(components, ci, weights, inputs) -> ci`` calibrated on the batch of step 0 (C8); ``inputs``: those of a
    program for one step.
    """
    state = outline.state

    def calibrated(components: Any, ci: Any, weights: Any, inputs: Any) -> Any:
        zero = jnp.zeros((), jnp.int32)
        return calibrate(outline.problem, Learned(components, ci), weights, outline.train.batch_of(inputs, zero, zero))

    function = jax.jit(calibrated, donate_argnums=1, out_shardings=_places(state.ci))
    return Program(function, (state.components, state.ci, outline.weights, outline.train.input_shapes(1)))


def steps_program(outline: Outline, size: int) -> Program:
    """``(state, weights, inputs, n) -> (state, rows of metrics)`` after ``n`` ≤ ``size`` training steps."""
    state, memory = outline.state, outline.problem.decomposition.memory
    steps = jax.jit(
        partial(training_steps, outline.problem, outline.train.batch_of, size),
        donate_argnums=(0,) if memory.donate else (),
        out_shardings=(_places(state), whole(outline.mesh)),
        compiler_options=memory.compiler_options,
    )
    return Program(steps, (state, outline.weights, outline.train.input_shapes(size), _COUNT))


_COUNT = jax.ShapeDtypeStruct((), jnp.int32)
"""Shape of the number of steps of a dispatch."""


def _warmup_steps(problem: Problem, components: Any, moments: Any, weights: Any, n: Any) -> tuple[Any, Any, Any]:
    def one(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        return warmup_step(problem, carry[0], carry[1], weights)

    return lax.fori_loop(jnp.zeros((), n.dtype), n, one, (components, moments, jnp.zeros(())))


def _initial_components(problem: Problem, moments: Any, weights: Any) -> Any:
    return weighted_singular_vectors(problem, weights, moments)


def _second_moments(outline: Outline) -> Any:
    sites = outline.problem.target.sites
    shapes = jax.eval_shape(partial(no_moments, sites))
    return with_shardings(shapes, shardings(outline.mesh, moments_axes(sites), shapes))


def _places(shapes: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, shapes)
