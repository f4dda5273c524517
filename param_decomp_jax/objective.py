"""What is minimised (section 8, point 4): every term of a decomposition on one batch, and their sum."""

from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.adversary import effective
from param_decomp_jax.ci import Judge, per_component, squashings
from param_decomp_jax.components import Components
from param_decomp_jax.losses import (
    Faithfulness,
    ImportanceMinimality,
    faithfulness,
    importance_minimality,
    penalty_sum,
)
from param_decomp_jax.masked import Stream, Summarise
from param_decomp_jax.masks import Bundle
from param_decomp_jax.recon import Reconstruction, errors, streams
from param_decomp_jax.scene import Scene
from param_decomp_jax.state import Decomposition, State

Metrics = dict[str, Float[Array, ""]]


def total_loss(
    spec: Decomposition,
    state: State,
    scene: Scene,
    components: Components,
    judge: Judge,
    raw: dict[str, Bundle],
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """``Σ coeff · term`` (point 4), and every term by name without its coefficient. ``components``: of every stack."""
    memory = scene.target.memory
    _, upper = squashings(spec.squashing)
    minimised = [term for term in spec.terms if isinstance(term, ImportanceMinimality)]

    def penalties(logits: Float[Array, "*n C"]) -> Float[Array, "C terms"]:
        of_terms = [penalty_sum(term.penalty, upper(logits), state.step, spec.steps) for term in minimised]
        return jnp.stack(of_terms, axis=-1)

    summarise = penalties if minimised else None
    reconstructions, sums = reconstruction_values(spec, state, scene, components, judge, raw, key, summarise)
    total, metrics = jnp.zeros(()), {}
    for term in spec.terms:
        match term:
            case Faithfulness():
                with jax.named_scope("faithfulness"):
                    value = faithfulness(components, scene.target.site_weights(scene.weights), memory)
            case ImportanceMinimality():
                of_term = {name: S[..., minimised.index(term)] for name, S in sums.items()}
                value, frequency = importance_minimality(term, of_term, scene.at.size)
                if term.frequency is not None and frequency is not None:
                    metrics[f"loss/{term.name}_frequency"] = frequency
                    total += term.frequency.coeff * frequency
            case Reconstruction():
                value = reconstructions[term.name]
        metrics[f"loss/{term.name}"] = value
        total += term.coeff * value
    metrics["loss/total"] = total
    return total, metrics


def reconstruction_values(
    spec: Decomposition,
    state: State,
    scene: Scene,
    components: Components,
    judge: Judge,
    raw: dict[str, Bundle],
    key: PRNGKeyArray,
    summarise: Summarise | None = None,
) -> tuple[dict[str, Float[Array, ""]], dict[str, Array]]:
    """Every reconstruction term by name, without coefficients, their forwards run together; 0 for one that is off.

    And the summaries of all sites' logits, by stack ``[layers, C, …]``, if they are asked for.
    """
    sites = scene.target.sites
    terms = [(number, term) for number, term in enumerate(spec.terms) if isinstance(term, Reconstruction)]
    attacks = {name: attack for name, (_, attack) in spec.persistent.items()}
    first_steps = {term.name: attacks[term.name].first_step(spec.steps) for _, term in terms if term.name in attacks}

    def values(from_step: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """With the terms on that are on from this step on."""
        on = [(number, term) for number, term in terms if first_steps.get(term.name, 0) <= from_step]
        found: list[list[Stream]] = []
        for number, term in on:
            bundle = effective(attacks[term.name], raw[term.name]) if term.name in attacks else None
            found.append(streams(term, scene, components, judge, jax.random.fold_in(key, number), bundle))
        together = [stream for of_term in found for stream in of_term]
        kinds = [term.error for (_, term), of_term in zip(on, found, strict=True) for _ in of_term]
        everywhere = {site for stream in together for site in stream.live} == set(range(len(sites)))
        means: dict[str, Array] = {}
        sums: dict[str, Array] = {}
        if together:
            now = summarise if everywhere else None
            by_stream, sums = errors(scene, components, judge, together, kinds, now)
            by_term = jnp.split(by_stream, list(accumulate(len(of_term) for of_term in found))[:-1])
            means = {term.name: jnp.mean(e) for (_, term), e in zip(on, by_term, strict=True)}
        if summarise is not None and not everywhere:
            sums = per_component(judge, components, sites, scene.target.memory, summarise)
        return {term.name: means.get(term.name, jnp.zeros(())) for _, term in terms}, sums

    # A6: off means not computed. What is on changes at few steps, each with a program of its own.
    stages = sorted({0, *first_steps.values()})
    if len(stages) == 1:
        return values(0)
    stage = sum((state.step >= first).astype(jnp.int32) for first in stages[1:])
    found: tuple[dict[str, Array], dict[str, Array]] = jax.lax.switch(stage, [partial(values, n) for n in stages])
    return found
