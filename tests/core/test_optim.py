"""AdamW (T1) and the clip of section 8, against the reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.method.optim import Adafactor, AdamW, Lion, Optimizer, clip, global_norm, transformation
from param_decomp_jax.sharding.mesh import Axes
from tests import reference as ref
from tests.core import tiny

STEPS = 6
TOTAL = 8
SPEC = AdamW(Schedule(2e-2, "cosine", 0.25, 0.1), (0.8, 0.97), weight_decay=0.3)


def arrays(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: scale * rng.normal(size=shape).astype(np.float32) for name, shape in {"V": (3, 4), "U": (2,)}.items()}


def gradients_of_steps() -> list[dict[str, np.ndarray]]:
    """Of very different sizes, those near eps among them."""
    return [arrays(n + 1, scale) for n, scale in enumerate([1.0, 0.1, 1e-8, 10.0, 0.0, 1.0])]


def run_core(spec: Optimizer, params: Any, gradients: list[Any]) -> list[Any]:
    optimizer = transformation(spec, TOTAL, jax.tree.map(lambda _: Axes(()), params))

    @jax.jit
    def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state, path = optimizer.init(params), []
    for gradient in gradients:
        params, state = step(params, state, gradient)
        path.append(params)
    return path


def run_reference(spec: AdamW, params: Any, gradients: list[Any]) -> list[Any]:
    params, gradients = (ref.tree_map(lambda x: x.astype(np.float64), tree) for tree in (params, gradients))
    moments, path = ref.zero_moments(params), []
    for n, gradient in enumerate(gradients):
        lr = ref.schedule(tiny.schema_schedule(spec.schedule), n, TOTAL)
        params, moments = ref.adamw(params, gradient, moments, lr, spec.betas, spec.weight_decay)
        path.append(params)
    return path


@pytest.mark.parametrize("spec", [SPEC, AdamW(Schedule(1e-2))], ids=["all set", "defaults"])
def test_adamw(spec: AdamW) -> None:
    params, gradients = arrays(0), gradients_of_steps()
    want = run_reference(spec, params, gradients)
    tiny.assert_alike(want, run_core(spec, jax.tree.map(jnp.asarray, params), gradients), 1e-5)
    with jax.enable_x64(True):
        params, gradients = tiny.to_float64((params, gradients))
        tiny.assert_alike(want, run_core(spec, params, gradients), 1e-9)


def test_updates_not_only_parameters() -> None:
    """D4 on the sum of all updates: parameters alone would hide an error in a small one."""
    params, gradients = arrays(0), gradients_of_steps()
    spec = dataclasses.replace(SPEC, schedule=Schedule(1e-4))
    with jax.enable_x64(True):
        got = run_core(spec, *tiny.to_float64((params, gradients)))[-1]
    want = run_reference(spec, params, gradients)[-1]
    moved = [ref.tree_map(lambda x, start: np.asarray(x) - start, end, params) for end in (want, got)]
    tiny.assert_alike(*moved, 1e-9)


def test_defaults() -> None:
    """T1: no decay unless asked for (optax's own default is 1e-4), betas (0.9, 0.999)."""
    spec = AdamW(Schedule(1.0))
    assert (spec.betas, spec.weight_decay, spec.clip_norm) == ((0.9, 0.999), 0.0, None)
    params = jax.tree.map(jnp.asarray, arrays(0))
    path = run_core(spec, params, [jax.tree.map(jnp.zeros_like, params)] * 2)
    jax.tree.map(np.testing.assert_array_equal, path[-1], params)


def test_decay_is_decoupled() -> None:
    """T1: with no gradient a parameter shrinks by lr · decay, whatever the moments."""
    params = jax.tree.map(jnp.asarray, arrays(0))
    spec = AdamW(Schedule(0.1), weight_decay=0.5)
    (shrunk,) = run_core(spec, params, [jax.tree.map(jnp.zeros_like, params)])
    tiny.assert_alike(jax.tree.map(lambda p: 0.95 * p, params), shrunk, 1e-6)


def test_warmup_starts_at_zero() -> None:
    """T2: the first update is that of step 0."""
    params = jax.tree.map(jnp.asarray, arrays(0))
    first, second = run_core(SPEC, params, [arrays(1)] * 2)
    jax.tree.map(np.testing.assert_array_equal, first, params)
    assert all(np.any(second[name] != params[name]) for name in params)


# ---- the optimisers that need less memory ----


def test_lion() -> None:
    """Chen et al. 2023, algorithm 2: the sign of an average that the moment does not have yet."""
    spec = Lion(Schedule(1e-2, "linear", 0.0, 0.5), (0.6, 0.9), weight_decay=0.3)
    params, gradients = arrays(0), gradients_of_steps()
    want, moment, path = ref.tree_map(np.float64, params), dict.fromkeys(params, 0.0), []
    for n, gradient in enumerate(gradients):
        lr = ref.schedule(tiny.schema_schedule(spec.schedule), n, TOTAL)
        for name, g in gradient.items():
            direction = np.sign(0.6 * moment[name] + 0.4 * g.astype(np.float64))
            want[name] = want[name] - lr * (direction + 0.3 * want[name])
            moment[name] = 0.9 * moment[name] + 0.1 * g
        path.append(dict(want))
    with jax.enable_x64(True):
        tiny.assert_alike(path, run_core(spec, *tiny.to_float64((params, gradients))), 1e-9)


def test_adafactor() -> None:
    """Shazeer and Stern 2018, algorithm 4 without the parameter's scale: a moment for every row and every column."""
    rng, lr, decay = np.random.default_rng(0), 0.1, 0.3
    spec = Adafactor(Schedule(lr), weight_decay=decay)
    params = {"V": rng.normal(size=(2, 130, 140))}
    gradients = [{"V": scale * rng.normal(size=(2, 130, 140))} for scale in (1.0, 0.1, 10.0)]
    want, rows, columns, path = params["V"], 0.0, 0.0, []
    for n, gradient in enumerate(gradients):
        g, beta = gradient["V"], 1 - (n + 1.0) ** -0.8
        rows = beta * rows + (1 - beta) * (g**2).mean(axis=2)
        columns = beta * columns + (1 - beta) * (g**2).mean(axis=1)
        second = rows[:, :, None] * columns[:, None, :] / rows.mean(axis=1)[:, None, None]
        update = g / np.sqrt(second)
        update /= max(1.0, float(np.sqrt((update**2).mean())))
        want = want - lr * (update + decay * want)
        path.append({"V": want})
    with jax.enable_x64(True):
        tiny.assert_alike(path, run_core(spec, *tiny.to_float64((params, gradients))), 1e-6)


@pytest.mark.parametrize(("spec", "share"), [(AdamW, 2.0), (Lion, 1.0), (Adafactor, 0.02)])
def test_what_an_optimiser_keeps(spec: type, share: float) -> None:
    """Elements of its state over those of the parameters."""
    state = jax.eval_shape(
        transformation(spec(Schedule(1.0)), TOTAL, {"V": Axes(())}).init, {"V": jnp.zeros((3, 128, 256))}
    )
    assert sum(x.size for x in jax.tree.leaves(state)) / (3 * 128 * 256) == pytest.approx(share, abs=0.01)


# ---- the clip ----

MAX_NORM = 1e-3


def scaled_to(norm: float) -> dict[str, np.ndarray]:
    tree = ref.tree_map(lambda x: x.astype(np.float64), arrays(3))
    return ref.tree_map(lambda x: x * (norm / ref.global_norm(tree)), tree)


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.5e-3, 0.9985e-3, 0.9995e-3, 1e-3, 1.0005e-3, 2e-3, 10.0])
def test_clip(norm: float) -> None:
    """Section 8, point 5: the 1e-6 counts, a gradient of exactly the largest norm is already scaled."""
    tree = scaled_to(norm)
    want = ref.clip_by_global_norm(tree, MAX_NORM)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    tiny.assert_alike(want, clip(narrow, global_norm(narrow), MAX_NORM), 1e-5)
    with jax.enable_x64(True):
        wide = tiny.to_float64(tree)
        tiny.assert_alike(want, clip(wide, global_norm(wide), MAX_NORM), 1e-12)


def test_clip_written_out() -> None:
    one = {"a": jnp.array([0.6, 0.0]), "b": jnp.array([[0.8]])}
    np.testing.assert_allclose(global_norm(one), 1.0, rtol=1e-6)
    half = clip(one, jnp.asarray(1.0), 0.5)
    np.testing.assert_allclose(half["a"], np.array([0.6, 0.0]) * 0.5 / (1 + 1e-6), rtol=1e-7)
    with jax.enable_x64(True):
        exact = clip({"a": jnp.array([3e-6])}, jnp.asarray(3e-6), 3e-6)
        np.testing.assert_allclose(exact["a"], [3e-6 * 0.75], rtol=1e-12)


def test_no_clip() -> None:
    tree = arrays(3, 1e6)
    assert clip(tree, jnp.asarray(1e6), None) is tree


def test_norm_is_over_all_arrays() -> None:
    tree = arrays(5)
    assert float(global_norm(tree)) == pytest.approx(ref.global_norm(ref.tree_map(np.float64, tree)), rel=1e-6)
    assert float(global_norm({})) == 0.0
