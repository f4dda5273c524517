"""The KL by blocks of tokens: value and gradient are the plain one's, and the vocabulary is never there as a whole."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from param_decomp_jax.nn.fused_kl import Head, fused_kl
from param_decomp_jax.nn.numerics import kl_divergence, matmul_wide, rms_norm
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding
from tests import reference as ref
from tests.cases import slow_but
from tests.core import tiny

B, T, D, VOCAB, STREAMS = 4, 12, 6, 37, 3
RNG = np.random.default_rng(0)
W = (1.5 * RNG.normal(size=(D, VOCAB))).astype(np.float32)
CLEAN = RNG.normal(size=(B, T, D)).astype(np.float32)
MASKED = [CLEAN + RNG.normal(size=CLEAN.shape).astype(np.float32) for _ in range(STREAMS)]
WEIGHTS = np.array([1.0, -0.5, 2.0], np.float32)
"""Of the streams' errors in a loss."""


def head(W: jax.Array, x: jax.Array) -> jax.Array:
    return matmul_wide(rms_norm(x, 1e-5), W)


def plain(W: jax.Array, clean: jax.Array, masked: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.mean(kl_divergence(head(W, clean), head(W, x))) for x in masked])


def fused(n_blocks: int) -> Callable[..., jax.Array]:
    return lambda W, clean, masked: fused_kl(Head(head, W), clean, masked, n_blocks)


def value_and_gradient(errors: Callable[..., jax.Array], W: Any, clean: Any, masked: Any) -> Any:
    """Of each stream, and of a weighted sum of them by what each of them ends in."""
    weights = jnp.asarray(WEIGHTS, clean.dtype)

    def loss(masked: Any) -> Any:
        found = errors(W, clean, masked)
        return jnp.sum(weights[: found.size] * found), found

    (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(masked)
    return values, gradient


@pytest.mark.parametrize("exact", [False, True], ids=["fp32", "float64"])
@pytest.mark.parametrize("n_blocks", slow_but([3, 12], [1, 2, 3, 12]))
def test_blocks_change_nothing(n_blocks: int, exact: bool) -> None:
    with jax.enable_x64(exact):
        given = W, CLEAN, MASKED
        arrays = tiny.to_float64(given) if exact else jax.tree.map(jnp.asarray, given)
        want = jax.jit(partial(value_and_gradient, plain))(*arrays)
        got = jax.jit(partial(value_and_gradient, fused(n_blocks)))(*arrays)
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float64 if exact else jnp.float32)}
        assert tiny.assert_alike(want, got, 1e-13 if exact else 1e-6) >= 0
        assert min(float(jnp.linalg.norm(x)) for x in got[1]) > 1e-3


def test_the_value_is_the_reference() -> None:
    """R1, of each stream."""
    with jax.enable_x64(True):
        W64, clean, masked = tiny.to_float64((W, CLEAN, MASKED))
        got = jax.jit(fused(3))(W64, clean, masked)
        want = [ref.kl_error(*(np.asarray(head(W64, x)) for x in (clean, x))) for x in masked]
    tiny.assert_alike([ref.value(x) for x in want], list(got), 1e-12)


def test_no_difference_is_no_error() -> None:
    """And a minimum: the gradient is 0."""
    values, (gradient,) = jax.jit(partial(value_and_gradient, fused(3)))(W, CLEAN, [CLEAN])
    assert np.abs(values).max() < 1e-6
    assert np.abs(gradient).max() < 1e-6


@pytest.mark.parametrize("exact", [False, True], ids=["fp32", "float64"])
def test_under_vmap(exact: bool) -> None:
    """Two batches at once, and two heads on one batch."""
    with jax.enable_x64(exact):
        given = W, CLEAN, MASKED[0], MASKED[1]
        W0, clean, one, other = tiny.to_float64(given) if exact else jax.tree.map(jnp.asarray, given)
        batches, heads = jnp.stack([one, other]), jnp.stack([W0, 0.5 * W0])

        def of(errors: Callable[..., jax.Array]) -> Any:
            found = partial(value_and_gradient, errors)
            return jax.jit(jax.vmap(lambda x: found(W0, clean, [x])))(batches), jax.jit(
                jax.vmap(lambda W: found(W, clean, [one, other]))
            )(heads)

        tiny.assert_alike(of(plain), of(fused(4)), 1e-13 if exact else 1e-6)


def test_bf16_hidden_states() -> None:
    """N1: products take bf16, the softmax is wide, gradients come back in bf16."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (W, CLEAN, MASKED))
    want, want_gradient = jax.jit(partial(value_and_gradient, plain))(*arrays)
    got, gradient = jax.jit(partial(value_and_gradient, fused(3)))(*arrays)
    assert got.dtype == jnp.float32
    assert {x.dtype for x in gradient} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert max(map(tiny.deviation, want_gradient, gradient)) < 0.01


def test_blocks_must_divide_the_sequence() -> None:
    with pytest.raises(AssertionError, match="5 blocks do not cut 12"):
        jax.eval_shape(fused(5), W, CLEAN, MASKED)


def sizes(jaxpr: Any) -> Iterator[int]:
    for e in jaxpr.eqns:
        yield from (v.aval.size for v in e.outvars if VOCAB in v.aval.shape)
        for inner in jaxprs_in_params(e.params):
            yield from sizes(inner)


@pytest.mark.parametrize("n_blocks", [1, 3, 12])
def test_logits_of_one_block_at_a_time(n_blocks: int) -> None:
    """Forward and backward; the plain form has all of them."""

    def largest(errors: Callable[..., jax.Array]) -> int:
        program = jax.make_jaxpr(partial(value_and_gradient, errors))(W, CLEAN, MASKED)
        # Without what nobody reads: a head's product has a gradient by the head.
        used, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
        return max(sizes(used))

    assert largest(plain) == B * T * VOCAB
    assert largest(fused(n_blocks)) == B * T * VOCAB // n_blocks


def test_a_gradient_is_all_that_is_kept() -> None:
    """Of each stream as large as its hidden state."""
    errors = partial(fused(3), jnp.asarray(W), jnp.asarray(CLEAN))
    _, backward = jax.eval_shape(lambda masked: jax.vjp(errors, masked), MASKED)
    assert sum(x.size for x in jax.tree.leaves(backward)) <= STREAMS * CLEAN.size + 2 * STREAMS


@pytest.mark.parametrize("shape", [MeshShape(fsdp=4), MeshShape(replica=2, tensor=2)], ids=str)
def test_on_several_devices(shape: MeshShape) -> None:
    """The batch split; each device has the gradients of its own rows."""
    want = jax.jit(partial(value_and_gradient, plain))(W, CLEAN, MASKED)
    mesh = make_mesh(shape)
    rows = batch_sharding(mesh, CLEAN.shape)
    with jax.set_mesh(mesh):
        clean, masked = jax.device_put((CLEAN, MASKED), rows)
        got = jax.jit(partial(value_and_gradient, fused(3)))(W, clean, masked)
    tiny.assert_alike(want, got, 1e-5)
    assert all(x.sharding.is_equivalent_to(rows, 3) for x in got[1])
