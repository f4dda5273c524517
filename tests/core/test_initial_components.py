"""Initial components from data (T6): against the reference, on one device and on eight, and against B1."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.components import Components
from param_decomp_jax.decomposition.draws import positions, uniform
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Site, Sites
from param_decomp_jax.method.initial_components import (
    aligned,
    n_batches,
    nonlinearity_aligned,
    output_moments,
    weighted_singular_vectors,
)
from param_decomp_jax.method.state import init_keys, init_state
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding, shardings
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.llama import module_name
from param_decomp_jax.targets.transformer import Transformer
from param_decomp_lab.baselines.parts import parts_of
from tests import reference as ref
from tests.core import test_experts as experts
from tests.core import tiny

LEADING = (8, 5)
ALONE, EIGHT = MeshShape(), MeshShape(2, 2, 2)
EMBEDDING = "embed_tokens"

# Three alike layers and one with a tie, whose first site is the later one. The widths are 8, of neurons 6, of values 4.
CONFIG = dataclasses.replace(tiny.CONFIG, n_layers=4)
ALIKE = {"q_proj": 5, "v_proj": 3, "o_proj": 10, "up_proj": 7, "down_proj": 9}
DOWN, UP = module_name(3, "down_proj"), module_name(3, "up_proj")
CHOSEN = {EMBEDDING: 10, **{module_name(n, kind): C for n in range(3) for kind, C in ALIKE.items()}}
CHOSEN |= {UP: 6, DOWN: 6} | {module_name(n, "q_proj") + PRE_IDENTITY: 8 for n in range(3)}
ZERO = {module_name(2, "o_proj"), module_name(2, "down_proj")}
OF_RANK_3 = {module_name(1, "up_proj"), module_name(1, "down_proj"), module_name(0, "o_proj")}

FEW_TOKENS = dataclasses.replace(CONFIG, n_layers=1, vocab_size=5)
"""Fewer than the embedding is wide."""


def weights() -> Any:
    """Some matrices are 0, or of rank 3 to the last bit: rows or columns that are others' multiples."""
    made = jax.tree.map(np.array, tiny.weights(CONFIG, 2))
    layers = made["layers"]
    layers["o_proj"][2] = layers["down_proj"][2] = 0
    layers["down_proj"][1, 3:] = -2 * layers["down_proj"][1, :3]
    layers["up_proj"][1, :, 3:] = layers["up_proj"][1, :, :3] / 2
    layers["o_proj"][0, 3:6], layers["o_proj"][0, 6:] = layers["o_proj"][0, :3], 2 * layers["o_proj"][0, 1:3]
    return made


class Case(NamedTuple):
    problem: Problem
    weights: Any


def case(config: Any, chosen: dict[str, int], weights: Any, tied: tuple[tuple[str, str], ...] = ()) -> Case:
    target = Transformer(config, choose_sites(config.matrices(), chosen, tied))
    return Case(tiny.problem((), target, batch_size=LEADING[0]), weights)


CASES = {
    "every kind": case(CONFIG, CHOSEN, weights(), ((DOWN, UP),)),
    "few tokens": case(FEW_TOKENS, {EMBEDDING: 9}, tiny.weights(FEW_TOKENS)),
}


TEXT, ONE_TOKEN = "text", "one token"
moments_of: Callable[..., dict[str, jax.Array]] = jax.jit(output_moments, static_argnums=0)
vectors_of: Callable[..., Components] = jax.jit(weighted_singular_vectors, static_argnums=0)


def tokens(name: str, kind: str) -> list[np.ndarray]:
    """Two batches of text; or one token everywhere, so that every position is the same."""
    if kind == ONE_TOKEN:
        return [np.full(LEADING, 2, np.int32)]
    vocabulary = CASES[name].problem.target.architecture.vocab_size
    return [np.random.default_rng(n).integers(0, vocabulary, LEADING).astype(np.int32) for n in (1, 2)]


