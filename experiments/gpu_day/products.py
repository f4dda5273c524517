"""Measures V U of Δ on the card, in every way to compute it: its time, and its error against float64."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset

from experiments.gpu_day.items import Products
from experiments.gpu_day.measure import median_s
from param_decomp_jax.nn import split_product as splitting
from param_decomp_jax.nn.split_product import product_in_bf16, rounded_to_bf16, split_product


def _split_in_one_go(V: jax.Array, U: jax.Array) -> jax.Array:
    with patch.object(splitting, "CHUNK", V.shape[-1]):
        return split_product(V, U)


WAYS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "fp32, `highest`": lambda V, U: jnp.matmul(V, U, precision="highest"),
    f"split, chunks of {splitting.CHUNK:,}": split_product,
    "split, in one go": _split_in_one_go,
    "bf16": lambda V, U: product_in_bf16(rounded_to_bf16(V), rounded_to_bf16(U)),
    "`BF16_BF16_F32_X3`": lambda V, U: jnp.matmul(V, U, precision=DotAlgorithmPreset.BF16_BF16_F32_X3),
}
"""The ways to compute V U. Each is called directly, not through `platform_dependent`, which would choose another on a
CPU."""


def measure_products(item: Products) -> dict[str, Any]:
    """Measures, for each way, seconds, FLOP/s (of one product, however many it makes) and the error of V U for normal
    numbers, or why it did not run."""
    d_in, C, d_out = item.shape
    V = jax.random.normal(jax.random.key(0), (d_in, C), jnp.float32)
    U = jax.random.normal(jax.random.key(1), (C, d_out), jnp.float32) / C**0.5
    rows, columns = (slice(None, None, -(-n // item.checked)) for n in (d_in, d_out))
    exact = np.asarray(V[rows], np.float64) @ np.asarray(U[:, columns], np.float64)
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        product = jax.jit(way)
        try:
            error = np.asarray(product(V, U)[rows, columns], np.float64) - exact
            seconds = median_s(partial(product, V, U), 3)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as why:  # not every platform supports all
            found[name] = {"failed": (str(why).splitlines() or [repr(why)])[0][:300]}
            continue
        found[name] = {
            "s": seconds,
            "flops_per_s": 2 * d_in * C * d_out / seconds,
            "error": float(np.linalg.norm(error) / np.linalg.norm(exact)),
            "smaller_by": float(-np.vdot(error, exact) / np.vdot(exact, exact)),
        }
    sizes = {"shape": [*item.shape], "checked": [*exact.shape]}
    return {"device": jax.devices()[0].device_kind, **sizes, "products": found}
