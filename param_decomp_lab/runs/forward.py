"""The functions that an opened run compiles, once per shape of inputs."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from param_decomp_jax.analysis.importances import read_batch, read_sites, site_logits, squash_existing
from param_decomp_jax.ci import squashings
from param_decomp_jax.method.adversary import FreshAttack, attack
from param_decomp_jax.method.masked import Stream
from param_decomp_jax.method.masks import Bundle, GivenSources, Sources, interpolate
from param_decomp_jax.method.recon import run_masked
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem, hold_for_reading
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import UNTOUCHED


def importances(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array, names: tuple[str, ...], kind: str
) -> dict[str, Array]:
    """Causal importances of the sites ``names``, by name: ``lower`` (λ), ``upper`` (υ), or the ``logits`` (C3)."""
    logits = site_logits(problem, learned, weights, inputs, names)
    lower, upper = squashings(problem.decomposition.squashing)
    if kind == "logits":
        return logits
    squash = {"lower": lower, "upper": upper}[kind]
    return {name: squash_existing(squash, z) for name, z in logits.items()}


def activations(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array, names: tuple[str, ...]
) -> dict[str, Array]:
    """Activations of the components of the sites ``names``, by name."""
    _, readings = read_sites(problem, learned, weights, inputs, names)
    return {name: reading.activation for name, reading in readings.items()}


def masked(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    sources: Bundle,
    live: tuple[int, ...],
    pinned: bool,
) -> Array:
    """The target's output with the ``live`` sites masked: by λ if ``pinned`` (sources are 0, M1), else by sources."""
    learned = hold_for_reading(problem, learned)
    batch = read_batch(problem, learned, weights, inputs)
    if not pinned:
        batch = batch.with_squash(jnp.zeros_like)
    stream = Stream(live, GivenSources(sources, batch.clean_pass.batch))
    [forward] = run_masked(batch, [stream]).forwards
    return _predictions(problem, weights, forward.output)


def masked_at(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    position: Int[Array, " B"],
    sources: Bundle,
    live: tuple[int, ...],
) -> tuple[Array, Array]:
    """Returns the target's output ``[B, d]`` at one position of each row (0 for a toy), twice: of the original target,
    and with the ``live`` sites masked by ``sources`` only at that position (I5).
    """
    learned = hold_for_reading(problem, learned)
    batch = read_batch(problem, learned, weights, inputs).with_squash(jnp.zeros_like)
    leading = batch.clean_pass.leading
    here = jnp.arange(prod(leading[1:])) == position[:, None]
    routes = jnp.broadcast_to(here.reshape(*leading, 1), (*leading, len(live)))
    [forward] = run_masked(batch, [Stream(live, GivenSources(sources, batch.clean_pass.batch), routes)]).forwards

    def output(hidden: Array) -> Array:
        by_row = hidden.reshape(len(hidden), -1, hidden.shape[-1])
        return _predictions(problem, weights, jnp.take_along_axis(by_row, position[:, None, None], axis=1)[:, 0])

    return output(batch.clean_pass.forward.output), output(forward.output)


def attacked(
    problem: Problem,
    learned: Learned,
    weights: Weights,
    inputs: Array,
    importances: Bundle,
    fixed: Bundle,
    value: Array,
    start: Bundle,
    steps: int,
    step_size: float,
) -> Bundle:
    """Returns the sources that an attack finds from ``start`` (A1, I3). It maximizes the error (R1) relative to the
    output with masks equal to the importances. Masks are ``value`` where they are ``fixed``, regardless of the sources;
    what ``fixed`` adds (F8) is added throughout.
    """
    learned = hold_for_reading(problem, learned)
    batch = read_batch(problem, learned, weights, inputs).with_squash(jnp.zeros_like)
    live = tuple(range(len(problem.target.sites)))

    def mask(importance: Sources, fixed: Sources, source: Sources) -> Sources:
        own = importance.components
        masks = jnp.where(fixed.components > 0, value, interpolate(own, source.components))
        return Sources(masks, source.delta, fixed.added)

    def run(sources: Bundle) -> Array:
        masks = {name: mask(importances[name], fixed[name], own) for name, own in sources.items()}
        stream = Stream(live, GivenSources(masks, batch.clean_pass.batch))
        [forward] = run_masked(batch, [stream]).forwards
        return forward.output

    no_sources = {name: Sources(jnp.zeros_like(own.components), None) for name, own in start.items()}
    target = problem.target
    reference = jax.lax.stop_gradient(target.reference(weights, run(no_sources)))
    spec = FreshAttack("random", step_size, steps, "unique_per_datapoint")
    return attack(spec, lambda sources: target.errors(weights, reference, [run(sources)])[0], start)


def clean(problem: Problem, weights: Weights, inputs: Array) -> Array:
    """The output of the original target."""
    as_it_is = replace(UNTOUCHED, memory=problem.target.memory)
    return _predictions(problem, weights, problem.target.forward(weights, inputs, as_it_is).output)


def _predictions(problem: Problem, weights: Weights, output: Array) -> Array:
    return problem.target.predictions(weights, output)
