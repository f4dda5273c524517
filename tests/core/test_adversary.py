"""Section 7: fresh and persistent attacks by themselves; within the step they are in test_step.py and test_recon.py."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.method import recon
from param_decomp_jax.method.adversary import (
    AdamAscent,
    Adversary,
    BroadcastAcrossBatch,
    FreshAttack,
    PerBatchPerPosition,
    PersistentAttack,
    RepeatAcrossBatch,
    SignAscent,
    SingleSource,
    ascend,
    attack,
    effective,
    init_adversary,
    initial_sources,
    source_shape,
    warm_up,
)  # fmt: skip
from param_decomp_jax.method.masks import Bundle, GivenSources, Sources, Stochastic
from param_decomp_jax.method.recon import AllSites, Chunks, Reconstruction
from param_decomp_jax.method.routing import UniformKSubset
from param_decomp_jax.method.step import training_step
from tests import reference as ref
from tests.cases import slow_but
from tests.core import tiny

SITES = tiny.target().sites
LEADING = (4, 5)
ALL = tuple(range(len(SITES)))
FRESH = FreshAttack("random", 0.25, 3, "unique_per_datapoint")
SCOPES = [SingleSource(), BroadcastAcrossBatch(), RepeatAcrossBatch(2), PerBatchPerPosition()]


# ---- A1 ----


@pytest.mark.parametrize("scope", ["unique_per_datapoint", "shared_across_batch"])
@pytest.mark.parametrize("init", ["random", "ones", "zeroes"])
@pytest.mark.parametrize("leading", [(4, 5), (6,)])
def test_fresh_start(init: Any, scope: Any, leading: tuple[int, ...]) -> None:
    spec = dataclasses.replace(FRESH, init=init, scope=scope)
    bundle = jax.jit(lambda key: initial_sources(spec, key, SITES, (1, 4), leading, True))(jax.random.key(0))
    live_stacks = {SITES.stack_rows[n][0].name for n in (1, 4)}
    assert bundle.keys() == live_stacks
    for stack in SITES.stacks:
        if stack.name in live_stacks:
            source, lead = bundle[stack.name], ref.fresh_scope_shape(scope, leading)
            assert source.components.shape == (stack.n_layers, *lead, stack.C)
            assert source.delta is not None
            assert source.delta.shape == (stack.n_layers, *lead)
            for x in map(np.asarray, (source.components, source.delta)):
                assert (x == {"ones": 1, "zeroes": 0}.get(init, x)).all()
                assert ((x >= 0) & (x <= 1)).all()
                if init == "random":
                    assert len(np.unique(x)) == x.size


def bundle_of(rng: np.random.Generator, lead: tuple[int, ...] = (4, 5)) -> Bundle:
    def uniform(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(size=shape), jnp.float32)

    return {s.name: Sources(uniform(s.n_layers, *lead, s.C), uniform(s.n_layers, *lead)) for s in SITES.stacks}


def test_fresh_attack_climbs_by_signs_and_is_constant() -> None:
    """A1, on a curved error with the maximum on the way and beyond the edge; no gradient through the ascents."""
    rng = np.random.default_rng(0)
    peak, start = bundle_of(rng), bundle_of(rng)
    peak = jax.tree.map(lambda x: 1.6 * x - 0.3, peak)
    start["layers.0-1.mlp.up_proj"] = peak["layers.0-1.mlp.up_proj"]  # gradient exactly 0: sign 0, stays

    def error(bundle: Bundle, scale: Any = 1.0) -> jax.Array:
        squares = jax.tree.map(lambda x, p: jnp.sum((x - p) ** 2), bundle, peak)
        return -scale * sum(jax.tree.leaves(squares))

    got = jax.jit(lambda start: attack(FRESH, error, start))(start)
    tree_peak, tree_start = (tiny.ref_bundle(b, SITES) for b in (peak, start))

    def ref_error(moving: ref.Tree) -> ref.Num:
        parts = ref.tree_leaves(ref.tree_map(lambda x, p: ((x - p) ** 2).sum(), moving, tree_peak))
        return -1.0 * sum(parts)

    want = ref.fresh_attack(ref_error, tree_start, FRESH.step_size, FRESH.n_steps)
    tiny.assert_alike(want, tiny.ref_bundle(got, SITES), 1e-6)

    def after(scale: jax.Array) -> jax.Array:
        return sum(jnp.sum(x) for x in jax.tree.leaves(attack(FRESH, lambda b: error(b, scale), start)))

    assert jax.jit(jax.grad(after))(1.0) == 0


# ---- A2, A5 ----


@pytest.mark.parametrize("scope", SCOPES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("leading", [(4, 5), (6,)])
def test_scopes(scope: Any, leading: tuple[int, ...]) -> None:
    shape = source_shape(scope, leading)
    assert shape == ref.persistent_scope_shape(tiny.schema_scope(scope), leading)
    spec = PersistentAttack(AdamAscent(Schedule(0.1)), scope)
    shapes = jax.eval_shape(lambda: init_adversary(spec, jax.random.key(0), SITES, leading, True))
    for stack in SITES.stacks:
        assert shapes.raw[stack.name].components.shape == (stack.n_layers, *shape, stack.C)
        assert shapes.raw[stack.name].delta.shape == (stack.n_layers, *shape)


@pytest.mark.parametrize("sigmoid", slow_but([True], [False, True]))
def test_persistent_start(sigmoid: bool) -> None:
    """A5: U[0, 1], or N(0, 1) under the sigmoid; moments and count zero. fp32 (N1)."""
    spec = PersistentAttack(AdamAscent(Schedule(0.1)), PerBatchPerPosition(), sigmoid)
    start = jax.jit(lambda key: init_adversary(spec, key, SITES, (40, 10), True))(jax.random.key(0))
    x = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(start.raw)])
    assert x.dtype == np.float32
    mean, deviation = (0, 1) if sigmoid else (0.5, 12**-0.5)
    assert abs(x.mean() - mean) < 5 * deviation / x.size**0.5
    assert abs(x.std() - deviation) < 5 * deviation / x.size**0.5
    assert len(np.unique(x)) > 0.99 * x.size
    if not sigmoid:
        assert ((x >= 0) & (x <= 1)).all()
    assert start.count == 0
    assert all((m == 0).all() for m in jax.tree.leaves((start.mean, start.square)))


def test_sign_ascent_has_no_moments() -> None:
    spec = PersistentAttack(SignAscent(Schedule(0.1)), SingleSource())
    start = jax.eval_shape(lambda: init_adversary(spec, jax.random.key(0), SITES, LEADING, False))
    assert start.mean is None
    assert start.square is None
    assert all(source.delta is None for source in start.raw.values())  # M5


OPTIMIZERS = [AdamAscent(Schedule(0.3, "linear", 0.4, 0.2), 0.5, 0.9, 1e-3), SignAscent(Schedule(0.2, "cosine"))]


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_ascents(optimizer: Any, sigmoid: bool) -> None:
    """A5, A7: three updates at different steps; clipped after every one, moments not; eps after the root."""
    spec = PersistentAttack(optimizer, PerBatchPerPosition(), sigmoid)
    rng, total = np.random.default_rng(0), 10
    raw = bundle_of(rng)
    zeros = jax.tree.map(jnp.zeros_like, raw) if isinstance(optimizer, AdamAscent) else None
    got = Adversary(raw, zeros, zeros, jnp.zeros((), jnp.int32))
    want, moments = tiny.ref_bundle(raw, SITES), ref.zero_moments(tiny.ref_bundle(raw, SITES))
    one = jax.jit(lambda a, g, step: ascend(spec, a, g, step, total))
    for step in (2, 4, 9):
        gradient = jax.tree.map(lambda x: 0.01 * (x - 0.5), bundle_of(rng))
        got = one(got, gradient, jnp.asarray(step, jnp.int32))
        as_ref = tiny.ref_bundle(gradient, SITES)
        want, moments = ref.ascend(tiny.schema_attack(spec), want, as_ref, moments, step, total)
        tiny.assert_alike(want, tiny.ref_bundle(got.raw, SITES), 1e-5)
        if not sigmoid:
            assert all(((x >= 0) & (x <= 1)).all() for x in jax.tree.leaves(got.raw))
    assert got.count == 3
    if isinstance(optimizer, AdamAscent):
        tiny.assert_alike(moments, tiny.ref_adversary_moments(got, SITES), 1e-5)
    shown = tiny.ref_bundle(effective(spec, got.raw), SITES)
    tiny.assert_alike(ref.effective_sources(tiny.schema_attack(spec), want), shown, 1e-5)


def test_warm_up_climbs_through_the_sigmoid() -> None:
    """A3, A5: the gradient is with respect to the raw sources."""
    spec = PersistentAttack(AdamAscent(Schedule(0.3)), PerBatchPerPosition(), sigmoid=True, n_warmup_steps=3)
    raw = bundle_of(np.random.default_rng(0))
    zeros = jax.tree.map(jnp.zeros_like, raw)
    start = Adversary(raw, zeros, zeros, jnp.zeros((), jnp.int32))

    def error(bundle: Bundle, _: jax.Array) -> jax.Array:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(bundle))

    got = jax.jit(lambda a: warm_up(spec, a, error, jnp.asarray(3, jnp.int32), 10))(start)
    loss, want = tiny.schema_attack(spec), tiny.ref_bundle(raw, SITES)
    moments = ref.zero_moments(want)
    for _ in range(3):
        gradient = ref.tree_map(lambda x: 2 * ref.sigmoid(x) ** 2 * (1 - ref.sigmoid(x)), want)
        want, moments = ref.ascend(loss, want, gradient, moments, 3, 10)
    tiny.assert_alike(want, tiny.ref_bundle(got.raw, SITES), 1e-5)
    assert got.count == 3


# ---- A6 ----


@pytest.mark.parametrize("total", [1, 7, 10, 100, 999])
def test_first_step(total: int) -> None:
    """A6: the first step with step / total ≥ start_frac, in floating point as the reference has it."""
    for fraction in (0.0, 0.1, 0.29, 0.3, 1 / 3, 0.5, 0.7, 0.99, *(n / total for n in range(total))):
        spec = PersistentAttack(SignAscent(Schedule(0.1)), SingleSource(), start_frac=fraction)
        on = [step for step in range(total) if ref.term_is_on({"start_frac": fraction}, step, total)]
        assert spec.first_step(total) == (on[0] if on else total)


# ---- A3, A4: what the step runs ----


def test_the_last_ascent_costs_no_forward_and_warm_ups_are_routed_as_the_term_is() -> None:
    """A3, A4: one forward for the warm-up (the body of its loop), then those of the terms' own means."""
    persistent = PersistentAttack(AdamAscent(Schedule(0.1)), BroadcastAcrossBatch(), n_warmup_steps=4)
    terms = (
        Reconstruction("PersistentPGDReconSubsetLoss", 0.5, AllSites(), UniformKSubset(), persistent, 2),
        Reconstruction("ChunkwiseSubsetReconLoss", 0.5, Chunks(4), UniformKSubset(), Stochastic()),
    )
    problem = tiny.problem(terms)
    counted = mock.Mock(side_effect=recon.run_masked)
    with mock.patch.object(recon, "run_masked", counted):
        state, weights = tiny.ruffled_state(problem), tiny.weights()
        jax.eval_shape(lambda *args: training_step(problem, *args), state, weights, jnp.asarray(tiny.TOKENS))
    warm_up, of_terms = (
        [(stream.live, type(stream.sources), stream.routes is None) for stream in call.args[1]]
        for call in counted.call_args_list
    )
    assert warm_up == [(ALL, GivenSources, False)]
    assert of_terms[:2] == [(ALL, GivenSources, False)] * 2
    assert [len(live) for live, _, _ in of_terms[2:]] == [4, 2]
