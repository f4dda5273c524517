"""Measures persistent PGD as a metric: an attack that lasts from the first batch of an evaluation to its last.

The sources of training belong to the training batches and their shape. A metric starts its own sources anew at every
evaluation, and treats each batch as training treats a step (A3, A4): warm-up ascents, the error, one more ascent.
"""

from dataclasses import replace

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.adversary import Adversary, PersistentAttack, ascend, effective, init_adversary, warm_up
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.masks import Bundle
from param_decomp_jax.method.recon import (
    Merged,
    Reconstruction,
    ascends_output_alone,
    at_step,
    attack_of,
    draw_particle,
    reconstruction,
    warm_up_error,
)
from param_decomp_jax.method.state import State

Adversaries = dict[str, Adversary]

FIRST_NUMBER = 1 << 16
"""The first number of the persistent terms among all that draw from a batch's key."""


def always_on(term: Reconstruction) -> Reconstruction:
    """Returns a metric's term, active from the beginning, since there is nothing to wait for."""
    if isinstance(term.sources, Merged):
        return replace(term, sources=replace(term.sources, attack=replace(term.sources.attack, start_frac=0.0)))
    assert isinstance(term.sources, PersistentAttack)
    return replace(term, sources=replace(term.sources, start_frac=0.0))


def fresh_adversaries(
    terms: tuple[Reconstruction, ...], key: PRNGKeyArray, sites: Sites, leading: tuple[int, ...], use_delta: bool
) -> Adversaries:
    """Returns the initial adversaries of one evaluation, by term name."""
    started = {}
    for number, term in enumerate(terms):
        attack = attack_of(term)
        assert attack is not None
        started[term.name] = init_adversary(attack, jax.random.fold_in(key, number), sites, leading, use_delta)
    return started


def attack_batch(
    terms: tuple[Reconstruction, ...],
    adversaries: Adversaries,
    batch: DecomposedBatch,
    state: State,
    total: int,
    key: PRNGKeyArray,
) -> tuple[Adversaries, dict[str, Float[Array, ""]]]:
    """Attacks one batch; returns the adversaries after it, and each term's error by name, with the parts of R6
    (``<term>/<part>``). ``key``: that of the batch's other terms.
    """
    moved, errors = {}, dict[str, Array]()
    for number, term in enumerate(terms):
        moved[term.name], value, parts = _attack_by(
            term, adversaries[term.name], batch, state, total, jax.random.fold_in(key, FIRST_NUMBER + number)
        )
        errors |= {term.name: value} | {f"{term.name}/{part}": x for part, x in parts.items()}
    return moved, errors


def _attack_by(
    term: Reconstruction, adversary: Adversary, batch: DecomposedBatch, state: State, total: int, key: PRNGKeyArray
) -> tuple[Adversary, Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns one term's adversary after a batch, its error, and the parts of the error."""
    spec, now = attack_of(term), at_step(term, state.step, total)
    assert spec is not None
    particle = draw_particle(term, key, batch.clean_pass.leading)
    climb = warm_up_error(term, batch, key, now)
    adversary = warm_up(spec, adversary, climb, state.step, total, particle=particle)

    def objective(raw: Bundle) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        value, parts = reconstruction(term, batch, key, effective(spec, raw, particle), now)
        return parts["output"] if ascends_output_alone(term) else value, (value, parts)

    (_, (value, parts)), gradient = jax.value_and_grad(objective, has_aux=True)(adversary.raw)
    return ascend(spec, adversary, gradient, state.step, total), value, parts
