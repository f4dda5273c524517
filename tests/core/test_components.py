"""F1 = F2: the masked site as it is defined and as it is computed; init of V and U."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.components import (
    Factors,
    component_gate,
    components_axes,
    delta,
    init_components,
    past_components,
    through_components,
)
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.nn import split_product as split_module
from param_decomp_jax.nn.split_product import DeltaProduct
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import shardings
from tests import reference as ref

SHAPES = {"x": (3, 4, 6), "W": (6, 5), "V": (6, 7), "U": (7, 5), "mask": (3, 4, 7), "delta": (3, 4), "route": (3, 4)}

DIFFERENTIABLE = [name for name in SHAPES if name != "W"]
"""W is frozen: its gradient is not made."""


def arguments(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    values["mask"], values["delta"] = (rng.uniform(size=SHAPES[name]) for name in ("mask", "delta"))
    values["route"] = rng.integers(0, 2, SHAPES["route"]).astype(float)
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


def masked_site_with_delta(x: Any, W: Any, V: Any, U: Any, mask: Any, delta_mask: Any, route: Any) -> jax.Array:
    """F1, as the definition reads: ``r · (((xV) ⊙ m) U + δ · xΔ) + (1 − r) · xW``."""
    masked = ((x @ V.astype(x.dtype)) * mask.astype(x.dtype)) @ U.astype(x.dtype)
    unexplained = x @ (W - V @ U).astype(x.dtype)
    r = route[..., None].astype(x.dtype)
    return r * (masked + delta_mask[..., None].astype(x.dtype) * unexplained) + (1 - r) * (x @ W.astype(x.dtype))


def masked_site(x: Any, W: Any, V: Any, U: Any, mask: Any, delta_mask: Any, route: Any) -> jax.Array:
    """F2, the sum of its two parts."""
    y = through_components(x, V, U, component_gate(mask, delta_mask, route))
    rest = past_components(x, W, delta_mask, route)
    return (y if rest is None else y + rest).astype(x.dtype)


def value_and_gradients(site: Any, a: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output, and the gradients of a fixed projection of it with respect to everything."""
    to = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 5)), jnp.float32)

    def projected(a: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = site(a["x"], a["W"], a["V"], a["U"], a["mask"], a["delta"], a["route"])
        return jnp.sum(y.astype(to.dtype) * to), y

    gradients, y = jax.jit(jax.grad(projected, has_aux=True))(a)
    return y, gradients


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_f1_is_f2_with_all_gradients() -> None:
    (y1, g1), (y2, g2) = (value_and_gradients(site, arguments()) for site in (masked_site_with_delta, masked_site))
    assert distance(y2, y1) < 1e-6
    for name in DIFFERENTIABLE:
        assert distance(g2[name], g1[name]) < 1e-5, name


def test_f1_is_f2_in_float64() -> None:
    with jax.enable_x64(True):
        a = arguments(jnp.float64)
        (y1, g1), (y2, g2) = (value_and_gradients(site, a) for site in (masked_site_with_delta, masked_site))
        assert distance(y2, y1) < 1e-14
        for name in DIFFERENTIABLE:
            assert distance(g2[name], g1[name]) < 1e-12, name


def test_reference_agrees() -> None:
    a = arguments()
    b = [np.asarray(a[name], np.float64) for name in SHAPES]
    y, _ = value_and_gradients(masked_site, a)
    assert distance(y, ref.value(ref.masked_site(*b))) < 1e-6
    assert distance(y, ref.value(ref.masked_site_without_delta(*b))) < 1e-6


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("with_route", [True, False])
def test_absent_delta_and_route_mean_zero_and_one(with_delta: bool, with_route: bool) -> None:
    a = arguments()
    none = jnp.zeros_like(a["delta"]) if not with_delta else a["delta"]
    everywhere = jnp.ones_like(a["route"]) if not with_route else a["route"]
    short = masked_site(
        a["x"], a["W"], a["V"], a["U"], a["mask"],
        a["delta"] if with_delta else None, a["route"] if with_route else None,
    )  # fmt: skip
    full = masked_site_with_delta(a["x"], a["W"], a["V"], a["U"], a["mask"], none, everywhere)
    assert distance(short, full) < 1e-6


def test_unrouted_positions_are_exactly_clean() -> None:
    a = arguments()
    y = masked_site(a["x"], a["W"], a["V"], a["U"], a["mask"], a["delta"], jnp.zeros_like(a["route"]))
    np.testing.assert_array_equal(y, a["x"] @ a["W"])


def test_bf16_gradient_of_the_delta_stays_close_to_f1() -> None:
    """F2's δ-gradient is a difference of two products; accumulated in fp32 it is 1.2 % off where F1's is 1.7 %."""
    exact = value_and_gradients(masked_site_with_delta, arguments())[1]["delta"]
    a = arguments()
    low = {name: v.astype(jnp.bfloat16) if name in ("x", "W") else v for name, v in a.items()}
    assert distance(value_and_gradients(masked_site, low)[1]["delta"], exact) < 0.02


def test_delta_is_what_the_components_leave() -> None:
    a = arguments()
    left = delta(a["W"][None], Factors(a["V"][None], a["U"][None]))
    assert distance(left[0], ref.value(ref.delta_component(*(np.asarray(a[n], np.float64) for n in "WVU")))) < 1e-6


@pytest.fixture
def on_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there, computed here."""

    def branch(*arguments: Any, cuda: Any, default: Any) -> Any:
        return cuda(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", branch)


CHUNKED = {"V": (6, 20), "U": (20, 5)}


def factors_and_weights() -> tuple[Factors, jax.Array]:
    """Two layers; V U is nearly W."""
    rng = np.random.default_rng(4)
    V, U = (jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32) for shape in CHUNKED.values())
    return Factors(V, U), V @ U + jnp.asarray(0.01 * rng.normal(size=(2, 6, 5)), jnp.float32)


def squares(factors: Factors, W: jax.Array, product: DeltaProduct) -> jax.Array:
    return jnp.sum(delta(W, factors, product) ** 2)


def test_split_products_are_for_gpus_and_float32_alone() -> None:
    """N4: elsewhere not a bit changes."""
    factors, W = factors_and_weights()
    of = jax.jit(jax.value_and_grad(squares), static_argnums=2)
    for a, b in zip(*(jax.tree.leaves(of(factors, W, p)) for p in ("fp32", "split")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("on_nvidia")
def test_float64_is_not_split() -> None:
    with jax.enable_x64(True):
        factors, W = jax.tree.map(lambda x: x.astype(jnp.float64), factors_and_weights())
        np.testing.assert_array_equal(delta(W, factors, "split"), W - factors.V @ factors.U)


@pytest.mark.usefixtures("on_nvidia")
@pytest.mark.parametrize("chunk", [7, 10, 100], ids=["chunks that do not divide", "chunks", "one chunk"])
@pytest.mark.parametrize("devices", [1, 4])
def test_delta_by_split_products(chunk: int, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """N4 against the reference; on devices the chunks are of each one's own components."""
    monkeypatch.setattr(split_module, "CHUNK", chunk)
    factors, W = factors_and_weights()
    # Another one each time: a jitted function remembers what it was traced with.
    of = jax.jit(jax.value_and_grad(lambda *given: squares(*given, "split")))
    if devices == 1:
        value, gradient = of(factors, W)
    else:
        mesh = make_mesh(MeshShape(fsdp=devices))
        with jax.set_mesh(mesh):
            places = shardings(mesh, components_axes({"": factors}), {"": factors})[""]
            value, gradient = of(jax.device_put(factors, places), W)
    for layer in range(2):
        V, U, own = (ref.Var(np.asarray(x[layer], np.float64)) for x in (factors.V, factors.U, W))
        of_layer = ref.split_squares(own.value, V, U, chunk)
        to_V, to_U = ref.gradients(of_layer, [V, U])
        # Δ itself is rounded in the one, a multiple of it in the other.
        assert distance(gradient.V[layer], to_V) < 3e-3
        assert distance(gradient.U[layer], to_U) < 3e-3
    want = sum(ref.value(ref.split_squares(*(np.asarray(x[n], np.float64) for x in (W, factors.V, factors.U)), chunk))
               for n in range(2))  # fmt: skip
    assert float(value) == pytest.approx(float(want), rel=1e-4)


def site(layer: int, kind: str, C: int) -> Site:
    return Site(f"layers.{layer}.{kind}", layer, kind, "in", 64, 32, C)


def test_initial_scales_and_independence_of_stacking() -> None:
    together = Sites((site(0, "a", 400), site(1, "a", 400)))
    apart = Sites((site(0, "a", 400), site(1, "a", 300)))
    key = jax.random.key(0)
    stacked, single = init_components(key, together), init_components(key, apart)
    V, U = stacked["layers.0-1.a"].V, stacked["layers.0-1.a"].U
    assert np.var(V) == pytest.approx(1 / 64, rel=0.05)
    assert np.var(U) == pytest.approx(1 / 400, rel=0.05)
    np.testing.assert_array_equal(V[0], single["layers.0.a"].V[0])
    assert not np.array_equal(V[0], V[1])