@cache
def found(name: str, exact: bool = True, shape: MeshShape = ALONE, kind: str = TEXT) -> ref.Tree:
    """By the implementation: V and U of every site that is trained."""
    problem, weights = CASES[name]
    mesh = make_mesh(shape)
    with jax.enable_x64(exact), jax.set_mesh(mesh):
        if exact:
            problem, weights = tiny.in_float64(problem), tiny.to_float64(weights)
        placed = jax.device_put(weights, shardings(mesh, problem.target.weight_axes(weights), weights))
        rows = [jax.device_put(inputs, batch_sharding(mesh, inputs.shape)) for inputs in tokens(name, kind)]
        moments = [jax.device_get(moments_of(problem, placed, inputs)) for inputs in rows]
        total = jax.tree.map(lambda *own: sum(own), *moments)
        components = jax.device_get(vectors_of(problem, placed, total))
    assert exact or {x.dtype for x in jax.tree.leaves(components)} == {np.dtype(np.float32)}
    return tiny.ref_components(components, problem.target.sites)


@cache
def drawn(name: str) -> dict[str, np.ndarray]:
    """V as a run without data draws it."""
    problem = CASES[name].problem
    sites = problem.target.sites
    components = jax.jit(lambda: init_state(problem.decomposition, sites, LEADING).components)()
    return {site: own["V"] for site, own in tiny.ref_components(components, sites).items()}


@cache
def clean_passes(name: str) -> list[ref.Clean]:
    target: Any = CASES[name].problem.target
    names = [site.name for site in target.sites.all]
    targets = [tiny.ref_target(target, CASES[name].weights, inputs) for inputs in tokens(name, TEXT)]
    return [ref.clean_pass(of, names) for of in targets]


def weights_of(name: str) -> dict[str, np.ndarray]:
    """W of every site."""
    return clean_passes(name)[0].weights


def moment(name: str, site: str) -> np.ndarray:
    """S, by the reference, of both batches."""
    W = weights_of(name)[site]
    return sum((ref.output_moment(clean.reads[site], W) for clean in clean_passes(name)), np.zeros(()))


def assert_the_reference(name: str, exact: bool, shape: MeshShape) -> None:
    got = found(name, exact, shape)
    assert got.keys() == drawn(name).keys()
    tolerance, worst = 1e-9 if exact else 1e-4, 0.0
    for site, start in drawn(name).items():
        W, V, U = weights_of(name)[site], got[site]["V"], got[site]["U"]
        rank, r = int(np.linalg.matrix_rank(W)), min(W.shape)
        want = ref.weighted_singular_vectors(W, moment(name, site), start)
        for a, b in ((want["V"].T, V.T), (want["U"], U)):
            worst = max(worst, tiny.assert_alike({site: a[:rank]}, {site: b[:rank]}, tolerance))
        # Of a matrix of a lower rank, the others up to r are 0 but for rounding, however V and U share that.
        sizes = np.linalg.norm(V, axis=0) * np.linalg.norm(U, axis=1)
        assert np.all(sizes[rank:r] <= tolerance * np.linalg.norm(W)), site
        as_drawn = r if rank else 0
        np.testing.assert_allclose(V[:, as_drawn:], start[:, as_drawn:], rtol=1e-6, err_msg=site)
        assert not np.any(U[as_drawn:]), site
    print(f"{worst:.1e}")


@tiny.SLOW_IN_FP32
def test_they_are_the_reference(exact: bool) -> None:
    """Of every shape and rank, with fewer and with more components than dimensions; moments of batches add up."""
    assert_the_reference("every kind", exact, ALONE)


def test_fewer_tokens_than_dimensions() -> None:
    """The embedding's S is of the rows that are looked up, as wide as they are; r is the number of tokens."""
    assert_the_reference("few tokens", True, ALONE)


