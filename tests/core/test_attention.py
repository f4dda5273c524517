"""The three forms of attention: against plain loops, against each other, and what they keep."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from param_decomp_jax.nn.attention import attend, blocked, plain
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from tests.cases import slow_but

TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12}


def drawn(B: int, T: int, heads: int, kv_heads: int, d: int, dtype: Any, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v and a cotangent; scores spread over several units, so that the softmax is no mean."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, heads, d), (B, T, kv_heads, d), (B, T, kv_heads, d), (B, T, heads, d)
    return tuple((1.5 * rng.normal(size=shape)).astype(dtype) for shape in shapes)


def loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """One query, one head after the other."""
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        last = t + 1 if causal else q.shape[1]
        of_head = h // (q.shape[2] // k.shape[2])
        scores = k[b, :last, of_head] @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, :last, of_head]
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_plain_against_loops(causal: bool) -> None:
    q, k, v, _ = drawn(2, 5, 6, 2, 3, np.float64)
    with jax.enable_x64(True):
        np.testing.assert_allclose(plain(*map(jnp.asarray, (q, k, v)), causal), loops(q, k, v, causal), rtol=1e-12)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(form: Any, q: Any, k: Any, v: Any, cotangent: Any) -> tuple[Any, ...]:
    out, pullback = jax.vjp(form, q, k, v)
    return out, *pullback(cotangent)


@pytest.mark.parametrize("dtype", slow_but([np.float64], [np.float32, np.float64]))
@settings(max_examples=10)
@given(
    T=st.integers(1, 13),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    d=st.integers(1, 4),
    block=st.integers(1, 16),
    causal=st.booleans(),
)
def test_blocks_change_nothing(
    dtype: Any, T: int, groups: int, kv_heads: int, d: int, block: int, causal: bool
) -> None:
    """Values and gradients, also where blocks do not divide T, hold one query, or hold more than there are."""
    arrays = drawn(2, T, groups * kv_heads, kv_heads, d, dtype)
    with jax.enable_x64(dtype is np.float64):
        want = value_and_gradients(partial(plain, causal=causal), *arrays)
        got = value_and_gradients(partial(blocked, causal=causal, block=block), *arrays)
        for a, b in zip(want, got, strict=True):
            assert a.dtype == b.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_blocks_round_bf16_as_plain_does() -> None:
    """Rounding errors over plain's: 1.25 for the gradients of k and v, which sum over 16 blocks, 1 for the others."""
    arrays = drawn(2, 64, 4, 2, 8, np.float32)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)
    exact = value_and_gradients(partial(plain, causal=True), *(np.asarray(x, np.float32) for x in narrow))

    def errors(form: Any) -> list[float]:
        got = value_and_gradients(form, *narrow)
        assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
        return [float(jnp.linalg.norm(a - b.astype(jnp.float32))) for a, b in zip(exact, got, strict=True)]

    of_blocks, of_plain = errors(partial(blocked, causal=True, block=4)), errors(partial(plain, causal=True))
    for mine, other, most in zip(of_blocks, of_plain, (1.1, 1.1, 1.4, 1.4), strict=True):
        assert mine < most * other


def intermediates(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from intermediates(inner)


def largest(form: Any, n_heads: int, T: int) -> int:
    """Elements of the largest array of forward and backward, and no mask of every query and key."""
    q = jax.ShapeDtypeStruct((1, T, n_heads, 2), jnp.float32)
    program = jax.make_jaxpr(lambda q: jax.grad(lambda q: jnp.sum(form(q, q, q, True)))(q))(q)
    return max(aval.size for aval in intermediates(program.jaxpr))


def test_scores_of_one_block_at_a_time() -> None:
    heads, T, block = 3, 64, 16
    assert largest(plain, heads, T) == heads * T * T
    # A fourth of all scores; less than a mask of all queries would be.
    assert largest(partial(blocked, block=block), 1, T) == block * T
    assert largest(partial(blocked, block=block), heads, T) == heads * block * T


def kept(form: Any, *arrays: Any) -> int:
    """Numbers that the forward keeps for the backward."""
    _, pullback = jax.eval_shape(lambda *a: jax.vjp(form, *a), *arrays)
    return sum(leaf.size for leaf in jax.tree.leaves(pullback))


@pytest.mark.parametrize("block", [16, 64])
def test_blocks_keep_their_inputs_alone(block: int) -> None:
    q, k, v, _ = drawn(1, 64, 4, 2, 8, np.float32)
    given = q.size + k.size + v.size
    assert kept(partial(blocked, causal=True, block=block), q, k, v) <= given + 64
    assert kept(partial(plain, causal=True), q, k, v) >= given + 4 * 64 * 64


@pytest.mark.parametrize("shape", [MeshShape(replica=2, fsdp=4), MeshShape(fsdp=4, tensor=2)], ids=str)
@pytest.mark.parametrize("form", [plain, partial(blocked, block=8)], ids=["plain", "blocked"])
def test_rows_and_heads_on_other_devices_do_not_meet(form: Any, shape: MeshShape) -> None:
    """Forward and backward need no communication where the batch, or heads beside it, are split."""
    split = NamedSharding(make_mesh(shape), PartitionSpec(("replica", "fsdp"), None, "tensor"))
    arrays = [jax.ShapeDtypeStruct((8, 32, h, 4), jnp.float32, sharding=split) for h in (4, 2, 2, 4)]
    program = value_and_gradients.lower(partial(form, causal=True), *arrays).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_without_a_gpu_flash_is_blocked(dtype: Any) -> None:
    """And fp32, which cuDNN does not take, is blocked anywhere."""
    arrays = tuple(jnp.asarray(x, dtype) for x in drawn(2, 6, 4, 2, 8, np.float32))
    want = value_and_gradients(partial(attend, causal=True, implementation="blocked"), *arrays)
    got = value_and_gradients(partial(attend, causal=True, implementation="flash"), *arrays)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("implementation", ["blocked", "flash"])
def test_under_vmap_scan_and_recomputation(implementation: Any) -> None:
    """One network of three layers, of which two batches are run by `jax.vmap`; k of the second layer is not mapped."""
    q, k, v, _ = (jnp.asarray(x) for x in drawn(3, 6, 4, 2, 4, np.float32))
    rows = jnp.stack([q, 0.5 * q])

    def loss(form: Any, q: Any, k: Any) -> Any:
        def layer(x: Any, scale: Any) -> tuple[Any, None]:
            return x + form(x, scale * k, v, True), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), q, jnp.arange(1.0, 4.0))[0]))

    def gradients(form: Any) -> Any:
        return jax.jit(jax.vmap(jax.value_and_grad(partial(loss, form), argnums=(0, 1)), in_axes=(0, None)))(rows, k)

    got, want = gradients(partial(attend, implementation=implementation)), gradients(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
