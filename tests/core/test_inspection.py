"""The entry points for comparisons with other implementations, against the step and the reference."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.components import Factors
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import BroadcastAcrossBatch, FreshAttack, PersistentAttack, SignAscent
from param_decomp_jax.method.inspection import (
    loss_and_gradients,
    stack_sites,
    step_draws,
    term_loss_and_gradients,
    unstack_sites,
)
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp
from param_decomp_jax.method.masks import Constant, Sources, Stochastic
from param_decomp_jax.method.recon import AllSites, Chunks, ForwardDraws, Reconstruction, live_sets
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.step import step_outcome
from param_decomp_jax.targets.tms import TMSConfig
from tests import reference as ref
from tests.core import tiny, toys

FRESH = FreshAttack("random", 0.125, 1, "unique_per_datapoint")
LASTING = PersistentAttack(SignAscent(Schedule(0.1)), BroadcastAcrossBatch(), n_warmup_steps=0)
TERMS = (
    Faithfulness("FaithfulnessLoss", 2.0),
    ImportanceMinimality("ImportanceMinimalityLoss", 0.1, Lp(Anneal(1.0, 1.0), 1e-6), frequency=Frequency(0.3, 50.0)),
    Reconstruction("StochasticReconSubsetLoss", 0.5, AllSites(), UniformKSubset(), Stochastic("binomial"), 2),
    Reconstruction("PGDReconLoss", 0.6, AllSites(), Everywhere(), FRESH),
    Reconstruction("PersistentPGDReconLoss", 0.4, AllSites(), Everywhere(), LASTING),
)
UNMASKED = Reconstruction("UnmaskedReconLoss", 0.2, AllSites(), Everywhere(), Constant(1.0))
TOY, CHOSEN = TMSConfig(n_features=5, n_hidden=3), {"linear1": 4, "linear2": 3}
# λ without the leak of C1: gradients of single terms add up.
PROBLEM = tiny.in_float64(tiny.problem(TERMS, toys.target(TOY, CHOSEN), squashing="normal", ci=tiny.SCALAR))
FEATURES = toys.features(TOY)
LEADING = FEATURES.shape[:-1]


def arguments() -> tuple[Any, Any, jax.Array]:
    """State, weights and inputs in float64 (under ``jax.enable_x64``)."""
    state = tiny.ruffled_state(PROBLEM, leading=LEADING)
    return tiny.to_float64(state), tiny.to_float64(toys.weights(TOY)), jnp.asarray(FEATURES)


def worst(want: Any, got: Any) -> float:
    assert jax.tree.structure(want) == jax.tree.structure(got)
    return max(map(tiny.deviation, jax.tree.leaves(want), jax.tree.leaves(got)))


@pytest.fixture(scope="module")
def outcome() -> Any:
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(partial(step_outcome, PROBLEM))(*arguments()))


def test_losses_and_gradients_are_those_of_the_step(outcome: Any) -> None:
    """And with the step's own draws given, everything is as with its key."""
    with jax.enable_x64(True):
        draws = jax.jit(step_draws, static_argnums=(0, 2))(PROBLEM, 3, LEADING)
        losses, gradients = jax.jit(partial(loss_and_gradients, PROBLEM))(*arguments(), draws)
    assert set(draws) == {term.name for term in TERMS if isinstance(term, Reconstruction)}
    assert {name for name in outcome.metrics if name.startswith("loss/")} == set(losses)
    assert worst({name: outcome.metrics[name] for name in losses}, losses) <= 1e-11
    assert worst(outcome.gradients, gradients) <= 1e-9


@pytest.mark.slow
def test_terms_add_up_to_the_step(outcome: Any) -> None:
    """Each alone, without warm-up ascents (there are none here) and without the leak of C1."""
    with jax.enable_x64(True):
        parts = {
            term.name: jax.jit(partial(term_loss_and_gradients, PROBLEM, name=term.name))(*arguments())
            for term in TERMS
        }
        total = sum(float(loss) for loss, _ in parts.values())
        gradients = [gradients for _, gradients in parts.values()]
        components, ci = (
            jax.tree.map(lambda *xs: sum(xs), *(getattr(g, name) for g in gradients)) for name in ("components", "ci")
        )
    for term in TERMS:
        if isinstance(term, Faithfulness | Reconstruction):
            contribution = term.coeff * outcome.metrics[f"loss/{term.name}"]
            assert tiny.deviation(contribution, parts[term.name][0]) <= 1e-11
    assert tiny.deviation(outcome.metrics["loss/total"], total) <= 1e-11
    assert worst(outcome.gradients.components, components) <= 1e-9
    assert worst(outcome.gradients.ci, ci) <= 1e-9
    persistent = parts["PersistentPGDReconLoss"][1].sources
    assert worst(outcome.gradients.sources, persistent) <= 1e-9


