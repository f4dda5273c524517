"""Faithfulness (L1) and importance minimality (L2 to L4) against the reference, values and gradients."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_aot.traffic import traffic
from param_decomp_jax.decomposition.components import Factors, components_axes
from param_decomp_jax.decomposition.schedules import Anneal, Knot, Knots, Schedule
from param_decomp_jax.method.losses import (
    Frequency,
    ImportanceMinimality,
    Lp,
    SmoothL0,
    faithfulness,
    importance_minimality,
    penalty_of,
    penalty_sum,
)  # fmt: skip
from param_decomp_jax.sharding.memory import INTERMEDIATES, MemoryPolicy
from param_decomp_jax.sharding.memory import PLAIN as SAVED
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import shardings
from tests import reference as ref
from tests.core import tiny

RNG = np.random.default_rng(0)

# ---- L1 ----

SHAPES = {"a": (3, 5, 4, 6), "b": (1, 2, 7, 3)}
"""By stack: layers, d_in, d_out, C."""
COMPONENTS = {
    name: Factors(
        jnp.asarray(RNG.normal(size=(n, d_in, C)), jnp.float32),
        jnp.asarray(RNG.normal(size=(n, C, d_out)), jnp.float32),
    )
    for name, (n, d_in, d_out, C) in SHAPES.items()
}
WEIGHTS = {
    name: jnp.asarray(2 * RNG.normal(size=(n, d_in, d_out)), jnp.float32)
    for name, (n, d_in, d_out, _) in SHAPES.items()
}


def rows(stacks: Any) -> Any:
    """Arrays by stack to float64 arrays by site, ``stack.row``."""
    return {f"{name}.{row}": x for name, of in stacks.items() for row, x in enumerate(tiny.array(of))}


def components_by_site(components: Any) -> Any:
    V, U = (rows({name: getattr(f, part) for name, f in components.items()}) for part in "VU")
    return {site: {"V": V[site], "U": U[site]} for site in V}


RECOMPUTED = MemoryPolicy(save=frozenset(INTERMEDIATES) - {"layers"})
IN_BOTH_WAYS = pytest.mark.parametrize("memory", [SAVED, RECOMPUTED], ids=["all at once", "layer by layer"])
jit_faithfulness = jax.jit(faithfulness, static_argnums=2)


def assert_faithfulness(components: Any, weights: Any, memory: MemoryPolicy, tolerance: float) -> None:
    value, gradient = jax.jit(jax.value_and_grad(faithfulness), static_argnums=2)(components, weights, memory)
    trained = ref.tree_map(ref.Var, components_by_site(components))
    want = ref.faithfulness(trained, rows(weights))
    tiny.assert_alike([want.value], [value], tolerance)
    tiny.assert_alike(ref.gradients(want, trained), components_by_site(gradient), tolerance)


@IN_BOTH_WAYS
def test_faithfulness(memory: MemoryPolicy) -> None:
    assert_faithfulness(COMPONENTS, WEIGHTS, memory, 1e-5)
    with jax.enable_x64(True):
        assert_faithfulness(*tiny.to_float64((COMPONENTS, WEIGHTS)), memory, 1e-12)


def test_stacks_of_as_many_layers_go_through_one_scan() -> None:
    """So that XLA can send what the sites of a layer exchange as one collective operation."""
    components = {**COMPONENTS, "c": jax.tree.map(jnp.negative, COMPONENTS["a"])}
    weights = {**WEIGHTS, "c": 2 * WEIGHTS["a"]}
    assert_faithfulness(components, weights, RECOMPUTED, 1e-5)
    program = jax.make_jaxpr(faithfulness, static_argnums=2)(components, weights, RECOMPUTED)
    assert [e.primitive.name for e in program.jaxpr.eqns].count("scan") == 1  # b has a single layer


def test_devices_add_up_their_squares_once() -> None:
    """Not in each of the three layers: all-reduces as executed."""
    mesh, name = make_mesh(MeshShape(fsdp=2)), "a"
    components = {name: COMPONENTS[name]}
    with jax.set_mesh(mesh):
        places = shardings(mesh, components_axes(components), components)
        placed = jax.device_put(components, places)
        program = jit_faithfulness.lower(placed, {name: WEIGHTS[name]}, RECOMPUTED).compile()
    found = traffic(program.as_text()).collectives
    assert sum(n for c, n in found.items() if c.kind == "all-reduce" and c.payload == 4) == 1  # the others are of VU


@IN_BOTH_WAYS
def test_faithfulness_of_a_target_stored_in_bf16(memory: MemoryPolicy) -> None:
    """L1, N1: the target's storage is widened before W − VU, not VU rounded to it."""
    weights = {name: W.astype(jnp.bfloat16) for name, W in WEIGHTS.items()}
    got = jit_faithfulness(COMPONENTS, weights, memory)
    assert got.dtype == jnp.float32
    want = ref.faithfulness(components_by_site(COMPONENTS), rows(weights))
    assert float(got) == pytest.approx(float(want), rel=1e-5)


