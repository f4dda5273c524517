"""Persistent PGD as a metric: an attack of the evaluation's own, which lives from its first batch to its last.

The sources of training belong to the training batches and their shape. A metric starts its own ones afresh at every
evaluation and treats each batch as training treats a step (A3, A4): warm-up ascents, the error, one more ascent.
"""

from dataclasses import replace

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.adversary import Adversary, PersistentAttack, ascend, effective, init_adversary, warm_up
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.masks import Bundle
from param_decomp_jax.method.recon import Reconstruction, reconstruction, warm_up_error
from param_decomp_jax.method.state import State

Adversaries = dict[str, Adversary]

FIRST_NUMBER = 1 << 16
"""Of the persistent terms among all that draw from a batch's key."""


def always_on(term: Reconstruction) -> Reconstruction:
    """A metric's term: there is nothing to wait for."""
    assert isinstance(term.sources, PersistentAttack)
    return replace(term, sources=replace(term.sources, start_frac=0.0))


def fresh_adversaries(
    terms: tuple[Reconstruction, ...], key: PRNGKeyArray, sites: Sites, leading: tuple[int, ...], use_delta: bool
) -> Adversaries:
    """Where the attacks of one evaluation begin, by term name."""
    started = {}
    for number, term in enumerate(terms):
        assert isinstance(term.sources, PersistentAttack)
        started[term.name] = init_adversary(term.sources, jax.random.fold_in(key, number), sites, leading, use_delta)
    return started


def attack_batch(
    terms: tuple[Reconstruction, ...],
    adversaries: Adversaries,
    batch: DecomposedBatch,
    state: State,
    total: int,
    key: PRNGKeyArray,
) -> tuple[Adversaries, dict[str, Float[Array, ""]]]:
    """One batch: the adversaries after it, and each term's error by name. ``key``: that of the batch's other terms."""
    moved, errors = {}, {}
    for number, term in enumerate(terms):
        spec = term.sources
        assert isinstance(spec, PersistentAttack)
        term_key = jax.random.fold_in(key, FIRST_NUMBER + number)
        climb = warm_up_error(term, batch, term_key)
        adversary = warm_up(spec, adversaries[term.name], climb, state.step, total)

        def error(raw: Bundle, term: Reconstruction = term, term_key: PRNGKeyArray = term_key) -> Array:
            assert isinstance(term.sources, PersistentAttack)
            return reconstruction(term, batch, term_key, effective(term.sources, raw))

        errors[term.name], gradient = jax.value_and_grad(error)(adversary.raw)
        moved[term.name] = ascend(spec, adversary, gradient, state.step, total)
    return moved, errors
