"""Hidden activations beside the output (R6) in an evaluation: values, parts, and the ascents of its own attacks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.method.objective import Objective, term_keys
from param_decomp_jax.method.state import State
from param_decomp_jax.method.step import compared_points
from param_decomp_lab.eval.persistent import FIRST_NUMBER, attack_batch
from tests import reference as ref
from tests.core import tiny
from tests.core.test_beside import FEW, FRESHLY, LATE, ROUTED, of_the_sum, persistent

TERMS = (ROUTED, persistent(of_the_sum(FEW)))


def test_an_evaluation_is_the_reference() -> None:
    """Two attacks that are kept, one on each objective; a fresh attack; chunks. After the last step a coefficient that
    moves has its last value."""
    problem = tiny.problem((*TERMS, FRESHLY, LATE))
    state, sites = tiny.ruffled_state(problem, step=10), problem.target.sites
    measured = tiny.problem((FRESHLY, LATE))
    with jax.enable_x64(True):
        exact, of_state = tiny.in_float64(measured), tiny.to_float64(state)

        def evaluate(state: State, weights: Any, inputs: jax.Array) -> Any:
            points = compared_points(exact, TERMS)
            batch = read_batch(exact, state.learned, weights, inputs, points=points)
            keys = term_keys(exact.decomposition, jax.random.key(3))
            _, (losses, _) = Objective(exact.decomposition, state.step, keys).total_loss(batch, {})
            moved, errors = attack_batch(TERMS, state.adversaries, batch, state, 10, jax.random.key(4))
            return {name: own.raw for name, own in moved.items()}, losses, errors

        got = jax.jit(evaluate)(of_state, tiny.to_float64(tiny.weights()), jnp.asarray(tiny.TOKENS))
    moved, losses, errors = jax.device_get(got)

    own, names = tiny.ref_state(state, sites), [site.name for site in sites.all]
    config, target = tiny.schema(problem), tiny.ref_target(problem.target, tiny.weights(), tiny.TOKENS)
    clean = ref.clean_pass(target, names)
    lower, _ = ref.causal_importance(config, own["ci"], clean.inputs, own["components"])
    model = ref.Decomposition(target, ref.kl_error, clean, own["components"], lower)
    want: dict[str, float] = {}
    entries = {entry["name"]: entry for entry in config["loss_metrics"]}

    def note(name: str, found: dict) -> None:
        want.update({f"{name}/{part}": float(ref.value(x)) for part, x in found.items() if part != "sum"})
        want[name] = float(ref.value(found["sum"]))

    for number, term in enumerate((FRESHLY, LATE)):
        loss, beside = entries[term.name], ref.beside_output(entries[term.name], 9, 10)
        key = jax.random.fold_in(jax.random.key(3), number)
        draws = tiny.ref_term_draws(term, key, sites, tiny.LEADING, True)
        note(term.name, ref.mean_errors(model, ref.forwards_of(model, loss, 1, draws, None, beside), False, beside))
    for number, term in enumerate(TERMS):
        loss, beside = entries[term.name], ref.beside_output(entries[term.name], 9, 10)
        key = jax.random.fold_in(jax.random.key(4), FIRST_NUMBER + number)
        draws = tiny.ref_term_draws(term, key, sites, tiny.LEADING, True)
        forwards, ascents = ref.split_draws(loss, names, 1, draws)
        raw, moments = own["sources"][term.name], own["source_moments"][term.name]
        raw, moments = ref.warm_up_sources(model, loss, raw, moments, ascents, 9, 10)
        moving = ref.tree_map(ref.Var, raw)
        found = ref.mean_errors(model, ref.forwards_of(model, loss, 1, forwards, moving, beside), False, beside)
        note(term.name, found)
        climbed = found["sum" if ref.ascends_sum(loss) else "output"]
        raw, _ = ref.ascend(loss, raw, ref.gradients(climbed, moving), moments, 9, 10)
        tiny.assert_alike(raw, tiny.ref_bundle(moved[term.name], sites), 1e-9)

    del losses["loss/total"]
    found = {tiny.ref_part(name.removeprefix("loss/")): x for name, x in {**losses, **errors}.items()}
    tiny.assert_alike(want, found, 1e-9)
    assert all(np.all(x > 0) for x in found.values())