@IN_BOTH_WAYS
def test_faithfulness_is_over_all_entries_not_a_mean_of_sites(memory: MemoryPolicy) -> None:
    zero = jax.tree.map(jnp.zeros_like, COMPONENTS)
    ones = {name: jnp.full_like(W, name == "a") for name, W in WEIGHTS.items()}
    assert float(jit_faithfulness(zero, ones, memory)) == pytest.approx(60 / (60 + 14), rel=1e-6)


def test_faithfulness_of_more_entries_than_an_int32_counts() -> None:
    """The MLPs of all layers of an 8B: found by compiling them."""

    def of(V: jax.Array, U: jax.Array, W: jax.Array) -> jax.Array:
        return faithfulness({"mlp": Factors(V, U)}, {"mlp": W}, SAVED)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((96, 4096, 8), (96, 8, 14336), (96, 4096, 14336))]
    assert jax.eval_shape(of, *shapes).shape == ()


# ---- L2 ----

LEAD = (4, 5)
STEP, TOTAL = 6, 10
UPPERS = {
    "a": RNG.uniform(0.01, 1.2, size=(2, *LEAD, 6)).astype(np.float32),
    "b": RNG.uniform(0.01, 1.2, size=(1, *LEAD, 3)).astype(np.float32),
}
"""υ by stack: two sites with C = 6, one with C = 3."""
LP = Lp(Anneal(2.0, 0.4, 0.2, 0.9), eps=1e-3)
SMOOTH = SmoothL0(Schedule(0.5, "linear", 0.0, 0.2))
PLAIN = ImportanceMinimality("ImportanceMinimalityLoss", 1.0, LP)

TERMS = {
    "Lp": PLAIN,
    "Lp, beta": dataclasses.replace(PLAIN, beta=0.7),
    "p constant": dataclasses.replace(PLAIN, penalty=Lp(Anneal(0.9, 0.9), eps=1e-12), beta=0.7),
    "Lp, frequency": dataclasses.replace(PLAIN, frequency=Frequency(0.3, 1000.0)),
    "smooth L0": dataclasses.replace(PLAIN, penalty=SMOOTH),
    "smooth L0, beta": dataclasses.replace(PLAIN, penalty=SMOOTH, beta=0.7),
    "smooth L0, beta, frequency": dataclasses.replace(PLAIN, penalty=SMOOTH, beta=0.7, frequency=Frequency(0.3, 9.0)),
}


def value(term: ImportanceMinimality, uppers: Any, step: Any) -> tuple[jax.Array, jax.Array | None]:
    """(main, frequency) from υ: one row per site, a sum for each of its components."""
    sums = {
        name: jnp.stack([penalty_sum(term.penalty, of_site, jnp.asarray(step), TOTAL) for of_site in upper])
        for name, upper in uppers.items()
    }
    assert {name: S.shape for name, S in sums.items()} == {n: (u.shape[0], u.shape[-1]) for n, u in uppers.items()}
    n_positions = math.prod(next(iter(uppers.values())).shape[1:-1])
    return importance_minimality(term, sums, n_positions)


@partial(jax.jit, static_argnums=0)
def core(term: ImportanceMinimality, uppers: Any, step: Any = STEP) -> Any:
    """(main, frequency), and the gradients of both."""

    def parts(uppers: Any) -> tuple[jax.Array, ...]:
        return tuple(x for x in value(term, uppers, step) if x is not None)

    values, backward = jax.vjp(parts, uppers)
    one_hot = np.eye(len(values))
    return values, [backward(tuple(jnp.asarray(x, values[0].dtype) for x in row))[0] for row in one_hot]


def penalty(term: ImportanceMinimality, step: int) -> Any:
    return ref.penalty_of(tiny.schema_term(term), step, TOTAL)


def assert_importance(term: ImportanceMinimality, uppers: Any, tolerance: float, step: int = STEP) -> None:
    values, gradients = core(term, jax.tree.map(jnp.asarray, uppers), step)
    by_site = ref.tree_map(ref.Var, rows(uppers))
    psi = penalty(term, step)
    want = [ref.importance_minimality(by_site, psi, term.beta)]
    if term.frequency is not None:
        want.append(ref.importance_frequency(by_site, psi, term.frequency.reference_token_count))
    tiny.assert_alike([part.value for part in want], list(values), tolerance)
    tiny.assert_alike([ref.gradients(part, by_site) for part in want], [rows(g) for g in gradients], tolerance)