def test_the_comparison_is_sharp() -> None:
    """Every kind of site is in it. What it asks for is determined: no two eigenvalues of a site are near each other,
    none is near 0, and of no row of U are the two largest entries so near that rounding could choose the sign."""
    W = {site: weights_of("every kind")[site] for site in drawn("every kind")}
    assert W.keys() == CHOSEN.keys() - {UP}
    ranks = {site: int(np.linalg.matrix_rank(w)) for site, w in W.items()}
    assert {site for site in W if ranks[site] == 0} == ZERO
    assert {site for site in W if 0 < ranks[site] < min(W[site].shape)} == OF_RANK_3
    kinds = {(np.sign(w.shape[0] - w.shape[1]), np.sign(CHOSEN[s] - min(w.shape))) for s, w in W.items() if ranks[s]}
    assert kinds == {(-1, 0), (-1, 1), (0, -1), (0, 0), (0, 1), (1, -1), (1, 1)}
    for site in W.keys() - ZERO:
        S = moment("every kind", site)
        values = np.linalg.eigvalsh(S)[::-1][: ranks[site]]
        assert values[-1] > 1e-4 * values[0], site
        assert np.all(values[1:] < 0.95 * values[:-1]), site
        rows = ref.weighted_singular_vectors(W[site], S, np.zeros((len(W[site]), ranks[site])))["U"]
        entries = np.sort(np.abs(rows), axis=1)
        assert np.all(entries[:, -2] < 0.995 * entries[:, -1]), site


@pytest.mark.parametrize("kind", [TEXT, ONE_TOKEN])
@tiny.SLOW_IN_FP32
def test_they_make_up_the_matrix(exact: bool, kind: str) -> None:
    """Where C is r or more; also if one token, again and again, shows one direction of every matrix."""
    for site, own in found("every kind", exact, kind=kind).items():
        W = weights_of("every kind")[site]
        assert all(np.all(np.isfinite(x)) for x in own.values()), site
        if CHOSEN[site] >= min(W.shape):
            np.testing.assert_allclose(own["V"] @ own["U"], W, atol=1e-9 if exact else 1e-5, err_msg=site)


def test_they_are_the_baselines() -> None:
    """B1, which takes singular vectors of M W: as many as there are, each the same matrix."""
    got, passes = found("every kind"), clean_passes("every kind")
    # Tokens that the text has not: M has an eigenvalue of 0, of which B1 makes something else.
    for site in got.keys() - ZERO - OF_RANK_3 - {EMBEDDING}:
        W = weights_of("every kind")[site]
        x = np.concatenate([clean.reads[site].reshape(-1, W.shape[0]) for clean in passes])
        V, U = parts_of("weighted singular vectors", "q_proj", W, x.T @ x / len(x), np.random.default_rng(0))
        for c in range(min(len(U), CHOSEN[site])):
            product = np.outer(got[site]["V"][:, c], got[site]["U"][c])
            np.testing.assert_allclose(product, np.outer(V[:, c], U[c]), atol=1e-9, err_msg=site)


def test_how_many_batches() -> None:
    """The largest r of all sites, not the largest width; as many positions at least as it asks for."""
    sites = Sites((Site("a", 0, "a", "x", 100, 3, 4), Site("b", 1, "b", "h", 5, 7, 2)))
    for of, most in ((sites, 5), (CASES["every kind"].problem.target.sites, 8)):
        shapes = [(site.d_in, site.d_out) for site in of.all]
        for n in (1, 7, 16 * most - 1, 16 * most, 16 * most + 1, 10**6):
            assert n_batches(of, n) == ref.initial_batches(shapes, n), (most, n)
    assert [n_batches(sites, n) for n in (79, 80)] == [2, 1]


def test_experts_are_refused() -> None:
    problem = tiny.problem((), experts.target())
    with pytest.raises(AssertionError, match="expert"):
        jax.eval_shape(partial(output_moments, problem), experts.weights(), jnp.asarray(tiny.TOKENS))


