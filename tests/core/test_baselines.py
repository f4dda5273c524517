"""Baselines (section 17): the choice by gradient and the match against the reference; and where the truth is known,
parts that add up to their matrix, neurons that are features."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_jax.analysis.baselines import (
    Masks,
    activations,
    by_gradient,
    cross_entropy,
    integrated_gradients,
    largest,
    masked_errors,
    masked_passes,
    mean_l0,
    second_moments,
)
from param_decomp_jax.decomposition.components import Components, Factors
from param_decomp_jax.method.inspection import stack_sites, unstack_sites
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.resid_mlp import ResidMLP, ResidMLPConfig
from param_decomp_lab.baselines.matching import shares
from param_decomp_lab.baselines.parts import BASELINES, Baseline, parts_of
from param_decomp_lab.baselines.result import LAMBDA, LARGEST, OWN, BaselinePoint, Comparison
from tests import reference as ref
from tests.core import tiny, toys

N, WIDTH = 6, 9


def made(reader: np.ndarray) -> tuple[Problem, dict[str, object]]:
    """A ResidMLP of N features with as many neurons, of which ``reader`` says what each reads of the features."""
    config = ResidMLPConfig(N, WIDTH, N, 1)
    sites = choose_sites(config.matrices(), {"layers.0.mlp_in": N, "layers.0.mlp_out": N})
    embed = np.linalg.qr(np.random.default_rng(0).standard_normal((WIDTH, N)))[0].T
    layers = {"mlp_in": (embed.T @ reader)[None], "mlp_out": (reader.T @ embed)[None]}
    weights = {"embed": embed, "layers": layers}
    return tiny.problem((), ResidMLP(config, sites)), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)


ROWS = (np.random.default_rng(1).uniform(0.2, 1, (24, N)) * np.eye(N)[np.arange(24) % N]).astype(np.float32)
"""One feature on at a time."""


def by_activation(problem: Problem, parts: Components, weights: object, inputs: jax.Array, most: int) -> Masks:
    return {name: jnp.abs(a) for name, a in activations(problem, parts, weights, inputs).items()}


def error_of(
    kind: Baseline,
    problem: Problem,
    weights: object,
    k: int,
    lengths: tuple[int, ...] = (),
    rows: np.ndarray = ROWS,
    values: Callable[..., Masks] = by_activation,
) -> tuple[float, ...]:
    inputs = jnp.asarray(rows)
    moments = second_moments(problem, weights, inputs)
    given = problem.target.site_weights(weights)
    parts = {}
    for stack in problem.target.sites.stacks:
        rng = np.random.default_rng(5)
        V, U = parts_of(kind, stack.kind, np.asarray(given[stack.name][0]), np.asarray(moments[stack.name][0]), rng)
        parts[stack.name] = Factors(jnp.asarray(V[None], jnp.float32), jnp.asarray(U[None], jnp.float32))
    masks = largest(values(problem, parts, weights, inputs, k), k)
    assert float(mean_l0(masks)) <= k
    found = masked_errors(problem, parts, weights, inputs, masks, jax.random.key(0), lengths, 0.1)
    return float(found.error), float(found.random), *found.attacked.tolist()


def test_features_that_are_neurons() -> None:
    """One neuron is on for one feature: the others may do what they like, and a rotation of them loses much."""
    problem, weights = made(np.eye(N))
    perfect = error_of("neurons", problem, weights, 1, (5, 20))
    assert max(perfect) < 1e-10
    assert error_of("random rotation", problem, weights, 1)[0] > 1e-3


def test_singular_vectors_of_a_diagonal_matrix() -> None:
    """In the basis of the features the matrix is diagonal, so that its singular vectors are the features."""
    problem, weights = made(np.diag(np.linspace(1, 2, N)))
    for kind in ("singular vectors", "neurons"):
        assert max(error_of(kind, problem, weights, 1)) < 1e-10
    assert error_of("random rotation", problem, weights, 1)[0] > 1e-3


def test_neurons_that_stay_silent() -> None:
    """A feature far below 0 gives the largest activation, which the ReLU then takes away: by gradient it is not on."""
    problem, weights = made(np.eye(N))
    rows = 0.3 * ROWS - np.roll(np.eye(N, dtype=np.float32), 1, axis=0)[np.arange(len(ROWS)) % N]
    assert error_of("neurons", problem, weights, 1, rows=rows, values=by_gradient)[0] < 1e-10
    assert error_of("neurons", problem, weights, 1, rows=rows)[0] > 1e-3


def test_attacks_grow() -> None:
    rotated = np.linalg.qr(np.random.default_rng(2).standard_normal((N, N)))[0]
    problem, weights = made(rotated)
    _, random, *attacked = error_of("neurons", problem, weights, 2, (2, 8, 32))
    assert random < attacked[0] < attacked[1] <= attacked[2] * 1.001


class Case(NamedTuple):
    """Parts at random in a small target, and the same for the reference. ``on``: 0 or 1 by stack."""

    problem: Problem
    parts: Components
    weights: Any
    inputs: np.ndarray
    on: Masks

    @property
    def error(self) -> Callable[[Masks], jax.Array]:
        return masked_passes(self.problem, self.parts, self.weights, jnp.asarray(self.inputs)).error

    @property
    def for_reference(self) -> tuple[Any, ...]:
        target = self.problem.target
        error = ref.kl_error if isinstance(target, type(tiny.target())) else ref.mse_error
        return (
            tiny.ref_target(target, self.weights, self.inputs),
            error,
            tiny.ref_components(self.parts, target.sites),
        )

    def by_site(self, masks: Masks) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = unstack_sites(self.problem.target.sites, jax.device_get(masks))
        return found


def llama() -> Case:
    return case(tiny.target(), tiny.weights(), tiny.TOKENS)


def tms() -> Case:
    """Of so many parts that the last are switched on two at a time."""
    config = toys.SPARSE
    return case(toys.target(config, dict.fromkeys(toys.EVERY_MATRIX, 20)), toys.weights(config), toys.features(config))


def case(target: Any, weights: Any, inputs: np.ndarray) -> Case:
    problem = tiny.problem((), target)
    leading, rng = tiny.leading_axes(target, inputs), np.random.default_rng(4)
    parts = tiny.ruffled_state(problem, leading=leading).components
    on = {site.name: rng.integers(0, 2, (*leading, site.C)).astype(np.float32) for site in target.sites.all}
    return Case(problem, parts, weights, inputs, stack_sites(target.sites, on))


def in_float64(of: Case) -> Case:
    inputs = of.inputs if of.inputs.dtype.kind == "i" else of.inputs.astype(np.float64)
    return Case(tiny.in_float64(of.problem), *tiny.to_float64((of.parts, of.weights)), inputs, tiny.to_float64(of.on))


@pytest.mark.parametrize("exact", [False, True], ids=["fp32", "float64"])
@pytest.mark.parametrize("make", [llama, tms])
def test_integrated_gradients(make: Callable[[], Case], exact: bool) -> None:
    """Those of the reference; and by many points, what all parts take off the error that some leave (B2)."""
    of = make()
    want = ref.part_scores(*of.for_reference, {s: m > 0 for s, m in of.by_site(of.on).items()})
    with jax.enable_x64(exact):
        of = in_float64(of) if exact else of
        error = of.error
        scores = jax.jit(partial(integrated_gradients, error))
        tiny.assert_alike(want, of.by_site(scores(of.on, 2)), 1e-9 if exact else 1e-5)
        off = jax.tree.map(lambda score, m: jnp.sum(score * (1 - m)), scores(of.on, 400), of.on)
        taken = float(error(of.on) - error(jax.tree.map(jnp.ones_like, of.on)))
        assert float(sum(off.values())) == pytest.approx(taken, rel=1e-3)
        assert abs(taken) > 1e-2


@pytest.mark.parametrize(("make", "numbers"), [(llama, (1, 2, 4)), (tms, (1, 5, 16, 17, 18, 20))])
def test_the_choice_by_gradient(make: Callable[[], Case], numbers: tuple[int, ...]) -> None:
    """The reference's, with any number of parts on, from one order (B2)."""
    of = make()
    wanted = {k: ref.choice_by_gradient(*of.for_reference, tiny.leading_axes(of.problem.target, of.inputs), k)
              for k in numbers}  # fmt: skip
    with jax.enable_x64():
        own = in_float64(of)
        choose = jax.jit(by_gradient, static_argnums=0)
        values = choose(own.problem, own.parts, own.weights, jnp.asarray(own.inputs), max(numbers))
        for k, want in wanted.items():
            found = of.by_site(largest(values, k))
            for site, masks in want.items():
                np.testing.assert_array_equal(found[site], masks, f"{site}, {k} parts")


