"""Schedules (T2, T8) and the annealing of p (L4), T2 and L4 against the reference at every step."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_jax.decomposition.schedules import Anneal, AnySchedule, Knot, Knots, Schedule
from param_decomp_jax.method.adversary import BroadcastAcrossBatch, PersistentAttack, SignAscent
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp
from param_decomp_jax.method.recon import AllSites, Reconstruction
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.step import step_outcome
from tests import reference as ref
from tests.core import tiny, toys

STEPS = 7
"""Examples are evaluated at so many steps at once; one shape, one compilation."""


def evaluate(schedule: AnySchedule | Anneal, steps: list[int], total: int) -> np.ndarray:
    return np.asarray(jax.vmap(lambda step: schedule(step, total))(np.array(steps)))


def reference(schedule: Schedule, steps: list[int], total: int) -> list[float]:
    return [ref.schedule(tiny.schema_schedule(schedule), step, total) for step in steps]


def assert_like_reference(schedule: Schedule, steps: list[int], total: int) -> None:
    want = reference(schedule, steps, total)
    # Near a cosine's end ½(1 + cos) is a small difference: absolute in units of the full value.
    np.testing.assert_allclose(evaluate(schedule, steps, total), want, rtol=1e-5, atol=1e-6 * schedule.start)
    with jax.enable_x64(True):
        np.testing.assert_allclose(evaluate(schedule, steps, total), want, rtol=1e-12, atol=1e-14 * schedule.start)


SCHEDULES = [
    Schedule(3e-3, warmup_pct=warmup) for warmup in (0.0, 0.25)
] + [
    Schedule(3e-3, kind, warmup, final)
    for kind, warmup, final in itertools.product(("linear", "cosine"), (0.0, 0.25), (0.0, 0.1, 1.0, 1.5))
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_step(schedule: Schedule) -> None:
    assert_like_reference(schedule, list(range(20)), 20)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_edges(schedule: Schedule) -> None:
    """T2: full at step 0 without a warm-up and 0 with one, full right after it, final at the last step."""
    warmup = int(schedule.warmup_pct * 20)
    first, below, full, last = evaluate(schedule, [0, max(0, warmup - 1), warmup, 19], 20)
    assert full == pytest.approx(schedule.start, rel=1e-6)
    assert last == pytest.approx(schedule.start * schedule.final_val_frac, rel=1e-6, abs=1e-9)
    assert first == (0.0 if warmup else full)
    assert below == (pytest.approx(schedule.start * (warmup - 1) / warmup, rel=1e-6) if warmup else full)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_trainings(schedule: Schedule, total: int) -> None:
    assert_like_reference(schedule, list(range(total)), total)


def test_one_step_has_the_full_value() -> None:
    """T2: t = 0 / max(1, 0), so the only step of a training is its first."""
    assert evaluate(Schedule(2.0, "linear", 0.9, 0.0), [0], 1) == 2.0


def test_all_warmup() -> None:
    assert_like_reference(Schedule(1.0, "cosine", 1.0, 0.0), list(range(5)), 5)


def test_a_constant_has_no_final_value() -> None:
    with pytest.raises(AssertionError):
        Schedule(1.0, "constant", final_val_frac=0.5)


def test_traced_step_is_the_same() -> None:
    schedule = Schedule(0.3, "cosine", 0.2, 0.1)
    traced = jax.jit(lambda step: schedule(step, 50))(17)
    assert float(traced) == pytest.approx(float(schedule(17, 50)), rel=1e-6)


steps_and_total = st.integers(1, 10**6).flatmap(
    lambda total: st.tuples(st.lists(st.integers(0, total - 1), min_size=STEPS, max_size=STEPS), st.just(total))
)


@given(
    steps_and_total=steps_and_total,
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    start=st.floats(1e-6, 10),
    warmup=st.floats(0, 1),
    final=st.floats(0, 2),
)
@settings(max_examples=30)
def test_any_schedule(
    steps_and_total: tuple[list[int], int], kind: str, start: float, warmup: float, final: float
) -> None:
    schedule = Schedule(start, kind, warmup, 1.0 if kind == "constant" else final)  # type: ignore[arg-type]
    assert_like_reference(schedule, *steps_and_total)


# ---- T8 ----

RISE_STAY_FALL = Knots(2.0, (Knot(0.0, 0.5), Knot(0.25, 1.0), Knot(0.5, 1.0, "hold"), Knot(1.0, 0.2, "cosine")))
ATTACK = PersistentAttack(SignAscent(Schedule(0.1)), BroadcastAcrossBatch())


def test_knots_written_out() -> None:
    values = evaluate(RISE_STAY_FALL, list(range(9)), 9)
    fall = [2.0 - 1.6 * (1 - np.cos(np.pi * u)) / 2 for u in (0, 0.25, 0.5, 0.75, 1)]
    np.testing.assert_allclose(values, [1.0, 1.5, 2.0, 2.0, *fall], rtol=1e-6)
    assert evaluate(RISE_STAY_FALL, [9, 100], 9).tolist() == [values[-1]] * 2, "an evaluation comes after the last step"


def test_knots_between_steps() -> None:
    """The first knot's ``interp`` has no effect; a knot that no step falls on is passed."""
    knots = Knots(1.0, (Knot(0.0, 0.0, "hold"), Knot(0.1, 0.3, "hold"), Knot(0.2, 1.0), Knot(1.0, 0.0)))
    np.testing.assert_allclose(evaluate(knots, [0, 1, 2], 3), [0.0, 0.625, 0.0], rtol=1e-6)
    assert evaluate(knots, [0], 1) == 0.0
    assert evaluate(knots, [0, 1], 2).tolist() == [0.0, 0.0]


