"""Streams: masked forwards run together are the forwards run one by one, but that a site's λ is shared (C1)."""

import dataclasses
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.ci.squash import LEAK, Squash, lower_leaky
from param_decomp_jax.decomposition.draws import positions
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.inspection import unstack_sites
from param_decomp_jax.method.masked import Stream, side_by_side, split_rows
from param_decomp_jax.method.masks import (
    Constant,
    ConstantSources,
    GivenSources,
    Sources,
    Stochastic,
    StochasticSources,
)
from param_decomp_jax.method.recon import attacked_error, errors, run_masked
from param_decomp_jax.method.routing import UniformKSubset, draw_routes
from param_decomp_jax.sharding.memory import INTERMEDIATES, PLAIN, MemoryPolicy
from param_decomp_jax.targets.llama import module_name
from tests import reference as ref
from tests.core import test_embedding_site as with_embedding
from tests.core import test_experts as with_experts
from tests.core import tiny

RNG = np.random.default_rng(0)
KEY = jax.random.key(9)
EVERYTHING = frozenset(INTERMEDIATES)

# Layers without a site before and between those with one; two alike sites; and two that share an input.
CONFIG = dataclasses.replace(tiny.CONFIG, n_layers=5)
CHOSEN = {module_name(1, "k_proj"): 4, module_name(2, "k_proj"): 4, module_name(2, "up_proj"): 6}
CHOSEN |= {module_name(4, "q_proj"): 3, module_name(4, "v_proj"): 4}
TARGET = dataclasses.replace(tiny.target(CONFIG, CHOSEN), compute_dtype=jnp.float64)
SITES, ALL = TARGET.sites, tuple(range(len(CHOSEN)))

POLICIES: dict[str, MemoryPolicy] = {
    "plain": PLAIN,
    "unrolled": MemoryPolicy(layers="unroll"),
    "blocks": MemoryPolicy(component_block=2),
    "recomputed": MemoryPolicy(save=EVERYTHING - {"layers"}),
    "recomputed blocks": MemoryPolicy(save=EVERYTHING - {"layers"}, component_block=2),
    "micro-batches": MemoryPolicy(micro_batches=2),
}
LAZY = {"lazy": PLAIN, "lazy blocks": POLICIES["recomputed blocks"]}
"""With logits that are made where they are used."""

FAST = {"plain"}


def under(*names: str) -> Any:
    """Parametrised by the name of a policy."""
    return pytest.mark.parametrize(
        "policy", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]
    )


def logits(seed: int = 1, shift: float = 0.5) -> dict[str, np.ndarray]:
    """On both sides of 0 and of 1, by stack."""
    rng = np.random.default_rng(seed)
    return {s.name: rng.normal(shift, 0.7, (s.n_layers, *tiny.LEADING, s.C)) for s in SITES.stacks}


def bundle(lead: tuple[int, ...] = tiny.LEADING) -> dict[str, Sources]:
    """With numbers that are added (F8)."""
    rng = np.random.default_rng(2)
    return {
        s.name: Sources(*(jnp.asarray(rng.uniform(size=(s.n_layers, *lead, *last))) for last in ((s.C,), (), (s.C,))))
        for s in SITES.stacks
    }


def setting() -> tuple[Any, Any, dict[str, jax.Array], dict[str, Sources]]:
    """float64: weights, components, logits, given sources."""
    components = tiny.ruffled_state(tiny.problem((), TARGET)).components
    return tuple(map(tiny.to_float64, (tiny.weights(CONFIG), components, logits(), bundle())))


def streams_of(sources: dict[str, Sources], batch: int) -> list[Stream]:
    """Every kind of source, routed or not; they begin at every layer with a site, not in the order of these layers."""
    at = positions(tiny.LEADING)

    def routes(n: int, n_live: int) -> Any:
        return draw_routes(UniformKSubset(), jax.random.fold_in(KEY, n), at, n_live)

    def stochastic(n: int, delta: bool = True) -> StochasticSources:
        return StochasticSources(Stochastic(), jax.random.fold_in(KEY, n), delta)

    return [
        Stream((3, 4), stochastic(0), routes(0, 2)),
        Stream(ALL, GivenSources(sources, batch)),
        Stream((1, 2, 4), stochastic(1, delta=False), routes(1, 3)),
        Stream((1,), ConstantSources(Constant(0.0))),
        Stream((0, 2), GivenSources(sources, batch), routes(2, 2)),
    ]


KINDS = ("output", "hidden_acts", "output", "output", "output")


# ---- rows ----