def test_the_match() -> None:
    """At an L0 everything is what is expected of rows that draw their number of parts (B5): L0, R1, cross-entropy, at
    random, and after each attack. R1 is the reference's. The sites have 3 to 6 parts."""
    with jax.enable_x64():
        of = in_float64(llama())
        rng, n_rows, for_reference = np.random.default_rng(6), len(of.inputs), of.for_reference
        values = {name: rng.uniform(size=m.shape) for name, m in of.on.items()}

        def masks_of(k: np.ndarray) -> Masks:
            """With k parts on, ``[rows]``."""
            rows = {name: [ref.top_k(v[:, row], n) for row, n in enumerate(k)] for name, v in values.items()}
            return {name: np.stack(on, axis=1).astype(np.float64) for name, on in rows.items()}

        @jax.jit
        def errors_of(parts: Components, weights: Any, inputs: jax.Array, masks: Masks) -> tuple[jax.Array, Any]:
            key = jax.random.key(3)
            return mean_l0(masks), masked_errors(of.problem, parts, weights, inputs, masks, key, (3,), 0.1)

        def measured(k: np.ndarray) -> np.ndarray:
            l0, found = errors_of(of.parts, of.weights, of.inputs, masks_of(k))
            return np.hstack([l0, found.error, found.cross_entropy, found.random, found.attacked])

        def by_reference(k: np.ndarray) -> np.ndarray:
            return ref.value(ref.selected_error(*for_reference, of.by_site(masks_of(k))))

        for l0, numbers in ((1.75, {1, 2}), (2.0, {2}), (0.4, {1}), (0.0, {1}), (7.25, {7, 8})):
            points = [BaselinePoint(OWN, LAMBDA, 0.0, l0, 0.0, 0.0, 0.0)]
            assert shares(l0).keys() == numbers
            for k in numbers:
                own_l0, error, cross, random, *attacked = measured(np.full(n_rows, k)).tolist()
                points.append(BaselinePoint("neurons", LARGEST, k, own_l0, error, cross, random, tuple(attacked)))
            matched = Comparison("", 0, True, 0, (3,), tuple(points), 0).matched["neurons"]
            found = (matched.l0, matched.error, matched.cross_entropy, matched.random, *matched.attacked)
            want = ref.matched(measured, n_rows, l0)
            assert found[0] == pytest.approx(want[0], rel=1e-6)  # L0 is a mean in fp32
            np.testing.assert_allclose(found[1:], want[1:], rtol=1e-9, err_msg=str(l0))
            assert matched.error == pytest.approx(float(ref.matched(by_reference, n_rows, l0)), rel=1e-9)
            assert matched.number == max(1, l0)
            if l0 in (1.75, 2.0):
                assert matched.l0 == pytest.approx(l0, rel=1e-6)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 99), st.sampled_from(BASELINES), st.booleans())
