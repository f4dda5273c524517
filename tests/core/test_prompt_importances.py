"""Importances of one prompt (section 16): errors, loss, gradients and steps of the descent, against the reference."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.attribution import for_attribution
from param_decomp_jax.analysis.prompt_importances import (
    READINGS,
    Descent,
    Importances,
    Lowered,
    Measure,
    PromptErrors,
    ReadingTest,
    _masks,
    _random_sources,
    lower,
    lowering_loss,
    penalty_total,
    reading_errors,
    start_lowering,
)
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import FreshAttack
from param_decomp_jax.method.inspection import stack_sites, unstack_sites
from param_decomp_jax.method.losses import ImportanceMinimality, Lp, SmoothL0
from param_decomp_jax.method.masks import Bundle, Sources
from param_decomp_jax.method.state import State
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding, shardings
from tests import reference as ref
from tests.core import test_experts as with_experts
from tests.core import tiny, toys

LP = Lp(Anneal(1.6, 0.5, 0.0, 1.0), 1e-3)
SMOOTH = SmoothL0(Schedule(0.4, "linear", 0.0, 0.1))
STEP = 3
LOG_PRICES = np.asarray([-2.98, -0.4, 0.1])  # the first falls to the least that O4 allows
ALLOWED = np.asarray([2.0, 0.3, 0.01])
JUDGED = ReadingTest(2, 3, FreshAttack("random", 0.125, 2, "unique_per_datapoint"))  # exact in float32, as sources are


class Case(NamedTuple):
    """One row of inputs in float64. ``start``: λ₀; ``importances``: what the descent has come to. Both 0 after the
    measured position, and where an expert is not taken; some are 0 or 1 elsewhere."""

    problem: Problem
    state: State
    weights: Any
    inputs: np.ndarray
    descent: Descent
    start: Importances
    importances: Importances

    @property
    def leading(self) -> tuple[int, ...]:
        return tiny.leading_axes(self.problem.target, self.inputs)

    @property
    def network(self) -> tuple[Any, ...]:
        return self.state.learned, self.weights, jnp.asarray(self.inputs)


def make_case(target: Any, weights: Any, inputs: np.ndarray, measure: Measure, penalty: Any, **changes: Any) -> Case:
    plain = tiny.problem((), target, **changes)
    problem = for_attribution(tiny.in_float64(plain))
    state, weights = tiny.to_float64(tiny.ruffled_state(plain)), tiny.to_float64(weights)
    inputs = inputs if inputs.dtype.kind == "i" else inputs.astype(np.float64)
    sites, leading = target.sites, tiny.leading_axes(target, inputs)
    exists = ref.clean_pass(tiny.ref_target(problem.target, weights, inputs), [s.name for s in sites.all]).exists
    rng = np.random.default_rng(5)

    def free() -> Importances:
        def of_site(name: str, C: int) -> np.ndarray:
            values = np.clip(rng.uniform(-0.2, 1.1, (*leading, C)), 0, 1)
            if measure.row is not None:
                values[:, measure.row + 1 :] = 0
            return values * exists[name][..., None] if name in exists else values

        made: Importances = stack_sites(
            sites, {site.name: jnp.asarray(of_site(site.name, site.C)) for site in sites.all}
        )
        return made

    descent = Descent(measure, penalty, 10, 0.05, 0.25, 0.05)
    return Case(problem, state, weights, inputs, descent, free(), free())


CHOSEN = (4, 1)


def llama(outputs: Any = None, penalty: Any = LP) -> Case:
    return make_case(tiny.target(), tiny.weights(), tiny.TOKENS[:1], Measure(3, outputs), penalty)


def experts(outputs: Any = None) -> Case:
    """Sites among the experts of two layers of four."""
    return make_case(with_experts.target(), with_experts.weights(), tiny.TOKENS[:1, :3], Measure(1, outputs), LP)


def tms(outputs: Any = None, penalty: Any = SMOOTH, **changes: Any) -> Case:
    target, features = toys.target(toys.SPARSE, toys.EVERY_MATRIX), toys.features(toys.SPARSE)[:1]
    return make_case(target, toys.weights(toys.SPARSE), features, Measure(None, outputs), penalty, **changes)


CASES = {
    "llama": llama,
    "llama, logits": partial(llama, CHOSEN, SMOOTH),
    "experts": experts,
    "experts, logits": partial(experts, CHOSEN),
    "tms": tms,
    "tms, features": partial(tms, CHOSEN, LP),
    "tms without deltas": partial(tms, use_delta=False),
}


def cases(*fast: str) -> Any:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in CASES]
    )


# ---- the reference's side ----


def ref_importances(case: Case, importances: Importances) -> dict[str, np.ndarray]:
    return {name: tiny.array(x) for name, x in unstack_sites(case.problem.target.sites, importances).items()}


def ref_model(case: Case) -> ref.Decomposition:
    sites, measure = case.problem.target.sites, case.descent.measure
    target = tiny.ref_target(case.problem.target, case.weights, case.inputs)
    clean = ref.clean_pass(target, [site.name for site in sites.all])
    error = partial(ref.prompt_error, at=measure.row, outputs=measure.outputs)
    components = tiny.ref_components(case.state.components, sites)
    return ref.Decomposition(target, error, clean, components, ref_importances(case, case.importances))


def ref_adam(case: Case, moments: Any) -> Any:
    return tiny.ref_moments(moments, lambda x: ref_importances(case, x))


def by_reading(values: Any) -> dict[str, float]:
    return dict(zip(READINGS, map(float, values), strict=True))


# ---- steps of the descent ----


def in_mid_descent(case: Case) -> Lowered:
    """Moments away from 0, weights of the readings from 1."""
    rng = np.random.default_rng(6)
    state = jax.jit(lambda: start_lowering(case.problem, case.importances, case.leading, case.descent))()
    assert int(state.step) == 0
    assert not any(np.any(x) for x in (state.log_prices, *jax.tree.leaves(state.moments)))
    sources = np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.sources)])
    assert len(np.unique(sources)) == len(sources)
    assert ((sources >= 0) & (sources < 1)).all()
    adam, *rest = state.moments

    def noise(x: Any) -> np.ndarray:
        return 0.01 * rng.normal(size=x.shape)

    adam = adam._replace(
        count=jnp.asarray(STEP, jnp.int32),
        mu=jax.tree.map(lambda x, free: noise(x) * (np.asarray(free) > 0), adam.mu, case.importances),
        nu=jax.tree.map(lambda x: noise(x) ** 2 + 1e-6, adam.nu),
    )
    log_prices, step = jnp.asarray(LOG_PRICES), jnp.asarray(STEP, jnp.int32)
    return tiny.to_float64(Lowered(case.importances, (adam, *rest), state.sources, log_prices, step))


def draws_of_step(errors: PromptErrors, step: Any) -> Any:
    """What `lower` draws in a step."""
    return errors.draw(jax.random.fold_in(jax.random.key(1), step))


def step_and_draws(
    problem: Problem, network: Any, start: Importances, state: Lowered, descent: Descent
) -> tuple[Lowered, Any]:
    drawn = draws_of_step(PromptErrors(problem, *network, descent.measure), state.step)
    at_start = penalty_total(descent, start, jnp.zeros((), jnp.int32))
    return lower(problem, *network, jnp.asarray(ALLOWED), at_start, state, descent, 1), drawn


def loss_and_gradients(
    problem: Problem, network: Any, start: Importances, state: Lowered, descent: Descent
) -> tuple[Any, Any, Any]:
    """Of the first step, with its draws."""
    errors = PromptErrors(problem, *network, descent.measure)
    drawn = draws_of_step(errors, state.step)
    at_start = penalty_total(descent, start, jnp.zeros((), jnp.int32))

    def loss(importances: Any, sources: Any) -> Any:
        prices, allowed = state.log_prices, jnp.asarray(ALLOWED)
        return lowering_loss(errors, descent, importances, sources, drawn, prices, allowed, at_start, state.step)

    return *jax.value_and_grad(loss, (0, 1), has_aux=True)(state.importances, state.sources), drawn


_step_and_draws = jax.jit(step_and_draws, static_argnums=(0, 4))


def ref_lowering(case: Case, state: Lowered) -> ref.Lowering:
    sources = tiny.ref_bundle(state.sources, case.problem.target.sites)
    prices = by_reading(state.log_prices)
    return ref.Lowering(ref_importances(case, state.importances), ref_adam(case, state.moments), sources, prices)


def ref_step(case: Case, state: ref.Lowering, drawn: Any, step: int) -> ref.Lowered:
    descent = case.descent
    minimality = tiny.schema_term(ImportanceMinimality("ImportanceMinimalityLoss", 1.0, descent.penalty))
    random = tiny.ref_bundle(drawn, case.problem.target.sites)
    start, allowed = ref_importances(case, case.start), by_reading(ALLOWED)
    settings = {"lr": descent.learning_rate, "step_size": descent.ascent, "step": step, "total": descent.steps}
    return ref.lower_once(ref_model(case), start, minimality, allowed, state, random, **settings)


@cases()
def test_steps_are_the_reference_s(name: str) -> None:
    """O3, O4: two steps, with Adam's moments, the attack's sources and the weights of the readings."""
    with jax.enable_x64():
        case = CASES[name]()
        state = in_mid_descent(case)
        at, row = ref_lowering(case, state), case.descent.measure.row
        for step in (STEP, STEP + 1):
            state, drawn = _step_and_draws(case.problem, case.network, case.start, state, case.descent)
            at = ref_step(case, at, drawn, step).state
            mine = ref_lowering(case, state)
            tiny.assert_alike(at._asdict(), mine._asdict(), 1e-9)
            assert float(state.log_prices[0]) == -3.0
            assert int(state.step) == step + 1
            if row is not None:  # O1
                assert not any(np.any(x[:, row + 1 :]) for x in mine.lower.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_reference_s(name: str) -> None:
    """O2, O3: errors of the three readings, the loss, and its gradients in λ and in the attack's sources."""
    with jax.enable_x64():
        case = CASES[name]()
        state = in_mid_descent(case)
        program = jax.jit(loss_and_gradients, static_argnums=(0, 4))
        (loss, errors), gradients, drawn = program(case.problem, case.network, case.start, state, case.descent)
        want = ref_step(case, ref_lowering(case, state), drawn, STEP)
        assert float(loss) == pytest.approx(want.loss, rel=1e-9)
        assert by_reading(errors) == pytest.approx(want.errors, rel=1e-9)
        of_importances = ref_importances(case, gradients[0])
        sources = tiny.ref_bundle(gradients[1], case.problem.target.sites)
        tiny.assert_alike(want.gradients, {"lower": of_importances, "attack": sources}, 1e-9)
        moved = [s for s, own in sources.items() if np.any(own["components"])]
        assert len(moved) > len(sources) / 2


