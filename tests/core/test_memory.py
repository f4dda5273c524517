"""The memory policy by itself: layers and blocks give what a loop gives, and keep what they say that they keep.

That it changes no number of a step is in test_policies.py.
"""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_aot.compile import compile_for
from param_decomp_aot.traffic import traffic
from param_decomp_jax.decomposition.components import U_AXES, V_AXES
from param_decomp_jax.method.offload import fetch
from param_decomp_jax.sharding.by_layer import ByLayer, SomeLayers
from param_decomp_jax.sharding.memory import FAST, INTERMEDIATES, PLAIN, Intermediate, MemoryPolicy, StatePart
from param_decomp_jax.sharding.mesh import MeshShape, gather_tree, sharding
from param_decomp_jax.sharding.remat import component_blocks, named, over_blocks, over_layers, token_blocks
from tests.core.test_aot import CARDS
from tests.plugin import needs_plugin


def recomputing(*names: Intermediate, **changes: Any) -> MemoryPolicy:
    """All but these is saved."""
    return MemoryPolicy(save=frozenset(INTERMEDIATES) - set(names), **changes)


POLICIES = {
    "unroll": MemoryPolicy(layers="unroll"),
    "scan, recompute": recomputing("layers"),
    "unroll, recompute": recomputing("layers", layers="unroll"),
    "groups of 2, recompute": recomputing("layers", layer_group=2),
    "groups that do not divide, recompute": recomputing("layers", layer_group=3),
    "one group of all, recompute": recomputing("layers", layer_group=9),
}
LAYERS, D = 4, 6
RNG = np.random.default_rng(0)
XS = {"W": RNG.normal(size=(LAYERS, D, D)) / D**0.5, "b": RNG.normal(size=(LAYERS, D)), "none": None}
X = RNG.normal(size=(3, D))


def body(x: jax.Array, layer: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer of a toy network, which records its input and its output."""
    y = x + jnp.tanh(named(jnp.sin(x @ layer["W"]), "attention") + layer["b"])
    return y, {"in": x, "out": y}


def run(policy: MemoryPolicy, x: Any, xs: Any) -> tuple[jax.Array, Any]:
    last, records = over_layers(policy, body, x, xs)
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


def around(x: Any) -> Any:
    """``x`` with a layer before it and two behind."""
    return jnp.concatenate([x[:1] + 1, x, x[:2] - 1])


@pytest.mark.parametrize("kept", ["stacked", "by layer"])
@pytest.mark.parametrize("name", ["unroll", "scan", "scan, recompute", "groups of 2, recompute"])
def test_some_layers_of_larger_arrays(name: str, kept: str) -> None:
    """A loop indexes a part of the frozen network's layers, which may have arrays of their own."""

    def whole(x: Any) -> Any:
        return ByLayer(tuple(around(jnp.asarray(x)))) if kept == "by layer" else around(jnp.asarray(x))

    policy = POLICIES.get(name, PLAIN)

    def run_part(x: Any, W: Any, b: Any) -> Any:
        return run(policy, x, {"W": SomeLayers(W, 1, 1 + LAYERS), "b": b, "none": None})

    found = jax.jit(jax.value_and_grad(run_part, has_aux=True))(X, whole(XS["W"]), ByLayer(tuple(XS["b"])))
    (want_value, want_aux), (want_gradient, _) = values_and_gradients(PLAIN, False)
    for a, b in zip(jax.tree.leaves(((want_value, want_aux), want_gradient)), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [PLAIN, *POLICIES.values()], ids=["scan", *POLICIES])
def test_like_a_loop(policy: MemoryPolicy) -> None:
    with jax.enable_x64(True):
        want, got = loop(), jax.jit(over_layers, static_argnums=(0, 1))(policy, body, X, XS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), want, got)


@pytest.mark.parametrize("policy", [PLAIN, *POLICIES.values()], ids=["scan", *POLICIES])
def test_a_body_that_records_nothing(policy: MemoryPolicy) -> None:
    last, records = over_layers(policy, lambda x, layer: (x + layer["b"], {}), jnp.asarray(X), XS)
    np.testing.assert_allclose(last, X + XS["b"].sum(axis=0), rtol=1e-5, atol=1e-5)
    assert records == {}


def kept(policy: MemoryPolicy) -> int:
    """Numbers that the forward keeps for the backward."""

    def forward(x: jax.Array, xs: Any) -> jax.Array:
        return over_layers(policy, lambda x, layer: (body(x, layer)[0], {}), x, xs)[0]

    _, backward = jax.eval_shape(lambda x, xs: jax.vjp(forward, x, xs), X, XS)
    return sum(leaf.size for leaf in jax.tree.leaves(backward))