def test_rows_of_streams_lie_side_by_side() -> None:
    """Row b of stream i at b · streams + i, so a batch row's copies stay on its device; and back."""
    streams = [jnp.asarray(RNG.normal(size=(4, 3, 2))) for _ in range(3)]
    rows = side_by_side(streams)
    assert rows.shape == (12, 3, 2)
    for b in range(4):
        for i in range(3):
            np.testing.assert_array_equal(rows[b * 3 + i], streams[i][b])
    for one, again in zip(streams, split_rows(rows, 3), strict=True):
        np.testing.assert_array_equal(one, again)
    assert side_by_side(streams[:1]) is streams[0]
    assert split_rows(streams[0], 1)[0] is streams[0]


# ---- together and alone ----


@cache
def values_and_gradients(policy: str, together: bool) -> Any:
    """Errors in the order given, and gradients of a sum of them by components, λ and sources.

    λ itself is given, so that nothing is squashed on the way back.
    """
    target, weighted = dataclasses.replace(TARGET, memory=POLICIES[policy]), jnp.asarray([1.0, -2.0, 0.5, 3.0, -1.0])

    def loss(components: Any, given: Any, sources: Any, weights: Any) -> Any:
        clean_pass = tiny.clean_pass(target, weights, tiny.TOKENS, outputs=True)
        reader = tiny.importance_reader(given, clean_pass, lambda z: z)
        streams = streams_of(sources, clean_pass.batch)
        if together:
            found = errors(DecomposedBatch(clean_pass, components, reader), streams, KINDS).by_stream
        else:
            alone = [
                errors(DecomposedBatch(clean_pass, components, reader), [s], [kind])[0]
                for s, kind in zip(streams, KINDS, strict=True)
            ]
            found = jnp.concatenate(alone)
        return jnp.sum(found * weighted), found

    with jax.enable_x64(True):
        weights, components, z, sources = setting()
        given = jax.tree.map(lambda z: jnp.clip(z, 0, 1), z)
        of = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        return jax.device_get(of(components, given, sources, weights))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_together_is_one_by_one(policy: str) -> None:
    """Of each stream, errors and gradients are what they are alone, with every policy."""
    want, got = values_and_gradients("plain", False), values_and_gradients(policy, True)
    (_, found), gradients = want
    assert len({round(float(x), 9) for x in found}) == len(KINDS)
    assert all(np.linalg.norm(x) > 1e-6 for x in jax.tree.leaves(gradients))
    assert max(map(tiny.deviation, jax.tree.leaves(want), jax.tree.leaves(got))) <= 1e-11


@pytest.mark.slow
def test_what_is_recorded_is_of_each_stream() -> None:
    """Outputs of the sites in every run of layers from the stream's own start on, like those of it alone."""
    with jax.enable_x64(True):
        weights, components, z, sources = setting()

        @jax.jit
        def both(weights: Any) -> Any:
            clean_pass = tiny.clean_pass(TARGET, weights, tiny.TOKENS)
            reader, streams = tiny.importance_reader(z, clean_pass), streams_of(sources, clean_pass.batch)
            together = run_masked(
                DecomposedBatch(clean_pass, components, reader), streams, record_outputs=True
            ).forwards
            alone = [
                run_masked(DecomposedBatch(clean_pass, components, reader), [s], record_outputs=True).forwards[0]
                for s in streams
            ]
            return [[(f.output, dict(f.records)) for f in of] for of in (together, alone)]

        together, alone = both(weights)
    for stream, (output, records), (want, of_one) in zip(streams_of(sources, 4), together, alone, strict=True):
        np.testing.assert_allclose(output, want, rtol=1e-11, atol=1e-12)
        assert min(records) >= SITES.all[stream.live[0]].layer or not records[min(records)]
        for kind in {name for run in of_one.values() for name in run}:
            a, b = (
                np.concatenate([run[kind] for _, run in sorted(r.items()) if kind in run]) for r in (records, of_one)
            )
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("policy", ["plain", "blocks"])
def test_what_is_added_is_added_where_it_is_routed(policy: str) -> None:
    """F8, against the reference: with routes, deltas, and another stream that adds nothing."""
    target = dataclasses.replace(TARGET, memory=POLICIES[policy])
    routes = np.random.default_rng(3).random((*tiny.LEADING, 2)) < 0.5
    with jax.enable_x64(True):
        weights, components, z, sources = setting()

        @jax.jit
        def outputs(weights: Any) -> Any:
            clean_pass = tiny.clean_pass(target, weights, tiny.TOKENS)
            reader = tiny.importance_reader(z, clean_pass, lambda z: jnp.clip(z, 0, 1))
            streams = [
                Stream((0, 2), GivenSources(sources, clean_pass.batch), jnp.asarray(routes)),
                Stream(ALL, ConstantSources(Constant(0.5))),
            ]
            found = run_masked(DecomposedBatch(clean_pass, components, reader), streams).forwards
            return [target.predictions(weights, one.output) for one in found]

        found, _ = outputs(weights)
    names = [SITES.all[n].name for n in (0, 2)]
    given, logit = (unstack_sites(SITES, jax.device_get(x)) for x in (sources, z))
    lam = {name: np.clip(logit[name], 0, 1) for name in names}
    masks = {name: lam[name] + (1 - lam[name]) * given[name].components for name in names}
    expected, _ = ref.masked_pass(
        tiny.ref_target(TARGET, weights, tiny.TOKENS),
        tiny.ref_components(components, SITES),
        masks,
        {name: given[name].delta for name in names},
        {name: routes[..., n].astype(float) for n, name in enumerate(names)},
        added={name: given[name].added for name in names},
    )
    np.testing.assert_allclose(found, ref.value(expected), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["experts", "embedding"])