# ---- errors ----


def judge(problem: Problem, network: Any, importances: Importances, measure: Measure, leading: Any) -> Any:
    """The errors, and the sources that they come from: those of the draws, and those that the attacks start from."""
    key = jax.random.key(2)
    found = reading_errors(problem, *network, importances, key, measure, JUDGED)
    for_draws, for_attacks = jax.random.split(key)
    errors = PromptErrors(problem, *network, measure)
    draws = [errors.draw(jax.random.fold_in(for_draws, n)) for n in range(JUDGED.draws)]
    starts = [_random_sources(problem, leading, jax.random.fold_in(for_attacks, n)) for n in range(JUDGED.starts)]
    return found, draws, starts


@cases()
def test_judged_errors_are_the_reference_s(name: str) -> None:
    """O2: a mean over draws, and the largest error of several attacks."""
    with jax.enable_x64():
        case = CASES[name]()
        sites, attack = case.problem.target.sites, JUDGED.attack
        program = jax.jit(judge, static_argnums=(0, 3, 4))
        found, *sources = program(case.problem, case.network, case.importances, case.descent.measure, case.leading)
        draws, starts = ([tiny.ref_bundle(one, sites) for one in some] for some in sources)
        want = ref.judged_errors(ref_model(case), draws, starts, attack.step_size, attack.n_steps)
        assert by_reading(found) == pytest.approx(want, rel=1e-9)


