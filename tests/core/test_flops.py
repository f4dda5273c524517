"""Matrix-product FLOPs from a jaxpr, against counts made by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from param_decomp_aot.flops import Flops, matmul_flops
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.transformer_config import KINDS
from tests.core import tiny

N = 4
A = jax.ShapeDtypeStruct((N, N), jnp.float32)
ONE = 2 * N**3
"""One product of two N by N matrices."""


def flops(function: Any, *args: Any) -> Flops:
    return matmul_flops(jax.make_jaxpr(function)(*args))


def exactly(function: Any, *args: Any) -> int:
    count = flops(function, *args)
    assert count.unknown == ()
    assert sum(count.by_scope.values()) == sum(count.by_precision.values()) == count.total
    return count.total


def product(x: jax.Array) -> jax.Array:
    return x @ x


def test_batched_products_of_any_axes() -> None:
    x, y = jax.ShapeDtypeStruct((3, 5, 7), jnp.float32), jax.ShapeDtypeStruct((7, 3, 11), jnp.float32)
    assert exactly(lambda x, y: jnp.einsum("bmk,kbn->mnb", x, y), x, y) == 2 * 3 * 5 * 7 * 11
    assert exactly(lambda x, y: jnp.einsum("bmk,lbn->mn", x, y), x, y) == 2 * 3 * 5 * 11  # k and l are summed first
    vector = jax.ShapeDtypeStruct((N,), jnp.float32)
    assert exactly(jnp.dot, vector, vector) == 2 * N
    empty = jax.ShapeDtypeStruct((0, N), jnp.float32)
    assert exactly(jnp.matmul, empty, A) == 0


def test_vmap_is_a_batched_product() -> None:
    many = jax.ShapeDtypeStruct((6, N, N), jnp.float32)
    assert exactly(jax.vmap(jnp.matmul), many, many) == 6 * ONE
    assert exactly(jax.vmap(jnp.matmul, in_axes=(0, None)), many, A) == 6 * ONE


def test_convolution() -> None:
    image, kernel = jax.ShapeDtypeStruct((2, 6, 9), jnp.float32), jax.ShapeDtypeStruct((8, 6, 3), jnp.float32)
    assert exactly(lambda x, k: lax.conv(x, k, (1,), "VALID"), image, kernel) == 2 * (2 * 8 * 7) * (6 * 3)
    grouped = jax.ShapeDtypeStruct((8, 3, 3), jnp.float32)
    convolve = lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=2)  # noqa: E731
    assert exactly(convolve, image, grouped) == 2 * (2 * 8 * 7) * (3 * 3)


def test_a_scan_counts_every_round() -> None:
    def rounds(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (lax.fori_loop(0, 3, lambda _, y: y @ x, x), None), x, length=5)[0]

    assert exactly(rounds, A) == 5 * 3 * ONE
    assert exactly(jax.jit(rounds), A) == 5 * 3 * ONE
    assert exactly(lambda x: lax.map(lambda row: row @ x, x), A) == ONE


def chain(x: jax.Array) -> jax.Array:
    """Two products of which the second needs, for its gradient, what the first gave."""
    return jnp.sin(jnp.sin(x @ x) @ x)


def test_gradient() -> None:
    """Two forward; backward two for each factor of each product: the sine needs no product run again."""
    assert exactly(jax.grad(lambda x: chain(x).sum()), A) == (2 + 4) * ONE


def test_recomputation_is_counted() -> None:
    assert exactly(jax.value_and_grad(lambda x: jax.checkpoint(chain)(x).sum()), A) == (2 + 2 + 4) * ONE

    def nested(x: jax.Array) -> jax.Array:
        return jnp.sin(jax.checkpoint(chain)(jnp.sin(x @ x)) @ x)

    # Forward 4; outer recomputation 4; the inner one runs its 2 again; backward 8.
    assert exactly(jax.value_and_grad(lambda x: jax.checkpoint(nested)(x).sum()), A) == (4 + 4 + 2 + 8) * ONE


def test_a_recomputation_that_nothing_needs_is_not_counted() -> None:
    """The gradient of a product needs its factors, not the product; and without the value there is no forward."""
    assert exactly(jax.value_and_grad(lambda x: jax.checkpoint(product)(x).sum()), A) == (1 + 2) * ONE
    assert exactly(jax.grad(lambda x: jax.checkpoint(product)(x).sum()), A) == 2 * ONE
    assert exactly(jax.grad(lambda x: jax.checkpoint(chain)(x).sum()), A) == (2 + 4) * ONE


def test_gradient_of_a_scan_of_checkpoints() -> None:
    layers = jax.ShapeDtypeStruct((7, N, N), jnp.float32)

    def loss(checkpoint: bool, x: jax.Array, ws: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(x @ w), None

        return lax.scan(jax.checkpoint(body) if checkpoint else body, x, ws)[0].sum()

    both = jax.value_and_grad(loss, argnums=(1, 2))
    assert exactly(lambda x, ws: both(False, x, ws), A, layers) == 7 * (1 + 2) * ONE
    assert exactly(lambda x, ws: both(True, x, ws), A, layers) == 7 * (1 + 1 + 2) * ONE
    only_x = jax.value_and_grad(loss, argnums=1)
    assert exactly(lambda x, ws: only_x(True, x, ws), A, layers) == 7 * (1 + 1 + 1) * ONE


def test_dead_code() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        _ = x @ x
        kept, _ = lax.scan(lambda c, _: ((c[0] @ x, c[1] @ x), None), (x, x), length=3)[0]
        kept, _ = jax.jit(lambda y: (y + 1, y @ y))(kept)
        kept, _ = jax.checkpoint(lambda y: (y + 1, y @ y))(kept)
        _, kept = lax.cond(kept[0, 0] > 0, lambda y: (y @ y, y), lambda y: (y, y @ x), kept)
        return kept

    assert exactly(wasteful, A) == (3 + 1) * ONE


def test_dead_parts_of_a_while() -> None:
    def loop(x: jax.Array) -> jax.Array:
        def body(carry: Any) -> Any:
            i, kept, dead, feeder = carry
            return i + 1, kept @ feeder, dead @ x, feeder @ x

        return lax.while_loop(lambda c: c[0] < 5, body, (0, x, x, x))[1]

    assert exactly(loop, A) == 5 * 2 * ONE


@pytest.mark.parametrize(
    ("start", "keep_on", "step", "rounds"),
    [
        (0, lambda i: i < 5, 1, 5), (0, lambda i: i <= 5, 2, 3), (7, lambda i: i > 0, -3, 3),
        (7, lambda i: i >= 1, -3, 3), (3, lambda i: lax.gt(10, i), 4, 2), (5, lambda i: i < 5, 1, 0),
    ],
)  # fmt: skip
def test_a_while_with_fixed_bounds(start: int, keep_on: Any, step: int, rounds: int) -> None:
    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: keep_on(c[0]), lambda c: (c[0] + step, c[1] @ x), (start, x))[1]

    assert exactly(loop, A) == rounds * ONE
    assert exactly(jax.jit(loop), A) == rounds * ONE
    assert exactly(lambda x: lax.scan(lambda x, _: (loop(x), None), x, length=2)[0], A) == 2 * rounds * ONE


def test_a_while_whose_bounds_are_arrays_of_the_program() -> None:
    """`fori_loop` given arrays makes a while; constants reach it through casts and calls."""

    def loop(upper: Any) -> Any:
        return lambda x: lax.fori_loop(jnp.zeros((), jnp.int32), upper, lambda _, y: y @ x, x)

    assert exactly(jax.jit(loop(jnp.asarray(6))), A) == 6 * ONE
    inner = jax.jit(lambda x, n: loop(n.astype(jnp.int32))(x))
    assert exactly(lambda x: inner(x, jnp.asarray(4, jnp.int8)), A) == 4 * ONE


def test_a_while_of_unknown_length_is_said_to_be_one() -> None:
    def loop(x: jax.Array, n: jax.Array) -> jax.Array:
        with jax.named_scope("here"):
            return lax.fori_loop(0, n, lambda _, y: y @ x, x)

    count = flops(loop, A, jax.ShapeDtypeStruct((), jnp.int32))
    assert count.total == ONE
    assert count.unknown == ("while in here: counted as one round",)
    until = flops(lambda x: lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ x, x), A)
    assert (until.total, len(until.unknown)) == (ONE, 1)
    no_product = flops(lambda x: lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y + x, x), A)
    assert (no_product.total, no_product.unknown) == (0, ())


def test_a_while_whose_step_is_not_fixed() -> None:
    loop = lambda x: lax.while_loop(lambda c: c[0] < 99, lambda c: (2 * c[0], c[1] @ x), (1, x))[1]  # noqa: E731
    assert flops(loop, A).unknown


def test_the_condition_of_a_while_is_run_too() -> None:
    loop = lambda x: lax.while_loop(lambda y: (y @ x)[0, 0] < 1, lambda y: y + 1, x)  # noqa: E731
    assert flops(loop, A).total == ONE


def test_the_largest_branch_counts() -> None:
    def choose(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.switch(n, [lambda y: y, lambda y: y @ y @ y, lambda y: y @ y], x)

    assert exactly(choose, A, jax.ShapeDtypeStruct((), jnp.int32)) == 2 * ONE


def test_of_platforms_cuda_counts() -> None:
    """Also in the gradient, and where the branch of another platform multiplies more."""

    def by_platform(**branches: Any) -> Any:
        return lambda x: lax.platform_dependent(x, **branches)

    largest = lambda y: y @ y @ y  # noqa: E731
    assert exactly(by_platform(cuda=product, default=largest), A) == ONE
    assert exactly(by_platform(cpu=largest, cuda=lambda y: y, default=product), A) == 0
    assert exactly(by_platform(cpu=largest, default=product), A) == ONE
    assert exactly(by_platform(cpu=product), A) == ONE  # none is for CUDA
    split = by_platform(cuda=lambda y: jnp.matmul(y, y, precision="BF16_BF16_F32_X3"), default=exact)
    both = flops(jax.value_and_grad(lambda x: jnp.sin(jax.checkpoint(split)(x)).sum()), A)
    assert both.by_precision == {"bf16": 3 * (1 + 2) * ONE}


def exact(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x, precision="highest")


@pytest.mark.parametrize(
    ("dtypes", "precision", "expected"),
    [
        (("bfloat16", "bfloat16"), None, ("bf16", 1)),
        (("float16", "float16"), "highest", ("bf16", 1)),
        (("float8_e4m3fn", "float8_e4m3fn"), None, ("bf16", 1)),
        (("float32", "bfloat16"), None, ("tf32", 1)),
        (("float32", "float32"), None, ("tf32", 1)),
        (("float32", "float32"), "high", ("tf32", 1)),
        (("float32", "float32"), ("default", "highest"), ("fp32", 1)),
        (("float32", "float32"), "highest", ("fp32", 1)),
        (("float32", "float32"), lax.DotAlgorithmPreset.DEFAULT, ("tf32", 1)),
        (("float32", "float32"), "BF16_BF16_F32", ("bf16", 1)),
        (("float32", "float32"), "BF16_BF16_F32_X3", ("bf16", 3)),
        (("float32", "float32"), "BF16_BF16_F32_X6", ("bf16", 6)),
        (("float32", "float32"), "BF16_BF16_F32_X9", ("bf16", 9)),
        (("float32", "float32"), "TF32_TF32_F32", ("tf32", 1)),
        (("float32", "float32"), "TF32_TF32_F32_X3", ("tf32", 3)),
        (("float32", "float32"), "F32_F32_F32", ("fp32", 1)),
        (("float16", "float16"), "F16_F16_F32", ("bf16", 1)),
        (("float32", "float32"), lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32), ("fp32", 1)),
        (("float32", "float32"), lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, 2, 2, 3), ("bf16", 3)),
    ],
)  # fmt: skip
def test_by_precision(dtypes: tuple[str, str], precision: Any, expected: tuple[str, int]) -> None:
    """Emulated precision counts as the products that run."""
    left, right = (jax.ShapeDtypeStruct((N, N), dtype) for dtype in dtypes)
    dimensions = (((1,), (0,)), ((), ()))
    count = flops(lambda x, y: lax.dot_general(x, y, dimensions, precision=precision), left, right)
    where, times = expected
    assert count.by_precision == {where: times * ONE}
    assert count.total == times * ONE


def test_precision_of_doubles_and_of_convolutions() -> None:
    with jax.enable_x64(True):
        assert flops(product, jax.ShapeDtypeStruct((N, N), jnp.float64)).by_precision == {"fp32": ONE}
    image, kernel = jax.ShapeDtypeStruct((2, 6, 9), jnp.bfloat16), jax.ShapeDtypeStruct((8, 6, 3), jnp.bfloat16)
    convolve = lambda x, k: lax.conv(x, k, (1,), "VALID", precision="highest")  # noqa: E731
    assert set(flops(convolve, image, kernel).by_precision) == {"bf16"}


def test_several_precisions_of_one_program() -> None:
    def mixed(x: jax.Array) -> jax.Array:
        x = lax.scan(lambda x, _: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), None), x, length=5)[0]
        return exact(x.astype(jnp.float32)) + product(x.astype(jnp.float32))

    count = flops(mixed, jax.ShapeDtypeStruct((N, N), jnp.bfloat16))
    assert count.by_precision == {"bf16": 5 * ONE, "fp32": ONE, "tf32": ONE}
    with jax.default_matmul_precision("highest"):
        assert flops(product, A).by_precision == {"fp32": ONE}


def test_custom_derivatives() -> None:
    @jax.custom_vjp
    def thrice(x: jax.Array) -> jax.Array:
        return x @ x

    thrice.defvjp(lambda x: (x @ x @ x, x), lambda x, g: (g @ x @ x @ x,))

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x @ x

    same.defjvp(lambda x, t: (x[0] @ x[0], t[0] @ x[0] @ x[0]))
    assert exactly(thrice, A) == exactly(same, A) == ONE
    assert exactly(jax.value_and_grad(lambda x: thrice(x).sum()), A) == (2 + 3) * ONE
    assert exactly(jax.value_and_grad(lambda x: same(x).sum()), A) == (1 + 2) * ONE


def test_every_device_of_a_shard_map() -> None:
    mesh = make_mesh(MeshShape(replica=2, fsdp=4))
    split = PartitionSpec(("replica", "fsdp"))
    rows = jax.ShapeDtypeStruct((16, N), jnp.float32)

    def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split)(x, w)

    assert exactly(mapped, rows, A) == 2 * 16 * N * N
    assert exactly(jax.grad(lambda w, x: mapped(x, w).sum()), A, rows) == 2 * 16 * N * N

    def partly(x: jax.Array, w: jax.Array) -> jax.Array:
        part = PartitionSpec("fsdp")
        inner = jax.shard_map(
            jnp.matmul, mesh=mesh, in_specs=(part, PartitionSpec()), out_specs=part, axis_names={"fsdp"}
        )  # fmt: skip
        return inner(x, w)

    assert exactly(jax.jit(partly), rows, A) == 2 * 16 * N * N


def test_scopes() -> None:
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            x = lax.scan(named, x, length=3)[0]
        return x @ x

    def named(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        with jax.named_scope("inner"):
            return x @ x, None

    assert flops(step, A).by_scope == {"outer/inner": 3 * ONE, "": ONE}


def test_an_unknown_primitive_with_a_jaxpr_is_reported() -> None:
    solve = lambda b: lax.custom_linear_solve(lambda v: v, b, lambda _, b: b @ b)  # noqa: E731
    count = flops(solve, A)
    assert count.total == ONE
    assert "custom_linear_solve" in count.unknown[0]


def test_a_llama_scanned_and_unrolled() -> None:
    """The whole forward: layers times their seven matrices and attention, and the head."""
    config = tiny.CONFIG
    B, T = tiny.LEADING
    attention = 2 * 2 * B * T * T * config.n_heads * config.head_dim
    matrices = sum(2 * B * T * config.matrix_shape(kind)[0] * config.matrix_shape(kind)[1] for kind in KINDS)
    expected = config.n_layers * (matrices + attention) + 2 * B * T * config.d_model * config.vocab_size
    for layers in ("scan", "unroll"):
        llama = tiny.target(chosen={}, memory=MemoryPolicy(layers=layers))
        got = exactly(
            lambda w, x, llama=llama: llama.logits(w, llama.forward(w, x, UNTOUCHED).output), *_llama_arguments()
        )
        assert got == expected


def _llama_arguments() -> tuple[Any, Any]:
    return jax.eval_shape(tiny.weights), jax.ShapeDtypeStruct(tiny.LEADING, jnp.int32)