def test_what_is_added_in_experts_and_to_embeddings(kind: str) -> None:
    """F8, against the reference: at the positions that the router gives an expert, and where tokens are looked up."""
    of_experts = kind == "experts"
    target = with_experts.target() if of_experts else tiny.target(chosen=with_embedding.CHOSEN)
    with jax.enable_x64(True):
        problem = tiny.in_float64(tiny.problem((), target))
        given = with_experts.weights() if of_experts else tiny.weights()
        state, weights = map(tiny.to_float64, (tiny.ruffled_state(problem), given))
        sites, rng = problem.target.sites, np.random.default_rng(5)
        sources = {
            s.name: Sources(
                *(jnp.asarray(rng.uniform(size=(*s.lead, *tiny.LEADING, *c))) for c in ((s.C,), (), (s.C,)))
            )
            for s in sites.stacks
        }

        @jax.jit
        def output(learned: Any, weights: Any, sources: Any) -> Any:
            batch = read_batch(problem, learned, weights, jnp.asarray(tiny.TOKENS)).with_squash(jnp.zeros_like)
            stream = Stream(tuple(range(len(sites))), GivenSources(sources, batch.clean_pass.batch))
            [forward] = run_masked(batch, [stream]).forwards
            return problem.target.predictions(weights, forward.output)

        found = output(state.learned, weights, sources)
    by_site = unstack_sites(sites, jax.device_get(sources))
    masks = {name: own.components for name, own in by_site.items()}
    deltas, added = ({name: getattr(own, part) for name, own in by_site.items()} for part in ("delta", "added"))
    plain, factors = tiny.ref_target(target, weights, tiny.TOKENS), tiny.ref_components(state.components, sites)
    chosen = ref.clean_pass(plain, list(masks)).chosen  # X3
    expected, _ = ref.masked_pass(plain, factors, masks, deltas, {}, chosen, added=added)
    without, _ = ref.masked_pass(plain, factors, masks, deltas, {}, chosen)
    np.testing.assert_allclose(found, ref.value(expected), rtol=1e-9, atol=1e-10)
    assert np.abs(ref.value(expected) - ref.value(without)).max() > 0.1


def test_importances_of_a_site_are_computed_once_however_many_streams_it_is_live_in() -> None:
    counted = mock.Mock(side_effect=lower_leaky)
    target = dataclasses.replace(TARGET, memory=MemoryPolicy(layers="unroll"))
    with jax.enable_x64(True):
        weights, components, z, sources = setting()

        def value(weights: Any) -> Any:
            clean_pass = tiny.clean_pass(target, weights, tiny.TOKENS)
            reader = tiny.importance_reader(z, clean_pass, counted)
            streams = streams_of(sources, clean_pass.batch)
            return errors(DecomposedBatch(clean_pass, components, reader), streams, ["output"] * len(streams))[0]

        jax.eval_shape(value, weights)
    assert counted.call_count == len(ALL)


# ---- C1: the leak is of the sum ----


@cache
def to_logits(policy: str, squash: Squash, alone: bool = False) -> Any:
    """Logits, most of them below 0, and the gradient by them of the difference of two errors; ``alone``: of each of
    its two terms, along a first axis."""
    target = dataclasses.replace(TARGET, memory=(POLICIES | LAZY)[policy])

    def terms(z: Any, weights: Any, components: Any) -> jax.Array:
        clean_pass = tiny.clean_pass(target, weights, tiny.TOKENS)
        reader = tiny.importance_reader(z, clean_pass, squash, lazy=policy in LAZY)
        drawn = [StochasticSources(Stochastic(), jax.random.fold_in(KEY, n), True) for n in range(2)]
        found, *_ = errors(
            DecomposedBatch(clean_pass, components, reader), [Stream(ALL, of) for of in drawn], ["output"] * len(drawn)
        )
        return found * jnp.asarray([1.0, -1.0])

    def difference(*arguments: Any) -> jax.Array:
        return jnp.sum(terms(*arguments))

    with jax.enable_x64(True):
        weights, components, _, _ = setting()
        z = tiny.to_float64(logits(shift=-1.0))
        return jax.device_get(
            (z, jax.jit(jax.jacrev(terms) if alone else jax.grad(difference))(z, weights, components))
        )


