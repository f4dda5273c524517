"""What a mixture of experts takes of a GPU's memory, by how it is computed. Compiled for a card that is not here.

    JAX_PLATFORMS=cpu python -m experiments.expert_memory          # needs the extra `probe`

One layer of OLMoE's size (64 experts of 2048 x 1024, 8 a token) on 4,096 tokens in bf16, forward and backward:

- the product of all slots with their experts' matrices by `jax.lax.ragged_dot`, and by `nn/grouped.py`;
- the whole mixture with the weighted sum of a token's experts in bf16, as it is, and in fp32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array
from rich.console import Console

from param_decomp_aot.compile import compile_for
from param_decomp_jax.nn.grouped import Groups, group, grouped_matmul_wide
from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_lab.probe.cards import card
from param_decomp_lab.ui.tables import plain_table

B, T, K, E, D, M = 8, 512, 8, 64, 2048, 1024


def ragged(x: Array, W: Array, chosen: Array) -> Array:
    """The product by `jax.lax.ragged_dot`: rows sorted by expert."""
    slots = chosen.reshape(-1)
    order = jnp.argsort(slots)
    y = jax.lax.ragged_dot(x.reshape(-1, D)[order], W, jnp.bincount(slots, length=E).astype(jnp.int32))
    return y[jnp.argsort(order)].reshape(B, T, K, M)


def grouped(x: Array, W: Array, chosen: Array) -> Array:
    """The product as the program computes it."""
    return grouped_matmul_wide(x, W, group(chosen, E))


def mixture(wide_sum: bool, h: Array, gate: Array, up: Array, down: Array, weights: Array, chosen: Array) -> Array:
    """A whole mixture, as `targets/experts.py` computes it but for the sum's dtype."""

    def product(x: Array, W: Array, groups: Groups) -> Array:
        return grouped_matmul_wide(x, W, groups).astype(jnp.bfloat16)

    groups, shared = group(chosen, E), h[..., None, :]
    y = product(jax.nn.silu(product(shared, gate, groups)) * product(shared, up, groups), down, groups)
    dtype = jnp.float32 if wide_sum else jnp.bfloat16
    return jnp.einsum("...kd,...k->...d", y.astype(dtype), weights.astype(dtype)).astype(jnp.bfloat16)


def planned(function: Callable[..., Array], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> float:
    """GiB that XLA plans beyond the arguments, for the function and its gradients by all but the last argument."""

    def program(mesh: Any) -> Any:
        where = NamedSharding(mesh, PartitionSpec())
        arguments = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in shapes)

        def total(*of: Array) -> Array:
            return jnp.sum(function(*of).astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(total, tuple(range(len(shapes) - 1)))), arguments

    return compile_for(program, MeshShape(), card("h100")).memory.temp / 2**30


def main() -> None:
    half, chosen = jnp.bfloat16, ((B, T, K), jnp.int32)
    one = (((B, T, K, D), half), ((E, D, M), half), chosen)
    whole = (((B, T, D), half), ((E, D, M), half), ((E, D, M), half), ((E, M, D), half), ((B, T, K), half), chosen)
    table = plain_table("One layer of 64 experts on 4,096 tokens, with gradients, H100", ("", "left"), ("GiB", "right"))
    for name, function, shapes in (
        ("one product, jax.lax.ragged_dot", ragged, one),
        ("one product, nn/grouped.py", grouped, one),
        ("the mixture, sum in fp32", lambda *of: mixture(True, *of), whole),
        ("the mixture, sum in bf16", lambda *of: mixture(False, *of), whole),
    ):
        table.add_row(name, f"{planned(function, shapes):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