@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_importance_minimality(term: ImportanceMinimality) -> None:
    assert_importance(term, UPPERS, 1e-5)
    with jax.enable_x64(True):
        assert_importance(term, tiny.to_float64(UPPERS), 1e-9)


@pytest.mark.parametrize("step", [0, 2, 9])
def test_penalties_follow_the_step(step: int) -> None:
    """L4 for p, T2 for γ; the step is traced."""
    assert_importance(TERMS["Lp, beta"], UPPERS, 1e-5, step)
    assert_importance(TERMS["smooth L0, beta"], UPPERS, 1e-5, step)


def test_p_on_a_schedule() -> None:
    """Also at step ``total``, for which the evaluation after the last step asks."""
    upper = jnp.asarray(UPPERS["b"])
    for p in (Schedule(2.0, "linear", 0.0, 0.01), Knots(2.0, (Knot(0.0, 1.0), Knot(1.0, 0.01)))):
        for step, value in ((0, 2.0), (TOTAL - 1, 0.02), (TOTAL, 0.02)):
            got = penalty_of(Lp(p, 1e-3), upper, jnp.asarray(step), TOTAL)
            np.testing.assert_allclose(got, (upper + 1e-3) ** value, rtol=1e-5)


def test_importances_that_are_exactly_zero() -> None:
    """eps is inside the power: at υ = 0 the value is eps^p and the slope p · eps^(p − 1), both finite for p < 1."""
    uppers = {name: np.where(u > 0.6, u, np.float32(0)) for name, u in UPPERS.items()}
    term = dataclasses.replace(PLAIN, penalty=Lp(Anneal(0.4, 0.4), eps=1e-12), beta=0.7)
    for each in (term, TERMS["smooth L0, beta"]):
        assert_importance(each, uppers, 1e-5)
        with jax.enable_x64(True):
            assert_importance(each, tiny.to_float64(uppers), 1e-9)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (1, 6)])
def test_positions_are_all_leading_axes(lead: tuple[int, ...]) -> None:
    """L2: N = batch · seq, or batch alone; with υ = 1 and p = 1 every S_c is N."""
    uppers = {"a": np.ones((2, *lead, 3), np.float32), "b": np.ones((1, *lead, 5), np.float32)}
    frequency = Frequency(1.0, 15.0)
    term = dataclasses.replace(PLAIN, penalty=Lp(Anneal(1.0, 1.0), eps=0.0), beta=0.5, frequency=frequency)
    (main, part), _ = core(term, uppers)
    assert float(main) == pytest.approx(11 * (1 + 0.5 * math.log2(7)), rel=1e-6)
    assert float(part) == pytest.approx(11 * 4, rel=1e-6)


@pytest.mark.parametrize("of", [LP, SMOOTH], ids=["Lp", "smooth L0"])
def test_both_forms_are_one(of: Lp | SmoothL0) -> None:
    """L2: with a = N and the frequency's coefficient coeff · β they are equal."""
    coeff, beta, N = 0.02, 0.7, float(math.prod(LEAD))
    with jax.enable_x64(True):
        uppers = tiny.to_float64(UPPERS)
        (whole,), (gradient,) = core(dataclasses.replace(PLAIN, penalty=of, beta=beta), uppers)
        frequent = dataclasses.replace(PLAIN, penalty=of, frequency=Frequency(coeff * beta, N))
        (main, part), (main_gradient, part_gradient) = core(frequent, uppers)
        tiny.assert_alike([coeff * whole], [coeff * main + coeff * beta * part], 1e-12)
        both = jax.tree.map(lambda a, b: coeff * a + coeff * beta * b, main_gradient, part_gradient)
        tiny.assert_alike(jax.tree.map(lambda g: coeff * g, gradient), both, 1e-12)


def test_logarithm_is_of_the_global_sum() -> None:
    """L3: the mean over two halves of the batch is another number."""
    term = TERMS["Lp, beta"]
    halves = [{name: u[:, part] for name, u in UPPERS.items()} for part in (slice(0, 2), slice(2, 4))]
    (whole,), _ = core(term, UPPERS)
    mean = sum(float(core(term, half)[0][0]) for half in halves) / 2
    assert abs(float(whole) - mean) > 0.05 * float(whole)
    plain = [float(core(TERMS["Lp"], uppers)[0][0]) for uppers in (UPPERS, *halves)]
    assert plain[0] == pytest.approx(sum(plain[1:]) / 2, rel=1e-5)


def test_frequency_is_given_only_if_asked_for() -> None:
    def parts(term: ImportanceMinimality) -> Any:
        return jax.eval_shape(lambda uppers: value(term, uppers, 0), UPPERS)

    assert parts(PLAIN)[1] is None
    assert parts(TERMS["Lp, frequency"])[1].shape == ()