def leaked(z: np.ndarray, g: np.ndarray) -> np.ndarray:
    """C1, by hand."""
    return np.where(z <= 0, np.where(g < 0, LEAK * g, 0.0), np.where(z <= 1, g, 0.0))


@pytest.mark.slow  # every whole step against the reference has it too, mixed with the rest
@pytest.mark.parametrize("policy", [*POLICIES, *LAZY])
def test_the_one_sided_leak_is_of_the_summed_gradient(policy: str) -> None:
    """C1: below 0 a gradient passes if it is negative *in sum*: what two forwards send is added before.

    Their cotangents have opposite signs, so leaking forward by forward is another number.
    """
    z, got = to_logits(policy, lower_leaky)
    # What each stream alone sends to λ: its gradient by way of a squashing that lets everything pass.
    _, sent = to_logits("plain", passing, alone=True)
    for name in z:
        first, second = sent[name]
        once = leaked(z[name], first + second)
        forward_by_forward = leaked(z[name], first) + leaked(z[name], second)
        assert tiny.deviation(once, got[name]) <= 1e-11, name
        below = z[name] <= 0
        assert below.mean() > 0.8, name
        assert np.mean((first * second)[below] < 0) > 0.3, name
        assert tiny.deviation(once[below], forward_by_forward[below]) > 0.05, name


@jax.custom_vjp
def passing(z: jax.Array) -> jax.Array:
    """λ of `lower_leaky` with derivative 1 everywhere."""
    return jnp.clip(z, 0, 1)


passing.defvjp(lambda z: (passing(z), None), lambda _, g: (g,))


# ---- summaries ----


@under(*POLICIES, *LAZY)
def test_summaries_of_all_sites(policy: str) -> None:
    """Read off the logits on the way, of every component over the whole batch; values and gradients."""
    target = dataclasses.replace(TARGET, memory=(POLICIES | LAZY)[policy])

    def summarise(z: jax.Array, _: Any) -> jax.Array:
        axes = tuple(range(z.ndim - 1))
        return jnp.stack([jnp.sum(jnp.sin(z), axis=axes), jnp.sum(z**2, axis=axes)], axis=-1)

    def loss(z: Any, weights: Any, components: Any) -> Any:
        clean_pass = tiny.clean_pass(target, weights, tiny.TOKENS)
        off = ConstantSources(Constant(0.0))
        # One site of a stack of two is live in two streams, the other in one.
        streams = [Stream((3, 4), off), Stream((0, 1, 2), off), Stream((1, 2), off)]
        reader = tiny.importance_reader(z, clean_pass, lazy=policy in LAZY)
        sums = errors(DecomposedBatch(clean_pass, components, reader), streams, ["output"] * 3, summarise).summaries
        return sum(jnp.sum(S**2) for S in sums.values()), sums

    with jax.enable_x64(True):
        weights, components, z, _ = setting()
        of = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, sums), gradient = jax.device_get(of(z, weights, components))
    z = jax.device_get(z)
    want = {name: np.stack([np.sin(x).sum(axis=(1, 2)), (x**2).sum(axis=(1, 2))], axis=-1) for name, x in z.items()}
    tiny.assert_alike(want, sums, 1e-11)
    S = {name: x[:, None, None] for name, x in want.items()}
    by_hand = {name: 2 * S[name][..., 0] * np.cos(x) + 4 * S[name][..., 1] * x for name, x in z.items()}
    tiny.assert_alike(by_hand, gradient, 1e-11)


# ---- attacks ----


@pytest.mark.parametrize("lazy", [False, True])
def test_an_attack_holds_components_and_importances(lazy: bool) -> None:
    """A1, A3: the error that is climbed sends a gradient to the sources alone."""
    with jax.enable_x64(True):
        weights, components, z, sources = setting()

        def error(components: Any, z: Any, sources: Any) -> jax.Array:
            clean_pass = tiny.clean_pass(TARGET, weights, tiny.TOKENS)
            reader = tiny.importance_reader(z, clean_pass, lazy=lazy)
            return attacked_error(DecomposedBatch(clean_pass, components, reader), ALL, None, "output")(sources)

        of_components, of_logits, of_sources = jax.jit(jax.grad(error, argnums=(0, 1, 2)))(components, z, sources)
    assert not any(np.any(x) for x in jax.tree.leaves((of_components, of_logits)))
    assert all(np.any(x) for x in jax.tree.leaves(of_sources))