@settings(max_examples=60)
def test_parts_add_up(d_in: int, d_out: int, seed: int, kind: Baseline, reads: bool) -> None:
    rng = np.random.default_rng(seed)
    W, x = rng.standard_normal((d_in, d_out)), rng.standard_normal((3, d_in))
    V, U = parts_of(kind, "down_proj" if reads else "up_proj", W, x.T @ x / 3, rng)
    np.testing.assert_allclose(V @ U, W, atol=1e-9)
    np.testing.assert_array_equal(W.shape, (V.shape[0], U.shape[1]))


def test_weighted_singular_vectors_are_the_best_of_a_rank() -> None:
    """No other matrix of rank 2 gives the outputs on these inputs with a smaller squared error."""
    rng = np.random.default_rng(3)
    W = rng.standard_normal((5, 4))
    x = rng.standard_normal((200, 5)) * np.asarray([9.0, 3.0, 1.0, 0.3, 0.1])
    errors = {}
    for kind in ("singular vectors", "weighted singular vectors"):
        V, U = parts_of(kind, "up_proj", W, x.T @ x / len(x), rng)
        errors[kind] = np.sum((x @ W - x @ V[:, :2] @ U[:2]) ** 2)
    s = np.linalg.svd(x @ W, compute_uv=False)
    assert errors["weighted singular vectors"] == pytest.approx(np.sum(s[2:] ** 2), rel=1e-6)
    assert errors["weighted singular vectors"] < errors["singular vectors"]


def test_the_largest() -> None:
    found = largest({"a": jnp.asarray([[[3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0], [1.0, 1.0, 1.0, 0.0]]])}, 2)["a"]
    # Of equal ones those with the lower numbers, and none that is 0.
    np.testing.assert_array_equal(found[0], [[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0]])


@pytest.mark.slow
def test_all_parts_of_a_language_model_are_the_model() -> None:
    target, weights = tiny.target(), tiny.weights()
    problem = tiny.problem((), target)
    tokens = jnp.asarray(tiny.TOKENS)
    given = jax.device_get(target.site_weights(weights))
    parts, masks = {}, {}
    for stack in target.sites.stacks:
        eye = np.eye(stack.d_in)
        found = [parts_of("singular vectors", stack.kind, W, eye, np.random.default_rng(0)) for W in given[stack.name]]
        V, U = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*found, strict=True))
        parts[stack.name] = Factors(V, U)
        masks[stack.name] = jnp.ones((stack.n_layers, *tokens.shape, V.shape[-1]))
    found = masked_errors(problem, parts, weights, tokens, masks, jax.random.key(0), (3,), 0.1)
    # In fp32 the KL of a prediction from itself is a few roundings, some 10⁻⁸; how many depends on the machine.
    assert max(abs(float(x)) for x in (found.error, found.random, found.attacked[0])) < 1e-6
    assert float(found.cross_entropy) == pytest.approx(float(cross_entropy(problem, weights, tokens)), rel=1e-5)
