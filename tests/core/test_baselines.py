"""Baselines (section 17) where the truth is known: parts add up to their matrix; neurons that are features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_jax.baselines import (
    activations,
    cross_entropy,
    largest,
    masked_errors,
    mean_l0,
    second_moments,
)
from param_decomp_jax.components import Factors
from param_decomp_jax.step import Problem
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.resid_mlp import ResidMLP, ResidMLPConfig
from param_decomp_lab.baselines.parts import BASELINES, Baseline, parts_of
from tests.core import tiny

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


def error_of(
    kind: Baseline, problem: Problem, weights: object, k: int, lengths: tuple[int, ...] = ()
) -> tuple[float, ...]:
    inputs = jnp.asarray(ROWS)
    moments = second_moments(problem, weights, inputs)
    given = problem.target.site_weights(weights)
    parts = {}
    for stack in problem.target.sites.stacks:
        rng = np.random.default_rng(5)
        V, U = parts_of(kind, stack.kind, np.asarray(given[stack.name][0]), np.asarray(moments[stack.name][0]), rng)
        parts[stack.name] = Factors(jnp.asarray(V[None], jnp.float32), jnp.asarray(U[None], jnp.float32))
    sizes = {name: jnp.abs(a) for name, a in activations(problem, parts, weights, inputs).items()}
    masks = largest(sizes, k)
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


def test_attacks_grow() -> None:
    rotated = np.linalg.qr(np.random.default_rng(2).standard_normal((N, N)))[0]
    problem, weights = made(rotated)
    _, random, *attacked = error_of("neurons", problem, weights, 2, (2, 8, 32))
    assert random < attacked[0] < attacked[1] <= attacked[2] * 1.001


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
    # Equal ones are all chosen, and none that is 0.
    np.testing.assert_array_equal(found[0], [[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0]])


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
