"""Products with wide results: what their backward pass multiplies, and how it is summed over nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from param_decomp_jax.nn.numerics import matmul_wide
from param_decomp_jax.sharding.mesh import MeshShape, constrain, make_mesh
from tests.core.test_mesh import equations

RNG = np.random.default_rng(0)
X, W, TO = (jnp.asarray(RNG.normal(size=size), jnp.float32) for size in ((8, 3, 4), (4, 16), (8, 3, 16)))


def loss(x: Array, W: Array) -> Array:
    return jnp.sum(jnp.sin(matmul_wide(constrain(x, "batch"), W)) * TO)


def test_backward_products_take_what_the_forward_takes() -> None:
    """N1: no product of fp32 arrays where the forward has one of bf16; results wide forward, narrow backward."""
    narrow = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*narrow)
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    assert [str(e.outvars[0].aval.dtype) for e in products] == ["float32", "bfloat16", "bfloat16"]
    assert {str(x.aval.dtype) for e in products for x in e.invars} == {"bfloat16"}


@pytest.mark.parametrize("shape", [MeshShape(fsdp=8, nodes=4), MeshShape(replica=2, fsdp=4, nodes=2)], ids=str)
def test_sums_within_nodes_first(shape: MeshShape) -> None:
    """The gradient by W of any mesh; in two stages, of which the second is between the devices of different nodes."""
    want = jax.grad(loss, argnums=(0, 1))(X, W)
    with jax.set_mesh(make_mesh(shape)):
        got = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, W)
        program = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(X, W))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    assert f"f32[{shape.nodes},4,16]" in program