N, OTHERS = 3, 4
"""Coordinates of the side that faces a nonlinearity, and of the other one."""


def orders(key: Any, n: int, o: int) -> tuple[np.ndarray, np.ndarray]:
    """The random orders of T9."""
    of_coordinates, of_entries = jax.random.split(key)
    drawn = uniform(of_coordinates, positions((1,)), n)[0], uniform(of_entries, positions((n,)), o)
    first, second = (np.argsort(np.asarray(x), axis=-1, kind="stable") for x in drawn)
    return first, second


@pytest.mark.parametrize("C", [1, 2, N, 4, 6, 7, N * OTHERS])
@pytest.mark.parametrize("side", ["input", "output"])
def test_aligned_components_are_the_reference(side: str, C: int) -> None:
    """T9: fewer than coordinates, as many, more, and one for each entry."""
    rows = np.arange(1.0, 1 + N * OTHERS).reshape(N, OTHERS)
    key = jax.random.key(5)
    chosen, others = aligned(jnp.asarray(rows), C, key)
    wanted = ref.nonlinearity_aligned(rows.T if side == "output" else rows, side, C, *orders(key, N, OTHERS))
    V, U = (others.T, chosen) if side == "output" else (chosen.T, others)
    np.testing.assert_array_equal(V, wanted["V"])
    np.testing.assert_array_equal(U, wanted["U"])
    assert np.all(np.any(np.asarray(others) != 0, axis=1)), "no component is empty"
    if C >= N:
        np.testing.assert_array_equal(np.asarray(chosen).T @ np.asarray(others), rows)


def test_aligned_components_of_every_site() -> None:
    """T9: each site by the side that it faces, in random orders of its own; the same bits on eight devices."""
    # Fewer than coordinates, as many, more: 8 of queries, 4 of keys, 6 of neurons.
    counts = {"q_proj": 3, "k_proj": 6, "o_proj": 8, "gate_proj": 4, "up_proj": 6, "down_proj": 20}
    aligned_case = case(CONFIG, {module_name(n, kind): C for n in range(4) for kind, C in counts.items()}, weights())
    problem, frozen = aligned_case
    sites = problem.target.sites

    def made(shape: MeshShape) -> Components:
        mesh = make_mesh(shape)
        with jax.set_mesh(mesh):
            placed = jax.device_put(frozen, shardings(mesh, problem.target.weight_axes(frozen), frozen))
            return jax.device_get(jax.jit(partial(nonlinearity_aligned, problem))(placed))

    alone = made(ALONE)
    jax.tree.map(np.testing.assert_array_equal, alone, made(EIGHT))
    key = init_keys(problem.decomposition).components
    matrices = problem.target.site_weights(jax.tree.map(jnp.asarray, frozen))
    for number, (site, (stack, row)) in enumerate(zip(sites.all, sites.stack_rows, strict=True)):
        assert site.faces is not None
        W, side = np.asarray(matrices[stack.name][row]), site.faces.side
        sizes = W.shape if side == "input" else W.shape[::-1]
        wanted = ref.nonlinearity_aligned(W, side, site.C, *orders(jax.random.fold_in(key, number), *sizes))
        np.testing.assert_array_equal(alone[stack.name].V[row], wanted["V"], err_msg=site.name)
        np.testing.assert_array_equal(alone[stack.name].U[row], wanted["U"], err_msg=site.name)


def test_one_device_is_eight() -> None:
    """Split over all axes of the mesh; in float64."""
    assert_the_reference("every kind", True, EIGHT)
    one, eight = found("every kind"), found("every kind", shape=EIGHT)
    for site, own in one.items():
        rank = int(np.linalg.matrix_rank(weights_of("every kind")[site]))
        a, b = ({"V": x["V"][:, :rank], "U": x["U"][:rank]} for x in (own, eight[site]))
        tiny.assert_alike(a, b, 1e-9)
    jax.clear_caches()