def test_jumps_are_at_their_step() -> None:
    """T8: a knot is met at the first step with step / (steps − 1) ≥ at, also where float32 would round below it."""
    missed = 0
    for total, knot in [(n + 1, k) for n in (3, 10, 77, 1000, 99_999) for k in {1, n // 3, (7 * n) // 10, n - 1}]:
        at = knot / (total - 1)
        missed += float(np.float32(knot) / np.float32(total - 1)) < at
        jump = Knots(1.0, (Knot(0.0, 0.25), Knot(at, 1.0, "hold"), Knot(1.0, 0.0)))
        assert evaluate(jump, [knot - 1, knot], total).tolist() == [0.25, 1.0], (total, knot)
    assert missed > 3


EARLIER = {
    "constant": (Schedule(3e-3), (Knot(0.0, 1.0), Knot(1.0, 1.0))),
    "linear": (Schedule(3e-3, "linear", 0.0, 0.1), (Knot(0.0, 1.0), Knot(1.0, 0.1))),
    "cosine": (Schedule(3e-3, "cosine", 0.0, 0.1), (Knot(0.0, 1.0), Knot(1.0, 0.1, "cosine"))),
}


@pytest.mark.parametrize("kind", EARLIER)
def test_knots_can_say_what_schedules_say(kind: str) -> None:
    schedule, points = EARLIER[kind]
    steps, knots = list(range(20)), Knots(3e-3, points)
    np.testing.assert_allclose(evaluate(knots, steps, 20), evaluate(schedule, steps, 20), rtol=2e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(evaluate(knots, steps, 20), evaluate(schedule, steps, 20), rtol=1e-12)


def test_a_step_whose_numbers_are_on_schedules() -> None:
    """It computes what a step with their values as numbers does, and logs the coefficients."""
    at, total = 6, 10
    moving = RISE_STAY_FALL, Schedule(0.3, "linear", 0.0, 0.1)
    outcomes = []
    for knots, line, p in (
        (*moving, RISE_STAY_FALL),
        (*(float(schedule(at, total)) for schedule in moving), Anneal(*2 * [float(RISE_STAY_FALL(at, total))])),
    ):
        terms = (
            Reconstruction("Persistent", knots, AllSites(), Everywhere(), ATTACK),
            ImportanceMinimality("Minimal", line, Lp(p, 1e-6), frequency=Frequency(knots, 9.0)),
            Faithfulness("Faithful", line),
        )
        problem = tiny.problem(
            terms, toys.target(toys.SPARSE, {"linear1": 3, "linear2": 2}), ci=tiny.SHARED, steps=total
        )
        state = tiny.ruffled_state(problem, step=at, leading=(toys.ROWS,))
        step = jax.jit(partial(step_outcome, problem))
        outcomes.append(step(state, toys.weights(toys.SPARSE), toys.features(toys.SPARSE)))
    got, want = outcomes
    logged = {name: float(got.metrics.pop(name)) for name in got.metrics.keys() - want.metrics.keys()}
    assert logged == {
        f"schedules/{name}_coeff": pytest.approx(float(schedule(at, total)))
        for name, schedule in zip(
            ("Persistent", "Minimal_frequency", "Minimal", "Faithful"), [moving[0]] * 2 + [moving[1]] * 2, strict=True
        )
    }
    tiny.assert_alike(jax.tree.leaves(want), jax.tree.leaves(got), 1e-5)


# ---- L4 ----


def assert_anneal_like_reference(anneal: Anneal, steps: list[int], total: int) -> None:
    config = {
        "pnorm": anneal.start,
        "p_anneal_final_p": anneal.final,
        "p_anneal_start_frac": anneal.start_frac,
        "p_anneal_end_frac": anneal.end_frac,
    }
    want = [ref.annealed_p(config, step, total) for step in steps]
    # A steep slope magnifies the rounding of step / total; a jump has none.
    span = anneal.end_frac - anneal.start_frac
    rounding = 1e-7 * abs(anneal.final - anneal.start) / span if span > 0 else 0.0
    np.testing.assert_allclose(evaluate(anneal, steps, total), want, rtol=1e-5, atol=rounding)
    with jax.enable_x64(True):
        np.testing.assert_allclose(evaluate(anneal, steps, total), want, rtol=1e-12, atol=1e-8 * rounding)


@pytest.mark.parametrize(
    "anneal",
    [
        Anneal(2.0, 0.4, 0.0, 1.0),
        Anneal(2.0, 0.4, 0.25, 0.75),
        Anneal(0.4, 2.0, 0.3, 0.31),
        Anneal(2.0, 0.4, 0.35, 0.35),
        Anneal(2.0, 0.4, 0.0, 0.0),
        Anneal(2.0, 0.4),
        Anneal(0.9, 0.9, 0.1, 0.4),
    ],
    ids=str,
)
def test_anneal_at_every_step(anneal: Anneal) -> None:
    assert_anneal_like_reference(anneal, list(range(20)), 20)


def test_anneal_written_out() -> None:
    """L4: constant before and after, linear between, fraction = step / total (not total − 1)."""
    values = evaluate(Anneal(2.0, 1.0, 0.2, 0.6), [0, 2, 3, 4, 6, 9], 10)
    np.testing.assert_allclose(values, [2.0, 2.0, 1.75, 1.5, 1.0, 1.0], rtol=1e-6)


@given(
    steps_and_total=steps_and_total,
    fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    values=st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)),
)
@settings(max_examples=30)
def test_any_anneal(
    steps_and_total: tuple[list[int], int], fractions: list[float], values: tuple[float, float]
) -> None:
    steps, total = steps_and_total
    # On a grid that contains every step's fraction or is far coarser: fp32 and float64 agree on which side a step is.
    start, end = (round(fraction * min(total, 1000)) / min(total, 1000) for fraction in fractions)
    assert_anneal_like_reference(Anneal(*values, start, end), steps, total)