def test_given_draws_are_used() -> None:
    """Numbers from elsewhere, by site name: the term's value is the reference's with the same numbers."""
    term = Reconstruction("ChunkwiseSubsetReconLoss", 0.5, Chunks(1), UniformKSubset(), Stochastic())
    problem = dataclasses.replace(PROBLEM, decomposition=dataclasses.replace(PROBLEM.decomposition, terms=(term,)))
    sites, rng = PROBLEM.target.sites, np.random.default_rng(8)

    def uniform(*shape: int) -> jax.Array:
        """Multiples of 2⁻²⁴, as the core's own: then 1 − source is exact in fp32."""
        return jnp.asarray(rng.integers(0, 1 << 24, shape) / (1 << 24), jnp.float32)

    draws = []
    for live in live_sets(term.live, len(sites)):
        by_site = {sites.all[n].name: Sources(uniform(*LEADING, sites.all[n].C), uniform(*LEADING)) for n in live}
        routes = jnp.asarray(rng.uniform(size=(*LEADING, len(live))) < 0.7)
        draws.append(ForwardDraws(routes, stack_sites(sites, by_site, fill=True)))
    with jax.enable_x64(True):
        state, weights, inputs = arguments()
        state = dataclasses.replace(state, adversaries={})
        call = jax.jit(partial(term_loss_and_gradients, problem, name=term.name))
        loss, gradients = call(state, weights, inputs, draws={term.name: draws})
        mirrored = [ForwardDraws(d.routes, jax.tree.map(lambda x: 1 - x, d.sources)) for d in draws]
        other, _ = call(state, weights, inputs, draws={term.name: mirrored})

    names = [site.name for site in sites.all]
    forward = tiny.ref_target(PROBLEM.target, weights, FEATURES)
    given = {term.name: tiny.ref_forward_draws(term, draws, sites)}
    start = tiny.ref_state(state, sites)
    want = ref.training_step(forward, ref.mse_error, names, tiny.schema(problem), start, given)
    assert tiny.deviation(want.total, loss) <= 1e-9
    tiny.assert_alike(want.gradients["components"], tiny.ref_components(gradients.components, sites), 1e-9)
    assert tiny.deviation(loss, other) > 1e-6


ROUTED = Reconstruction(
    "PersistentPGDReconSubsetLoss", 0.4, AllSites(), UniformKSubset(),
    dataclasses.replace(LASTING, n_warmup_steps=2), n_samples=2,
)  # fmt: skip


@pytest.mark.slow
def test_ascents_draw_routes_of_their_own() -> None:
    """A3: a step on one persistent term is the reference's, routes of its ascents included, be they drawn or given."""
    problem = tiny.in_float64(tiny.problem((ROUTED,), toys.target(TOY, CHOSEN), squashing="normal", ci=tiny.SCALAR))
    state = tiny.ruffled_state(problem, leading=LEADING)
    sites, name = problem.target.sites, ROUTED.name
    want = tiny.ref_step(problem, tiny.ref_state(state, sites), toys.weights(TOY), FEATURES)
    with jax.enable_x64(True):
        wide, weights, inputs = tiny.to_float64(state), tiny.to_float64(toys.weights(TOY)), jnp.asarray(FEATURES)
        draws = jax.jit(step_draws, static_argnums=(0, 2))(problem, 3, LEADING)
        step = jax.jit(partial(step_outcome, problem))
        tiny.assert_step(problem, step(wide, weights, inputs), want, 1e-9)
        tiny.assert_step(problem, step(wide, weights, inputs, draws), want, 1e-9)
        exchanged = {name: [*draws[name][:2], draws[name][3], draws[name][2]]}
        other = step(wide, weights, inputs, exchanged)
    routes = [np.asarray(draw.routes) for draw in draws[name]]
    assert len({r.tobytes() for r in routes}) == 4, "two forwards and two ascents, each with a draw of its own"
    raw = (tiny.ref_bundle(other.state.adversaries[name].raw, sites), want.state["sources"][name])
    assert max(tiny.deviation(*pair) for pair in zip(*map(ref.tree_leaves, raw), strict=True)) > 1e-6


