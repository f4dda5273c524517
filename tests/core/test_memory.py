"""The memory policy changes no number: a scan, the layers written out, and recomputation agree."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.memory import PLAIN, MemoryPolicy

POLICIES = {
    "unroll": MemoryPolicy("unroll"),
    "scan, recompute": MemoryPolicy("scan", recompute_layers=True),
    "unroll, recompute": MemoryPolicy("unroll", recompute_layers=True),
}
LAYERS, D = 4, 6
RNG = np.random.default_rng(0)
XS = {"W": RNG.normal(size=(LAYERS, D, D)) / D**0.5, "b": RNG.normal(size=(LAYERS, D)), "none": None}
X = RNG.normal(size=(3, D))


def body(x: jax.Array, layer: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer of a toy network, which records its input and its output."""
    y = x + jnp.tanh(jnp.sin(x @ layer["W"]) + layer["b"])
    return y, {"in": x, "out": y}


def run(policy: MemoryPolicy, x: Any, xs: Any) -> tuple[jax.Array, Any]:
    last, records = policy.over_layers(body, x, xs)
    return jnp.sum(last**2) + jnp.sum(records["in"][1:] * records["out"][:-1] ** 2), (last, records)


@cache
def values_and_gradients(policy: MemoryPolicy, x64: bool) -> Any:
    with jax.enable_x64(x64):
        return jax.jit(jax.value_and_grad(lambda *args: run(policy, *args), argnums=(0, 1), has_aux=True))(X, XS)


def loop() -> Any:
    """The layers one after the other, with neither a policy nor JAX's control flow."""
    x, records = jnp.asarray(X), []
    for n in range(LAYERS):
        x, record = body(x, {"W": XS["W"][n], "b": XS["b"][n]})
        records.append(record)
    return x, {name: jnp.stack([record[name] for record in records]) for name in records[0]}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_same_values_and_gradients(policy: MemoryPolicy) -> None:
    for x64, tolerance in ((False, 1e-5), (True, 1e-11)):
        want, got = values_and_gradients(PLAIN, x64), values_and_gradients(policy, x64)
        assert jax.tree.structure(want) == jax.tree.structure(got)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", [PLAIN, *POLICIES.values()], ids=["scan", *POLICIES])
def test_like_a_loop(policy: MemoryPolicy) -> None:
    with jax.enable_x64(True):
        want, got = loop(), jax.jit(policy.over_layers, static_argnums=0)(body, X, XS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), want, got)


@pytest.mark.parametrize("policy", [PLAIN, *POLICIES.values()], ids=["scan", *POLICIES])
def test_a_body_that_records_nothing(policy: MemoryPolicy) -> None:
    last, records = policy.over_layers(lambda x, layer: (x + layer["b"], {}), jnp.asarray(X), XS)
    np.testing.assert_allclose(last, X + XS["b"].sum(axis=0), rtol=1e-5, atol=1e-5)
    assert records == {}


def kept(policy: MemoryPolicy) -> int:
    """Numbers that the forward keeps for the backward."""

    def forward(x: jax.Array, xs: Any) -> jax.Array:
        return policy.over_layers(lambda x, layer: (body(x, layer)[0], {}), x, xs)[0]

    _, backward = jax.eval_shape(lambda x, xs: jax.vjp(forward, x, xs), X, XS)
    return sum(leaf.size for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_recomputing_keeps_only_the_inputs(layers: Any) -> None:
    given = sum(x.size for x in jax.tree.leaves((X, XS)))
    inputs = LAYERS * X.size
    assert kept(MemoryPolicy(layers, recompute_layers=True)) <= given + inputs
    assert kept(MemoryPolicy(layers)) >= kept(MemoryPolicy(layers, recompute_layers=True)) + LAYERS * X.size


def test_layers_are_one_body_or_many() -> None:
    """The point of a scan: the body is compiled once however many layers there are."""

    def bodies(policy: MemoryPolicy) -> int:
        return str(jax.make_jaxpr(lambda x, xs: policy.over_layers(body, x, xs))(X, XS)).count(" tanh ")

    assert bodies(PLAIN) == 1
    assert bodies(MemoryPolicy("unroll")) == LAYERS