GIVEN = sum(x.size for x in jax.tree.leaves((X, XS)))


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_recomputing_keeps_only_the_inputs(layers: Any) -> None:
    nothing = recomputing("layers", "attention", layers=layers)
    assert kept(nothing) <= GIVEN + LAYERS * X.size
    assert kept(MemoryPolicy(layers=layers)) >= kept(nothing) + LAYERS * X.size


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_a_recomputed_layer_keeps_what_is_named(layers: Any) -> None:
    """And only if the policy saves it."""
    nothing, attention = (recomputing("layers", *also, layers=layers) for also in (("attention",), ()))
    assert kept(attention) == kept(nothing) + LAYERS * X.size
    other = MemoryPolicy(save=frozenset({"site_outputs"}), layers=layers)
    assert kept(other) == kept(nothing)


def test_groups_keep_one_input_each() -> None:
    """√n checkpointing: of the groups' inputs, and of no layer's inside."""
    every, groups = (recomputing("layers", "attention", layer_group=group) for group in (None, 2))
    assert kept(every) - kept(groups) == (LAYERS - LAYERS // 2) * X.size


def test_what_is_offloaded_waits_in_host_memory() -> None:
    """It leaves the device after the forward and comes back for the backward; what is saved never moves."""

    def text(policy: MemoryPolicy) -> str:
        def loss(x: jax.Array, xs: Any) -> jax.Array:
            return jnp.sum(over_layers(policy, lambda x, layer: (body(x, layer)[0], {}), x, xs)[0])

        return str(jax.make_jaxpr(jax.grad(loss))(X, XS))

    offloaded = MemoryPolicy(save=frozenset({"site_outputs"}), offload=frozenset({"attention"}))
    assert "Host" in text(offloaded)
    assert "Host" not in text(recomputing("layers"))


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(AssertionError, match="offloaded is not saved"):
        MemoryPolicy(offload=frozenset({"attention"}))
    with pytest.raises(AssertionError, match=r"cannot be offloaded: \['logits'\]"):
        MemoryPolicy(save=frozenset(), offload=frozenset({"logits"}))


def test_another_intermediate_decides_over_other_layers() -> None:
    """The CI function's layers go by "ci"."""

    def kept_of(policy: MemoryPolicy, of: Intermediate) -> int:
        forward = partial(over_layers, policy, lambda x, layer: (body(x, layer)[0], {}), name=of)
        _, backward = jax.eval_shape(lambda x, xs: jax.vjp(lambda *args: forward(*args)[0], x, xs), X, XS)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    of_layers, of_ci = (recomputing(name, "attention") for name in ("layers", "ci"))
    assert kept_of(of_layers, "ci") == kept_of(PLAIN, "ci") == kept_of(of_ci, "layers")
    assert kept_of(of_ci, "ci") == kept_of(of_layers, "layers") < kept_of(PLAIN, "ci")


def test_layers_are_one_body_or_many() -> None:
    """The point of a scan: the body is compiled once however many layers there are."""

    def bodies(policy: MemoryPolicy) -> int:
        return str(jax.make_jaxpr(lambda x, xs: over_layers(policy, body, x, xs))(X, XS)).count(" tanh ")

    assert bodies(PLAIN) == 1
    assert bodies(recomputing("layers", layer_group=2)) == 1
    assert bodies(MemoryPolicy(layers="unroll")) == LAYERS


# ---- blocks of components ----

C, ROWS = 12, 5
FACTORS = {"V": RNG.normal(size=(D, C)), "U": RNG.normal(size=(C, D))}
ROWS_IN = RNG.normal(size=(ROWS, D))


def blocks_of(factors: Any, n_blocks: int) -> Any:
    V = jnp.moveaxis(jnp.reshape(factors["V"], (D, n_blocks, -1)), 1, 0)
    return {"V": V, "U": jnp.reshape(factors["U"], (n_blocks, -1, D))}


def sum_over_blocks(n_blocks: int, x: Any, factors: Any) -> Any:
    """A sum over components that is not linear in any of them, in two results; and something of each component."""

    def of_block(block: Any) -> Any:
        inner = jnp.sin(x @ block["V"])
        return {"y": inner @ block["U"], "total": jnp.sum(inner**2)}, {"own": jnp.sum(inner**2, axis=0)}

    total, found = over_blocks(of_block, blocks_of(factors, n_blocks), n_blocks)
    return {**total, "own": found["own"].reshape(-1)}


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 12])
def test_over_blocks(n_blocks: int) -> None:
    """Values and gradients, of what is cut and of what all blocks read."""

    def loss(n_blocks: int, x: Any, factors: Any) -> Any:
        found = sum_over_blocks(n_blocks, x, factors)
        return jnp.sum(found["y"] ** 3) + found["total"] * jnp.sum(found["own"] ** 2), found

    with jax.enable_x64(True):
        of = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
        want, got = of(1, ROWS_IN, FACTORS), of(n_blocks, ROWS_IN, FACTORS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), want, got)
        inner = np.sin(ROWS_IN @ FACTORS["V"])
        np.testing.assert_allclose(got[0][1]["y"], inner @ FACTORS["U"], rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(got[0][1]["own"], (inner**2).sum(axis=0), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n_blocks", [2, 3, 12])
def test_nothing_of_several_blocks_is_kept(n_blocks: int) -> None:
    """Neither what is inside a block, nor a partial sum."""
    _, backward = jax.eval_shape(lambda *args: jax.vjp(partial(sum_over_blocks, n_blocks), *args), ROWS_IN, FACTORS)
    given = ROWS_IN.size + sum(x.size for x in FACTORS.values())
    assert sum(leaf.size for leaf in jax.tree.leaves(backward)) <= given + n_blocks


@pytest.mark.parametrize(
    ("C", "largest", "n_blocks"),
    [(12, None, 1), (12, 12, 1), (12, 99, 1), (12, 11, 2), (12, 5, 3), (12, 1, 12), (7, 6, 7)],
)
def test_blocks_are_equal_and_as_large_as_allowed(C: int, largest: int | None, n_blocks: int) -> None:
    assert component_blocks(MemoryPolicy(component_block=largest), C) == n_blocks


@pytest.mark.parametrize(
    ("leading", "most", "n_blocks"),
    [
        ((4, 6), None, 1),
        ((4, 6), 24, 1),
        ((4, 6), 23, 2),
        ((4, 6), 8, 3),
        ((4, 6), 1, 6),
        ((4, 5), 12, 5),
        ((4,), 1, 1),
    ],
)
def test_blocks_of_tokens(leading: tuple[int, ...], most: int | None, n_blocks: int) -> None:
    """They are cut along T, and there is at least one position of every row in one."""
    assert token_blocks(leading, most) == n_blocks


@pytest.mark.parametrize("part", ["components_moments", "ci_moments"])
def test_moments_on_the_host_wait_for_the_gradients(part: StatePart) -> None:
    """Otherwise XLA copies them to the device at the beginning of the step."""
    moments, gradients = {"mu": jnp.ones((2, 3))}, {"V": jnp.ones((4, 5))}

    def barriers(policy: MemoryPolicy) -> list[list[tuple[int, ...]]]:
        traced = jax.make_jaxpr(lambda m, g: fetch(policy, part, m, g))(moments, gradients)
        return [
            [x.aval.shape for x in eqn.invars] for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier"
        ]

    assert barriers(MemoryPolicy(offload_state=frozenset({part}))) == [[(2, 3), (4, 5)]]
    assert barriers(PLAIN) == []


# ---- what devices send each other at the same point ----


@needs_plugin
@pytest.mark.parametrize(("collective_mib", "a_layer"), [(None, 3), (32, 2), (48, 1)])
def test_what_a_layer_gathers_goes_together(collective_mib: int | None, a_layer: int) -> None:
    """V, U and another V of 16 MiB each, in a scan of five layers: gathers as executed, compiled for GPUs. All three
    are more than XLA sends at once by itself."""
    policy = dataclasses.replace(FAST, collective_mib=collective_mib)

    def forward(layers: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            V, U, other = gather_tree(own, (V_AXES, U_AXES, V_AXES), jnp.bfloat16)
            return x + jnp.tanh(x @ V) @ U + jnp.sin(x @ other)[:, :2048], None

        return jax.lax.scan(layer, x, layers)[0]

    def program(mesh: Any) -> Any:
        def array(shape: tuple[int, ...], dtype: Any, *names: str | None) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, shape, names))

        shapes = (2048, 4096), (4096, 2048), (2048, 4096)
        column, row = (None, None, "component"), (None, "component")
        layers = tuple(
            array((5, *shape), jnp.float32, *names) for shape, names in zip(shapes, (column, row, column), strict=True)
        )
        x = array((1024, 2048), jnp.bfloat16, "batch")
        return jax.jit(forward, compiler_options=policy.compiler_options), (layers, x)

    compiled = compile_for(program, MeshShape(fsdp=8), CARDS["b200"])
    found = traffic(compiled.program.as_text())
    assert sum(n for c, n in found.collectives.items() if c.kind == "all-gather") == 5 * a_layer


def test_options_for_the_compiler() -> None:
    """A program compiled elsewhere takes them too."""
    options = FAST.compiler_options
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == str(4 * 2**30)
    assert PLAIN.compiler_options == {}
    assert float(jax.jit(lambda x: x + 1, compiler_options=options)(1.0)) == 2
