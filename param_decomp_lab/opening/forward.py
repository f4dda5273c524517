"""The functions that an opened run compiles, once per shape of inputs."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from param_decomp_jax.ci import squashings
from param_decomp_jax.importances import read_batch, read_sites, site_logits, squash_existing
from param_decomp_jax.masked import Stream
from param_decomp_jax.masks import Bundle, GivenSources
from param_decomp_jax.recon import run_masked
from param_decomp_jax.step import Problem, hold_for_reading
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import UNTOUCHED


def importances(
    problem: Problem, components: Any, ci: Any, weights: Weights, inputs: Array, names: tuple[str, ...], kind: str
) -> dict[str, Array]:
    """Causal importances of the sites ``names``, by name: ``lower`` (λ), ``upper`` (υ), or the ``logits`` (C3)."""
    logits = site_logits(problem, components, ci, weights, inputs, names)
    lower, upper = squashings(problem.decomposition.squashing)
    if kind == "logits":
        return logits
    squash = {"lower": lower, "upper": upper}[kind]
    return {name: squash_existing(squash, z) for name, z in logits.items()}


def activations(
    problem: Problem, components: Any, ci: Any, weights: Weights, inputs: Array, names: tuple[str, ...]
) -> dict[str, Array]:
    """Activations of the components of the sites ``names``, by name."""
    _, readings = read_sites(problem, components, ci, weights, inputs, names)
    return {name: reading.activation for name, reading in readings.items()}


def masked(
    problem: Problem,
    components: Any,
    ci: Any,
    weights: Weights,
    inputs: Array,
    sources: Bundle,
    live: tuple[int, ...],
    pinned: bool,
) -> Array:
    """The target's output with the ``live`` sites masked: by λ if ``pinned`` (sources are 0, M1), else by sources."""
    components, ci = hold_for_reading(problem, components, ci)
    clean_pass, reader = read_batch(problem, components, ci, weights, inputs)
    if not pinned:
        reader = replace(reader, squash=jnp.zeros_like)
    [forward], _ = run_masked(clean_pass, components, reader, [Stream(live, GivenSources(sources, clean_pass.batch))])
    return _predictions(problem, weights, forward.output)


def clean(problem: Problem, weights: Weights, inputs: Array) -> Array:
    """The output of the original target."""
    as_it_is = replace(UNTOUCHED, memory=problem.target.memory)
    return _predictions(problem, weights, problem.target.forward(weights, inputs, as_it_is).output)


def _predictions(problem: Problem, weights: Weights, output: Array) -> Array:
    return problem.target.predictions(weights, output)