def test_wrong_draws_are_refused() -> None:
    state, weights, inputs = tiny.ruffled_state(PROBLEM, leading=LEADING), toys.weights(TOY), jnp.asarray(FEATURES)
    problem = tiny.problem((*TERMS, UNMASKED), toys.target(TOY, CHOSEN), ci=tiny.SCALAR)
    draws = jax.eval_shape(lambda: step_draws(problem, 3, LEADING))
    draws = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), draws)
    name = "StochasticReconSubsetLoss"

    def refused(message: str, draws: Any) -> None:
        with pytest.raises(AssertionError, match=message):
            jax.eval_shape(lambda d: loss_and_gradients(problem, state, weights, inputs, d), draws)

    refused("no draws are given for UnmaskedReconLoss", {k: d for k, d in draws.items() if k != "UnmaskedReconLoss"})
    refused(f"{name} has 2 forwards, draws are given for 1", draws | {name: draws[name][:1]})
    refused(f"{name} needs given sources", draws | {name: [ForwardDraws(d.routes, None) for d in draws[name]]})
    elsewhere = [ForwardDraws(d.routes, {"linear1": d.sources["linear1"]}) for d in draws[name]]
    refused(rf"{name}: no sources are given for linear2", draws | {name: elsewhere})
    ascents = tiny.problem((ROUTED,), toys.target(TOY, CHOSEN), ci=tiny.SCALAR)
    of_ascents, routes = tiny.ruffled_state(ascents, leading=LEADING), ForwardDraws(jnp.ones((*LEADING, 2), bool), None)
    for given in ([routes] * 3, [*[routes] * 3, ForwardDraws(None, None)]):
        with pytest.raises(AssertionError, match="has 2 warm-up ascents, each with routes of its own; given are 1"):
            jax.eval_shape(lambda d: loss_and_gradients(ascents, of_ascents, weights, inputs, d), {ROUTED.name: given})
    constant = [ForwardDraws(None, draws[name][0].sources)]
    refused("UnmaskedReconLoss takes no given sources", draws | {"UnmaskedReconLoss": constant})
    with pytest.raises(AssertionError, match="no term is called Recon; there are FaithfulnessLoss"):
        term_loss_and_gradients(problem, state, weights, inputs, "Recon")


# ---- stacked layout and site names ----


def by_site() -> dict[str, Factors]:
    rng = np.random.default_rng(0)
    return {
        site.name: Factors(
            jnp.asarray(rng.normal(size=(site.d_in, site.C))), jnp.asarray(rng.normal(size=(site.C, site.d_out)))
        )
        for site in tiny.target().sites.all
    }


def test_stacked_and_back() -> None:
    sites, given = tiny.target().sites, by_site()
    stacked = stack_sites(sites, given)
    for stack in sites.stacks:
        for row, n in enumerate(stack.sites):
            np.testing.assert_array_equal(stacked[stack.name].V[row], given[sites.all[n].name].V)
    again = unstack_sites(sites, stacked)
    assert list(again) == [site.name for site in sites.all]
    assert worst(given, again) == 0


def test_some_sites_alone() -> None:
    """Whole stacks are left out; single sites of one only on demand."""
    sites, given = tiny.target().sites, by_site()
    stack, *_ = sites.stacks
    first, second = (sites.all[n].name for n in stack.sites)
    filled = stack_sites(sites, {first: given[first]}, fill=True)
    assert set(filled) == {stack.name}
    assert not np.any(filled[stack.name].V[1])
    assert list(unstack_sites(sites, filled)) == [first, second]
    with pytest.raises(AssertionError, match=f"{second} are missing"):
        stack_sites(sites, {first: given[first]})
    with pytest.raises(AssertionError, match=r"not sites of this decomposition: layers\.9"):
        stack_sites(sites, {"layers.9": given[first]})