def test_errors_of_a_position_are_the_reference_s() -> None:
    """O2, of text: KL at one position alone, and logits less their mean; readings `ci` and `random`."""
    with jax.enable_x64():
        case = llama()
        sites = case.problem.target.sites
        sources = start_sources(case)

        def found(network: Any, importances: Importances) -> Any:
            maskings = [_masks(importances, own) for own in (None, sources)]
            return [
                PromptErrors(case.problem, *network, Measure(3, outputs)).of(maskings) for outputs in (None, CHOSEN)
            ]

        both = jax.jit(found)(case.network, case.importances)
        model, own = ref_model(case), tiny.ref_bundle(sources, sites)
        for outputs, got in zip((None, CHOSEN), both, strict=True):
            model = dataclasses.replace(model, error=partial(ref.prompt_error, at=3, outputs=outputs))
            want = [ref.reading_error(model, one) for one in (None, own)]
            np.testing.assert_allclose(got, want, rtol=1e-9)


def start_sources(case: Case) -> Bundle:
    rng = np.random.default_rng(7)
    return {
        name: Sources(jnp.asarray(rng.uniform(size=x.shape)), jnp.asarray(rng.uniform(size=x.shape[:-1])))
        for name, x in case.importances.items()
    }


# ---- devices ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("llama", MeshShape(2, 2, 2)), ("experts, logits", MeshShape(fsdp=8))], ids=str
)
def test_eight_devices_are_one(name: str, shape: MeshShape) -> None:
    """A step, and errors as they are judged. A single row is on all devices that rows are divided among."""
    with jax.enable_x64():
        case = CASES[name]()
        problem, descent = case.problem, case.descent
        state = in_mid_descent(case)

        def both(network: Any, importances: Importances) -> Any:
            stepped, _ = step_and_draws(problem, network, case.start, state, descent)
            judged = reading_errors(problem, *network, importances, jax.random.key(2), descent.measure, JUDGED)
            return stepped, judged

        want = jax.device_get(jax.jit(both)(case.network, case.importances))
        mesh = make_mesh(shape)
        learned, weights, inputs = case.network
        places = state_shardings(mesh, problem.decomposition, case.state)
        learned = jax.tree.map(jax.device_put, learned, places.learned)
        frozen = jax.tree.map(jax.device_put, weights, shardings(mesh, problem.target.weight_axes(weights), weights))
        row = jax.device_put(inputs, batch_sharding(mesh, inputs.shape))
        with jax.set_mesh(mesh):
            got = jax.device_get(jax.jit(lambda *args: both(*args))((learned, frozen, row), case.importances))
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)
        jax.clear_caches()  # programs for eight devices are large, and no other test asks for the same
